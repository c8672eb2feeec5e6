"""Checkpoints that can replace a model on a card: quantized ones, and smaller models of its series."""

import json
from collections.abc import Iterator
from dataclasses import replace

from legroom.facts.bundled import find, smaller_siblings, variants
from legroom.facts.model import Model, Quantization
from legroom.facts.model_sources import from_bundled
from legroom.memory.figure_cache import cached_by_model
from legroom.memory.weights.storage import StorageContext
from legroom.planning.plan import Target
from legroom.vllm.args import ServeArgs
from legroom.vllm.resolve import config_overrides

FULL_BITS = 16
FP8_NATIVE, FP4_NATIVE = (8, 9), (10, 0)
"""Lowest compute capability with FP8 and with FP4 tensor cores."""
FP8_MARLIN = (8, 0)
"""Lowest compute capability of Marlin, which unpacks FP8 weights to 16 bits on cards without FP8 tensor cores."""
_MIN_CAPABILITY = {"gptq": (6, 0), "bitsandbytes": (7, 0)}
_MIN_INTEGERS, _MIN_PACKED_BEFORE_0_12 = (7, 5), (8, 0)


def quantized_checkpoints(target: Target, args: ServeArgs) -> list[Model]:
    """The published quantized checkpoints that the card runs, widest weights first; none where the model is quantized
    or --quantization is given."""
    # Of equal widths, the publisher's own comes first, then native formats of the card.
    model = target.model
    if args.quantization or model.quantization or not model.source.startswith("bundled"):
        return []
    name = args.model if find(args.model) else model.name
    others = cached_by_model(_quantized, model, name, json.dumps(config_overrides(args), sort_keys=True))
    supported = [other for other in others if _is_supported(other.quantization, target)]
    return sorted(
        supported,
        key=lambda other: (lost_bits(other), _owner(other) != _owner(model), not _computes_natively(other, target)),
    )


def _quantized(model: Model, name: str, overrides: str) -> tuple[Model, ...]:
    """The quantized variants of the model `name`, with the same changes of its config (`overrides`, JSON text)."""
    # Cached, because memory figures are cached by model object.
    changes = json.loads(overrides)
    return tuple(replace(from_bundled(variant, overrides=changes), draft=model.draft) for variant in variants(name))


def smaller_models(target: Target, args: ServeArgs) -> Iterator[Model]:
    """Smaller models of the same series, the largest first; none for a model that is not bundled."""
    if target.model.source.startswith("bundled"):
        for sibling in smaller_siblings(args.model if find(args.model) else target.model.name):
            yield from_bundled(sibling)


def lost_bits(model: Model) -> int:
    """Bits per weight that quantization removed, from 16; 0 for an unquantized model."""
    return FULL_BITS - model.quantization.weight_bits if model.quantization else 0


def unpacks_weights(model: Model, target: Target) -> bool:
    """Whether the card computes with the checkpoint's FP8 or FP4 weights in 16 bits: it has no units for them, or Ada's
    are left unused for FP8 blocks."""
    scheme = model.quantization
    if scheme is None or scheme.number != "float":
        return False
    context = StorageContext("bfloat16", target.release, target.gpu.compute_capability, target.gpu.vendor)
    is_repacked = scheme.block is not None and scheme.weight_bits == 8 and context.repacks_fp8_blocks
    return is_repacked or not _computes_natively(model, target)


def unpacks_fp8(target: Target) -> bool:
    """Whether the card, a known NVIDIA one, has no FP8 units and unpacks 8-bit values to 16 bits."""
    return target.gpu.vendor == "nvidia" and _capability(target) < FP8_NATIVE


def _owner(model: Model) -> str:
    """The Hugging Face organization in the model's id, in lower case."""
    return model.name.partition("/")[0].lower()


def _computes_natively(model: Model, target: Target) -> bool:
    """Whether the GPU computes in the checkpoint's float format and need not unpack its weights."""
    scheme = model.quantization
    if scheme is None or scheme.number != "float" or target.gpu.vendor != "nvidia":
        return True
    if scheme.method == "bitsandbytes":
        return False  # unpacked on every card
    return _capability(target) >= (FP8_NATIVE if scheme.weight_bits >= 8 else FP4_NATIVE)


def _capability(target: Target) -> tuple[int, int]:
    """The card's compute capability; (8, 0), Ampere's, for a card given by its size alone."""
    known = target.gpu.compute_capability
    return known if known != (0, 0) else FP8_MARLIN


def _is_supported(scheme: Quantization | None, target: Target) -> bool:
    """Whether release and card run a checkpoint of this scheme; 4-bit floats only on cards that compute in FP4."""
    # `get_min_capability` of each scheme: ModelOpt FP8 8.9 up to 0.28, other FP8 8.0 through Marlin, packed integers
    # 8.0 up to 0.11 and 7.5 since. NVFP4 is proposed where the card computes in it.
    if scheme is None or target.gpu.vendor != "nvidia":
        return scheme is not None and not (scheme.number == "float" and scheme.weight_bits < 8)
    capability = _capability(target)
    if scheme.method in _MIN_CAPABILITY:
        return capability >= _MIN_CAPABILITY[scheme.method]
    if scheme.number == "float":
        if scheme.weight_bits < 8:
            return capability >= FP4_NATIVE or scheme.method == "mxfp4"
        return capability >= (FP8_NATIVE if scheme.method.startswith("modelopt") else FP8_MARLIN)
    packed = scheme.method == "compressed-tensors" and scheme.weight_bits < 8
    return capability >= (_MIN_PACKED_BEFORE_0_12 if packed and target.release.before("0.12.0") else _MIN_INTEGERS)
