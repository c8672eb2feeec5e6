"""Admission: bounds each request and admits by what the KV pool can hold.

`vllm serve ... --middleware legroom.guard.Guard` puts it inside vLLM; `legroom guard --upstream URL` in front of any
OpenAI-compatible server.

A request flows through four folders: `request` reads its body and applies the policy's bounds, `weight` estimates its
KV blocks, `pool` admits it or lets it wait, and `serving` does this for HTTP, as middleware or as a proxy.
"""

from typing import TYPE_CHECKING, Any

from legroom.guard.request.endpoints import START_REQUESTED as START_REQUESTED
from legroom.guard.request.endpoints import TOKEN_NAME as TOKEN_NAME

if TYPE_CHECKING:
    from legroom.guard.serving.middleware import Guard as Guard
    from legroom.guard.weight.engine_limits import native_flags as native_flags

__all__ = ["MIDDLEWARE", "START_REQUESTED", "TOKEN_NAME", "Guard", "native_flags"]

MIDDLEWARE = "legroom.guard.Guard"
"""The value of `--middleware`."""
_HOMES = {"Guard": "legroom.guard.serving.middleware", "native_flags": "legroom.guard.weight.engine_limits"}


def __getattr__(name: str) -> Any:
    """`Guard` or `native_flags`, imported on first use; AttributeError for any other name."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'legroom.guard' has no attribute {name!r}")
