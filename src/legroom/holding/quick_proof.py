"""Does a server that says it is healthy also serve? Its model, one completion, and one request at the full context."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from typing import Any

_PATIENCE_S = 120.0


def prove(url: str, api_key: str | None = None) -> tuple[bool, str]:
    """Whether all of it worked, and what was done, or what did not work."""
    try:
        _ask(url, "/health", None, api_key)
        model = _ask(url, "/v1/models", None, api_key)["data"][0]
        name, length = model["id"], int(model.get("max_model_len") or 0)
        _ask(url, "/v1/completions", {"model": name, "prompt": "Hello", "max_tokens": 4}, api_key)
        done = f"serves {name}: one completion"
        if length > 16:
            prompt = [3] * (length - 8)  # token ids, so that the length is exact whatever the tokenizer
            _ask(url, "/v1/completions", {"model": name, "prompt": prompt, "max_tokens": 4}, api_key)
            done += f" and a request of {length:,} tokens"
    except (OSError, ValueError, KeyError, IndexError) as error:
        return False, f"the server is healthy but does not serve: {_told(error)}"
    return True, done


def _ask(url: str, path: str, body: Any, api_key: str | None) -> Any:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url + path, data, headers)
    context = ssl._create_unverified_context() if url.startswith("https") else None
    with urllib.request.urlopen(request, timeout=_PATIENCE_S, context=context) as answer:
        text = answer.read(1 << 20)
    return json.loads(text) if text else {}


def _told(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"{error.code} from {error.url}: {error.read(300).decode('utf-8', 'replace')}"
    return str(error)
