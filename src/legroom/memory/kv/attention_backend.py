"""The attention backend and the KV block size: the backend's preference, and the alignment of hybrid models."""

from math import lcm

from legroom.facts.gpus import Gpu
from legroom.facts.model import LatentAttention, Model, latent, recurrent, with_kv_heads
from legroom.facts.releases import Release
from legroom.memory.dtypes import dtype_bytes
from legroom.records import dataclass
from legroom.units import cdiv
from legroom.vllm.args import EngineSettings, named_backend
from legroom.vllm.traits import masks_images, traits

DEFAULT_BLOCK_SIZE = 16
"""vLLM's CacheConfig.DEFAULT_BLOCK_SIZE."""


@dataclass(frozen=True, slots=True)
class Backend:
    """An attention backend and its block sizes."""

    name: str
    smallest_block: int
    """The kernel block size; block_size is a multiple of it."""
    preferred_block: int


def attention_backend(model: Model, settings: EngineSettings, gpu: Gpu) -> Backend:
    """The attention layers' backend, with its block sizes; most that are not MLA are given as "FLASH_ATTN"."""
    release = settings.release
    mixers = [layer.mixer for layer in model.distinct_layers]
    if latents := latent(mixers):
        return _latent_backend(latents[0], settings, gpu, release)
    if any(mixer.index_head_dim for mixer in with_kv_heads(mixers)):
        return Backend("MINIMAX_M3_SPARSE", 128, 128)
    composite = gpu.compute_capability[0] == 10 and release.at_least("0.32.0")
    if composite and masks_images(settings.given, model, release):
        return Backend("TRITON_FLASHINFER", 16, 64)
    page = (
        _intel_page(model, settings) if gpu.vendor == "intel" else _flash_attention_page(model, settings, gpu, release)
    )
    return Backend("FLASH_ATTN", page, page)


def _intel_page(model: Model, settings: EngineSettings) -> int:
    """Tokens per block of the attention kernel on Intel GPUs: 64; 16 for V0, Triton, float32 or image masks."""
    masked = masks_images(settings.given, model, settings.release)
    triton = "TRITON" in named_backend(settings.given, settings.release) or settings.dtype == "float32" or masked
    return DEFAULT_BLOCK_SIZE if settings.engine == "V0" or triton else 64


def _flash_attention_page(model: Model, settings: EngineSettings, gpu: Gpu, release: Release) -> int:
    """Tokens per block that FlashAttention's kernel takes: one fixed size for FA4's wide heads (0.32+), else 16."""
    if release.before("0.32.0"):
        return DEFAULT_BLOCK_SIZE
    named, major = named_backend(settings.given, release), gpu.compute_capability[0]
    heads = max((mixer.head_dim for mixer in with_kv_heads(layer.mixer for layer in model.distinct_layers)), default=0)
    if major == 9 and heads == 512 and settings.kv_cache_dtype in ("fp8", "fp8_e4m3") and named in ("", "FLASH_ATTN"):
        return 64
    softcap = model.config.get("attn_logit_softcapping")
    plain = settings.kv_cache_dtype in ("auto", "bfloat16", "float16") and settings.decode_context_parallel_size == 1
    wide = heads == 256 and plain and not softcap and not masks_images(settings.given, model, release)
    return 128 if major == 10 and wide and named == "FLASH_ATTN" else DEFAULT_BLOCK_SIZE


def _latent_backend(mixer: LatentAttention, settings: EngineSettings, gpu: Gpu, release: Release) -> Backend:
    """The backend that vLLM selects for an MLA layer, with its smallest and preferred block size."""
    major = gpu.compute_capability[0]
    quantized = settings.kv_cache_dtype.startswith(("fp8", "nvfp4"))
    named = named_backend(settings.given, release)
    if mixer.compress_ratio or mixer.window is not None:
        return Backend("DEEPSEEK_SPARSE_SWA", 32, 256)
    if mixer.index_heads or mixer.index_head_dim or (gpu.vendor == "intel" and not named.startswith("TRITON")):
        return Backend("FLASHMLA_SPARSE", 64, 64)
    if release.before("0.8.0") or settings.given.env.get("VLLM_MLA_DISABLE") == "1":
        return Backend("TRITON_MLA", 16, DEFAULT_BLOCK_SIZE)
    if named in ("TRITON_MLA", "TRITON_MLA_VLLM_V1"):
        return Backend(named, 16, DEFAULT_BLOCK_SIZE)
    if major == 10:
        # Data-centre Blackwell: CUTLASS MLA, and FlashInfer for DeepSeek's head size from 0.15 on.
        if release.before("0.10.2") and named != "CUTLASS_MLA":
            return Backend("TRITON_MLA", 16, DEFAULT_BLOCK_SIZE)
        flashinfer = named == "FLASHINFER_MLA" or (release.at_least("0.15.0") and mixer.qk_nope_head_dim == 128)
        if named == "CUTLASS_MLA" or not flashinfer:
            return Backend("CUTLASS_MLA", 128, 128)
        return Backend("FLASHINFER_MLA", 32, 32 if release.at_least("0.18.0") else 64)
    if major == 9 and release.at_least("0.8.0"):
        # Hopper prefers FlashMLA before 0.18, then FlashAttention's MLA kernel, which has no fp8 cache.
        flash_attention = named == "FLASH_ATTN_MLA" or (release.at_least("0.18.0") and not quantized)
        if named != "FLASHMLA" and flash_attention:
            return Backend("FLASH_ATTN_MLA", 16, DEFAULT_BLOCK_SIZE)
        return Backend("FLASHMLA", 64, 64)
    return Backend("TRITON_MLA", 16, DEFAULT_BLOCK_SIZE)


def block_size_before_alignment(model: Model, settings: EngineSettings, gpu: Gpu) -> int:
    """--block-size, or the backend's preference; MLA backends override the flag up to 0.17."""
    backend = attention_backend(model, settings, gpu)
    given = settings.block_size
    if keeps_boundary_layers(model, settings) and settings.release.at_least("0.25.0"):
        # A block of the packed layers covers a kernel block of those in the model's dtype (not in 0.22.1, in 0.25.1).
        step = max(backend.smallest_block, given or backend.preferred_block)
        return step * cdiv(backend.smallest_block * dtype_bytes(settings.dtype), step)
    if given is None:
        return backend.preferred_block
    overruled = settings.release.before("0.18.0") and backend.preferred_block != DEFAULT_BLOCK_SIZE
    multiple = settings.release.at_least("0.12.0") and given % backend.preferred_block == 0
    return backend.preferred_block if overruled and not multiple else given


def keeps_boundary_layers(model: Model, settings: EngineSettings) -> bool:
    """Whether a TurboQuant or UltraQuant KV cache leaves the two layers at each end unquantized; False in hybrids."""
    return settings.kv_cache_dtype.startswith(("turboquant_", "ultraquant_")) and not traits(model).has_state


def state_cache_mode(model: Model, settings: EngineSettings) -> str:
    """mamba_cache_mode (`none`, `align`, `all`): how prefix caching keeps recurrent states (0.11.1+)."""
    release = settings.release
    if release.before("0.11.1") or not settings.enable_prefix_caching:
        return "none"
    kinds = {mixer.kind for mixer in recurrent(layer.mixer for layer in model.distinct_layers)}
    keeps_all = kinds <= {"mamba1", "mamba2"} and release.before("0.32.0")
    if release.before("0.15.0"):
        return "all" if keeps_all else "none"
    given = settings.given.mamba_cache_mode
    if given == "align" or not keeps_all or (given != "all" and release.at_least("0.28.0")):
        return "align"
    return "align" if release.at_least("0.20.0") and settings.num_speculative_tokens and given != "all" else "all"


def aligned_block_size(
    model: Model, settings: EngineSettings, gpu: Gpu, block_size: int, *, token_bytes: int, state_bytes: int
) -> int:
    """The block size with which a page of `token_bytes` per token holds a hybrid's state; else `block_size` itself."""
    if settings.release.before("0.10.0") or state_bytes == 0 or token_bytes == 0:
        return block_size
    backend = attention_backend(model, settings, gpu)
    latents = latent(layer.mixer for layer in model.distinct_layers)
    step = _alignment_step(backend, bool(latents), gpu, settings.release, block_size)
    if state_cache_mode(model, settings) == "all":
        states = recurrent(layer.mixer for layer in model.distinct_layers)
        scanned = max((dict(mixer.config).get("chunk_size", 1) for mixer in states), default=1)
        step = lcm(settings.given.mamba_block_size or scanned, step)
        wanted = step * cdiv(cdiv(state_bytes, token_bytes), step)
    else:
        wanted = step * cdiv(state_bytes, step * token_bytes)
    if settings.release.at_least("0.31.0"):
        wanted = backend.smallest_block * cdiv(wanted, backend.smallest_block)
    return max(block_size, wanted)


def _alignment_step(backend: Backend, is_latent: bool, gpu: Gpu, release: Release, block_size: int) -> int:
    """Tokens of which a hybrid model's block size must be a multiple; `is_latent`: some of its layers are MLA."""
    if release.before("0.11.1"):
        return 16
    if release.before("0.20.0"):
        if is_latent:
            return 128 if backend.name == "CUTLASS_MLA" else 64
        return 32 if gpu.compute_capability[0] == 10 and release.before("0.19.0") else 16
    step = max(backend.smallest_block, block_size)
    return max(step, 128) if is_latent else step
