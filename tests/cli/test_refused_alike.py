"""plan, lint, gate, run and the page refuse what vLLM refuses with the same words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from legroom.cli.main import main
from legroom.gate.verdict import plan_verdict
from legroom.lint.linter import LintOptions, lint_texts
from legroom.run.expectation import Gpus, expected_pool
from legroom.run.server_command import read_command
from legroom.web.endpoints import call

MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def pod(words: list[str]) -> dict[str, object]:
    container = {
        "name": "vllm",
        "image": "vllm/vllm-openai:v0.32.0",
        "command": ["vllm", "serve", MODEL, *words],
        "resources": {"limits": {"nvidia.com/gpu": 1}},
    }
    spec = {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "m"}, "spec": spec}


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--long-prefill-token-threshold", "1000000", "long_prefill_token_threshold (1000000) cannot be greater"),
        ("--max-model-len", "999999", "--max-model-len 999999 is above the 131072 tokens of the model"),
        ("--attention-backend", "FLASHMLA", "Selected backend AttentionBackendEnum.FLASHMLA is not valid"),
    ],
)
def test_a_refusal_reads_the_same_everywhere(
    flag: str,
    value: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest = pod([flag, value])
    main(["plan", MODEL, "--gpu", "h100", flag, value, "--no-advice"])
    shown = capsys.readouterr()
    request = {"model": MODEL, "gpu": "h100", "flags": {flag[2:].replace("-", "_"): value}, "vllm": "0.32.0"}
    page = json.loads(call("plan", json.dumps(request)))
    findings = lint_texts([("pod.yaml", json.dumps(manifest))], LintOptions()).findings
    (tmp_path / "vllm").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    command = read_command(["vllm", "serve", MODEL, flag, value], "0.32.0", {"PATH": str(tmp_path)})
    expected = expected_pool(command, {}, Gpus("h100", 1))
    assert expected.verdict == "does_not_fit"
    told = {
        "plan": " ".join((shown.out + shown.err).split()),
        "page": page["error"]["message"] if "error" in page else page["failure"]["message"],
        "lint": " ".join(finding.message for finding in findings if finding.rule == "does-not-fit"),
        "gate": " ".join(plan_verdict(manifest).sentences),
        "run": expected.text,
    }
    assert {name: said in text for name, text in told.items()} == dict.fromkeys(told, True), told
