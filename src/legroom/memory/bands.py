"""Error bands: how far off a figure may be, by what is known of the deployment's class.

Every rule says how sure it is of its own figure. Real start-ups of the same class then say how far to believe that:
each class has a factor on the rule's own error, such that nine starts in ten lie inside (`facts/data/bands.json`). The
KV cache is what is left after all the parts, so its band is that of the whole sum, fitted as such.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from legroom.facts.fit import BandRow, band, bands, row_at, rows_of, sum_band
from legroom.facts.releases import release as known_release
from legroom.figures import Figure
from legroom.memo import Memo
from legroom.memory.activation.encoder import encoder_profile
from legroom.memory.cache import PROFILE_RUN, cached
from legroom.records import dataclass
from legroom.units import MIB
from legroom.vllm.traits import is_moe

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.facts.model import Model
    from legroom.vllm.args import EngineSettings

_ADA = (8, 9)
_CARDS = {6: "pascal", 7: "turing-volta", 8: "ampere", 9: "hopper", 10: "blackwell", 11: "blackwell", 12: "blackwell"}
"""Families by the first number of their compute capability."""
_LEAST_BYTES = 4 * MIB
"""The least to each side of weights that are not exact."""
_banded: Memo[Figure] = Memo()


@dataclass(frozen=True, slots=True)
class BandClass:
    """What decides how far off a plan may be."""

    measured: bool
    """Whether this release was measured on this family of cards, rather than read from its source."""
    multimodal: bool
    """Whether the profile run includes an encoder."""
    several_gpus: bool
    card: str
    """hopper | blackwell | ada | ampere | turing-volta | pascal | amd | intel | unified | unknown"""
    release: str
    weights: str
    """The quantization method, or `plain`."""

    @property
    def path(self) -> tuple[str, ...]:
        """From the coarsest class to the finest. Runs were measured on one GPU of one family, release by release."""
        takes = "multimodal" if self.multimodal else "text"
        if self.measured:
            return ("measured", takes, self.release)
        return ("read", takes, "several" if self.several_gpus else "one", self.card)

    @property
    def weights_path(self) -> tuple[str, ...]:
        """The same for the weights: they do not depend on what was profiled where."""
        return ("multimodal" if self.multimodal else "text", self.weights)

    @property
    def name(self) -> str:
        """The class as `legroom score` lists it."""
        return "/".join(self.path)


def band_class(model: Model, settings: EngineSettings, gpu: Gpu) -> BandClass:
    """The class of one deployment."""
    return cached(_class, model, settings, gpu, inputs=PROFILE_RUN)


def _class(model: Model, settings: EngineSettings, gpu: Gpu, _: int) -> BandClass:
    several = settings.tensor_parallel_size * settings.pipeline_parallel_size > 1
    # Data-parallel ranks share their experts; a dense model's are servers of their own.
    several = several or (settings.data_parallel_size > 1 and is_moe(model))
    card = card_family(gpu)
    releases: Sequence[str] = bands()["measured"]["releases"]
    measured = card == bands()["measured"]["card"] and settings.release in releases
    return BandClass(
        measured and not several,
        encoder_profile(model, settings, gpu) is not None,
        several,
        card,
        settings.release,
        model.quantization.method if model.quantization else "plain",
    )


def card_family(gpu: Gpu) -> str:
    """The family of cards whose drivers and kernels take about the same memory."""
    if gpu.unified:
        return "unified"
    if gpu.vendor != "nvidia":
        return gpu.vendor
    if gpu.compute_capability == _ADA:
        return "ada"
    return _CARDS.get(gpu.compute_capability[0], "unknown")


def banded(figure: str, value: Figure, of: BandClass, settings: EngineSettings, gpu: Gpu) -> Figure:
    """A part of the layout with the band of its class. What is exact or measured stays so, but for weights of a class
    in which real checkpoints differed from what their configs say."""
    if value.kind == "measured":
        return value
    return _banded.get((value, of, gpu), (figure,), lambda: _with_band(figure, value, of, settings, gpu))


def _with_band(figure: str, value: Figure, of: BandClass, settings: EngineSettings, gpu: Gpu) -> Figure:
    if figure == "weights":
        return _banded_weights(value, of, gpu)
    if value.kind == "exact":
        return value
    return _widened(value, *band(rows_of(figure), of.path, scale(value, settings), gpu.total_bytes, least=1.0))


def _widened(value: Figure, below: int, above: int) -> Figure:
    """The figure with this band: no part is less than nothing."""
    low = min(value.bytes, max(0, value.bytes - below))
    return Figure(value.bytes, "estimated", low, value.bytes + above, value.terms)


def kv_band(parts: Sequence[Figure], of: BandClass, settings: EngineSettings, gpu: Gpu) -> tuple[int, int]:
    """Bytes below and above what is left of the budget: one band for the whole sum, not the sum of the parts' worst.

    What the weights may take more or less is missing or left over there in full, so no class has a narrower band.
    """
    weights = parts[0]
    below, above = sum_band(rows_of("kv_cache"), of.path, kv_scale(parts, settings, gpu), gpu.total_bytes)
    return max(below, weights.high - weights.bytes), max(above, weights.bytes - weights.low)


def kv_scale(parts: Sequence[Figure], settings: EngineSettings, gpu: Gpu) -> float:
    """The error that the parts' own rules expect of the sum; a card whose total is not known adds its own."""
    if all(part.kind != "estimated" for part in parts):
        return 0.0
    weights, *others = parts
    total = (gpu.total_high_bytes - gpu.total_low_bytes) / 2 * settings.gpu_memory_utilization
    of_weights = (weights.high - weights.low) / 2
    return math.sqrt(of_weights**2 + total**2 + sum(scale(part, settings) ** 2 for part in others))


def scale(value: Figure, settings: EngineSettings) -> float:
    """The error that the figure's own rule expects, with what is doubtful about some of its terms."""
    if value.kind != "estimated":
        return 0.0
    own = value.high - value.bytes
    shares = _doubtful_shares(settings.release)
    return math.hypot(own, *(shares.get(term.label, 0.0) * term.bytes for term in value.terms)) if shares else own


@cache
def _doubtful_shares(release: str) -> dict[str, float]:
    """By the label of a term, what share of it is doubtful in a release."""
    known = known_release(release)
    doubts = (doubt for doubt in bands()["doubts"] if "before" not in doubt or known.before(doubt["before"]))
    return {doubt["term"]: float(doubt["share"]) for doubt in doubts}


def _banded_weights(value: Figure, of: BandClass, gpu: Gpu) -> Figure:
    below, above = band(rows_of("weights"), of.weights_path, value.bytes, gpu.total_bytes)
    if value.kind == "exact" and not below + above:
        return value
    return _widened(value, max(below, _LEAST_BYTES), max(above, _LEAST_BYTES))


def evidence(of: BandClass) -> tuple[BandRow, bool]:
    """The real starts behind a class's KV band, and whether they are of that very class."""
    return row_at(rows_of("kv_cache"), of.path)
