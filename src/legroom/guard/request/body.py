"""Reads a request body: prompts, output length, copies, logprobs, media. Values are read as vLLM's pydantic models read
them (a number in a string is that number). A value that cannot be read is counted at its largest and left to the server
to refuse."""

import json
import re
from itertools import islice
from typing import Any, NamedTuple

from legroom.guard.request.endpoints import Kind, kind_of_body
from legroom.guard.request.media import Media
from legroom.guard.request.prefixes import PrefixUnit
from legroom.guard.request.prompts import MOST_PROMPTS, UNTOKENIZED, BodyWalk, Prompt, prompts_of
from legroom.json_records import gc_paused

MOST_VALUES = 250_000
"""Most lists, objects and strings in a body; 1,000 tools and 10,000 messages have a tenth of it. Each blocks the event
loop as long as 30 characters of text do, so a few MiB of brackets would block it for seconds."""


def parse_body(body: bytes) -> Any:
    """Parse JSON in UTF-8, 16 or 32. Raises ValueError with the reason."""
    if len(body) > MOST_VALUES and _has_too_many_values(body):
        raise ValueError(f"it has more than {MOST_VALUES:,} lists, objects and strings")
    try:
        if len(body) < 1 << 20:
            return json.loads(body)
        with gc_paused():
            return json.loads(body)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _has_too_many_values(body: bytes) -> bool:
    """Whether a body has more than `MOST_VALUES` values, by counting bytes: 100 times faster than parsing."""
    if body.count(b'"') - body.count(b'\\"') > 2 * MOST_VALUES:
        return True
    if body.count(b"[") + body.count(b"{") <= MOST_VALUES:
        return False
    # Brackets inside strings do not count.
    between = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    return between.count(b"[") + between.count(b"{") > MOST_VALUES


COMPLETION_DEFAULT = 16
"""vLLM's default max_tokens of /v1/completions."""

WHOLE_VOCABULARY = 1 << 31
"""More logprobs than any vocabulary has tokens; stands for -1."""

MOST = 1 << 53
"""Caps counts: more than any server holds, and exact in a float."""

_NO_FRACTION = re.compile(r"\.0*\s*$")
_TRUE = frozenset(("true", "t", "yes", "y", "on", "1"))

_TRUNCATING = ("truncate_prompt_tokens", "max_tokens_per_query", "max_tokens_per_doc")
"""Keys that let the server truncate a prompt."""
_PREFIX_SEED_KEYS = ("model", "cache_salt", "reasoning_effort", "chat_template_kwargs")
"""Requests that differ in one of these share no prefix blocks."""
_RARE = frozenset((*UNTOKENIZED, *_TRUNCATING, "logprobs", "top_logprobs", "prompt_logprobs"))
"""Most requests have none of these keys, which one set operation shows."""

OUTPUT_KEYS: dict[Kind, tuple[str, ...]] = {
    Kind.COMPLETION: ("max_tokens",),
    Kind.CHAT: ("max_tokens", "max_completion_tokens"),
    Kind.CHAT_BATCH: ("max_tokens", "max_completion_tokens"),
    Kind.RESPONSES: ("max_output_tokens",),
    Kind.MESSAGES: ("max_tokens",),
    Kind.GENERATE: ("max_tokens",),
}
"""Keys of the output length; every release reads the first."""


class Demand(NamedTuple):
    """The prompts, output length and media of a request."""

    kind: Kind
    model: str
    prompts: tuple[Prompt, ...]
    output_tokens: int | None
    """None where the request names none."""
    output_key: str | None
    sequences: int
    """Copies of each prompt: the largest of n, best_of and the beam width."""
    logprobs: int
    prompt_logprobs: int
    media: tuple[Media, ...]
    streams: bool
    background: bool
    generates: bool
    has_untokenized: bool = False
    """Part of the prompt is in keys that `/tokenize` does not take."""
    is_truncated: bool = False
    """The server may truncate the prompt, so that its token count says nothing about the text."""

    @property
    def informative(self) -> bool:
        """Whether the response will show a length of answers or a number of tokens per byte to learn from."""
        if self.generates:
            return True
        return any([not prompt.exact for prompt in self.prompts])  # noqa: C419 - a list is quicker for the usual one


def demand_of(kind: Kind, body: dict[str, Any], unit: PrefixUnit | None = None) -> Demand:
    """The prompts, output length and media of a body; `unit`: the server's prefix-cache block, None if it is off."""
    if kind is Kind.ANY:
        kind = kind_of_body(body)
    sampling = body
    if kind is Kind.GENERATE and isinstance(body.get("sampling_params"), dict):
        sampling = body["sampling_params"]
    is_usual = _RARE.isdisjoint(body) and (sampling is body or _RARE.isdisjoint(sampling))
    prompt_logprobs = 0 if is_usual else _prompt_logprobs(kind, sampling)
    is_truncated = not is_usual and any(body.get(key) for key in _TRUNCATING)
    if unit is not None and (
        is_truncated or prompt_logprobs or kind not in OUTPUT_KEYS or "kv_transfer_params" in body
    ):
        unit = None  # vLLM computes such prompts in full, or their prefix is not the one in the body
    walk = BodyWalk(unit, 0 if unit is None else hash((kind, *[str(body.get(key)) for key in _PREFIX_SEED_KEYS])))
    prompts = tuple(islice(prompts_of(kind, body, walk), MOST_PROMPTS + 1))
    output, key = _max_output_tokens(kind, sampling)
    model = body.get("model")
    return Demand(
        kind=kind,
        model=model if isinstance(model, str) else "",
        prompts=prompts,
        output_tokens=output,
        output_key=key,
        sequences=max(1, count_of(sampling.get("n")) or 1, count_of(sampling.get("best_of")) or 1),
        logprobs=0 if is_usual else max(_logprobs(sampling.get("logprobs")), _logprobs(sampling.get("top_logprobs"))),
        prompt_logprobs=prompt_logprobs,
        media=tuple(walk.media),
        streams=_is_true(body.get("stream")),
        background=kind is Kind.RESPONSES and _is_true(body.get("background")),
        generates=kind in OUTPUT_KEYS,
        has_untokenized=not is_usual and any(body.get(key) for key in UNTOKENIZED),
        is_truncated=is_truncated,
    )


def _max_output_tokens(kind: Kind, sampling: dict[str, Any]) -> tuple[int | None, str | None]:
    """(The largest output length that the body names, its key). Without one the key is None and the length vLLM's
    default, None where it is open, or 0 for a kind without output."""
    keys = OUTPUT_KEYS.get(kind)
    if keys is None:
        return 0, None
    named = [(value, key) for key in keys if (value := count_of(sampling.get(key))) is not None]
    if named:
        # Which key counts depends on the release, so the larger one is used.
        return max(named)
    # vLLM fills in a missing key, and leaves an explicit null open.
    if kind in (Kind.COMPLETION, Kind.GENERATE) and "max_tokens" not in sampling:
        return COMPLETION_DEFAULT, None
    return None, None


def count_of(value: Any) -> int | None:
    """A count as pydantic reads it (5, 5.0, "5", "5.0"), clamped to 0 and MOST; None for anything else."""
    if value is None:
        return None
    count = value if type(value) is int else _whole_number(value)
    return None if count is None else min(max(0, count), MOST)


def _whole_number(value: Any) -> int | None:
    """The integer of a number or of a string such as "5.0"; None where the value is not a whole number."""
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        return None
    try:
        return int(_NO_FRACTION.sub("", value) if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):
        return None


def _logprobs(value: Any) -> int:
    """The logprobs that a JSON value asks for: null, false or text 0, true 1, a negative number WHOLE_VOCABULARY."""
    if value is None or value is False:
        return 0
    if value is True:
        return 1
    count = _whole_number(value) or 0
    return WHOLE_VOCABULARY if count < 0 else min(count, WHOLE_VOCABULARY)


def _prompt_logprobs(kind: Kind, sampling: dict[str, Any]) -> int:
    """The logprobs per prompt token that `sampling` asks for; with `echo`, those of the answer count too."""
    named = sampling.get("prompt_logprobs")
    if named is None and kind in (Kind.COMPLETION, Kind.CHAT, Kind.CHAT_BATCH) and _is_true(sampling.get("echo")):
        named = sampling.get("logprobs" if kind is Kind.COMPLETION else "top_logprobs")
    return _logprobs(named)


def _is_true(value: Any) -> bool:
    """Whether a JSON value counts as true: true, 1 or one of the accepted words."""
    return value is True or value == 1 or (isinstance(value, str) and value.lower() in _TRUE)
