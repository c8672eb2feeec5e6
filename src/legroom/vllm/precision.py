"""The precision of activations and of the KV cache that a release ends up with."""

from __future__ import annotations

from legroom.errors import LegroomError
from legroom.facts.gpus import Gpu
from legroom.facts.model import Model
from legroom.facts.releases import Release
from legroom.vllm.args import ServeArgs
from legroom.vllm.refusals import RefusedByVllm
from legroom.vllm.traits import is_pooling, uses_sparse_mla

_DTYPES = {
    "half": "float16", "float16": "float16", "bfloat16": "bfloat16", "float": "float32", "float32": "float32",
}  # fmt: skip


def activation_dtype(args: ServeArgs, model: Model, gpu: Gpu, release: Release) -> tuple[str, str]:
    """The precision of activations and unquantized weights, and a sentence where it is not the checkpoint's."""
    has_bf16 = gpu.compute_capability == (0, 0) or gpu.vendor != "nvidia" or gpu.compute_capability >= (8, 0)
    asked = (args.dtype or "auto").lower().removeprefix("torch.")
    if asked == "auto":
        stored = _DTYPES.get(model.dtype, model.dtype)
        if stored == "float32":
            return _narrowed(args, model, release, has_bf16), ""
        if stored == "bfloat16" and not has_bf16 and release.at_least("0.9.1"):
            return "float16", f"{gpu.name} has no bfloat16: vLLM {release} falls back to float16"
    elif asked in _DTYPES:
        stored = _DTYPES[asked]
    else:
        raise LegroomError(
            f"--dtype {args.dtype} is not a precision vLLM knows", "use one of auto, " + ", ".join(_DTYPES)
        )
    if stored == "bfloat16" and not has_bf16:
        raise _no_bfloat16(gpu)
    return stored, ""


def _narrowed(args: ServeArgs, model: Model, release: Release, has_bf16: bool) -> str:
    """`auto` never runs a float32 checkpoint in float32."""
    if release.before("0.9.1") or not has_bf16:
        return "float16"
    return "float16" if is_pooling(args, model) and release.at_least("0.10.1") else "bfloat16"


def _no_bfloat16(gpu: Gpu) -> RefusedByVllm:
    capability = ".".join(map(str, gpu.compute_capability))
    said = (
        "Bfloat16 is only supported on GPUs with compute capability of at least 8.0. "
        f"Your {gpu.name} GPU has compute capability {capability}. You can use float16 instead by explicitly "
        "setting the `dtype` flag in CLI, for example: --dtype=half."
    )
    return RefusedByVllm(f"{gpu.name} (compute capability {capability}) has no bfloat16", "add --dtype half", said)


def kv_cache_dtype(args: ServeArgs, model: Model, gpu: Gpu, release: Release) -> str:
    """`auto` follows the checkpoint where the release does; sparse MLA has formats of its own."""
    dtype = args.kv_cache_dtype or "auto"
    if dtype == "auto":
        dtype = _checkpoint_dtype(model, release)
    # GLM-5 on data-centre Blackwell: an fp8 cache unasked (not yet in 0.28.0, there in 0.32.0).
    glm_dsa = model.architecture == "GlmMoeDsaForCausalLM" and gpu.compute_capability[0] == 10
    if dtype == "auto" and glm_dsa and release.at_least("0.30.0"):
        dtype = "fp8_e4m3"
    return _sparse_dtype(dtype, gpu, release) if uses_sparse_mla(model) else dtype


def _checkpoint_dtype(model: Model, release: Release) -> str:
    """ModelOpt checkpoints are followed since 0.11.1, compressed-tensors since 0.15.0, NVFP4 caches since 0.20.0."""
    stored = model.quantization
    if stored is None or stored.kv_cache_dtype is None:
        return "auto"
    since = "0.11.1" if stored.method.startswith("modelopt") else "0.15.0"
    if stored.kv_cache_dtype.startswith("nvfp4"):
        since = "0.20.0"
    return stored.kv_cache_dtype if release.at_least(since) else "auto"


def _sparse_dtype(dtype: str, gpu: Gpu, release: Release) -> str:
    """DeepSeek sparse attention: FlashMLA's packed fp8 entry, where FlashMLA is what runs."""
    if dtype == "bfloat16":
        return "auto"
    if release.before("0.11.1") and dtype == "auto":
        return "fp8_ds_mla"
    major = gpu.compute_capability[0]
    if dtype == "auto":
        return "fp8_ds_mla" if major == 12 and release.at_least("0.26.0") else dtype
    plain_fp8 = dtype.startswith("fp8")
    # 0.18.0+: Blackwell runs FlashInfer's sparse kernel, which keeps plain fp8.
    return "fp8_ds_mla" if plain_fp8 and (major != 10 or release.before("0.18.0")) else dtype
