"""CUDA graphs: what is subtracted for them and what they take."""

from __future__ import annotations

import dataclasses

import pytest
from recorded_runs import H200, Recorded, models, recorded, settle

from legroom.facts.gpus import gpu
from legroom.facts.model_sources import load
from legroom.memory.attention_workspace import split_buffers
from legroom.memory.cudagraph_memory import captured_sizes, graph_bytes, graph_estimate, warm_up_cache
from legroom.units import MIB

GRAPHS = [run for run in recorded() if run.seen.get("graph_bytes")]
LLAMA = models()["g-llama"]
MOE = models()["g-qwen30b"]
CAPTURED_TO_256 = {"max_cudagraph_capture_size": 256}


@pytest.mark.parametrize("run", GRAPHS, ids=lambda run: run.id)
def test_the_estimate_of_the_release_is_predicted_to_ninety_mebibytes(run: Recorded) -> None:
    predicted = graph_estimate(run.model, run.settings, H200).bytes
    assert abs(predicted - run.seen["graph_estimate_bytes"]) < 90 * MIB


def test_captured_graphs_are_predicted_to_half_a_gibibyte() -> None:
    for run in GRAPHS:
        assert abs(graph_bytes(run.model, run.settings, H200).bytes - run.seen["graph_bytes"]) < 450 * MIB


def test_nothing_is_captured_without_graphs() -> None:
    settings = settle(LLAMA, enforce_eager=True)
    assert graph_bytes(LLAMA, settings, H200).bytes == graph_estimate(LLAMA, settings, H200).bytes == 0


@pytest.mark.parametrize(("version", "counted"), [("0.17.1", False), ("0.19.0", False), ("0.20.0", True)])
def test_the_estimate_counts_from_0_20_on(version: str, counted: bool) -> None:
    settings = settle(MOE, version, max_model_len=8192)
    assert bool(graph_estimate(MOE, settings, H200).bytes) is counted


@pytest.mark.parametrize(("version", "counted"), [("0.26.0", False), ("0.28.0", False), ("0.29.0", True)])
def test_the_v2_runner_estimates_nothing_before_0_29(version: str, counted: bool) -> None:
    settings = settle(LLAMA, version, max_model_len=8192)
    assert settings.runner == "V2"
    assert bool(graph_estimate(LLAMA, settings, H200).bytes) is counted


# Estimates and captures of vLLM 0.32.0 on one H200 at 8,192 tokens and 1,024 sequences (2026-11).
@pytest.mark.parametrize(
    ("name", "estimate_mib", "held_mib"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 938, 684),
        ("google/gemma-3-12b-it", 1308, 850),
        ("openai/gpt-oss-20b", 674, 1060),
    ],
)
def test_the_trial_capture_of_the_v2_runner_is_predicted_to_fifty_mebibytes(
    name: str, estimate_mib: int, held_mib: int
) -> None:
    model = load(name)
    flags = {"max_model_len": 8192, "max_num_batched_tokens": 8192, "max_num_seqs": 1024, "language_model_only": True}
    settings = settle(model, "0.32.0", **flags)
    assert abs(graph_estimate(model, settings, H200).bytes - estimate_mib * MIB) < 50 * MIB
    assert abs(graph_bytes(model, settings, H200).bytes - held_mib * MIB) < 50 * MIB


def test_the_estimate_has_flashinfers_workspace_where_it_serves() -> None:
    card = gpu("rtx 5090")
    plain = settle(MOE, "0.26.0", card, max_model_len=8192, max_num_seqs=1)
    quantized = settle(MOE, "0.26.0", card, max_model_len=8192, max_num_seqs=1, kv_cache_dtype="fp8")
    more = graph_estimate(MOE, quantized, card).bytes - graph_estimate(MOE, plain, card).bytes
    assert more == 394 * MIB


def test_a_card_without_splits_captures_less() -> None:
    card = gpu("a100 80gb")
    here, there = settle(MOE, "0.26.0", max_num_seqs=256), settle(MOE, "0.26.0", card, max_num_seqs=256)
    assert graph_bytes(MOE, there, card).bytes < graph_bytes(MOE, here, H200).bytes - 100 * MIB


def test_full_graphs_are_captured_for_decode_batches_alone() -> None:
    settings = settle(LLAMA, max_num_seqs=64)
    piecewise, full = captured_sizes(settings)
    assert piecewise == sorted(settings.cudagraph_capture_sizes)
    assert full == [size for size in piecewise if size <= 64]
    assert captured_sizes(dataclasses.replace(settings, cudagraph_mode="PIECEWISE")) == (piecewise, [])


def test_more_layers_take_more() -> None:
    deeper = dataclasses.replace(LLAMA, layers=LLAMA.layers * 4)
    settings = settle(LLAMA)
    assert graph_bytes(deeper, settings, H200).bytes > graph_bytes(LLAMA, settings, H200).bytes + 100 * MIB


def test_the_split_buffers_and_one_small_segment_stay_cached() -> None:
    settings = settle(LLAMA, "0.32.0")
    cached = warm_up_cache(LLAMA, settings, H200, 496)
    assert cached == 248 * MIB + 20 * MIB + 2 * MIB
    assert cached > split_buffers(LLAMA, settings, H200, 496)


def test_a_pass_that_carves_up_the_split_buffer_needs_a_second_one() -> None:
    model = load("google/gemma-3-12b-it")
    settings = settle(model, "0.32.0", max_model_len=8192)
    assert warm_up_cache(model, settings, H200, 496) > 2 * 240 * MIB


@pytest.mark.parametrize(("name", "sequences", "measured_mib"), [("glm-4.5-air", 248, 414), ("deepseek-v3", 128, 1098)])
def test_experts_leave_one_split_buffer_cached(name: str, sequences: int, measured_mib: int) -> None:
    model = load(name)
    settings = settle(model, "0.32.0", max_model_len=16384, max_num_seqs=256)
    assert abs(warm_up_cache(model, settings, H200, sequences) - measured_mib * MIB) < 40 * MIB


def test_two_mixers_side_by_side_make_two_pieces() -> None:
    falcon = load("falcon-h1-7b")
    settings = settle(falcon, "0.32.0", max_model_len=16384, max_num_seqs=256, compilation_config=CAPTURED_TO_256)
    assert abs(graph_estimate(falcon, settings, H200).bytes - 632 * MIB) < 60 * MIB


def test_off_hopper_a_pass_leaves_its_activations_alone() -> None:
    card = gpu("a100 80gb")
    assert warm_up_cache(LLAMA, settle(LLAMA, "0.32.0", card), card, 240) < 64 * MIB
