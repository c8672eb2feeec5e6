"""Scoring: which start-ups count, how errors add up, and that a bad record is named rather than fatal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.errors import LegroomError
from legroom.planning import scoring_data
from legroom.planning.recorded import config_of
from legroom.planning.scoring import quantile, result_json, score, spread, summaries_by, summary, weighted_quantile
from legroom.units import GIB

LLAMA = {
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
    "source": "config.json",
    "weight_quantization": None,
    "num_parameters": 8030261248,
}
MODELS = {"org/eight": LLAMA, "org/guess": {**LLAMA, "source": "assumed"}}


def record(**changed: Any) -> dict[str, Any]:
    return {
        "id": "R1",
        "url": "https://example.org/who/what/blob/main/x.log",
        "vllm_version": "0.10.2",
        "model": "org/eight",
        "model_family": "llama3",
        "gpu": "NVIDIA H100 80GB HBM3",
        "gpu_count": 1,
        "tp": 1,
        "pp": 1,
        "dtype": "bfloat16",
        "gpu_memory_utilization": 0.9,
        "max_model_len": 8192,
        "flags_known": True,
        "good": True,
        "total_gpu_memory_gib": 79.1,
        "weights_gib": 14.99,
        "available_kv_gib": 54.5,
        "kv_tokens": 446464,
        "outcome": "started",
        **changed,
    }


def loaded(*records: dict[str, Any]) -> scoring_data.Loaded:
    return scoring_data.published_cases([(str(r["id"]), r) for r in records], MODELS)


@pytest.mark.parametrize(
    "lack",
    [
        {"vllm_version": None},
        {"vllm_version": "0.2.6"},
        {"vllm_version": "main 73c8d67"},
        {"good": False},
        {"flags_known": False},
        {"approximate": True},
        {"model": None},
        {"model": "org/guess"},
        {"model": "org/none"},
        {"gpu": None, "total_gpu_memory_gib": None},
        {"gpu": "NVIDIA A100 + NVIDIA L4"},
    ],
)
def test_a_record_that_says_too_little_is_passed_over(lack: dict[str, Any]) -> None:
    found = loaded(record(**lack))
    assert (len(found.cases), found.passed_over, found.bad) == (0, 1, ())


def test_a_record_becomes_the_plan_its_user_would_have_asked_for() -> None:
    (case,) = loaded(
        record(tp=2, gpu_count=None, enforce_eager=True, quantization="awq-4bit", kv_cache_dtype="fp8")
    ).cases
    assert case.target.gpus == 2
    assert case.target.gpu.total_bytes == round(79.1 * GIB)
    assert case.target.release.version == "0.10.2"
    assert case.args.tensor_parallel_size == 2
    assert case.args.enforce_eager is True
    assert case.args.kv_cache_dtype == "fp8"
    assert case.args.quantization is None, "words about the checkpoint are no flag"
    assert case.source == "https://example.org/who/what"


def test_a_failure_that_other_processes_caused_is_not_judged() -> None:
    (case,) = loaded(record(outcome="failed_startup", error_type="free_memory_lt_requested")).cases
    assert case.printed.started is None


def test_blocks_stand_in_for_tokens_where_only_blocks_were_printed() -> None:
    (case,) = loaded(record(kv_tokens=None, gpu_blocks=1000, block_size=32)).cases
    assert case.printed.tokens == 32000


def test_an_unknown_card_is_a_bad_record_with_a_reason() -> None:
    found = loaded(record(gpu="Voodoo 2", total_gpu_memory_gib=None), record(id="R2"))
    assert [bad.id for bad in found.bad] == ["R1"]
    assert "Voodoo 2" in found.bad[0].why
    assert len(found.cases) == 1


def test_lines_that_are_no_records_are_named_by_number(tmp_path: Path) -> None:
    path = tmp_path / "startups.jsonl"
    path.write_text(json.dumps(record()) + "\n{ half\n\n[1]\n")
    found = scoring_data.published_cases(scoring_data.read_records(path), MODELS)
    assert [bad.id for bad in found.bad] == ["line 2", "line 4"]
    assert len(found.cases) == 1


def test_an_empty_file_is_an_error_with_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "startups.jsonl"
    path.write_text("\n")
    with pytest.raises(LegroomError, match="holds no records"):
        scoring_data.read_records(path)


@pytest.mark.parametrize(
    ("words", "method"),
    [
        ("awq 4-bit", "awq"),
        ("gptq int4", "gptq"),
        ("bnb nf4", "bitsandbytes"),
        ("nvfp4", "modelopt"),
        ("mxfp4", "mxfp4"),
        ("fp8 per-channel", "compressed-tensors"),
        ("fp8", "fp8"),
        ("int8 w8a8", "compressed-tensors"),
        ("int4 g128", "compressed-tensors"),
    ],
)
def test_precision_in_words_becomes_a_quantization_config(words: str, method: str) -> None:
    assert config_of({**LLAMA, "weight_quantization": words})["quantization_config"]["quant_method"] == method


def test_a_stated_quantization_config_of_the_same_kind_is_kept() -> None:
    stated = {"quant_method": "fp8", "weight_block_size": None}
    config = config_of({**LLAMA, "weight_quantization": "fp8", "quantization_config": stated})
    assert config["quantization_config"] == stated


def test_bookkeeping_stays_out_of_the_config() -> None:
    assert not {"source", "num_parameters", "weight_quantization"} & set(config_of(LLAMA))


def test_a_start_up_is_scored_from_end_to_end() -> None:
    results = score(loaded(record()).cases)
    (result,) = results
    assert not result.why_unanswered
    assert abs(result.errors["weights"]) < 0.01
    assert abs(result.errors["kv_of_card"]) < 0.05
    assert abs(result.errors["tokens_per_byte"]) < 0.01
    assert result.verdict_right is True
    whole = summary(results)
    assert (whole.records, whole.unanswered, whole.starts, whole.failures) == (1, 0, 1, 0)
    assert set(summaries_by(results, "family")) == {"llama3"}
    assert json.loads(json.dumps(result_json(result)))["id"] == "R1"


def test_a_record_that_cannot_be_planned_is_counted_as_unanswered() -> None:
    results = score(loaded(record(tp=3)).cases)
    assert summary(results).unanswered == 1
    assert results[0].why_unanswered


def test_progress_is_told_after_every_record() -> None:
    told: list[tuple[int, int]] = []
    score(loaded(record(), record(id="R2")).cases, lambda done, of: told.append((done, of)))
    assert told == [(1, 2), (2, 2)]


def test_a_source_with_many_records_weighs_as_much_as_one_with_few() -> None:
    errors = [("sweep", 0.5)] * 99 + [("one", 0.0), ("two", 0.0)]
    assert spread(errors).mean_by_source == pytest.approx(0.5 / 3)
    assert spread(errors).median_by_source == 0.0
    assert spread(errors).median == 0.5


FINITE = st.floats(-10, 10, allow_nan=False)


@given(st.lists(FINITE, min_size=1), st.floats(0, 1))
def test_a_quantile_is_one_of_the_values(values: list[float], share: float) -> None:
    assert quantile(values, share) in values


@given(st.lists(FINITE, min_size=1), st.floats(0.01, 1))
def test_with_equal_weights_enough_values_lie_at_or_below_the_weighted_quantile(
    values: list[float], share: float
) -> None:
    found = weighted_quantile([(value, 1.0) for value in values], share)
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6


@given(st.lists(st.tuples(st.sampled_from("abc"), FINITE), min_size=1))
def test_a_spread_is_ordered_and_never_negative(errors: list[tuple[str, float]]) -> None:
    found = spread(errors)
    assert 0 <= found.median <= found.p90 <= found.worst
    assert found.mean <= found.worst + 1e-9


def test_a_band_is_checked_against_the_truth_and_its_rounding() -> None:
    (right,), (wrong,) = (score(loaded(record(available_kv_gib=kv)).cases) for kv in (54.5, 30.0))
    assert right.plan is not None
    assert wrong.bands["kv_cache"].inside is False
    kv_cache = right.plan.layout.kv_cache
    just_outside = (kv_cache.high + 2**20) / GIB
    (rounded,) = score(loaded(record(available_kv_gib=just_outside)).cases)
    assert rounded.bands["kv_cache"].inside
    assert summary([rounded, wrong]).coverage["kv_cache"].inside == 0.5
    assert set(summaries_by([rounded], "class")) == {"read/text/one/hopper"}
