"""How a module is stored: the tensors that loading creates, and those that remain after it."""

import math
from collections.abc import Callable

from legroom.facts.model import Quantization
from legroom.facts.releases import Release
from legroom.memory.dtypes import FLOAT32_BYTES, INT32_BYTES, dtype_bytes
from legroom.memory.weights.module import Module
from legroom.records import dataclass
from legroom.units import cdiv, round_up

Step = int
"""A positive number allocates a tensor of that many bytes; ~n frees the n-th tensor, counted from the first loaded."""


@dataclass(frozen=True, slots=True)
class Storage:
    """The sizes of a module's tensors."""

    loaded: tuple[int, ...]
    """Created with the module, the weight first."""
    after: tuple[Step, ...] = ()
    """Repacking or quantizing after loading, with its temporary tensors."""
    layer_by_layer: bool = False
    """Created when its layer loads and quantized at once: the model is never on the GPU unquantized."""
    freed_last: bool = False
    """Replaced tensors are freed after the whole model has loaded, because the loader references them."""

    @property
    def kept(self) -> tuple[int, ...]:
        """Bytes of each tensor that remains after loading and repacking."""
        if not self.after:
            return self.loaded
        sizes = list(self.loaded)
        for step in self.after:
            if step >= 0:
                sizes.append(step)
            else:
                sizes[~step] = 0
        return tuple(size for size in sizes if size)


def replaced(*new_sizes: int | None) -> tuple[Step, ...]:
    """Steps that replace loaded tensors, in order, by new ones of these bytes; None keeps a tensor, 0 frees it."""
    steps: list[Step] = []
    for index, size in enumerate(new_sizes):
        if size:
            steps.append(size)
        if size is not None:
            steps.append(~index)
    return tuple(steps)


@dataclass(frozen=True, slots=True)
class StorageContext:
    """Precision, release and GPU, which decide how modules are stored."""

    dtype: str
    release: Release
    capability: tuple[int, int] = (9, 0)
    vendor: str = "nvidia"
    wants_marlin: bool = False
    """VLLM_MXFP4_USE_MARLIN=1."""
    quantization_flag: str | None = None
    """--quantization as given: `awq` and `gptq` disable repacking for faster kernels."""

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element of a layer that is not quantized."""
        return dtype_bytes(self.dtype)

    @property
    def runs_marlin(self) -> bool:
        """Whether Marlin kernels run: NVIDIA from compute capability 8.0 (unknown cards count as newer)."""
        return self.vendor == "nvidia" and (self.capability >= (8, 0) or self.capability == (0, 0))

    @property
    def fp8_kernels(self) -> bool:
        """Whether the card computes in FP8; older ones store FP8 and compute in 16 bits with Marlin."""
        return self.vendor != "nvidia" or self.capability >= (8, 9) or self.capability == (0, 0)

    @property
    def repacks_fp8_blocks(self) -> bool:
        """Whether Marlin runs linears with FP8 blocks: cards before Ada, and Ada from 0.29 on."""
        return not self.fp8_kernels or (self.capability == (8, 9) and self.release.at_least("0.29.0"))


def kernels_unmeasured(scheme: Quantization, context: StorageContext) -> str | None:
    """`nvfp4` or `fp8_marlin` where kernels store the weights in a layout that was never measured; else None."""
    schemes = (scheme, *(other for _, other in scheme.rules))
    if any(each.is_nvfp4 for each in schemes):
        return "nvfp4"
    eight_bits = (each for each in schemes if each.number == "float" and each.weight_bits == 8)
    if any(context.repacks_fp8_blocks if each.block else not context.fp8_kernels for each in eight_bits):
        return "fp8_marlin"
    return None


def storage(module: Module, scheme: Quantization | None, context: StorageContext) -> Storage:
    """The tensors that one module loads and keeps under this scheme, in bytes; None: unquantized."""
    size = dtype_bytes(module.dtype or context.dtype)
    bias = (module.copies * module.outputs * size,) if module.bias else ()
    if scheme is None or not module.quantizable or not module.inputs:
        return Storage((module.elements * size, *bias))
    stored = _METHODS[_family(scheme)](module, scheme, context)
    if scheme.method == "mxfp4" and module.copies > 1:
        return stored  # its biases are padded and widened with the rest
    return _with_bias(stored, bias) if bias else stored


def _with_bias(stored: Storage, bias: tuple[int, ...]) -> Storage:
    """The storage with further loaded tensors of the `bias` sizes (bytes), which repacking leaves unchanged."""
    count, more = len(stored.loaded), len(bias)
    steps = tuple(step - more if step < 0 and ~step >= count else step for step in stored.after)
    return Storage(stored.loaded + bias, steps, stored.layer_by_layer, stored.freed_last)


def _family(scheme: Quantization) -> str:
    """The storage layout of a quantization scheme, as the key of `_METHODS` with its function."""
    if scheme.method in ("awq", "gptq", "bitsandbytes", "mxfp4", "gguf", "experts_int8"):
        return scheme.method
    if scheme.weight_bits == 4:
        return "nvfp4" if scheme.is_nvfp4 else ("packed_int" if scheme.number == "int" else "mxfp4_linear")
    if scheme.number == "int" and not (scheme.dynamic_activations or scheme.static_activations):
        return "packed_int"
    return "mxfp8" if scheme.group_size == 32 and scheme.scale_bits == 8 else "eight_bits"


def _shards(module: Module) -> int:
    """How many of the checkpoint's matrices vLLM fuses here, each with a per-tensor scale of its own until loaded."""
    return max(len(module.shards), 1) if module.copies == 1 or ".w13" in module.name else 1


def _groups(module: Module, scheme: Quantization) -> int:
    """How many quantization groups the inputs of a row have; 1 without a group size."""
    return cdiv(module.inputs, scheme.group_size) if scheme.group_size else 1


def _awq(module: Module, scheme: Quantization, context: StorageContext) -> Storage:
    """AWQ's packed weights, zero points and scales; 0.5.4+ repacks all three for Marlin where it runs."""
    groups = _groups(module, scheme)
    weight = module.elements * scheme.weight_bits // 8
    scales = module.copies * groups * module.outputs
    sizes = (weight, scales * scheme.weight_bits // 8, scales * context.dtype_bytes)
    if not (context.runs_marlin and context.release.at_least("0.5.4")) or context.quantization_flag == "awq":
        return Storage(sizes)
    if module.copies == 1 and context.release.at_least("0.19.0"):
        kernel = _to_machete if _uses_machete(module, scheme, context) else _to_marlin
        return Storage(sizes, _awq_to_standard(*sizes[:2]) + kernel(*sizes))
    return Storage(sizes, replaced(*sizes))


def _awq_to_standard(weight_bytes: int, zeros_bytes: int) -> tuple[Step, ...]:
    """Steps by which 0.19+ unpacks AWQ's weights and zero points to 32 bits a value and packs them again."""
    wide, wide_zeros = 8 * weight_bytes, 8 * zeros_bytes
    weights = (wide, wide, ~3, wide, ~4, wide, weight_bytes, ~6)
    points = (wide_zeros, wide_zeros, ~8, wide_zeros, ~9, wide_zeros, ~10, wide_zeros, zeros_bytes, ~12)
    return (*weights, *points, ~0, ~5, ~1, ~11)


def _to_marlin(weight: int, zeros: int, scales: int) -> tuple[Step, ...]:
    """Steps after `_awq_to_standard` that repack weights, zero points and scales of these bytes for Marlin."""
    wide_zeros = 8 * zeros
    return (wide_zeros, wide_zeros, ~14, wide_zeros, ~15, zeros, ~16, ~13, weight, ~7, scales, ~2)


def _to_machete(weight: int, zeros: int, scales: int) -> tuple[Step, ...]:
    """Steps after `_awq_to_standard` for Machete, which stores zero points as 16-bit numbers times the scales."""
    return (weight, weight, ~14, ~7, 8 * zeros, scales, scales, scales, ~18, ~17, ~16, ~13)


def _uses_machete(module: Module, scheme: Quantization, context: StorageContext) -> bool:
    """Whether Hopper's Machete kernel, not Marlin, runs this linear layer."""
    suits = module.inputs % 64 == 0 and module.outputs % 128 == 0 and scheme.group_size in (None, 64, 128)
    return context.vendor == "nvidia" and context.capability == (9, 0) and module.copies == 1 and suits


def _gptq(module: Module, scheme: Quantization, context: StorageContext) -> Storage:
    """GPTQ's packed weights, zero points, scales and each input's group index, which Marlin drops without act-order."""
    groups = _groups(module, scheme)
    if scheme.act_order and module.whole_inputs and scheme.group_size:
        groups = cdiv(module.whole_inputs, scheme.group_size)
    weight = module.elements * scheme.weight_bits // 8
    scales = module.copies * groups * module.outputs
    zeros, index = scales * scheme.weight_bits // 8, module.copies * module.inputs * INT32_BYTES
    loaded = (weight, index, zeros, scales * context.dtype_bytes)
    marlin = context.runs_marlin and context.release.at_least("0.4.2") and scheme.weight_bits in (4, 8)
    if not marlin or context.quantization_flag == "gptq":
        return Storage(loaded)
    plain = not (scheme.act_order or scheme.zero_point)
    if plain and _uses_machete(module, scheme, context) and context.release.at_least("0.6.3"):
        # Machete repacks weights and scales; the loaded zero points and g_idx stay allocated.
        return Storage(loaded, replaced(weight, 0 if context.release.at_least("0.29.0") else None, None, loaded[3]))
    steps = replaced(weight, index if scheme.act_order else 0, zeros if scheme.zero_point else 0, loaded[3])
    return Storage(loaded, (*steps, index) if scheme.act_order else steps)


def _packed_int(module: Module, scheme: Quantization, context: StorageContext) -> Storage:
    """compressed-tensors weights of 4 or 8 bits with 16-bit activations; for mixed precision their mean bits."""
    if scheme.mean_bits:
        return Storage((int(module.elements * scheme.mean_bits / 8),))
    groups = _groups(module, scheme)
    weight = module.elements * scheme.weight_bits // 8
    scales = module.copies * groups * module.outputs
    zeros = (scales * scheme.weight_bits // 8,) if scheme.zero_point else ()
    shape = (module.copies * 2 * (8 if module.copies == 1 else context.dtype_bytes),)
    sizes = (weight, scales * context.dtype_bytes, *zeros, *shape)
    return Storage(sizes, replaced(*sizes[:-1]) if context.runs_marlin else ())


def _eight_bits(module: Module, scheme: Quantization, context: StorageContext) -> Storage:
    """FP8 or INT8 weights with one scale per tensor, channel or block."""
    weight, copies, shards = module.elements, module.copies, _shards(module)
    if scheme.block:
        # Experts keep separate scales for gate and up; fused linears share a block that spans both.
        parts = shards if copies > 1 else 1
        high, wide = _scale_block(module, scheme.block, parts)
        rows, columns = parts * cdiv(module.outputs // parts, high), cdiv(module.inputs, wide)
        loaded = (weight, copies * rows * columns * FLOAT32_BYTES)
        if context.fp8_kernels if copies > 1 else not context.repacks_fp8_blocks:
            return Storage(loaded)
        # Marlin needs a 16-bit scale for every output and 128 inputs.
        return Storage(loaded, replaced(weight, copies * module.outputs * columns * context.dtype_bytes))
    if scheme.strategy == "channel":
        return Storage((weight, copies * module.outputs * FLOAT32_BYTES))
    activation = (copies * shards * FLOAT32_BYTES,) if scheme.static_activations else ()
    if scheme.online:
        steps = (weight, copies * FLOAT32_BYTES, ~0)
        # 0.16+ keeps the weights of a layer on the meta device until all are read. 0.13 to 0.15 quantize a layer when
        # it is read, but the loader's list of parameters references the 16-bit ones of every layer.
        streams = context.release.at_least("0.16.0")
        freed_last = context.release.at_least("0.13.0") and not streams
        return Storage((weight * context.dtype_bytes,), steps, streams, freed_last)
    loaded = (weight, copies * shards * FLOAT32_BYTES, *activation)
    if context.fp8_kernels or scheme.number == "int":
        return Storage(loaded)
    scales = copies * module.outputs * context.dtype_bytes
    return Storage(loaded, replaced(weight, scales, *(0 for _ in activation)))


def _scale_block(module: Module, block: tuple[int, int], parts: int) -> tuple[int, int]:
    """(rows, columns) that share a scale: `block`, or less for experts where it does not divide the rank's slice;
    `parts`: matrices fused into one."""
    if module.copies == 1:
        return block
    width = module.outputs // parts if ".w13" in module.name else module.inputs
    return math.gcd(block[0], width), math.gcd(block[1], width)


def _nvfp4(module: Module, scheme: Quantization, context: StorageContext) -> Storage:
    """NVFP4: two weights per byte, an FP8 scale per 16, a float per tensor and one for its activations."""
    groups = module.inputs // (scheme.group_size or 16)
    weight, scales = module.elements // 2, module.copies * module.outputs * groups
    scalar = module.copies * _shards(module) * FLOAT32_BYTES
    loaded = (weight, scalar, scales, *((scalar,) if scheme.static_activations else ()))
    # Kernels read scales in tiles of 128 rows by 4 groups.
    tiles = module.copies * round_up(module.outputs, 128) * round_up(groups, 4)
    return Storage(loaded, replaced(None, None, tiles) if context.capability >= (10, 0) else ())


def _grouped_float(module: Module, scheme: Quantization, context: StorageContext) -> Storage:
    """MXFP8 and linear MXFP4: 8 or 4 bits per weight and a byte per group."""
    scales = module.copies * module.outputs * _groups(module, scheme)
    return Storage((module.elements * scheme.weight_bits // 8, scales))


def _mxfp4(module: Module, scheme: Quantization, context: StorageContext) -> Storage:
    """gpt-oss experts, padded for the kernel of this GPU and release."""
    rows, columns = _mxfp4_sizes(module, context)
    copies = module.copies
    weight, scales = copies * rows * columns // 2, copies * rows * columns // 32
    bias = (copies * rows * context.dtype_bytes,) if module.bias else ()
    # Marlin reads 16-bit biases; the Triton and FlashInfer kernels need 32 bits.
    wide = tuple(size if _uses_marlin_for_mxfp4(context) else copies * rows * FLOAT32_BYTES for size in bias)
    loaded = (weight, scales, *bias)
    if not _uses_triton_on_hopper(context):
        return Storage(loaded, replaced(weight, scales, *wide))
    packed = columns // 2
    tile = copies * round_up(rows, 256)
    if context.release.at_least("0.21.0"):
        # Triton kernels 3.5.1 pad the scales to 256 rows by 4 groups.
        return Storage(loaded, replaced(weight, tile * round_up(columns // 32, 4), *wide))
    groups = round_up(columns // 32, 2)
    if context.release.at_least("0.19.0"):
        # Triton kernels 3.6.0 pad the packed inputs to 64 and keep the loaded scales.
        return Storage(loaded, (*replaced(copies * rows * round_up(packed, 64), None, *wide), tile * groups))
    return Storage(loaded, (*replaced(weight, None, *wide), tile * groups))


def _uses_marlin_for_mxfp4(context: StorageContext) -> bool:
    """Whether Marlin serves MXFP4: cards before Hopper and after data-centre Blackwell; Hopper before 0.12."""
    if context.vendor != "nvidia" or context.wants_marlin:
        return context.vendor == "nvidia"
    major = context.capability[0]
    return major not in (9, 10) or (major == 9 and not context.release.at_least("0.12.0"))


def _uses_triton_on_hopper(context: StorageContext) -> bool:
    """Whether mxfp4 weights run with the Triton kernels on Hopper, not with Marlin."""
    return context.vendor == "nvidia" and context.capability[0] == 9 and not _uses_marlin_for_mxfp4(context)


def _mxfp4_sizes(module: Module, context: StorageContext) -> tuple[int, int]:
    """(rows, columns) of an expert's gate and up matrix, or of its down matrix, as padded for the kernel."""
    if _uses_triton_on_hopper(context):
        hidden_step, width_step = 1, 64
    elif context.vendor == "amd":
        hidden_step, width_step = 256, 256
    elif context.capability[0] == 10 and not _uses_marlin_for_mxfp4(context):
        hidden_step, width_step = 256, 128 if context.release.at_least("0.21.0") else 256
    else:
        hidden_step, width_step = 256, 128
    if ".w13" in module.name:  # gate and up
        return 2 * round_up(module.outputs // 2, width_step), round_up(module.inputs, hidden_step)
    return round_up(module.outputs, hidden_step), round_up(module.inputs, width_step)


def _bitsandbytes(module: Module, scheme: Quantization, context: StorageContext) -> Storage:
    """bitsandbytes: 4 bits and a scale per 64 weights; up to 0.9.1 the scales stay quantized."""
    if scheme.weight_bits == 8:
        return _int8(module, scheme, context)
    blocks = module.elements // 64
    nested = not context.release.at_least("0.9.2")
    scales = blocks + cdiv(blocks, 256) * FLOAT32_BYTES if nested else blocks * FLOAT32_BYTES
    return Storage((module.elements // 2, scales))


def _int8(module: Module, scheme: Quantization, context: StorageContext) -> Storage:
    """experts_int8 and 8-bit bitsandbytes: a byte per weight and a float32 scale per output."""
    return Storage((module.elements, module.copies * module.outputs * FLOAT32_BYTES))


_METHODS: dict[str, Callable[[Module, Quantization, StorageContext], Storage]] = {
    "awq": _awq,
    "gptq": _gptq,
    "packed_int": _packed_int,
    "eight_bits": _eight_bits,
    "mxfp8": _grouped_float,
    "nvfp4": _nvfp4,
    "mxfp4": _mxfp4,
    "mxfp4_linear": _grouped_float,
    "bitsandbytes": _bitsandbytes,
    # Blocks of 32 weights, each with a 16-bit scale.
    "gguf": lambda module, scheme, _: Storage((module.elements * (scheme.weight_bits * 32 + 16) // 256,)),
    "experts_int8": _int8,
}
