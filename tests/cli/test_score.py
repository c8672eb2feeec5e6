"""`legroom score` from the outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from legroom.cli.main import main

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
RECORD = {
    "id": "R1",
    "url": "https://example.org/who/what",
    "vllm_version": "0.10.2",
    "model": "org/eight",
    "model_family": "llama3",
    "gpu": "NVIDIA H100 80GB HBM3",
    "flags_known": True,
    "good": True,
    "total_gpu_memory_gib": 79.1,
    "weights_gib": 14.99,
    "available_kv_gib": 54.5,
    "kv_tokens": 446464,
    "max_model_len": 8192,
    "outcome": "started",
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "models.json").write_text(json.dumps({"org/eight": {**MODEL, "source": "config.json"}}))
    records: list[Any] = [
        RECORD,
        {
            **RECORD,
            "id": "R2",
            "gpu": "NVIDIA L4",
            "total_gpu_memory_gib": 22.05,
            "available_kv_gib": 4.0,
            "kv_tokens": 32768,
        },
    ]
    path = tmp_path / "startups.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n{ half\n")
    return path


def test_the_error_table_names_every_measure_and_group(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(data)]) == 0
    told = capsys.readouterr().out
    for word in ("weights", "KV bytes", "tokens a KV byte", "by gpu", "NVIDIA L4", "2 start-ups predicted", "line 3"):
        assert word in told


def test_json_is_one_document_with_the_same_figures(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(data), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["summary"]["records"] == 2
    assert document["bad"] == [{"id": "line 3", "why": document["bad"][0]["why"]}]
    assert set(document["by"]) == {"class", "family", "gpu", "release", "quantization"}


def test_every_record_is_written_out_on_request(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    assert main(["score", str(data), "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["id"] for row in rows] == ["R1", "R2"]
    assert rows[0]["predicted"]["kv_cache_bytes"] > 0


def test_an_instrumented_run_is_scored_to_its_peak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "configs" / "eight").mkdir(parents=True)
    (tmp_path / "configs" / "eight" / "config.json").write_text(json.dumps(MODEL))
    total = 150_109_880_320
    run = {
        "id": "A",
        "model": "eight",
        "ok": True,
        "args": {"max_num_batched_tokens": 8192},
        "env": None,
        "weights_bytes": 16_100_000_000,
        "peak_activation": 940_000_000,
        "available_kv_bytes": 120_000_000_000,
        "init_snapshot": {"total_memory": total},
        "mem_ready": {"free": 8_000_000_000},
    }
    path = tmp_path / "measured.jsonl"
    path.write_text(json.dumps(run) + "\n" + json.dumps({**run, "id": "B", "ok": False}))
    assert main(["score", str(path), "--configs", str(tmp_path / "configs"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["passed_over"] == 1
    assert document["summary"]["spreads"]["peak_of_card"]["count"] == 1


def test_a_folder_of_logs_is_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.log").write_text(
        "INFO non-default args: {'model': 'meta-llama/Llama-3.1-8B-Instruct', 'max_model_len': 8192}\n"
        "INFO Initializing a V1 LLM engine (v0.10.2) with config: model='meta-llama/Llama-3.1-8B-Instruct', "
        "dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=1\n"
        "INFO Model loading took 14.9889 GiB and 3.1 seconds\nINFO Available KV cache memory: 54.50 GiB\n"
        "INFO GPU KV cache size: 446,464 tokens\n"
    )
    (tmp_path / "b.log").write_text("nothing of interest\n")
    assert main(["score", "--from-logs", str(tmp_path), "--gpu", "h100", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["summary"]["records"] == 1
    assert [bad["id"] for bad in document["bad"]] == ["b.log"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["score"], "either a file"),
        (["score", "/nowhere/data.jsonl"], "cannot be read"),
        (["score", "--from-logs", "/nowhere"], "is not a folder"),
    ],
)
def test_a_wrong_call_is_a_message_and_code_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_without_model_facts_bundled_models_are_scored_and_the_others_named(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data.with_name("models.json").unlink()
    bundled = {**json.loads(data.read_text().splitlines()[0]), "id": "bundled", "model": "meta-llama/Llama-3.1-8B"}
    data.write_text(
        "\n".join(json.dumps(record) for record in (bundled, {**bundled, "id": "other", "model": "who/knows"}))
    )
    assert main(["score", str(data), "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["summary"]["records"] == 1
    assert document["bad"] == [
        {"id": "other", "why": "who/knows is not a bundled model: its facts have to stand in a models.json"}
    ]
    assert "models.json" in captured.err


def test_named_model_facts_that_are_missing_are_a_message(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(data), "--models", "/nowhere/models.json"]) == 2
    assert "models.json" in capsys.readouterr().err


def test_a_file_without_a_record_is_told_before_its_model_facts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "noise.jsonl"
    path.write_text("model: Qwen/Qwen3-8B\n")
    assert main(["score", str(path)]) == 2
    assert "holds no start-up record" in capsys.readouterr().err
