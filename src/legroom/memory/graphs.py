"""CUDA graphs: what the release subtracts for them, and what capturing them takes.

A captured graph costs the driver a piece for every kernel it holds, so layers x sizes, and torch a private pool as
large as the largest captures need. The constants are fitted (`facts/data/fit.json`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from legroom.facts.attention import latent
from legroom.facts.fit import by_release, constants
from legroom.facts.model import Experts
from legroom.facts.releases import release as known_release
from legroom.figures import Figure, Term, estimated, exact
from legroom.memory.activation.layers import layer_kinds
from legroom.memory.cache import cached, cached_by_model
from legroom.units import MIB

# Attention splits a decode batch over the processors up to about this many sequences.
_LARGEST_SPLIT = 512

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.facts.model import Model
    from legroom.vllm.args import EngineSettings


def graph_estimate(model: Model, settings: EngineSettings, gpu: Gpu) -> Figure:
    """What the release subtracts from the budget for CUDA graphs."""
    return cached(_estimate, model, settings, gpu, 0)


def graph_bytes(model: Model, settings: EngineSettings, gpu: Gpu) -> Figure:
    """What capturing the graphs really takes."""
    return cached(_taken, model, settings, gpu, 0)


def _estimate(model: Model, settings: EngineSettings, gpu: Gpu, _: int) -> Figure:
    """0.18+ captures the two largest sizes of each kind and scales the second by their number, 1 MiB at least."""
    if not settings.graph_estimate_applied or settings.cudagraph_mode == "NONE":
        return exact(0, "CUDA graph estimate", "this release subtracts nothing for graphs here")
    if settings.runner == "V2":
        if known_release(settings.release).before("0.29.0"):
            return exact(0, "CUDA graph estimate", "the V2 runner estimates 0 before 0.29")
        # From 0.29 the V2 runner measures its piecewise graphs whole, so the guess is close to what capture takes.
        real = graph_bytes(model, settings, gpu)
        return estimated(
            real.bytes, real.low, real.high, (Term("CUDA graph estimate", real.bytes, "measured nearly whole"),)
        )
    fit = constants()["graphs"]["estimate"]
    pieces, full = captures(settings)
    each = layer_nodes(model)
    decode = min(_largest_full(settings), _LARGEST_SPLIT) if full else 0
    pieces_first = fit["piecewise_mib_per_token"] * _largest(settings) if pieces else 0.0
    first = fit["first_mib"] + max(fit["full_mib_per_token"] * decode, pieces_first)
    rest = (pieces - 1) * max(1.0, each * fit["piecewise_mib"]) if pieces else 0.0
    rest += (full - 1) * max(1.0, each * fit["full_mib"]) if full else 0.0
    guess = int((first + rest) * MIB)
    spread = int(guess * fit["relative_band"])
    how = f"first capture + {pieces} piecewise and {full} full sizes"
    return estimated(guess, guess - spread, guess + spread, (Term("CUDA graph estimate", guess, how),))


def _taken(model: Model, settings: EngineSettings, gpu: Gpu, _: int) -> Figure:
    if settings.cudagraph_mode == "NONE" or settings.enforce_eager:
        return exact(0, "CUDA graphs", "none are captured")
    fit = _era(settings)
    pieces, full = captures(settings)
    each = layer_nodes(model)
    driver = each * (pieces * fit["piecewise_mib"] + full * fit["full_mib"])
    largest = min(_largest_full(settings) if full else _largest(settings) // 4, _LARGEST_SPLIT)
    pool = fit["pool_mib"] + fit["pool_mib_per_token"] * largest
    if any(isinstance(layer.feedforward, Experts) for layer, _ in cached_by_model(layer_kinds, model)):
        pool += fit["pool_mib_experts"]
    taken = int((driver + pool) * MIB)
    spread = int(taken * fit["relative_band"])
    terms = (
        Term(
            "graph nodes", int(driver * MIB), f"{len(model.layers)} layers x ({pieces} piecewise + {full} full sizes)"
        ),
        Term("graph pool", int(pool * MIB), f"the largest captures, up to {largest} tokens"),
    )
    return estimated(taken, taken - spread, taken + spread, terms)


def _era(settings: EngineSettings) -> dict[str, Any]:
    runner = "V0" if settings.engine == "V0" else settings.runner
    return by_release(constants()["graphs"][runner], settings.release)


def captures(settings: EngineSettings) -> tuple[int, int]:
    """How many piecewise and full graphs are captured: full ones are of decode batches, one token a sequence."""
    sizes = settings.cudagraph_capture_sizes
    tokens_a_sequence = 1 + settings.num_speculative_tokens
    decode = sum(1 for size in sizes if size <= settings.max_num_seqs * tokens_a_sequence)
    return {
        "PIECEWISE": (len(sizes), 0),
        "FULL": (0, len(sizes)),
        "FULL_DECODE_ONLY": (0, decode),
        "FULL_AND_PIECEWISE": (len(sizes), decode),
    }.get(settings.cudagraph_mode, (0, 0))


def layer_nodes(model: Model) -> float:
    """Layers of this model, counted in those of a plain transformer: MLA launches more kernels."""
    heavier: float = constants()["graphs"]["heavy_layer"] - 1.0
    return len(model.layers) + heavier * cached_by_model(_latent_layers, model)


def _latent_layers(model: Model) -> int:
    return len(latent(layer.mixer for layer in model.layers))


def _largest(settings: EngineSettings) -> int:
    return max(settings.cudagraph_capture_sizes, default=0)


def _largest_full(settings: EngineSettings) -> int:
    return min(_largest(settings), settings.max_num_seqs * (1 + settings.num_speculative_tokens))
