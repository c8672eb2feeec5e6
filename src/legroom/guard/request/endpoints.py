"""How a request's body must be read, by its path, and which client sent it, by its headers."""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Iterable, Mapping
from enum import Enum

from legroom.guard.policy import ClientPolicy

_SLASHES = re.compile("/{2,}")


class Kind(Enum):
    """How a body is read."""

    COMPLETION = "completion"
    CHAT = "chat"
    CHAT_BATCH = "chat batch"
    RESPONSES = "responses"
    MESSAGES = "messages"
    GENERATE = "generate"
    POOLING = "pooling"
    SCORE = "score"
    DECISION = "decision"
    TEXT = "text"
    """Uses no KV cache: only the size of the body is bounded."""
    UPLOAD = "upload"
    """A file in a form, whose tokens are unknown."""
    ANY = "any"
    """Any of the others, by the body's keys."""


GUARDED: dict[str, Kind] = {
    "/v1/completions": Kind.COMPLETION,
    "/v1/chat/completions": Kind.CHAT,
    "/v1/chat/completions/batch": Kind.CHAT_BATCH,
    "/v1/responses": Kind.RESPONSES,
    "/v1/messages": Kind.MESSAGES,
    "/cohere/v2/chat": Kind.CHAT,
    "/inference/v1/generate": Kind.GENERATE,
    "/generative_scoring": Kind.SCORE,
    "/v1/systemone": Kind.DECISION,
    "/v1/embeddings": Kind.POOLING,
    "/v2/embed": Kind.POOLING,
    "/pooling": Kind.POOLING,
    "/classify": Kind.POOLING,
    "/score": Kind.SCORE,
    "/v1/score": Kind.SCORE,
    "/rerank": Kind.SCORE,
    "/v1/rerank": Kind.SCORE,
    "/v2/rerank": Kind.SCORE,
    "/tokenize": Kind.TEXT,
    "/detokenize": Kind.TEXT,
    "/v1/messages/count_tokens": Kind.TEXT,
    "/v1/completions/render": Kind.TEXT,
    "/v1/completions/derender": Kind.TEXT,
    "/v1/chat/completions/render": Kind.TEXT,
    "/v1/chat/completions/derender": Kind.TEXT,
    "/v1/responses/render": Kind.TEXT,
    "/v1/messages/render": Kind.TEXT,
    "/cohere/v2/chat/render": Kind.TEXT,
    "/v1/audio/transcriptions": Kind.UPLOAD,
    "/v1/audio/translations": Kind.UPLOAD,
    "/invocations": Kind.ANY,
}
"""All other paths pass without admission."""

METRICS = "/metrics"
DRAIN = "/-/legroom/drain"
STATUS = "/-/legroom/status"
TOKEN_NAME = "LEGROOM_GUARD_TOKEN"
"""The environment variable with the token for these two paths."""


def kind_of(method: str, path: str, root_path: str = "") -> Kind | None:
    """The kind of API body for a method and path; None where the request passes without admission."""
    if method != "POST":
        return None
    return GUARDED.get(path) or GUARDED.get(plain_path(path, root_path))


def plain_path(path: str, root_path: str = "") -> str:
    """A path without mount point, doubled or trailing slashes, and dot segments, as servers route it."""
    if root_path and path.startswith(root_path):
        path = path[len(root_path) :]
    path = _SLASHES.sub("/", path)
    if "/." in path:
        path = posixpath.normpath(path)
    return path.rstrip("/") or "/"


def kind_of_body(body: dict[str, object]) -> Kind:
    """How to read a body of `/invocations`, by its keys; the most expensive kind that matches."""
    if isinstance(body.get("messages"), list):
        return Kind.CHAT
    if body.get("prompt") is not None or body.get("prompt_embeds") is not None:
        return Kind.COMPLETION
    if body.get("input") is not None or body.get("data") is not None:
        return Kind.POOLING
    return Kind.SCORE


def client_of(headers: Iterable[tuple[bytes, bytes]], address: str, policy: ClientPolicy) -> str:
    """An identifier of the client, with a hash in place of its API key. Header names are in lower case."""
    if policy.by == "none":
        return ""
    named = policy.header.lower().encode()
    key = b""
    for name, value in headers:
        if named and name == named:
            return f"header:{value[:128].decode('latin-1')}"
        if name == b"authorization" or (name in (b"x-api-key", b"api-key") and not key):
            key = value.rpartition(b" ")[2]
    if key and policy.by != "address":
        return hashed_key(key)
    return "" if policy.by == "key" else f"address:{address}"


def hashed_key(key: bytes) -> str:
    """A client's name from its API key: "key:" and 16 hex digits of the SHA-256."""
    return f"key:{hashlib.sha256(key).hexdigest()[:16]}"


def weights_by_client(weights: Mapping[str, float]) -> dict[str, float]:
    """Weights by client identifier; the policy names an API key, a header's value or an address."""
    by_client: dict[str, float] = {}
    for name, weight in weights.items():
        for client in (hashed_key(name.encode()), f"header:{name}", f"address:{name}"):
            by_client[client] = weight
    return by_client
