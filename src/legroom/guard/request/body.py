"""What a request asks for, read off its body: prompts, output, copies, logprobs, media.

Values are read as vLLM's own models read them (a number in a string is that number). What cannot be read is taken at
its worst and left to the server to refuse.
"""

from __future__ import annotations

import gc
import json
import re
from itertools import islice
from typing import Any, NamedTuple

from legroom.guard.request.endpoints import Kind, kind_of_body
from legroom.guard.request.media import Media
from legroom.guard.request.prefixes import PrefixUnit
from legroom.guard.request.prompts import APART, MOST_PROMPTS, Prompt, Walk, prompts_of

_LARGE_BYTES = 1 << 20
MOST_VALUES = 250_000
"""Lists, objects and strings in a body. A thousand tools and ten thousand messages are a tenth of it; each takes the
event loop as long as thirty letters of text, so without a bound a few MiB of brackets would hold it for seconds."""


def parse_body(body: bytes) -> Any:
    """The document in UTF-8, with or without a mark, or in UTF-16 or 32. ValueError says what is wrong with it."""
    if len(body) > MOST_VALUES and _is_overfull(body):
        raise ValueError(f"it has more than {MOST_VALUES:,} lists, objects and strings")
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


def _is_overfull(body: bytes) -> bool:
    """Told by counting bytes, which is a hundred times quicker than reading them."""
    if body.count(b'"') - body.count(b'\\"') > 2 * MOST_VALUES:
        return True
    if body.count(b"[") + body.count(b"{") <= MOST_VALUES:
        return False
    # Brackets in text are no lists: look at what stands between the strings.
    between = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    return between.count(b"[") + between.count(b"{") > MOST_VALUES


COMPLETION_DEFAULT = 16
"""max_tokens of /v1/completions where the body has no such key."""

WHOLE_VOCABULARY = 1 << 31
"""More logprobs than any vocabulary has words: what -1 asks for."""

MOST = 1 << 53
"""What larger counts are read as: more than any server holds, and still exact in a float."""

_NO_FRACTION = re.compile(r"\.0*\s*$")
_TRUE = frozenset(("true", "t", "yes", "y", "on", "1"))

_CUTS = ("truncate_prompt_tokens", "max_tokens_per_query", "max_tokens_per_doc")
"""Keys that have the server drop part of a prompt."""
_APART_BY = ("model", "cache_salt", "reasoning_effort", "chat_template_kwargs")
"""Requests that differ in one of these share no blocks: adapters, salts, and what templates write at the start."""
_LOGPROBS = ("logprobs", "top_logprobs", "prompt_logprobs")
_RARE = frozenset((*APART, *_CUTS, *_LOGPROBS))
"""Most requests have none of these keys, and one look tells."""

OUTPUT_KEYS: dict[Kind, tuple[str, ...]] = {
    Kind.COMPLETION: ("max_tokens",),
    Kind.CHAT: ("max_tokens", "max_completion_tokens"),
    Kind.CHAT_BATCH: ("max_tokens", "max_completion_tokens"),
    Kind.RESPONSES: ("max_output_tokens",),
    Kind.MESSAGES: ("max_tokens",),
    Kind.GENERATE: ("max_tokens",),
}
"""Where the length of the answer may stand; the first is what every release, and Cohere's dialect, reads."""


class Demand(NamedTuple):
    kind: Kind
    model: str
    prompts: tuple[Prompt, ...]
    output_tokens: int | None
    """None where the request leaves it open."""
    output_key: str | None
    sequences: int
    """Copies of each prompt that run: n, best_of or the beam width, the largest."""
    logprobs: int
    prompt_logprobs: int
    media: tuple[Media, ...]
    streams: bool
    background: bool
    generates: bool
    apart: bool = False
    """Part of the prompt stands where the server's tokenizer does not look."""
    cut: bool = False
    """The server may drop part of the prompt: what it counts then says nothing about text."""

    @property
    def informative(self) -> bool:
        """Whether its answer can tell something that is not known: how long it is, or what text was not counted."""
        if self.generates:
            return True
        return any([not prompt.exact for prompt in self.prompts])  # noqa: C419 - a list is quicker for the usual one


def demand_of(kind: Kind, body: dict[str, Any], unit: PrefixUnit | None = None) -> Demand:
    """`unit`: how the server cuts the beginnings that it shares among requests; None: it shares none."""
    if kind is Kind.ANY:
        kind = kind_of_body(body)
    sampling = body
    if kind is Kind.GENERATE and isinstance(body.get("sampling_params"), dict):
        sampling = body["sampling_params"]
    usual = _RARE.isdisjoint(body) and (sampling is body or _RARE.isdisjoint(sampling))
    prompt_logprobs = 0 if usual else _prompt_logprobs(kind, sampling)
    cut = not usual and any(body.get(key) for key in _CUTS)
    if unit is not None and (cut or prompt_logprobs or kind not in OUTPUT_KEYS or "kv_transfer_params" in body):
        unit = None  # vLLM computes such prompts anew, or their beginning is not the one in the request
    walk = Walk(unit, 0 if unit is None else hash((kind, *[str(body.get(key)) for key in _APART_BY])))
    prompts = tuple(islice(prompts_of(kind, body, walk), MOST_PROMPTS + 1))
    output, key = _output(kind, sampling)
    model = body.get("model")
    return Demand(
        kind=kind,
        model=model if isinstance(model, str) else "",
        prompts=prompts,
        output_tokens=output,
        output_key=key,
        sequences=_sequences(sampling),
        logprobs=0 if usual else max(_logprobs(sampling.get("logprobs")), _logprobs(sampling.get("top_logprobs"))),
        prompt_logprobs=prompt_logprobs,
        media=tuple(walk.media),
        streams=_is_true(body.get("stream")),
        background=kind is Kind.RESPONSES and _is_true(body.get("background")),
        generates=kind in OUTPUT_KEYS,
        apart=not usual and any(body.get(key) for key in APART),
        cut=cut,
    )


def _sequences(sampling: dict[str, Any]) -> int:
    if "n" not in sampling and "best_of" not in sampling:
        return 1
    return max(1, count_of(sampling.get("n")) or 1, count_of(sampling.get("best_of")) or 1)


def _output(kind: Kind, sampling: dict[str, Any]) -> tuple[int | None, str | None]:
    keys = OUTPUT_KEYS.get(kind)
    if keys is None:
        return 0, None
    named = [(value, key) for key in keys if (value := count_of(sampling.get(key))) is not None]
    if named:
        # Which key wins depends on the release, and on whether the first is 0: the larger one is never too little.
        return max(named)
    # vLLM's completions fill the key in where it is missing, and leave an explicit null open.
    if kind is Kind.COMPLETION and "max_tokens" not in sampling:
        return COMPLETION_DEFAULT, None
    if kind is Kind.GENERATE and "max_tokens" not in sampling:
        return COMPLETION_DEFAULT, None
    return None, None


def count_of(value: Any) -> int | None:
    """A count as a lenient reader takes it: 5, 5.0, "5", "5.0"; None for what is none."""
    if value is None:
        return None
    count = value if type(value) is int else _whole(value)
    return None if count is None else min(max(0, count), MOST)


def _whole(value: Any) -> int | None:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        return None
    try:
        return int(_NO_FRACTION.sub("", value) if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):
        return None


def _logprobs(value: Any) -> int:
    """-1 asks for the whole vocabulary; true means the sampled token alone."""
    if value is None or value is False:
        return 0
    if value is True:
        return 1
    count = _whole(value) or 0
    return WHOLE_VOCABULARY if count < 0 else min(count, WHOLE_VOCABULARY)


def _prompt_logprobs(kind: Kind, sampling: dict[str, Any]) -> int:
    """An echoed prompt comes with the logprobs that were asked for the answer."""
    named = sampling.get("prompt_logprobs")
    if named is None and kind in (Kind.COMPLETION, Kind.CHAT, Kind.CHAT_BATCH) and _is_true(sampling.get("echo")):
        named = sampling.get("logprobs" if kind is Kind.COMPLETION else "top_logprobs")
    return _logprobs(named)


def _is_true(value: Any) -> bool:
    return value is True or value == 1 or (isinstance(value, str) and value.lower() in _TRUE)
