"""Does a server that says it is healthy also serve? Its model, one request, and one at the full context."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from typing import Any

from legroom.verify.server import ServerRefusal

_PATIENCE_S = 120.0
_SLOWEST_TOKENS_S = 1000.0
"""A prompt may take longer by its length at this speed."""
_TOKEN, _ANSWER = 3, 4
_BODY_BYTES = 1 << 16
POOLING_ENDPOINTS = {"embedding": "/v1/embeddings", "pooled input": "/pooling"}
"""What a pooling model is asked for, and where: an embedder at the first, every other kind (classifiers, rerankers,
reward models) at the second."""
_Tries = Callable[[str, str, int, str | None], None]


class _Refused(OSError):
    def __init__(self, status: int, url: str, body: str) -> None:
        super().__init__(f"{status} from {url}: {body[:500]}")
        self.refusal = ServerRefusal.read(status, body)


def smoke_test(url: str, api_key: str | None = None) -> tuple[bool | None, str]:
    """Whether all of it worked, and what was done, or what did not; None where there is no endpoint to try it at."""
    try:
        _ask(url, "/health", None, api_key)
        model = _ask(url, "/v1/models", None, api_key)["data"][0]
        name, length = str(model["id"]), int(model.get("max_model_len") or 0)
        pooled = {what: partial(_pooled, path) for what, path in POOLING_ENDPOINTS.items()}
        for what, tries in ({"completion": _completion} | pooled).items():
            try:
                tries(url, name, 0, api_key)
            except _Refused as refused:
                if not refused.refusal.is_unserved:
                    raise
                continue
            if length <= 4 * _ANSWER:
                return True, f"serves {name}: one {what}"
            return True, f"serves {name}: one {what} and {_at_full_context(tries, url, name, length, api_key)}"
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        return False, f"the server is healthy but does not serve: {error}"
    return None, f"serves {name}, but no completions, and pools nothing, so no request was tried"


def _at_full_context(tries: _Tries, url: str, model: str, length: int, api_key: str | None) -> str:
    try:
        tries(url, model, length, api_key)
    except _Refused as refused:
        if not refused.refusal.is_by_guard:
            raise
        return f"none of {length:,} tokens, which the guard does not let in"
    return f"a request of {length:,} tokens"


def _completion(url: str, model: str, length: int, api_key: str | None) -> None:
    """One of so many tokens in all, prompt and answer; a short one for 0."""
    # Token ids, so that the length is exact whatever the tokenizer.
    prompt = [_TOKEN] * (length - _ANSWER) if length else "Hello"
    body = {"model": model, "prompt": prompt, "max_tokens": _ANSWER, "ignore_eos": True}
    _ask(url, "/v1/completions", body, api_key, length)


def _pooled(path: str, url: str, model: str, length: int, api_key: str | None) -> None:
    """What a pooling model serves instead: all tokens are prompt."""
    _ask(url, path, {"model": model, "input": [_TOKEN] * length if length else "Hello"}, api_key, length)


def _ask(url: str, path: str, body: Any, api_key: str | None, length: int = 0) -> Any:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url + path, data, headers)
    # The server is on this machine: no proxy of the environment is between, and its certificate is its own.
    secure = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), secure)
    try:
        with opener.open(request, timeout=_PATIENCE_S + length / _SLOWEST_TOKENS_S) as answer:
            text = answer.read(1 << 20)
    except urllib.error.HTTPError as error:
        raise _Refused(error.code, error.url, error.read(_BODY_BYTES).decode("utf-8", "replace")) from None
    # Of the answers only the list of models is read; an embedding may be longer than what is read of it.
    return json.loads(text) if text and body is None else {}
