"""CUDA graphs: what the release subtracts for them, and what capturing them takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.facts.releases import release as known_release
from legroom.figures import Figure, Term, estimated, exact
from legroom.units import MIB

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.facts.model import Model
    from legroom.vllm.args import EngineSettings


def graph_estimate(model: Model, settings: EngineSettings, gpu: Gpu) -> Figure:
    """What the release subtracts from the budget for CUDA graphs."""
    release = known_release(settings.release)
    if not settings.graph_estimate_applied or settings.cudagraph_mode == "NONE":
        return exact(0, "CUDA graphs", "this release subtracts nothing for graphs here")
    if settings.runner == "V2" and release.before("0.29.0"):
        return exact(0, "CUDA graphs", "the V2 runner estimates 0 before 0.29")
    real = graph_bytes(model, settings, gpu)
    guess = int(real.bytes * 0.75)
    return estimated(
        guess, int(guess * 0.8), int(guess * 1.25), (Term("CUDA graph estimate", guess, "two captures, scaled"),)
    )


def graph_bytes(model: Model, settings: EngineSettings, gpu: Gpu) -> Figure:
    """What capturing the graphs really takes."""
    if settings.cudagraph_mode == "NONE" or settings.enforce_eager:
        return exact(0, "CUDA graphs", "none are captured")
    sizes = len(settings.cudagraph_capture_sizes)
    taken = (120 + 9 * sizes + model.hidden_size * len(model.layers) // 1024) * MIB
    return estimated(taken, int(taken * 0.7), int(taken * 1.3), (Term("CUDA graphs", taken, f"{sizes} sizes"),))
