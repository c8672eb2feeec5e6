"""A body as JSON, read as the server reads it."""

from __future__ import annotations

import gc
import json
from typing import Any

_LARGE_BYTES = 1 << 20


def read_body(body: bytes) -> Any:
    """The document in UTF-8, with or without a mark, or in UTF-16 or 32. ValueError says what is wrong with it."""
    try:
        return json.loads(body) if len(body) < _LARGE_BYTES else _read_large(body)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _read_large(body: bytes) -> Any:
    """Without the collector: it would walk what was read so far again and again, and JSON has no cycles to find."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return json.loads(body)
    finally:
        if was_on:
            gc.enable()
