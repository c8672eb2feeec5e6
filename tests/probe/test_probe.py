"""`legroom probe` with a Python that answers for a GPU, and with those that have none."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from legroom.cli.main import main
from legroom.errors import LegroomError
from legroom.probe.card_probe import probe_card, python_of_vllm
from legroom.units import GIB, MIB

CARD = {
    "finding": "card",
    "name": "NVIDIA H200",
    "total_bytes": 150_109_880_320,
    "driver": "580.1",
    "cuda": "13.0",
    "torch": "2.11.0",
    "others_bytes": 0,
    "context_bytes": 552_402_944,
}
VLLM = {"finding": "vllm", "non_torch_bytes": 241_172_480, "rank": 0}
STARTED = {"finding": "vllm_started", "vllm": "0.32.0", "ranks": 1}


def python_that_answers(folder: Path, torch_lines: list[dict[str, Any]], vllm_lines: list[dict[str, Any]]) -> str:
    """A program that is called like a Python and writes these answers."""
    answers = {"torch_stage.py": torch_lines, "vllm_stage.py": vllm_lines}
    (folder / "answers.json").write_text(json.dumps(answers))
    program = folder / "python"
    program.write_text(f"""#!{sys.executable}
import json, pathlib, sys
lines = json.loads(pathlib.Path({str(folder / "answers.json")!r}).read_text())[pathlib.Path(sys.argv[1]).name]
with open(sys.argv[2], "a") as file:
    file.writelines(json.dumps(line) + "\\n" for line in lines)
print("done")
""")
    program.chmod(0o755)
    return str(program)


def test_a_probe_is_made_of_what_torch_and_vllm_answer(tmp_path: Path) -> None:
    torch = [
        CARD,
        {"finding": "copies", "host_to_device_bytes_s": 55_000_000_000},
        {"finding": "host", "pinned_bytes": 8 * GIB, "refused": None},
    ]
    record = probe_card(python_that_answers(tmp_path, torch, [VLLM, STARTED])).record
    assert (record.name, record.total_bytes, record.context_bytes) == ("NVIDIA H200", 150_109_880_320, 552_402_944)
    assert (record.vllm, record.vllm_non_torch_bytes) == ("0.32.0", 241_172_480)
    assert (record.host_to_device_bytes_s, record.pinned_bytes) == (55_000_000_000, 8 * GIB)


def test_of_several_ranks_the_one_that_takes_the_most_counts(tmp_path: Path) -> None:
    ranks = [{**VLLM, "rank": rank, "non_torch_bytes": size * MIB} for rank, size in enumerate((300, 700, 500))]
    python = python_that_answers(tmp_path, [CARD], [*ranks, STARTED])
    assert probe_card(python, ranks=3).record.vllm_non_torch_bytes == 700 * MIB


def test_more_ranks_than_cards_are_refused_before_vllm_is_started(tmp_path: Path) -> None:
    python = python_that_answers(tmp_path, [{**CARD, "count": 1}], [VLLM, STARTED])
    with pytest.raises(LegroomError, match="--ranks 2 needs 2 GPUs") as refused:
        probe_card(python, ranks=2)
    assert refused.value.exit_code == 3


def test_what_failed_is_told_and_costs_nothing_else(tmp_path: Path) -> None:
    failed = {"finding": "copies", "error": "RuntimeError: no"}
    outcome = probe_card(python_that_answers(tmp_path, [CARD, failed], [{"finding": "vllm", "error": "ValueError: x"}]))
    assert outcome.record.total_bytes == 150_109_880_320
    assert outcome.record.vllm_non_torch_bytes is None
    assert outcome.problems == ("copies: RuntimeError: no", "vllm: ValueError: x")


def test_a_machine_without_a_gpu_is_told_so_with_exit_code_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path / "home"))
    python = python_that_answers(tmp_path, [{"finding": "no_gpu", "torch": "2.13.0+cpu"}], [])
    assert main(["probe", "--python", python]) == 3
    assert "sees no GPU" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


def test_a_python_without_torch_is_told_so_with_exit_code_3() -> None:
    with pytest.raises(LegroomError, match="ModuleNotFoundError") as error:
        probe_card(sys.executable)
    assert error.value.exit_code == 3


def test_the_python_of_the_vllm_command_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "vllm"
    command.write_text(f"#!{sys.executable}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert python_of_vllm() == sys.executable


def test_the_python_of_a_vllm_command_with_a_long_path_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("vllm", "#!/bin/sh\n'''exec' python \"$0\" \"$@\"\\n' '''\n"), ("python", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert python_of_vllm() == str(tmp_path / "python")


def test_a_plan_uses_what_was_probed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path / "home"))
    call = ["plan", "llama-3.1-8b", "--gpu", "h200", "--vllm", "0.32.0", "--json"]
    main(call)
    before = json.loads(capsys.readouterr().out)
    python = python_that_answers(
        tmp_path,
        [{**CARD, "total_bytes": CARD["total_bytes"] - GIB}],
        [{**VLLM, "non_torch_bytes": 741_172_480}, STARTED],
    )
    assert main(["probe", "--python", python, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["vllm_non_torch_bytes"] == 741_172_480
    main(call)
    after = json.loads(capsys.readouterr().out)
    assert after["gpu"]["total_bytes"] == before["gpu"]["total_bytes"] - GIB
    assert after["layout"]["non_torch_bytes"] == before["layout"]["non_torch_bytes"] + 500_000_000


def test_a_dry_run_keeps_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path / "home"))
    assert main(["probe", "--python", python_that_answers(tmp_path, [CARD], []), "--dry-run", "--no-vllm"]) == 0
    assert "Nothing was kept." in capsys.readouterr().out
    assert not (tmp_path / "home").exists()


def test_a_plan_of_a_probed_deployment_leaves_what_its_engine_had_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path / "home"))
    profile = {
        **VLLM,
        "total_bytes": CARD["total_bytes"],
        "weights_bytes": 16_110_920_192,
        "torch_peak_bytes": 1_239_545_088,
        "graph_estimate_bytes": 0,
        "requested_bytes": 138_101_089_895,
        "available_kv_bytes": 119_900_000_000,
    }
    python = python_that_answers(tmp_path, [CARD], [profile, STARTED])
    flags = ["--max-model-len", "8192", "--enforce-eager"]
    assert main(["probe", "--python", python, "--", "vllm", "serve", "llama-3.1-8b", *flags]) == 0
    capsys.readouterr()
    main(["plan", "llama-3.1-8b", "--gpu", "h200", "--vllm", "0.32.0", *flags, "--json"])
    planned = json.loads(capsys.readouterr().out)
    assert planned["layout"]["kv_cache_bytes"] == 119_900_000_000
    assert planned["confidence"]["activation_bytes"]["kind"] == "measured"


def test_what_was_profiled_of_one_deployment_says_nothing_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ["plan", "qwen3-8b", "--gpu", "h200", "--vllm", "0.32.0", "--json"]
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path / "home"))
    python = python_that_answers(tmp_path, [CARD], [VLLM, STARTED])
    main(["probe", "--python", python])
    capsys.readouterr()
    main(other)
    before = json.loads(capsys.readouterr().out)
    profile = {
        **VLLM,
        "total_bytes": CARD["total_bytes"],
        "weights_bytes": 16 * GIB,
        "torch_peak_bytes": 9 * GIB,
        "requested_bytes": 138_101_089_895,
        "available_kv_bytes": 90 * GIB,
    }
    python = python_that_answers(tmp_path, [CARD], [profile, STARTED])
    main(["probe", "--python", python, "--", "vllm", "serve", "llama-3.1-8b", "--enforce-eager"])
    capsys.readouterr()
    main(other)
    assert json.loads(capsys.readouterr().out)["layout"] == before["layout"]


def test_what_follows_the_dashes_must_be_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--", "python", "train.py"]) == 2
    assert "vllm serve" in capsys.readouterr().err
