"""vLLM 0.32.0's own model classes, built on the meta device by record_weights.py: parameters to the byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from weight_cases import H100, settings

from legroom.facts.config.model_config import model_from_config
from legroom.memory.weights.loaded import parameter_bytes

FIXTURE = Path(__file__).parents[1] / "fixtures" / "vllm_weights.jsonl"
NOT_MODELLED = {
    "bigcode 2x1": "0.32.0 runs it on Transformers' classes, which do not split the feed-forward block",
    "bigcode 4x1": "the same",
    "persimmon": "the same, for the whole model",
    "phi2": "Transformers' classes leave out the bias of the output layer, vLLM's own had it",
    "olmo2 2x1": "Transformers' classes keep whole query and key norms, vLLM's own split them",
    "olmo2 4x1": "the same",
    "olmo3 2x1": "the same",
    "olmo3 4x1": "the same",
    "dots1": "the correction bias became a buffer",
    "apertus": "two numbers of its activation function",
    "qwen3-reranker": "the two rows of its classification head",
    "bert 1x2": "encoders are not served over pipeline stages",
    "xlmr 1x2": "the same",
    "modernbert 1x2": "the same",
    "whisper 1x2": "the same",
    "zamba2": "its attention blocks are shared between layers",
}


def cases() -> Iterator[Any]:
    for line in FIXTURE.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        for ranks, stages in record["stages"].items():
            if record["name"] in NOT_MODELLED or f"{record['name']} {ranks}" in NOT_MODELLED:
                continue
            yield record, ranks, stages


def parameters_of(record: dict[str, Any], ranks: str) -> list[int]:
    tp, _, pp = ranks.partition("x")
    chosen = settings(tensor_parallel_size=int(tp), pipeline_parallel_size=int(pp), dtype=record["dtype"])
    model = model_from_config(record["config"])
    return [parameter_bytes(model, chosen, H100, stage) for stage in range(int(pp))]


def test_parameters_are_those_of_vllms_class() -> None:
    computed = {
        f"{record['name']} {ranks}": (parameters_of(record, ranks), stages) for record, ranks, stages in cases()
    }
    assert len(computed) > 200
    assert {name: both for name, both in computed.items() if both[0] != both[1]} == {}


@pytest.mark.parametrize("name", sorted(NOT_MODELLED))
def test_every_exception_still_differs(name: str) -> None:
    """An exception that has become exact must leave the list."""
    wanted, _, only = name.partition(" ")
    record = next(
        one for one in map(json.loads, FIXTURE.read_text(encoding="utf-8").splitlines()) if one["name"] == wanted
    )
    differs = False
    for ranks, stages in record["stages"].items():
        if only and ranks != only:
            continue
        tp, _, pp = ranks.partition("x")
        chosen = settings(tensor_parallel_size=int(tp), pipeline_parallel_size=int(pp), dtype=record["dtype"])
        model = model_from_config(record["config"])
        found = [parameter_bytes(model, chosen, H100, stage) for stage in range(int(pp))]
        differs = differs or found != stages
    assert differs
