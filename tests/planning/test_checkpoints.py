"""Which quantized checkpoints are named for a model on a card."""

from __future__ import annotations

import pytest

from legroom.planning.checkpoints import lost_bits, quantized_checkpoints, unpacks_weights
from legroom.vllm.args import ServeArgs


def names(target, model: str, card: str, vllm: str = "0.32.0") -> list[str]:
    return [found.name for found in quantized_checkpoints(target(model, card, vllm), ServeArgs(model=model))]


def test_a_base_model_gets_no_instruct_checkpoint(target):
    assert names(target, "meta-llama/Llama-3.1-8B", "h100") == []


def test_an_instruct_model_gets_instruct_checkpoints(target):
    found = names(target, "meta-llama/Llama-3.1-8B-Instruct", "h100")
    assert found
    assert all("Instruct" in name for name in found)


def test_a_short_name_leaves_the_role_open(target):
    assert names(target, "llama-3.1-8b", "h100")


def test_the_publishers_own_comes_first(target):
    assert names(target, "Qwen/Qwen3-8B", "h100")[0] == "Qwen/Qwen3-8B-FP8"


@pytest.mark.parametrize(("card", "offered"), [("a100-80gb", False), ("h100", False), ("b200", True)])
def test_nvfp4_is_named_where_the_card_computes_in_it(target, card, offered):
    assert any("NVFP4" in name for name in names(target, "llama-3.3-70b", card)) is offered


def test_modelopt_fp8_is_not_named_below_8_9(target):
    assert not any(name.startswith("nvidia/") for name in names(target, "llama-3.3-70b", "a100-80gb"))


def test_the_fewest_lost_bits_come_first(target):
    models = quantized_checkpoints(target("llama-3.3-70b", "h100"), ServeArgs(model="llama-3.3-70b"))
    assert [lost_bits(model) for model in models] == sorted(lost_bits(model) for model in models)


def test_a_card_known_by_its_size_alone_gets_the_usual_checkpoints(target):
    assert names(target, "meta-llama/Llama-3.1-8B-Instruct", "12GiB")


@pytest.mark.parametrize(
    ("card", "release", "unpacked"),
    [("rtx4090", "0.32.0", True), ("rtx4090", "0.28.0", False), ("h100", "0.32.0", False)],
)
def test_blocks_in_fp8_are_unpacked_where_marlin_runs_them(target, card, release, unpacked):
    on_card = target("Qwen/Qwen3-14B-FP8", card, release)
    assert unpacks_weights(on_card.model, on_card) == unpacked
