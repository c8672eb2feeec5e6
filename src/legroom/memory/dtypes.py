"""Element sizes of torch dtypes and KV cache dtypes."""

from legroom.errors import LegroomError

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "half": 2, "float32": 4, "float": 4, "float64": 8}
FLOAT32_BYTES = DTYPE_BYTES["float32"]
INT32_BYTES = 4


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element; LegroomError for an unknown dtype."""
    try:
        return DTYPE_BYTES[dtype]
    except KeyError:
        hint = "use auto, float16, bfloat16 or float32"
        raise LegroomError(f"dtype {dtype!r} is not one legroom knows", hint) from None


_PACKED_LATENT_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Sparse MLA layouts: latent, rope part and scales of one token (vLLM's FlashMLA sparse backend)."""


def cache_element_bytes(kv_cache_dtype: str, model_dtype: str) -> int:
    """Bytes of a KV cache element without scales: 1 if packed, `model_dtype`'s if `auto`; LegroomError if unknown."""
    if kv_cache_dtype == "auto":
        return dtype_bytes(model_dtype)
    if kv_cache_dtype in DTYPE_BYTES:
        return DTYPE_BYTES[kv_cache_dtype]
    if kv_cache_dtype.startswith(("fp8", "int8", "int4", "nvfp4", "turboquant", "ultraquant")):
        return 1
    raise LegroomError(f"kv_cache_dtype {kv_cache_dtype!r} is not one legroom knows", "try auto or fp8")


def head_token_bytes(
    head_dim: int, v_head_dim: int, kv_cache_dtype: str, model_dtype: str, *, packs_scales: bool = True
) -> int:
    """KV bytes of one head and token with scales; `packs_scales`: packed dtypes store their scales in the page too."""
    if kv_cache_dtype.endswith("_per_token_head"):
        halved = 2 if kv_cache_dtype.startswith("int4") else 1
        scales = 2 * FLOAT32_BYTES if packs_scales else 0  # for the keys and for the values of a head
        return head_dim // halved + v_head_dim // halved + scales
    if kv_cache_dtype.startswith("nvfp4"):
        return sum(dim // 2 + dim // 16 for dim in (head_dim, v_head_dim))
    if kv_cache_dtype.startswith("turboquant_"):
        # TurboQuant: packed keys and values of one head, with 16-bit scales and zero points.
        key_bits, value_bits = {"k8v4": (8, 4), "4bit_nc": (4, 4), "k3v4_nc": (3, 4), "3bit_nc": (3, 3)}[
            kv_cache_dtype.removeprefix("turboquant_")
        ]
        key = head_dim if key_bits == 8 else -(-head_dim * key_bits // 8) + 2
        value = -(-head_dim * value_bits // 8) + 4
        return key + value + (key + value) % 2
    return (head_dim + v_head_dim) * cache_element_bytes(kv_cache_dtype, model_dtype)


def latent_token_bytes(width: int, kv_cache_dtype: str, model_dtype: str) -> int:
    """Bytes of one token's MLA latent of `width` elements in this KV cache dtype (`auto`: the model's)."""
    return _PACKED_LATENT_BYTES.get(kv_cache_dtype) or width * cache_element_bytes(kv_cache_dtype, model_dtype)
