"""What speculative decoding adds to weights and to the pool."""

from __future__ import annotations

from dataclasses import replace

import pytest

from legroom.facts.gpus import gpu
from legroom.facts.model import Model
from legroom.facts.model_sources import load
from legroom.facts.releases import release
from legroom.memory.kv.kv_plan import kv_plan
from legroom.memory.weights.loaded import parameter_bytes, weights
from legroom.vllm.args import EngineSettings, ServeArgs
from legroom.vllm.resolve import resolve, with_draft

CARD = gpu("h100")
SPEC = {"model": "meta-llama/Llama-3.2-1B-Instruct", "num_speculative_tokens": 5}


def deployed(spec: dict[str, object] | None, vllm: str = "0.32.0", **flags: object) -> tuple[Model, EngineSettings]:
    args = replace(ServeArgs(model="llama-3.1-8b", speculative_config=spec, max_model_len=8192), **flags)  # type: ignore[arg-type]
    model = with_draft(load("llama-3.1-8b"), args)
    return model, resolve(args, model, CARD, release(vllm))


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_a_draft_model_is_held_whole_beside_the_model(tensor_parallel_size: int) -> None:
    plain, drafted = deployed(None), deployed(SPEC)
    plain = plain[0], replace(plain[1], tensor_parallel_size=tensor_parallel_size)
    drafted = drafted[0], replace(drafted[1], tensor_parallel_size=tensor_parallel_size)
    alone = parameter_bytes(load("llama-3.2-1b"), plain[1], CARD)
    assert parameter_bytes(*drafted, CARD) - parameter_bytes(*plain, CARD) == alone
    assert weights(*drafted, CARD).kind == "exact"


@pytest.mark.parametrize("vllm", ["0.6.3", "0.7.3", "0.14.0", "0.32.0"])
def test_its_layers_have_their_keys_and_values_in_the_pool(vllm: str) -> None:
    plain, drafted = (kv_plan(*deployed(spec, vllm), CARD, [40 << 30]) for spec in (None, SPEC))
    assert plain.bytes_per_token == 131072
    assert drafted.bytes_per_token == 131072 + 2 * 2 * 16 * 8 * 64


def test_only_the_last_stage_drafts() -> None:
    model, settings = deployed(SPEC)
    staged = replace(settings, pipeline_parallel_size=2)
    without = replace(staged, given=replace(staged.given, speculative_config=None))
    assert weights(model, staged, CARD, 0).bytes == weights(model, without, CARD, 0).bytes
    assert weights(model, staged, CARD, 1).bytes > weights(model, without, CARD, 1).bytes + (2 << 30)


def test_a_quantized_model_does_not_quantize_a_head_from_another_checkpoint() -> None:
    spec = {"method": "eagle", "num_speculative_tokens": 3}
    grown = []
    for name in ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct-AWQ"):
        model = load(name)
        args = ServeArgs(model=name, max_model_len=8192)
        plain = resolve(args, model, CARD, release("0.32.0"))
        drafted = resolve(replace(args, speculative_config=spec), model, CARD, release("0.32.0"))
        grown.append(parameter_bytes(model, drafted, CARD) - parameter_bytes(model, plain, CARD))
    assert grown[0] == grown[1]


def test_an_unread_head_of_a_mixture_of_experts_is_one_dense_layer() -> None:
    model = load("google/gemma-4-26B-A4B-it")
    args = ServeArgs(model=model.name, max_model_len=8192)
    plain = resolve(args, model, CARD, release("0.20.0"))
    spec = {"method": "eagle3", "num_speculative_tokens": 3}
    drafted = resolve(replace(args, speculative_config=spec), model, CARD, release("0.20.0"))
    grown = parameter_bytes(model, drafted, CARD) - parameter_bytes(model, plain, CARD)
    # RedHatAI's published head loads 16.12 GiB with the model's 15.77.
    assert abs(grown / 2**30 - 0.35) < 0.05


def test_a_head_named_eagle3_is_one_whatever_method_is_stated() -> None:
    model = load("llama-3.1-8b")
    args = ServeArgs(model=model.name, max_model_len=8192)
    sizes = []
    for method in ("eagle", "eagle3"):
        spec = {"method": method, "model": "somebody/Llama-3.1-8B-speculator.eagle3", "num_speculative_tokens": 3}
        settings = resolve(replace(args, speculative_config=spec), model, CARD, release("0.32.0"))
        sizes.append(parameter_bytes(model, settings, CARD))
    assert sizes[0] == sizes[1]


def test_medusa_has_a_layer_and_an_output_layer_for_each_speculative_token() -> None:
    spec = {"method": "medusa", "model": "not/there", "num_speculative_tokens": 3}
    plain, drafted = deployed(None), deployed(spec)
    for ranks in (1, 2):
        grown = [
            parameter_bytes(model, replace(settings, tensor_parallel_size=ranks), CARD)
            for model, settings in (plain, drafted)
        ]
        assert grown[1] - grown[0] == 3 * (4096 + 128256 // ranks) * 4096 * 2
