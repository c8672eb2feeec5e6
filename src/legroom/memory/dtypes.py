"""Bytes of one element of a torch dtype."""

from __future__ import annotations

from legroom.errors import LegroomError

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "half": 2, "float32": 4, "float": 4, "float64": 8}
FLOAT32_BYTES = DTYPE_BYTES["float32"]
INT32_BYTES = 4


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element; a name that legroom does not know is refused."""
    try:
        return DTYPE_BYTES[dtype]
    except KeyError:
        raise LegroomError(
            f"dtype {dtype!r} is not one legroom knows", "use auto, float16, bfloat16 or float32"
        ) from None
