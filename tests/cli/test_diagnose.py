from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from legroom.cli.main import main

SHORT_KV = (
    "(EngineCore_DP0 pid=77) INFO 01-02 03:04:00 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: "
    "model='meta-llama/Llama-3.1-8B-Instruct', max_seq_len=131072, tensor_parallel_size=1\n"
    "(EngineCore_DP0 pid=77) ERROR 01-02 03:04:05 [core.py:708] "
    "ValueError: To serve at least one request with the models's max "
    "seq len (131072), (16.00 GiB KV cache is needed, which is "
    "larger than the available KV cache memory (5.25 GiB). Based on "
    "the available memory, the estimated maximum model length is 43008. See https://example.org/advice\n"
)
HEALTHY = (
    "INFO 01-02 03:04:05 [kv_cache_utils.py:1087] GPU KV cache size: 98,304 tokens\n"
    "INFO:     Application startup complete.\n"
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "vllm.log"
    path.write_text(SHORT_KV, encoding="utf-8")
    return path


def document(capsys: pytest.CaptureFixture[str]) -> dict:  # type: ignore[type-arg]
    out = json.loads(capsys.readouterr().out)
    assert isinstance(out, dict)
    return out


def test_a_failure_is_answered_with_1_and_in_the_order_of_a_compiler(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", str(log)]) == 1
    out = capsys.readouterr().out
    parts = [
        "error[LR203]",
        "phase:",
        "--> " if "-->" in out else "──▶",
        "why:",
        "fix: --max-model-len 41984",
        "do not:",
        "how to verify:",
    ]
    assert [out.index(part) for part in parts] == sorted(out.index(part) for part in parts)
    assert "https://" not in out


def test_a_gpu_that_comes_in_two_sizes_is_said_to_be_read_as_one(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["diagnose", str(log), "--gpu", "a100"])
    assert "note: A100 comes with 40 and 80 GB; read as 40 GB" in " ".join(capsys.readouterr().out.split())
    main(["diagnose", str(log), "--gpu", "a100", "--json"])
    assert document(capsys)["notes"] == ["A100 comes with 40 and 80 GB; read as 40 GB: say a100-80gb for the other"]


def test_a_gpu_named_by_its_size_needs_no_note(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["diagnose", str(log), "--gpu", "a100-80gb", "--json"])
    assert "notes" not in document(capsys)


def test_the_json_document_keeps_its_contract(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(log), "--json"]) == 1
    out = document(capsys)
    assert (out["verdict"], out["phase"]) == ("cause found", "startup_kv")
    finding = out["findings"][0]
    assert (finding["cause"], finding["entry"]) == ("kv_too_small_for_max_len", "LR203")
    assert finding["evidence"][0]["line"] == 2
    assert finding["fixes"][0]["flags"] == {"max_model_len": 41984}
    assert {"flags", "env", "steps", "command", "why", "layout", "confidence"} <= set(finding["fixes"][0])
    assert {"action", "why_fails"} == set(finding["dead_ends"][0])
    assert out["deployment"]["vllm"] == "0.11.0"
    assert out["deployment"]["model"] == "meta-llama/Llama-3.1-8B-Instruct"


def test_a_fix_is_checked_on_the_memory_model_where_the_gpu_is_known(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["diagnose", str(log), "--json", "--gpu", "rtx4090"])
    fix = document(capsys)["findings"][0]["fixes"][0]
    assert fix["layout"]["kv_cache_bytes"] > 0
    assert fix["command"][:3] == ["vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct"]


def test_old_and_new_layout_stand_side_by_side(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["diagnose", str(log), "--gpu", "rtx4090"])
    out = capsys.readouterr().out
    assert "before" in out
    assert "after" in out


def test_a_command_line_tells_what_the_log_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cut.log"
    path.write_text(SHORT_KV.splitlines()[1], encoding="utf-8")
    line = "vllm serve Qwen/Qwen3-8B --max-model-len 131072 --max-num-seqs 7"
    main(["diagnose", str(path), "--json", "--command", line, "--gpu", "l4", "--vllm", "0.11.0"])
    command = document(capsys)["findings"][0]["fixes"][0]["command"]
    assert command[:3] == ["vllm", "serve", "Qwen/Qwen3-8B"]
    assert "7" in command


def test_a_healthy_log_is_answered_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ok.log"
    path.write_text(HEALTHY, encoding="utf-8")
    assert main(["diagnose", str(path)]) == 0
    assert "98,304" in capsys.readouterr().out


def test_standard_input_is_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(SHORT_KV.encode())))
    assert main(["diagnose", "-", "--json"]) == 1
    assert document(capsys)["sources"][0]["source"] == "standard input"


def test_several_files_are_each_diagnosed(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "ok.log"
    other.write_text(HEALTHY, encoding="utf-8")
    assert main(["diagnose", str(other), str(log), "--json"]) == 1
    out = document(capsys)
    assert [source["runs"] for source in out["sources"]] == [1, 1]
    assert out["findings"][0]["cause"] == "kv_too_small_for_max_len"


def test_chinese_is_spoken(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["diagnose", str(log), "--lang", "zh"])
    out = capsys.readouterr().out
    assert "KV 缓存容纳不下" in out
    assert "修复" in out


def test_a_log_of_another_program_is_answered_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nginx.log"
    path.write_text("GET / 200\n", encoding="utf-8")
    assert main(["diagnose", str(path), "--json"]) == 2
    assert document(capsys)["verdict"] == "not understood"


@pytest.mark.parametrize("words", [["nothing-here.log"], ["."], ["--docker", ""], ["-", "-"], ["x", "--gpus", "many"]])
def test_a_wrong_call_is_answered_with_2_and_a_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", *words]) == 2
    assert capsys.readouterr().err.startswith("error: ")
