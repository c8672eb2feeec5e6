"""CUDA graphs: what is subtracted for them and what they take."""

from __future__ import annotations

import dataclasses

import pytest
from recorded_runs import H200, Recorded, models, recorded, settle

from legroom.memory.graphs import captures, graph_bytes, graph_estimate
from legroom.units import MIB

GRAPHS = [run for run in recorded() if run.seen.get("graph_bytes")]
LLAMA = models()["g-llama"]
MOE = models()["g-qwen30b"]


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


def test_full_graphs_are_captured_for_decode_batches_alone() -> None:
    settings = settle(LLAMA, max_num_seqs=64)
    pieces, full = captures(settings)
    assert pieces == len(settings.cudagraph_capture_sizes)
    assert full == sum(1 for size in settings.cudagraph_capture_sizes if size <= 64)
    assert captures(dataclasses.replace(settings, cudagraph_mode="PIECEWISE")) == (pieces, 0)


def test_more_layers_take_more() -> None:
    deeper = dataclasses.replace(LLAMA, layers=LLAMA.layers * 4)
    settings = settle(LLAMA)
    assert graph_bytes(deeper, settings, H200).bytes > graph_bytes(LLAMA, settings, H200).bytes + 100 * MIB
