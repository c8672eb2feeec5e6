"""90 % error bands of the figures. Every figure has an error estimate of its own. Its band adds a share of the card
that grows with each property of the deployment that was hardly measured, so that nine of ten real start-ups lie inside
(`facts/data/bands.json`). The KV cache is the rest of the budget, so the band of the whole sum applies to it."""

import math
from collections.abc import Sequence

from legroom.facts.fit import Properties, bands, evidence, half_band, own_error, weights_band, weights_rows
from legroom.facts.gpus import Gpu
from legroom.facts.gpus import gpu as named_gpu
from legroom.facts.model import Experts, Model, Quantization, StateSpace, latent, recurrent
from legroom.figures import Figure
from legroom.memo import Memo
from legroom.memory.activation.encoder_profile import encoder_profile
from legroom.memory.activation.layer_peaks import layer_kinds
from legroom.memory.activation.profile_run import is_compiled
from legroom.memory.figure_cache import ALL_PARTS, cached, cached_by_model
from legroom.memory.weights.loaded import storage_context
from legroom.memory.weights.rank_modules import scheme_in_use
from legroom.memory.weights.storage import kernels_unmeasured
from legroom.records import dataclass
from legroom.units import MIB
from legroom.vllm.args import EngineSettings, draft_method
from legroom.vllm.traits import is_pooling, traits

_ADA = (8, 9)
_CARDS = {6: "pascal", 7: "turing-volta", 8: "ampere", 9: "hopper", 10: "blackwell", 11: "blackwell", 12: "blackwell"}
"""Card families by the major compute capability."""
_MIN_WEIGHTS_BAND_BYTES = 4 * MIB  # The minimum of both sides for weights that are not exact.
_SIDES = ("below", "above")
_banded: Memo[Figure] = Memo()


@dataclass(frozen=True, slots=True)
class BandClass:
    """What the error of a deployment depends on."""

    properties: Properties
    card: str
    """hopper | blackwell | ada | ampere | turing-volta | pascal | amd | intel | unified | unknown"""
    weights: str
    """`plain`, a quantization method, `nvfp4` or `fp8_marlin` (kernels whose layout was not measured), `online`
    (quantized while loading), or `unlisted` (the config does not list the modules left at 16 bits)."""
    multimodal: bool
    """Whether the profile run includes an encoder."""


@cached(ALL_PARTS)
def band_class(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> BandClass:
    """The properties of a deployment (card, architecture, storage ...) that decide how wide its error bands are."""
    several = settings.tensor_parallel_size * settings.pipeline_parallel_size > 1
    # Data-parallel ranks share their experts; a dense model's are servers of their own.
    several = several or (settings.data_parallel_size > 1 and traits(model).moe)
    card, weights = card_family(gpu), _storage_class(model, settings, gpu)
    multimodal = encoder_profile(model, settings, gpu) is not None
    counted = settings.graph_estimate_applied and settings.cudagraph_mode != "NONE"
    execution = "eager" if not is_compiled(settings) else "graphs counted" if counted else "compiled"
    given = settings.given
    properties = (
        ("card", card),
        ("release", ".".join(settings.release.version.split(".")[:2])),
        ("gpus", "several" if several else "one"),
        # The page cache of a memory that CPU and GPU share comes and goes while vLLM profiles.
        ("memory", "shared" if gpu.unified else "own"),
        ("architecture", cached_by_model(_architecture_class, model)),
        ("media", model.architecture if multimodal else "text"),
        ("weights", weights),
        ("execution", execution),
        ("runner", "pooling" if is_pooling(given, model) else settings.runner),
        ("adapters", "LoRA" if given.enable_lora else "none"),
        ("draft", "draft" if draft_method(given.speculative_config) else "none"),
    )
    return BandClass(properties, card, weights, multimodal)


def _architecture_class(model: Model) -> str:
    """`full`, `windowed`, `latent`, `linear attention` or `state space`, with `+experts` where layers have experts."""
    layers = [layer for layer, _ in layer_kinds(model)]
    mixers = [mixer for layer in layers for mixer in (layer.mixer, *layer.also)]
    states = {mixer.kind for mixer in recurrent(mixers)}
    if states:
        kind = "linear attention" if states <= {"gdn", "kda"} else "state space"
    elif latent(mixers):
        kind = "latent"
    else:
        kind = "windowed" if any(mixer and mixer.window for mixer in mixers) else "full"
    return kind + ("+experts" if any(isinstance(layer.feedforward, Experts) for layer in layers) else "")


def _storage_class(model: Model, settings: EngineSettings, gpu: Gpu) -> str:
    """The class that selects the weights' error band: plain, online, unlisted, a kernel's or the method's name."""
    scheme = scheme_in_use(model, settings)
    if scheme is None:
        return "plain"
    if scheme.online:
        return "online"
    if _lacks_unquantized_list(model, scheme):
        return "unlisted"
    return kernels_unmeasured(scheme, storage_context(settings, gpu)) or scheme.method


def _lacks_unquantized_list(model: Model, scheme: Quantization) -> bool:
    """Whether a 4-bit checkpoint's config does not list the modules left in 16 bits, where they take 4x the memory."""
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
    """Cards of like driver memory: `unified`, the vendor if not NVIDIA, else the architecture (`hopper`, `ada` ...)."""
    if gpu.unified:
        return "unified"
    if gpu.vendor != "nvidia":
        return gpu.vendor
    return "ada" if gpu.compute_capability == _ADA else _CARDS.get(gpu.compute_capability[0], "unknown")


def banded(name: str, value: Figure, of: BandClass, gpu: Gpu) -> Figure:
    """The figure of a layout part (`name`: "weights", "activation" ...) with its error band; unchanged if measured."""
    return _banded.get((value, of, gpu), (name,), lambda: _with_band(name, value, of, gpu))


def _with_band(name: str, value: Figure, of: BandClass, gpu: Gpu) -> Figure:
    """The figure of layout part `name` with the error band of starts like `of`; unchanged if measured or derived, or if
    exact and not the weights."""
    if value.kind in ("measured", "derived"):
        return value
    if name == "weights":
        # The error band that known starts of this class had, or the weights' own where that is wider.
        below, above = weights_band(weights_rows(), weights_class(of, value), value.bytes, gpu.total_bytes)
        if value.kind == "exact" and not below + above:
            return value
        below, above = max(below, value.bytes - value.low), max(above, value.high - value.bytes)
        return _widened(value, max(below, _MIN_WEIGHTS_BAND_BYTES), max(above, _MIN_WEIGHTS_BAND_BYTES))
    if value.kind == "exact":
        return value
    if name == "outside":
        row = bands()["outside"]
        wider = 1 if evidence(of.properties) == ("measured", ()) else row["unmeasured"]
        below, above = (int(row[side] * error_scale(value) * wider) for side in _SIDES)
    else:
        below = above = half_band(name, of.properties, own_error(name, error_scale(value)), gpu.total_bytes)
    return _widened(value, below + possible_saving(value), above + possible_extra(value))


def _widened(value: Figure, below: int, above: int) -> Figure:
    """The figure as an estimate, with a band from `below` bytes under it (not under 0) to `above` bytes over it."""
    low = min(value.bytes, max(0, value.bytes - below))
    return Figure(value.bytes, "estimated", low, value.bytes + above, value.terms)


def kv_band(
    parts: Sequence[Figure], of: BandClass, settings: EngineSettings, gpu: Gpu, first_start_bytes: int
) -> tuple[int, int]:
    """The KV cache's error band in bytes (below, above), (0, 0) where exact. `parts`: weights, activation, graph
    estimate, non-torch; `first_start_bytes`: what an empty compile cache would cost."""
    if all(part.kind != "estimated" for part in parts):
        return 0, 0
    errors = (own_error(name, error_scale(part)) for name, part in zip(COUNTED, parts[1:], strict=True))
    half = half_band("kv_cache", of.properties, math.hypot(*errors), gpu.total_bytes)
    weights = parts[0]
    smaller, larger = total_spread(settings, gpu)
    spare = possible_spare(parts[1:], settings, gpu)
    extra = sum(possible_extra(part) for part in parts[1:]) + first_start_bytes
    return (
        int(math.hypot(half, weights.high - weights.bytes, smaller)) + extra,
        int(math.hypot(half, weights.bytes - weights.low, larger)) + spare,
    )


def possible_spare(parts: Sequence[Figure], settings: EngineSettings, gpu: Gpu) -> int:
    """Bytes that the KV cache gains if optional parts of `parts` are absent and the card is the larger of its name."""
    return sum(possible_saving(part) for part in parts) + spare_on_larger_card(settings, gpu)


def spare_on_larger_card(settings: EngineSettings, gpu: Gpu) -> int:
    """Bytes that the budget gains on the larger card of an ambiguous name; 0 where the name means one card."""
    larger_bytes = named_gpu(gpu.larger).total_bytes if gpu.larger else gpu.total_bytes
    return int((larger_bytes - gpu.total_bytes) * settings.gpu_memory_utilization)


def possible_saving(value: Figure) -> int:
    """Bytes by which the error band reaches further down than up: those of parts that may be absent; else 0."""
    return max(0, value.bytes - value.low - (value.high - value.bytes)) if value.kind == "estimated" else 0


def possible_extra(value: Figure) -> int:
    """Bytes by which the error band reaches further up than down: those of parts that may exist uncounted; else 0."""
    return max(0, value.high - value.bytes - (value.bytes - value.low)) if _has_two_sides(value) else 0


COUNTED = ("activation", "cuda_graph", "non_torch")
"""The parts of the budget beside weights and KV cache."""


def total_spread(settings: EngineSettings, gpu: Gpu) -> tuple[float, float]:
    """Bytes (that the budget may lose, that it may gain), as the driver reserves more or less of the card's memory."""
    less, more = gpu.total_bytes - gpu.total_low_bytes, gpu.total_high_bytes - gpu.total_bytes
    return max(0, less) * settings.gpu_memory_utilization, max(0, more) * settings.gpu_memory_utilization


def error_scale(value: Figure) -> float:
    """Bytes to the nearer end of the error band, to its upper end if the lower is 0; 0 for a figure not estimated."""
    if value.kind != "estimated":
        return 0.0
    above = value.high - value.bytes
    return float(min(above, value.bytes - value.low) if _has_two_sides(value) else above)


def _has_two_sides(value: Figure) -> bool:
    """Whether the figure is estimated and its error band's lower end is above 0."""
    return value.kind == "estimated" and value.low > 0


def weights_class(of: BandClass, weights: Figure) -> tuple[str, ...]:
    """The key of the weights' error band: how they are stored, then text or multimodal; for AMD cards `amd` alone."""
    takes = "multimodal" if of.multimodal else "text"
    if of.card == "amd":
        return ("amd",)
    if of.weights not in ("plain", "unlisted"):
        return ("quantized", of.weights, takes)
    return (of.weights, takes) if weights.kind == "exact" else ("assumed", of.weights, takes)
