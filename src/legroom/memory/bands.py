"""Error bands: how far off a figure may be, by what is known of the deployment's class.

Every rule says how sure it is of its own figure. Real start-ups of the same class then say how far to believe that:
each class has a factor on the rule's own error, such that nine starts in ten lie inside (`facts/data/bands.json`). The
KV cache is what is left after all the parts, so its band is that of the whole sum, fitted as such.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from legroom.facts.fit import BandRow, band, bands, row_at, rows_of, sum_band
from legroom.facts.gpus import gpu as named_gpu
from legroom.facts.model import Experts, StateSpace
from legroom.figures import Figure
from legroom.memo import Memo
from legroom.memory.activation.encoder_profile import encoder_profile
from legroom.memory.activation.layer_peaks import layer_kinds
from legroom.memory.figure_cache import PROFILE_RUN, cached, cached_by_model
from legroom.memory.weights.loaded import storage_context
from legroom.memory.weights.rank_modules import scheme_in_use
from legroom.memory.weights.storage import kernels_unmeasured
from legroom.records import dataclass
from legroom.units import MIB
from legroom.vllm.traits import is_moe

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.facts.model import Model, Quantization
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
    engine: str
    weights: str
    """How they are stored: `plain`, a method of quantization, `nvfp4` or `fp8_marlin` (kernels whose layout was never
    measured), `online`: quantized while they load, or `unlisted`: the config does not list what its checkpoint left at
    16 bits."""

    @property
    def path(self) -> tuple[str, ...]:
        """From the coarsest class to the finest. Runs were measured on one GPU of one family, release by release."""
        takes = "multimodal" if self.multimodal else "text"
        if self.measured:
            return ("measured", takes, self.release)
        count = "several" if self.several_gpus else "one"
        if self.engine == "V0":
            return ("read", "V0", takes, count)
        if self.card == "unknown":
            return ("read", takes, count)  # a card known by its size alone is one of the families, not a new one
        return ("read", takes, count, self.card)

    @property
    def weights_path(self) -> tuple[str, ...]:
        """The same for the weights: they do not depend on what was profiled where, but for AMD's own accounting."""
        if self.card == "amd":
            return ("amd",)
        takes = "multimodal" if self.multimodal else "text"
        if self.weights in ("plain", "unlisted"):
            return (self.weights, takes)
        return ("quantized", self.weights, takes)

    @property
    def name(self) -> str:
        """The class as `bench/fit_bands.py` lists it."""
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
        settings.engine,
        _stored_as(model, settings, gpu),
    )


def _stored_as(model: Model, settings: EngineSettings, gpu: Gpu) -> str:
    scheme = scheme_in_use(model, settings)
    if scheme is None:
        return "plain"
    if scheme.online:
        return "online"
    if _lacks_its_list(model, scheme):
        return "unlisted"
    return kernels_unmeasured(scheme, storage_context(settings, gpu)) or scheme.method


def _lacks_its_list(model: Model, scheme: Quantization) -> bool:
    """4-bit checkpoints leave a tower, routers, linear attention and whatever else their makers chose at 16 bits, four
    times as large, and list it. A config without that list is not the checkpoint's own, or says only half."""
    if scheme.list_assumed:
        return True
    if scheme.weight_bits != 4 or scheme.rules or scheme.targets != ("Linear",) or scheme.method == "gguf":
        return False
    plain_dense = not model.modalities and not any(
        isinstance(layer.mixer, StateSpace) or isinstance(layer.feedforward, Experts)
        for layer, _ in cached_by_model(layer_kinds, model)
    )
    lists = any(name != "lm_head" for name in scheme.ignored)
    return not lists and (not plain_dense or scheme.method == "bitsandbytes")


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
    below, above = band(rows_of(figure), of.path, scale(value), gpu.total_bytes, least=1.0)
    return _widened(value, below + possible_saving(value), above + possible_extra(value))


def _widened(value: Figure, below: int, above: int) -> Figure:
    """The figure with this band: no part is less than nothing."""
    low = min(value.bytes, max(0, value.bytes - below))
    return Figure(value.bytes, "estimated", low, value.bytes + above, value.terms)


def kv_band(parts: Sequence[Figure], of: BandClass, settings: EngineSettings, gpu: Gpu) -> tuple[int, int]:
    """Bytes below and above what is left of the budget: one band for the whole sum, not the sum of the parts' worst.

    What the weights and the card's total may differ by is known by itself; the class speaks of the rest.
    """
    if all(part.kind != "estimated" for part in parts):
        return 0, 0
    below, above = sum_band(rows_of("kv_cache"), of.path, kv_scale(parts[1:]), gpu.total_bytes)
    weights = parts[0]
    smaller, larger = total_spread(settings, gpu)
    spare = possible_spare(parts[1:], settings, gpu)
    return (
        int(math.hypot(below, weights.high - weights.bytes, smaller)) + sum(possible_extra(part) for part in parts[1:]),
        int(math.hypot(above, weights.bytes - weights.low, larger)) + spare,
    )


def possible_spare(parts: Sequence[Figure], settings: EngineSettings, gpu: Gpu) -> int:
    """What the KV cache gets more if a doubt that no flag settles turns out well: the card is the larger one of its
    name, the installation has the library that needs less."""
    return sum(possible_saving(part) for part in parts) + spare_on_larger_card(settings, gpu)


def spare_on_larger_card(settings: EngineSettings, gpu: Gpu) -> int:
    """What the budget is larger by on the larger card of an ambiguous name; 0: the name means one card."""
    if not gpu.larger:
        return 0
    return int((named_gpu(gpu.larger).total_bytes - gpu.total_bytes) * settings.gpu_memory_utilization)


def possible_saving(value: Figure) -> int:
    """How much farther its own rule lets a figure fall than rise: a part of it may not be there at all."""
    return max(0, value.bytes - value.low - (value.high - value.bytes)) if value.kind == "estimated" else 0


def possible_extra(value: Figure) -> int:
    """How much farther its own rule lets a figure rise than fall: a part that nothing explains may come on top."""
    return max(0, value.high - value.bytes - (value.bytes - value.low)) if _has_two_sides(value) else 0


def kv_scale(parts: Sequence[Figure]) -> float:
    """The error that the rules of the parts beside the weights expect of their sum."""
    return math.hypot(*(scale(part) for part in parts))


def total_spread(settings: EngineSettings, gpu: Gpu) -> tuple[float, float]:
    """What a card whose total is not known to the last byte may take from the budget, and what it may add: drivers
    differ in what they keep for themselves, and the usual total need not be in the middle of those that were seen."""
    less, more = gpu.total_bytes - gpu.total_low_bytes, gpu.total_high_bytes - gpu.total_bytes
    return max(0, less) * settings.gpu_memory_utilization, max(0, more) * settings.gpu_memory_utilization


def scale(value: Figure) -> float:
    """The error that the figure's own rule expects."""
    if value.kind != "estimated":
        return 0.0
    above = value.high - value.bytes
    return float(min(above, value.bytes - value.low) if _has_two_sides(value) else above)


def _has_two_sides(value: Figure) -> bool:
    """Whether a figure's lower side is its rule's own: at 0 it was cut off, as no part is less than nothing."""
    return value.kind == "estimated" and value.low > 0


def weights_path(of: BandClass, weights: Figure) -> tuple[str, ...]:
    """Figures of which a part had to be assumed are classes of their own: they do not make exact ones doubtful."""
    has_class_of_its_own = of.weights_path[0] in ("amd", "quantized")
    return of.weights_path if weights.kind == "exact" or has_class_of_its_own else ("assumed", *of.weights_path)


def _banded_weights(value: Figure, of: BandClass, gpu: Gpu) -> Figure:
    least = bands()["unseen"]["least_of_weights"]
    below, above = band(rows_of("weights"), weights_path(of, value), value.bytes, gpu.total_bytes, least)
    if value.kind == "exact" and not below + above:
        return value
    own = value.high - value.bytes
    return _widened(value, max(below, own, _LEAST_BYTES), max(above, own, _LEAST_BYTES))


def evidence(of: BandClass) -> tuple[BandRow, bool]:
    """The real starts behind a class's KV band, and whether they are of that very class."""
    return row_at(rows_of("kv_cache"), of.path)
