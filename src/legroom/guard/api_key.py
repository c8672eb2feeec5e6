"""vLLM's own check of API keys, foretold: whom it will refuse must not take anybody's place."""

from __future__ import annotations

import hashlib
import hmac
import os
import sys
from collections.abc import MutableMapping
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.releases import release

_EVER = ("/v1",)
_SINCE = (("0.22.0", ("/v2", "/inference")), ("0.27.0", ("/cohere",)))
"""Paths that the check covers, and since when: elsewhere a request without a key is served as any other."""


class KeyCheck:
    """Learns keys and release from the application with the first request."""

    __slots__ = ("_keys", "_paths")

    def __init__(self) -> None:
        self._keys: list[bytes] | None = None
        self._paths: tuple[str, ...] = _EVER

    def will_refuse(self, scope: MutableMapping[str, Any]) -> bool:
        """Whether vLLM will refuse this request for want of a key."""
        if self._keys is None:
            self._keys = _keys(scope)
            self._paths = covered_paths(str(getattr(sys.modules.get("vllm"), "__version__", "")))
        if not self._keys or not scope["path"].removeprefix(scope.get("root_path", "")).startswith(self._paths):
            return False
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        shown = hashlib.sha256(key).digest()
        return scheme.lower() != b"bearer" or not any(hmac.compare_digest(shown, known) for known in self._keys)


def _keys(scope: MutableMapping[str, Any]) -> list[bytes]:
    args = getattr(getattr(scope.get("app"), "state", None), "args", None)
    named = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    keys = [named] if isinstance(named, str) else named
    return [hashlib.sha256(key.encode()).digest() for key in keys if key]


def covered_paths(version: str) -> tuple[str, ...]:
    """What the check of a release covers; of one that is not known, what every release's does."""
    try:
        running = release(version)
    except LegroomError:
        return _EVER
    return _EVER + tuple(path for since, paths in _SINCE if not running.before(since) for path in paths)
