"""How a module is stored: the tensors that loading creates, and what is left of them when vLLM is done with it."""

from __future__ import annotations

from dataclasses import dataclass

from legroom.facts.quantization import Quantization
from legroom.memory.weight_modules import Module
from legroom.units import cdiv

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float8": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class Storage:
    """The sizes of a module's tensors. `final` None: what is loaded stays as it is."""

    loaded: tuple[int, ...]
    final: tuple[int, ...] | None = None
    scales: int = 0
    """How much of what stays is scales, zero points and the like."""

    @property
    def kept(self) -> tuple[int, ...]:
        """What stays on the GPU."""
        return self.loaded if self.final is None else self.final


@dataclass(frozen=True, slots=True)
class StorageContext:
    """What storage depends on besides the module: precision, release and GPU."""

    dtype: str
    release: str = "0.32.0"
    capability: tuple[int, int] = (9, 0)
    vendor: str = "nvidia"

    @property
    def dtype_bytes(self) -> int:
        """Of one unquantized weight."""
        return DTYPE_BYTES[self.dtype]


def storage(module: Module, scheme: Quantization | None, context: StorageContext) -> Storage:
    """The tensors of one module under a scheme; None: stored in its own precision."""
    if scheme is None or not module.quantizable:
        return _plain(module, context)
    bias = _bias(module, context)
    loaded, final, scales = _quantized(module, scheme, context)
    return Storage(loaded + bias, None if final is None else final + bias, scales)


def _plain(module: Module, context: StorageContext) -> Storage:
    size = DTYPE_BYTES[module.dtype] if module.dtype else context.dtype_bytes
    return Storage((module.elements * size, *_bias(module, context)))


def _bias(module: Module, context: StorageContext) -> tuple[int, ...]:
    size = DTYPE_BYTES[module.dtype] if module.dtype else context.dtype_bytes
    return (module.copies * module.outputs * size,) if module.bias else ()


def _quantized(
    module: Module, scheme: Quantization, context: StorageContext
) -> tuple[tuple[int, ...], tuple[int, ...] | None, int]:
    weight = module.elements * scheme.weight_bits // 8
    rows, columns, copies = module.outputs, module.inputs, module.copies
    if scheme.block:
        scales = copies * cdiv(rows, scheme.block[0]) * cdiv(columns, scheme.block[1]) * 4
    elif scheme.strategy == "channel":
        scales = copies * rows * scheme.scale_bits // 8
    elif scheme.group_size:
        scales = copies * rows * cdiv(columns, scheme.group_size) * scheme.scale_bits // 8
    else:
        scales = copies * rows * cdiv(columns, columns) * 4 if scheme.strategy == "group" else copies * 4
    zeros = (
        copies * rows * cdiv(columns, scheme.group_size or columns) * scheme.weight_bits // 8
        if scheme.zero_point
        else 0
    )
    extra = (scales, zeros) if zeros else (scales,)
    return (weight, *extra), None, sum(extra)
