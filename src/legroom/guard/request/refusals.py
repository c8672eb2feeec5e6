"""The policy's bounds on a request, and the responses to refused requests, with OpenAI-style bodies."""

import json
from typing import Any

from legroom.guard.policy import Policy, RequestBounds
from legroom.guard.request.body import OUTPUT_KEYS, WHOLE_VOCABULARY, Demand, count_of
from legroom.guard.request.endpoints import Kind
from legroom.guard.request.media import Media
from legroom.guard.request.prompts import MOST_PROMPTS
from legroom.guard.weight.engine_limits import EngineLimits
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
        """The error as JSON in OpenAI's form."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.reason}
        return json.dumps({"error": error}, ensure_ascii=False).encode()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The response's headers, with retry-after if it may be retried, connection: close if the body is unread."""
        headers = [(b"content-type", b"application/json")]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.status in (408, 413):  # the rest of the body was not read
            headers.append((b"connection", b"close"))
        return headers


REASONS = (
    *("body_too_large", "body_timeout", "malformed_json", "prompt_too_long", "output_too_long"),
    *("too_many_sequences", "too_many_logprobs", "too_many_prompt_logprobs", "too_many_media", "media_too_large"),
    *("remote_media", "never_fits", "queue_full", "queue_timeout", "draining", "pool_unknown", "upstream_down"),
    *("upstream_timeout", "bad_request"),
)
"""All labels of `legroom_guard_rejected_total`."""


def bad_value(reason: str, message: str, param: str | None) -> Refusal:
    """A 400 response for a request outside the policy's bounds, counted under `reason`; `param` names its field."""
    return Refusal(400, reason, message, INVALID, param)


def too_large(limit_bytes: int) -> Refusal:
    """A 413 response for a body of more than `limit_bytes`."""
    return Refusal(413, "body_too_large", f"The request body is larger than {limit_bytes:,} bytes.")


def malformed(why: str) -> Refusal:
    """A 400 response for a body that is not a JSON object, with `why` in its message."""
    return Refusal(400, "malformed_json", f"The request body is not a JSON object: {why}.")


def body_timeout(seconds: float) -> Refusal:
    """A 408 response for a client that did not send its body within `seconds`."""
    return Refusal(408, "body_timeout", f"The request body did not arrive within {seconds:g} seconds.")


def never_fits(needed_tokens: int, pool_tokens: int, why: str) -> Refusal:
    """A 400 response for a sequence that needs more KV tokens than the whole pool has; `why`: put in brackets."""
    message = f"This request may grow to {needed_tokens:,} tokens of KV cache ({why}), and the whole cache holds "
    message += f"{pool_tokens:,}. Lower max_tokens or shorten the prompt."
    return Refusal(400, "never_fits", message)


def busy(reason: str, needed_tokens: int, free_tokens: int | None, waiting: int, retry_after_s: int) -> Refusal:
    """A 429 response, counted as `reason`; `waiting`: queued requests; `free_tokens`: None if only sequences lack."""
    why = "The server already runs as many sequences as it may"
    if free_tokens is not None:
        grown = f"it may grow to {needed_tokens:,} tokens, {free_tokens:,} are free"
        why = f"The KV cache has no room for this request now: {grown}"
    message = f"{why} and {waiting:,} requests wait. Retry in {retry_after_s} s."
    return Refusal(429, reason, message, RATE, None, retry_after_s)


def draining(retry_after_s: int) -> Refusal:
    """A 503 response while the guard drains."""
    return Refusal(503, "draining", "The server is draining and takes no new requests.", SERVER, None, retry_after_s)


def engine_dead(retry_after_s: int) -> Refusal:
    """A 503 response in place of vLLM's 500 for an engine that has ended."""
    return Refusal(503, "engine_dead", "The engine has ended; the server must restart.", SERVER, None, retry_after_s)


def pool_unknown(why: str) -> Refusal:
    """A 503 response while the pool's size is unknown (`why`), under the policy `when_unknown = "closed"`."""
    message = f"The size of the KV cache is not known yet ({why}), and the guard's policy is to wait for it."
    return Refusal(503, "pool_unknown", message, SERVER, None, 5)


_MEDIA_KEYS = {"image": "max_images", "audio": "max_audios", "video": "max_videos"}


@dataclass(frozen=True, slots=True)
class Change:
    """A value to write into the body; `counted` is its label in `legroom_guard_capped_total`."""

    key: str
    value: int
    counted: str


def refusal_of(demand: Demand, policy: Policy, limits: EngineLimits) -> Refusal | None:
    """The refusal for the first bound that the request exceeds, else None: sequences, prompts (the policy's or 65,536),
    output tokens (where the policy rejects them), logprobs, media inputs."""
    bounds = policy.requests
    most = bounds.max_sequences
    if most and demand.sequences > most:
        text = f"n, best_of or the beam width is {demand.sequences:,}; at most {most:,} sequences a request are served."
        return bad_value("too_many_sequences", text, "n")
    most = min(bounds.max_prompts or MOST_PROMPTS, MOST_PROMPTS)
    if len(demand.prompts) > most:
        count = f"{len(demand.prompts):,}" if len(demand.prompts) <= MOST_PROMPTS else f"over {MOST_PROMPTS:,}"
        text = f"The request has {count} prompts; at most {most:,} are served."
        return bad_value("too_many_sequences", text, "prompt")
    output = (demand.output_tokens or 0) if demand.output_key else 0
    if bounds.max_output_tokens and bounds.output_over == "reject" and output > bounds.max_output_tokens:
        text = f"{demand.output_key} is {output:,}; answers of at most {bounds.max_output_tokens:,} tokens are served."
        return bad_value("output_too_long", text, demand.output_key)
    too_many = _logprobs_refusal(demand, bounds, limits)
    return too_many or (_media_refusal(demand, bounds, limits) if demand.media else None)


def most_logprobs(policy_limit: int | None, limits: EngineLimits) -> int:
    """The most logprobs allowed: the policy's limit, else the server's (-1: WHOLE_VOCABULARY), else 20."""
    if policy_limit is not None:
        return policy_limit
    if limits.max_logprobs is None:
        return 20  # vLLM's default of --max-logprobs
    return limits.max_logprobs if limits.max_logprobs >= 0 else WHOLE_VOCABULARY


def _logprobs_refusal(demand: Demand, bounds: RequestBounds, limits: EngineLimits) -> Refusal | None:
    """The refusal for too many logprobs; None where they are within bounds or the policy caps them instead."""
    if bounds.logprobs_over == "cap":
        return None
    requested = (
        ("too_many_logprobs", "logprobs", demand.logprobs, bounds.max_logprobs),
        ("too_many_prompt_logprobs", "prompt_logprobs", demand.prompt_logprobs, bounds.max_prompt_logprobs),
    )
    for reason, name, value, policy_limit in requested:
        if value and value > (most := most_logprobs(policy_limit, limits)):
            amount = "the whole vocabulary" if value >= WHOLE_VOCABULARY else f"{value:,}"
            return bad_value(reason, f"{name} asks for {amount} a token; at most {most:,} are served.", name)
    return None


def _media_refusal(demand: Demand, bounds: RequestBounds, limits: EngineLimits) -> Refusal | None:
    """The refusal for too many images, audio or video inputs or for one that is not allowed; None where all are."""
    for kind, key in _MEDIA_KEYS.items():
        most = getattr(bounds, key)
        if most is None and limits.media is not None:
            most = limits.media.get(kind)
        count = sum(item.kind == kind for item in demand.media)
        if most is not None and count > most:
            text = f"The request has {count:,} {kind} inputs; at most {most:,} are served."
            return bad_value("too_many_media", text, "messages")
    return next((refusal for item in demand.media if (refusal := _media_item_refusal(item, bounds))), None)


def _media_item_refusal(item: Media, bounds: RequestBounds) -> Refusal | None:
    """The refusal for a media input given as a forbidden URL or too large in bytes or pixels; otherwise None."""
    if item.remote and bounds.remote_media == "reject":
        text = f"The {item.kind} is given as a URL; send it in the request itself."
        return bad_value("remote_media", text, "messages")
    if item.sent_bytes > bounds.media_bytes:
        text = f"One {item.kind} has {item.sent_bytes:,} bytes; at most {bounds.media_bytes:,} are served."
        return bad_value("media_too_large", text, "messages")
    if item.pixels is not None and item.pixels > bounds.image_pixels:
        text = f"One image has {item.pixels:,} pixels; at most {bounds.image_pixels:,} are served."
        return bad_value("media_too_large", text, "messages")
    return None


def changes_of(demand: Demand, policy: Policy, limits: EngineLimits) -> tuple[Change, ...]:
    """The values that the policy's bounds write into the body: caps, and an output length where none is given."""
    bounds, changes = policy.requests, []
    key = demand.output_key or OUTPUT_KEYS.get(demand.kind, (None,))[0]
    if key is not None:
        most = bounds.max_output_tokens
        if demand.output_tokens is None:
            if chosen := bounds.default_output_tokens or most:
                changes.append(Change(key, min(chosen, most or chosen), "default_output"))
        elif most and demand.output_tokens > most:
            changes.append(Change(key, most, "output"))
    if bounds.logprobs_over == "cap":
        if demand.logprobs > (most := most_logprobs(bounds.max_logprobs, limits)):
            name = "logprobs" if demand.kind in (Kind.COMPLETION, Kind.GENERATE) else "top_logprobs"
            changes.append(Change(name, most, "logprobs"))
        if demand.prompt_logprobs > (most := most_logprobs(bounds.max_prompt_logprobs, limits)):
            changes.append(Change("prompt_logprobs", most, "prompt_logprobs"))
    return tuple(changes)


def apply_changes(changes: tuple[Change, ...], kind: Kind, body: dict[str, Any]) -> None:
    """Write the capped values into the body, in place."""
    nested = kind is Kind.GENERATE and isinstance(body.get("sampling_params"), dict)
    target = body["sampling_params"] if nested else body
    for change in changes:
        target[change.key] = change.value
        # Chats have two keys, and the release decides which one counts, so both are capped.
        if change.counted == "output":
            for other in OUTPUT_KEYS.get(kind, ()):
                if (count_of(target.get(other)) or 0) > change.value:
                    target[other] = change.value
