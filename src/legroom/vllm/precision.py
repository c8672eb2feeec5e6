"""The dtypes that a release resolves: of activations, and of the KV cache."""

from legroom.errors import LegroomError
from legroom.facts.config_classes import known_names
from legroom.facts.gpus import Gpu
from legroom.facts.model import Model
from legroom.facts.releases import Release
from legroom.vllm.args import ServeArgs
from legroom.vllm.traits import is_pooling, traits

_DTYPES = {"half": "float16", "float16": "float16", "bfloat16": "bfloat16", "float": "float32", "float32": "float32"}


def activation_dtype(args: ServeArgs, model: Model, gpu: Gpu, release: Release) -> tuple[str, str]:
    """The dtype of activations and unquantized weights, and a note where a card without bfloat16 makes vLLM use another
    ("" if not); LegroomError for an unknown --dtype."""
    has_bf16 = gpu.compute_capability == (0, 0) or gpu.vendor != "nvidia" or gpu.compute_capability >= (8, 0)
    asked = (args.dtype or "auto").lower().removeprefix("torch.")
    if asked != "auto":
        if asked not in _DTYPES:
            hint = "use one of auto, " + ", ".join(_DTYPES)
            raise LegroomError(f"--dtype {args.dtype} is not a precision vLLM knows", hint)
        return _DTYPES[asked], ""
    stored = _DTYPES.get(model.dtype, model.dtype)
    if stored == "float32":
        pools_in_half = is_pooling(args, model) and release.at_least("0.10.1")
        return ("float16" if not has_bf16 or release.before("0.9.1") or pools_in_half else "bfloat16"), ""
    if stored == "bfloat16" and not has_bf16 and release.at_least("0.9.1"):
        without_half = known_names("without_float16", release)
        fallback = "float32" if model.config.get("model_type") in without_half else "float16"
        return fallback, f"{gpu.name} has no bfloat16: vLLM {release} falls back to {fallback}"
    return stored, ""


def kv_cache_dtype(args: ServeArgs, model: Model, gpu: Gpu, release: Release) -> str:
    """The KV cache dtype as stored: that of --kv-cache-dtype, or the packed format that sparse MLA makes of it."""
    dtype = requested_cache_dtype(args, model, gpu, release)
    if traits(model).compressed_mla:
        packed = dtype.startswith("fp8") or (dtype == "auto" and release.at_least("0.32.0"))
        return "fp8_ds_mla" if packed else dtype
    return _sparse_dtype(dtype, gpu, release) if traits(model).sparse_mla else dtype


def requested_cache_dtype(args: ServeArgs, model: Model, gpu: Gpu, release: Release) -> str:
    """The KV cache dtype that attention backends must support: --kv-cache-dtype; `auto` may be the checkpoint's."""
    dtype = args.kv_cache_dtype or "auto"
    if dtype == "auto":
        dtype = _checkpoint_dtype(model, release)
        if dtype == "fp8" and traits(model).sparse_mla and release.at_least("0.32.0"):
            # FlashMLA packs what is called fp8, and leaves e4m3, ModelOpt's name, to FlashInfer.
            dtype = "fp8_e4m3"
    # GLM-5 on data-centre Blackwell: an fp8 cache by default (not in 0.28.0, in 0.32.0).
    glm_dsa = model.architecture == "GlmMoeDsaForCausalLM" and gpu.compute_capability[0] == 10
    if dtype == "auto" and glm_dsa and release.at_least("0.30.0"):
        dtype = "fp8_e4m3"
    return "auto" if dtype == "bfloat16" and traits(model).sparse_mla else dtype


def _checkpoint_dtype(model: Model, release: Release) -> str:
    """The KV cache dtype that the checkpoint states; `auto` without one, or in releases that do not read it."""
    stored = model.quantization
    if stored is None or stored.kv_cache_dtype is None:
        return "auto"
    since = "0.11.1" if stored.method.startswith("modelopt") else "0.15.0"
    if stored.kv_cache_dtype.startswith("nvfp4"):
        since = "0.20.0"
    return stored.kv_cache_dtype if release.at_least(since) else "auto"


def _sparse_dtype(dtype: str, gpu: Gpu, release: Release) -> str:
    """The KV cache dtype of DeepSeek sparse attention: FlashMLA's packed fp8_ds_mla where FlashMLA runs."""
    if release.before("0.11.1") and dtype == "auto":
        return "fp8_ds_mla"
    major = gpu.compute_capability[0]
    if dtype == "auto":
        return "fp8_ds_mla" if major == 12 and release.at_least("0.26.0") else dtype
    plain_fp8 = dtype.startswith("fp8") and not (dtype == "fp8_e4m3" and major == 9 and release.at_least("0.32.0"))
    # 0.18.0+: Blackwell runs FlashInfer's sparse kernel, which keeps plain fp8.
    return "fp8_ds_mla" if plain_fp8 and (major != 10 or release.before("0.18.0")) else dtype
