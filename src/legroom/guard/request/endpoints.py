"""How a request's body must be read, by its path, and which client sent it, by its headers."""

import hashlib
import posixpath
import re
from collections.abc import Iterable, Mapping
from enum import Enum

from legroom.guard.policy import ClientPolicy

_SLASHES = re.compile("/{2,}")


class Kind(Enum):
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


_RENDERED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/cohere/v2/chat")
"""Paths with a `/render` below them, which returns the prompt."""
_PATHS: dict[Kind, tuple[str, ...]] = {
    Kind.COMPLETION: ("/v1/completions",),
    Kind.CHAT: ("/v1/chat/completions", "/cohere/v2/chat"),
    Kind.CHAT_BATCH: ("/v1/chat/completions/batch",),
    Kind.RESPONSES: ("/v1/responses",),
    Kind.MESSAGES: ("/v1/messages",),
    Kind.GENERATE: ("/inference/v1/generate",),
    Kind.DECISION: ("/v1/systemone",),
    Kind.POOLING: ("/v1/embeddings", "/v2/embed", "/pooling", "/classify"),
    Kind.SCORE: ("/generative_scoring", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    Kind.TEXT: ("/tokenize", "/detokenize", "/v1/messages/count_tokens", *(f"{path}/render" for path in _RENDERED)),
    Kind.UPLOAD: ("/v1/audio/transcriptions", "/v1/audio/translations"),
    Kind.ANY: ("/invocations",),
}
GUARDED = {path: kind for kind, paths in _PATHS.items() for path in paths}
GUARDED |= dict.fromkeys((f"{path}/derender" for path in _RENDERED[:2]), Kind.TEXT)
"""All other paths pass without admission."""

METRICS = "/metrics"
DRAIN = "/-/legroom/drain"
STATUS = "/-/legroom/status"
TOKEN_NAME = "LEGROOM_GUARD_TOKEN"
"""The environment variable with the token for these two paths."""
START_REQUESTED = "LEGROOM_RUN_START_REQUESTED"
"""The environment variable in which `legroom run` tells the server's guard whether the start follows no crash."""


def kind_of(method: str, path: str, root_path: str = "") -> Kind | None:
    """The kind of API body for a method and path (below `root_path`); None where a request needs no admission."""
    return GUARDED.get(path) or GUARDED.get(plain_path(path, root_path)) if method == "POST" else None


def plain_path(path: str, root_path: str = "") -> str:
    """A path without mount point (`root_path`), repeated or trailing slashes and dot segments, as servers route it."""
    if root_path and path.startswith(root_path):
        path = path[len(root_path) :]
    path = _SLASHES.sub("/", path)
    if "/." in path:
        path = posixpath.normpath(path)
    return path.rstrip("/") or "/"


def kind_of_body(body: dict[str, object]) -> Kind:
    """How to read a body of `/invocations`, by its keys; the most expensive kind that matches, SCORE for none."""
    if isinstance(body.get("messages"), list):
        return Kind.CHAT
    if body.get("prompt") is not None or body.get("prompt_embeds") is not None:
        return Kind.COMPLETION
    return Kind.POOLING if body.get("input") is not None or body.get("data") is not None else Kind.SCORE


def client_of(headers: Iterable[tuple[bytes, bytes]], address: str, policy: ClientPolicy) -> str:
    """The client as `header:`, `key:` (hashed) or `address:` and the value; empty where the policy ignores clients.
    `headers` have lower-case names."""
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
    """The policy's weights by `client_of`'s names: a policy name may be an API key, header value or address."""
    named = {name: (hashed_key(name.encode()), f"header:{name}", f"address:{name}") for name in weights}
    return {client: weights[name] for name, clients in named.items() for client in clients}
