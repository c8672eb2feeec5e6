"""All-reduces between tensor-parallel ranks, as captured graphs hold them."""

from __future__ import annotations

from typing import Any

import pytest
from recorded_runs import settle

from legroom.facts.gpus import Gpu, gpu
from legroom.facts.model import Model
from legroom.facts.model_sources import load
from legroom.memory.cudagraph_memory import captured_all_reduce, fuses_all_reduce, graph_bytes, graph_estimate
from legroom.units import GIB

H100, A100, L40S, RTX_4090 = (gpu(name) for name in ("h100", "a100-sxm4-80gb", "l40s", "rtx4090"))
QWEN_32B = load("Qwen/Qwen3-32B")
MOE = load("Qwen/Qwen3-30B-A3B")


def _a_graph(card: Gpu, version: str, ranks: int, tokens: int = 8, **args: Any) -> int:
    settings = settle(QWEN_32B, version, card=card, tensor_parallel_size=ranks, max_model_len=8192, **args)
    return captured_all_reduce(QWEN_32B, settings, card, [tokens])


def test_one_rank_has_none() -> None:
    assert _a_graph(H100, "0.26.0", 1) == 0


def test_nccl_costs_a_graph_more_than_a_kernel_and_a_fused_one_least() -> None:
    assert _a_graph(RTX_4090, "0.26.0", 2) > _a_graph(A100, "0.26.0", 2) > _a_graph(H100, "0.26.0", 2) > 0


def test_two_cards_on_pcie_use_vllms_own_kernel_and_four_nccl() -> None:
    assert _a_graph(L40S, "0.26.0", 2) == _a_graph(A100, "0.26.0", 2)
    assert _a_graph(L40S, "0.26.0", 4) == _a_graph(RTX_4090, "0.26.0", 4)


def test_a_flag_leaves_vllms_own_kernel_out() -> None:
    without = _a_graph(A100, "0.26.0", 2, others=("--disable-custom-all-reduce",))
    assert without == _a_graph(RTX_4090, "0.26.0", 2)


def test_large_sums_are_left_to_nccl() -> None:
    # 1,024 tokens x 5,120 x 2 bytes are 10 MiB; its own kernel takes less than 8.
    assert _a_graph(A100, "0.26.0", 2, tokens=1024) == _a_graph(RTX_4090, "0.26.0", 2)


def test_four_hopper_ranks_fuse_up_to_two_mebibytes() -> None:
    # 204 tokens x 5,120 x 2 bytes are the last below it.
    assert _a_graph(H100, "0.19.0", 4, tokens=204) < _a_graph(H100, "0.19.0", 4, tokens=208)


@pytest.mark.parametrize(
    ("version", "data_parallel", "fused"),
    [("0.16.0", 1, False), ("0.17.0", 1, True), ("0.20.0", 2, False), ("0.21.0", 2, True)],
)
def test_the_fused_kernel_serves_data_parallel_ranks_from_0_21_on(
    version: str, data_parallel: int, fused: bool
) -> None:
    settings = settle(QWEN_32B, version, card=H100, tensor_parallel_size=2, data_parallel_size=data_parallel)
    assert fuses_all_reduce(settings, H100) is fused


# What "Graph capturing finished" said in published logs.
@pytest.mark.parametrize(
    ("model", "version", "card", "ranks", "logged_gib"),
    [
        (QWEN_32B, "0.10.0", H100, 4, 1.18),
        (QWEN_32B, "0.10.0", H100, 8, 1.17),
        (MOE, "0.11.0", RTX_4090, 4, 1.88),  # vLLM #27782
    ],
)
def test_graphs_of_several_ranks_take_what_was_logged_to_a_tenth(
    model: Model, version: str, card: Gpu, ranks: int, logged_gib: float
) -> None:
    settings = settle(model, version, card=card, tensor_parallel_size=ranks)
    taken = graph_bytes(model, settings, card)
    assert taken.bytes == pytest.approx(logged_gib * GIB, rel=0.1)


def test_the_estimate_of_the_release_counts_them_for_every_size_but_the_first() -> None:
    settings = settle(MOE, "0.26.0", card=RTX_4090, tensor_parallel_size=4, max_model_len=8192)
    labels = {term.label: term.bytes for term in graph_estimate(MOE, settings, RTX_4090).terms}
    assert labels["all-reduces"] > labels["the other sizes"]
