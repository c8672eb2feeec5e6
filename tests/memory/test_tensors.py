"""Sizes of single tensors: those of the model are found by what torch prints, other sizes seldom."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.facts.gpus import gpu
from legroom.facts.model_sources import load
from legroom.facts.releases import release
from legroom.memory.tensors import Tensor, printed_request, tensors, tensors_of_size
from legroom.planning.plan import Target, plan
from legroom.units import GIB, MIB
from legroom.vllm.args import ServeArgs

MODELS = {
    "Qwen/Qwen2.5-7B-Instruct": 1,
    "Qwen/Qwen2.5-VL-7B-Instruct": 1,
    "Qwen/Qwen3-30B-A3B": 1,
    "deepseek-ai/DeepSeek-V3": 8,
}


@cache
def every_tensor(model: str, tokens: int = 8192, sequences: int = 256, version: str = "0.11.0") -> tuple[Tensor, ...]:
    args = ServeArgs(
        model=model, tensor_parallel_size=MODELS[model], max_num_batched_tokens=tokens, max_num_seqs=sequences
    )
    made = plan(Target(load(model), gpu("h200"), 8, release(version)), args)
    return tuple(tensors(made.target.model, made.settings, made.target.gpu, made.memory.kv))


def large(model: str) -> list[Tensor]:
    return [tensor for tensor in every_tensor(model) if tensor.bytes > 20 * MIB]


def one_of_each_size(model: str) -> list[Tensor]:
    return list({tensor.bytes: tensor for tensor in large(model)}.values())


@given(st.sampled_from(sorted(MODELS)), st.data())
def test_a_tensor_of_the_model_is_found_by_the_size_that_torch_prints(model: str, data: st.DataObject) -> None:
    tensor = data.draw(st.sampled_from(large(model)))
    number, unit = printed_request(tensor.bytes).split()
    parsed = int(float(number) * (GIB if unit == "GiB" else MIB))
    assert tensor in tensors_of_size(parsed, iter(every_tensor(model)))


@pytest.mark.parametrize("model", MODELS)
def test_other_sizes_match_seldom(model: str) -> None:
    # One size in every 0.1 % between 22 MiB and 80 GiB, as torch rounds them.
    sizes = [int(22 * MIB * 1.001**step) for step in range(8240)]
    of_each_size = one_of_each_size(model)
    matched = sum(bool(tensors_of_size(size, iter(of_each_size))) for size in sizes)
    assert matched < 0.08 * len(sizes)


@pytest.mark.parametrize(
    ("model", "tokens", "printed", "name", "setting"),
    [
        ("deepseek-ai/DeepSeek-V3", 8192, 380 * MIB, "buffers of the radix sort", "max_num_seqs"),
        ("Qwen/Qwen2.5-7B-Instruct", 131072, int(9.25 * GIB), "gate and up projection", "max_num_batched_tokens"),
    ],
)
def test_published_requests_are_factored(model: str, tokens: int, printed: int, name: str, setting: str) -> None:
    (tensor,) = tensors_of_size(printed, iter(every_tensor(model, tokens)))
    assert (tensor.name, tensor.setting) == (name, setting)


def test_the_segment_that_small_tensors_share_names_none() -> None:
    assert tensors_of_size(20 * MIB, iter(every_tensor("Qwen/Qwen2.5-7B-Instruct"))) == ()
    assert tensors_of_size(2 * MIB, iter(every_tensor("Qwen/Qwen2.5-7B-Instruct"))) == ()
