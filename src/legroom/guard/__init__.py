"""Admission: bounds each request and admits by what the KV pool can hold.

`vllm serve ... --middleware legroom.guard.Guard` puts it inside vLLM; `legroom guard --upstream URL` in front of any
OpenAI-compatible server.

A request's path says its kind (`paths`); its body becomes a `Demand` (`demand`, `prompts`, `media`), which the `policy`
bounds (`bounds`) and `request` weighs in blocks, by what the engine holds (`limits`) and what answers have shown
(`tokens`, `learning`). `admission` asks the `pool` for room; what gets none is refused (`refusals`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from legroom.guard.request.endpoints import TOKEN_NAME as TOKEN_NAME

if TYPE_CHECKING:
    from legroom.guard.serving.middleware import Guard as Guard
    from legroom.guard.weight.engine_limits import native_flags as native_flags

__all__ = ["MIDDLEWARE", "TOKEN_NAME", "Guard", "native_flags"]

MIDDLEWARE = "legroom.guard.Guard"
"""The value of `--middleware`."""
_HOMES = {"Guard": "legroom.guard.serving.middleware", "native_flags": "legroom.guard.weight.engine_limits"}


def __getattr__(name: str) -> Any:
    """Import what was asked for: reading a policy should not pay for the middleware, nor the other way round."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'legroom.guard' has no attribute {name!r}")
