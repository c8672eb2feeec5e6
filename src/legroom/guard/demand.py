"""What a request asks for, read off its body: prompts, output, copies, logprobs, media.

Values are read as vLLM's own models read them (a number in a string is that number). What cannot be read is taken at
its worst and left to the server to refuse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from legroom.guard.media import Media, beside_media, media_of
from legroom.guard.paths import Kind, kind_of_body

COMPLETION_DEFAULT = 16
"""max_tokens of /v1/completions where the body has no such key."""

WHOLE_VOCABULARY = 1 << 31
"""More logprobs than any vocabulary has words: what -1 asks for."""

MOST = 1 << 53
"""What larger counts are read as: more than any server holds, and still exact in a float."""

_NO_FRACTION = re.compile(r"\.0*\s*$")
_TRUE = frozenset(("true", "t", "yes", "y", "on", "1"))

_APART = ("functions", "system", "instructions", "documents", "text", "response_format")
_BESIDE = ("tools", "chat_template_kwargs", *_APART)
"""Where a conversation's prompt stands besides its messages; the first two are known to the server's tokenizer."""

OUTPUT_KEYS: dict[Kind, tuple[str, ...]] = {
    Kind.COMPLETION: ("max_tokens",),
    Kind.CHAT: ("max_completion_tokens", "max_tokens"),
    Kind.CHAT_BATCH: ("max_completion_tokens", "max_tokens"),
    Kind.RESPONSES: ("max_output_tokens",),
    Kind.MESSAGES: ("max_tokens",),
    Kind.GENERATE: ("max_tokens",),
}
"""Where the length of the answer stands, the key that wins first."""


class Prompt(NamedTuple):
    """One sequence's prompt: counted, or known by its bytes."""

    tokens: int = 0
    """Those that were counted; beside text, what may stand in its place."""
    text_bytes: int = 0
    ascii_only: bool = True
    messages: int = 0
    open_ended: bool = False
    """Part of it is not in the request (an earlier response, embeddings): it may be as long as the model takes."""

    @property
    def exact(self) -> bool:
        """Whether the tokens are counted."""
        return not self.text_bytes and not self.messages and not self.open_ended

    @property
    def text_alone(self) -> bool:
        """Whether its tokens are those of its text, and so tell something about text."""
        return not self.tokens and not self.open_ended


class Demand(NamedTuple):
    """One request."""

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

    @property
    def teaches(self) -> bool:
        """Whether its answer can tell something that is not known: text was not counted, or the answer is open."""
        if self.generates and self.output_tokens is None:
            return True
        return any([not prompt.exact for prompt in self.prompts])  # noqa: C419 - a list is quicker for the usual one


def demand_of(kind: Kind, body: dict[str, Any]) -> Demand:
    """Read a body."""
    if kind is Kind.ANY:
        kind = kind_of_body(body)
    sampling = body
    if kind is Kind.GENERATE and isinstance(body.get("sampling_params"), dict):
        sampling = body["sampling_params"]
    media: list[Media] = []
    prompts = tuple(_prompts(kind, body, media))
    output, key = _output(kind, sampling)
    model = body.get("model")
    return Demand(
        kind=kind,
        model=model if isinstance(model, str) else "",
        prompts=prompts,
        output_tokens=output,
        output_key=key,
        sequences=_sequences(sampling),
        logprobs=max(_logprobs(sampling.get("logprobs")), _logprobs(sampling.get("top_logprobs"))),
        prompt_logprobs=_logprobs(sampling.get("prompt_logprobs")),
        media=tuple(media),
        streams=_is_true(body.get("stream")),
        background=kind is Kind.RESPONSES and _is_true(body.get("background")),
        generates=kind in OUTPUT_KEYS,
        apart=any([body.get(key) for key in _APART]),  # noqa: C419 - quicker, as above
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
        # Releases to 0.11 take a 0 for nothing and read the other key.
        return named[0] if named[0][0] else max(named)
    # vLLM's completions fill the key in where it is missing, and leave an explicit null open.
    if kind is Kind.COMPLETION and "max_tokens" not in sampling:
        return COMPLETION_DEFAULT, None
    if kind is Kind.GENERATE and "max_tokens" not in sampling:
        return COMPLETION_DEFAULT, None
    return None, None


def count_of(value: Any) -> int | None:
    """A count as a lenient reader takes it: 5, 5.0, "5", "5.0"; None for what is none."""
    found = _whole(value)
    return None if found is None else min(max(0, found), MOST)


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
    found = _whole(value) or 0
    return WHOLE_VOCABULARY if found < 0 else min(found, WHOLE_VOCABULARY)


def _is_true(value: Any) -> bool:
    return value is True or value == 1 or (isinstance(value, str) and value.lower() in _TRUE)


def _prompts(kind: Kind, body: dict[str, Any], media: list[Media]) -> Iterator[Prompt]:
    match kind:
        case Kind.COMPLETION:
            yield from _texts_or_ids(body.get("prompt"))
            embeds = body.get("prompt_embeds")
            for _ in embeds if isinstance(embeds, list) else () if embeds is None else (embeds,):
                yield Prompt(open_ended=True)
        case Kind.GENERATE:
            yield from _texts_or_ids(body.get("token_ids"))
        case Kind.CHAT | Kind.MESSAGES:
            talk = _conversation(body, body.get("messages"), media)
            yield talk._replace(tokens=_forwarded(body)) if "kv_transfer_params" in body else talk
        case Kind.CHAT_BATCH:
            conversations = body.get("messages")
            for one in conversations if isinstance(conversations, list) else ():
                yield _conversation(body, one, media)
        case Kind.RESPONSES:
            said = body.get("input")
            found = _conversation(body, said if isinstance(said, list) else [said], media)
            elsewhere = body.get("previous_response_id") is not None or body.get("prompt") is not None
            yield _open(found) if elsewhere else found
        case Kind.POOLING:
            if isinstance(body.get("messages"), list):
                yield _conversation(body, body["messages"], media)
            else:
                named = (body[key] for key in ("input", "texts", "inputs") if body.get(key) is not None)
                yield from _texts_or_ids(next(named, None))
        case Kind.SCORE:
            yield from _pairs(body, media)
        case Kind.DECISION:
            yield from _decisions(body, media)


def _texts_or_ids(value: Any) -> Iterator[Prompt]:
    """A text, token ids, or a list of either."""
    if isinstance(value, str):
        yield _text(value)
    elif isinstance(value, list) and value:
        if isinstance(value[0], int):
            yield Prompt(tokens=len(value))
            return
        for one in value:
            if isinstance(one, str):
                yield _text(one)
            elif isinstance(one, list):
                yield Prompt(tokens=len(one))
            else:
                yield _measured(one, None, 1)


def _pairs(body: dict[str, Any], media: list[Media]) -> Iterator[Prompt]:
    """Scores: each text of one side beside the query or its partner of the other."""
    sides = [body[key] for key in ("text_1", "queries", "query", "data_1") if key in body]
    others = [body[key] for key in ("text_2", "documents", "items", "data_2") if key in body]
    first = [_measured(one, media, 1) for side in sides for one in (side if isinstance(side, list) else [side])]
    second = [_measured(one, media, 1) for side in others for one in (side if isinstance(side, list) else [side])]
    longest = max(first, key=lambda prompt: prompt.text_bytes, default=Prompt())
    for one in second or first:
        text = longest.text_bytes + one.text_bytes if second else one.text_bytes
        yield Prompt(0, text, longest.ascii_only and one.ascii_only, 1)


def _decisions(body: dict[str, Any], media: list[Media]) -> Iterator[Prompt]:
    """Decisions (0.32): each question behind the state that all of them are about."""
    for key, kind in (("images", "image_url"), ("audio", "audio_url"), ("videos", "video_url")):
        named = body.get(key)
        found = [media_of({kind: one}) for one in named] if isinstance(named, list) else []
        media += [one for one in found if one is not None]
    asked = body.get("questions")
    about = _text(json.dumps([body.get("state"), body.get("instructions")], ensure_ascii=False))
    for question in asked.items() if isinstance(asked, dict) else ():
        own = _text(json.dumps(question, ensure_ascii=False))
        yield Prompt(0, about.text_bytes + own.text_bytes, about.ascii_only and own.ascii_only, 1)


def _text(text: str) -> Prompt:
    ascii_only = text.isascii()
    size = len(text) if ascii_only else len(text.encode("utf-8", "surrogatepass"))
    return Prompt(0, size, ascii_only) if size else Prompt(tokens=1)


def _conversation(body: dict[str, Any], messages: Any, media: list[Media]) -> Prompt:
    said = messages if isinstance(messages, list) else []
    beside = [body[key] for key in _BESIDE if body.get(key)]
    talk = _measured(said, media, max(1, len(said)))
    if not beside:
        return talk
    more = _text(json.dumps(beside, ensure_ascii=False))  # templates write these as JSON, structure and all
    return Prompt(0, talk.text_bytes + more.text_bytes, talk.ascii_only and more.ascii_only, talk.messages)


def _forwarded(body: dict[str, Any]) -> int:
    """Token ids that a prefill server hands on, which 0.32 takes in place of a chat's messages."""
    params = body["kv_transfer_params"]
    ids = params.get("prompt_token_ids") if isinstance(params, dict) else None
    return len(ids) if isinstance(ids, list) else 0


def _measured(value: Any, media: list[Media] | None, messages: int) -> Prompt:
    """All text in a JSON value, keys included, with media set aside where there may be any."""
    size, ascii_only, todo = 0, True, [value]
    while todo:
        one = todo.pop()
        if isinstance(one, str):
            if one.isascii():
                size += len(one)
            else:
                ascii_only = False
                size += len(one.encode("utf-8", "surrogatepass"))
        elif isinstance(one, dict):
            if media is not None and "role" not in one and (found := media_of(one)) is not None:
                media.append(found)
                todo.extend(beside_media(one))
                continue
            keys = "".join(one)
            if keys.isascii():
                size += len(keys)
            else:
                ascii_only = False
                size += len(keys.encode("utf-8", "surrogatepass"))
            todo.extend(one.values())
        elif isinstance(one, list):
            todo.extend(one)
        elif one is not None:
            size += len(str(one)) if isinstance(one, float | bool) else (one.bit_length() // 3 + 1)
    return Prompt(0, size, ascii_only, messages)


def _open(prompt: Prompt) -> Prompt:
    return Prompt(prompt.tokens, prompt.text_bytes, prompt.ascii_only, prompt.messages, open_ended=True)
