"""Which paths of an OpenAI-compatible server spend KV memory, and how their bodies say how much."""

from __future__ import annotations

import posixpath
import re
from enum import Enum

_SLASHES = re.compile("/{2,}")


class Kind(Enum):
    """How a body names its prompt and its output."""

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
    """Work on the CPU alone: only the size of the body is bounded."""
    UPLOAD = "upload"
    """A file in a form: its tokens cannot be read off the body."""
    ANY = "any"
    """The body's keys tell which of the others it is."""


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
"""Every other path passes as it is: health, metrics, version, models, docs and administration."""

METRICS = "/metrics"
DRAIN = "/-/legroom/drain"
STATUS = "/-/legroom/status"
TOKEN_NAME = "LEGROOM_GUARD_TOKEN"
"""The environment variable with the token for these two."""


def kind_of(method: str, path: str, root_path: str = "") -> Kind | None:
    """What to do with a request; None lets it pass. A path is read as a lenient server might route it."""
    if method != "POST":
        return None
    return GUARDED.get(path) or GUARDED.get(plain_path(path, root_path))


def plain_path(path: str, root_path: str = "") -> str:
    """Without the mount point, doubled or trailing slashes, or detours."""
    if root_path and path.startswith(root_path):
        path = path[len(root_path) :]
    path = _SLASHES.sub("/", path)
    if "/." in path:
        path = posixpath.normpath(path)
    return path.rstrip("/") or "/"


def kind_of_body(body: dict[str, object]) -> Kind:
    """`/invocations` takes any request; tell it by its keys, the costliest reading first."""
    if isinstance(body.get("messages"), list):
        return Kind.CHAT
    if body.get("prompt") is not None or body.get("prompt_embeds") is not None:
        return Kind.COMPLETION
    if body.get("input") is not None or body.get("data") is not None:
        return Kind.POOLING
    return Kind.SCORE
