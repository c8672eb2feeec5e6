"""Lint on what legroom itself writes, and on files whose release is not the plan's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from legroom.cli.main import main

MANIFEST = """\
apiVersion: v1
kind: Pod
metadata: {name: x}
spec:
  containers:
    - name: server
      image: vllm/vllm-openai:v0.11.0
      args: ["--model", "Qwen/Qwen3-8B", "--swap-space", "4"]
      readinessProbe: {httpGet: {path: /health, port: 8000}}
"""


@pytest.mark.parametrize("kind", ["prometheus", "grafana"])
@pytest.mark.parametrize("release", [None, "0.11.0", "0.17.0", "0.32.0"])
def test_an_export_is_clean_without_saying_its_release_again(kind: str, release: str | None, tmp_path: Path) -> None:
    chosen = ["--vllm", release] if release else []
    assert main(["export", kind, *chosen, "-o", f"{tmp_path}/out/"]) == 0
    assert main(["lint", "--fail-on", "error", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("words", ["prometheus", "prometheus --operator", "grafana"])
def test_flags_in_the_sentences_of_an_export_for_a_plan_are_no_flags_of_a_server(words: str, tmp_path: Path) -> None:
    assert main(["export", *words.split(), "llama-3.1-8b", "--gpu", "h100", "-o", f"{tmp_path}/out/"]) == 0
    assert any("--max-num-seqs" in file.read_text() for file in (tmp_path / "out").rglob("*.*"))
    assert main(["lint", "--fail-on", "note", str(tmp_path / "out")]) == 0


def test_the_release_of_a_file_wins_over_the_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-8b", "--gpu", "h100", "--json"]) == 0
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    (tmp_path / "deploy.yaml").write_text(MANIFEST)
    main(["lint", "--json", "--plan", str(tmp_path / "plan.json"), str(tmp_path / "deploy.yaml")])
    assert {finding["rule"] for finding in json.loads(capsys.readouterr().out)["findings"]} == {"flag-ignored"}
    main(["lint", "--json", "--vllm", "0.32.0", str(tmp_path / "deploy.yaml")])
    assert {finding["rule"] for finding in json.loads(capsys.readouterr().out)["findings"]} == {"flag-removed"}


@pytest.mark.parametrize(("kind", "release"), [("kubernetes", "0.10.2"), ("kserve", "0.32.0")])
def test_the_drain_and_the_shared_memory_of_an_exported_manifest_raise_no_note(
    kind: str, release: str, tmp_path: Path
) -> None:
    deployment = ["qwen3-8b", "--gpu", "h100", "--vllm", release]
    assert main(["export", kind, *deployment, "-o", f"{tmp_path}/out/"]) == 0
    assert main(["lint", "--fail-on", "note", str(tmp_path / "out")]) == 0
