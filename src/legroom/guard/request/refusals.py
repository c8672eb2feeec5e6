"""Responses to refused requests, with OpenAI-style bodies."""

from __future__ import annotations

import json

from legroom.records import dataclass

INVALID = "invalid_request_error"
RATE = "rate_limit_error"
SERVER = "server_error"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A response in place of the server's; `reason` is its label in `legroom_guard_rejected_total`."""

    status: int
    reason: str
    message: str
    type: str = INVALID
    param: str | None = None
    retry_after_s: int | None = None

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.reason}
        return json.dumps({"error": error}, ensure_ascii=False).encode()

    def headers(self, body: bytes) -> list[tuple[bytes, bytes]]:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.status in (408, 413):  # the rest of the body was not read
            headers.append((b"connection", b"close"))
        return headers


REASONS = (
    "body_too_large",
    "body_timeout",
    "malformed_json",
    "prompt_too_long",
    "output_too_long",
    "too_many_sequences",
    "too_many_logprobs",
    "too_many_prompt_logprobs",
    "too_many_media",
    "media_too_large",
    "remote_media",
    "never_fits",
    "queue_full",
    "queue_timeout",
    "draining",
    "pool_unknown",
    "upstream_down",
    "upstream_timeout",
    "bad_request",
)
"""All labels of `legroom_guard_rejected_total`."""


def bad_value(reason: str, message: str, param: str | None) -> Refusal:
    """400 for a request outside the policy's bounds."""
    return Refusal(400, reason, message, INVALID, param)


def too_large(limit_bytes: int) -> Refusal:
    return Refusal(413, "body_too_large", f"The request body is larger than {limit_bytes:,} bytes.")


def malformed(why: str) -> Refusal:
    """400 for a body that is not a JSON object."""
    return Refusal(400, "malformed_json", f"The request body is not a JSON object: {why}.")


def body_timeout(seconds: float) -> Refusal:
    """408 for a client that sends too slowly."""
    return Refusal(408, "body_timeout", f"The request body did not arrive within {seconds:g} seconds.")


def never_fits(needed_tokens: int, pool_tokens: int, why: str) -> Refusal:
    """400 for a sequence that needs more than the whole pool."""
    message = (
        f"This request may grow to {needed_tokens:,} tokens of KV cache ({why}), and the whole cache holds "
        f"{pool_tokens:,}. Lower max_tokens or shorten the prompt."
    )
    return Refusal(400, "never_fits", message)


def busy(reason: str, needed_tokens: int, free_tokens: int | None, waiting: int, retry_after_s: int) -> Refusal:
    """429 with Retry-After; `free_tokens` is None where only sequences are limited."""
    why = (
        "The server already runs as many sequences as it may"
        if free_tokens is None
        else f"The KV cache has no room for this request now: it may grow to {needed_tokens:,} tokens, "
        f"{free_tokens:,} are free"
    )
    message = f"{why} and {waiting:,} requests wait. Retry in {retry_after_s} s."
    return Refusal(429, reason, message, RATE, None, retry_after_s)


def draining(retry_after_s: int) -> Refusal:
    """503 while the guard drains."""
    return Refusal(503, "draining", "The server is draining and takes no new requests.", SERVER, None, retry_after_s)


def pool_unknown(why: str) -> Refusal:
    """503 under `when_unknown = "closed"`."""
    message = f"The size of the KV cache is not known yet ({why}), and the guard's policy is to wait for it."
    return Refusal(503, "pool_unknown", message, SERVER, None, 5)
