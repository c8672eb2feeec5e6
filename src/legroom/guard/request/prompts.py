"""The prompts of a request, read off its body: counted where they are token ids, else measured in bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from legroom.guard.request.endpoints import Kind
from legroom.guard.request.media import Media, beside_media, media_of
from legroom.guard.request.prefixes import MOST_KEYS_A_REQUEST, PrefixChain, PrefixUnit, chain_of_ids, chain_of_text

MOST_PROMPTS = 1 << 16
"""Prompts that are read of one request; one with more is refused."""

MOST_WALKED = 200_000
"""Values inside messages and documents that are looked at; a request with more is taken for as long as the model."""

_MEDIA_STEPS = 20
"""How many plain values take as long as one image."""

APART = ("functions", "system", "instructions", "documents", "text", "response_format")
_BESIDE = ("tools", "chat_template_kwargs", *APART)
"""Where a conversation's prompt stands besides its messages; the first two are known to the server's tokenizer."""
_ANY_BESIDE = frozenset(_BESIDE)

_TEXT_PARTS = frozenset(("text", "input_text", "output_text"))

_FIRST = ("text_1", "queries", "query", "data_1")
_SECOND = ("text_2", "documents", "items", "data_2")
"""The two sides of a score, by the names that releases and their relatives give them."""


class Prompt(NamedTuple):
    """One sequence's prompt: counted, or known by its bytes."""

    tokens: int = 0
    """Those that were counted; beside text, what may stand in its place."""
    text_bytes: int = 0
    ascii_only: bool = True
    messages: int = 0
    open_ended: bool = False
    """Part of it is not in the request (an earlier response, embeddings): it may be as long as the model takes."""
    chain: PrefixChain | None = None
    """How it begins, where the server shares that among requests."""

    @property
    def exact(self) -> bool:
        """Whether the tokens are counted."""
        return not self.text_bytes and not self.messages and not self.open_ended

    @property
    def text_alone(self) -> bool:
        """Whether its tokens are those of its text, and so tell something about text."""
        return not self.tokens and not self.open_ended


class Walk:
    """What reading a body has found, and how much more of it is looked at."""

    __slots__ = ("_keys_left", "_seed", "_unit", "left", "media")

    def __init__(self, unit: PrefixUnit | None = None, seed: int = 0) -> None:
        self.media: list[Media] = []
        self.left = MOST_WALKED
        self._unit = unit
        self._seed = seed
        self._keys_left = MOST_KEYS_A_REQUEST if unit is not None else 0

    @property
    def chains(self) -> bool:
        """Whether it is to be noted how prompts begin."""
        return self._keys_left > 0

    def chain_of(self, prompt: str | list[Any]) -> PrefixChain | None:
        if self._unit is None or self._keys_left <= 0:
            return None
        if isinstance(prompt, str):
            chain = chain_of_text(prompt, self._unit, self._seed, self._keys_left)
        else:
            chain = chain_of_ids(prompt, self._unit, self._seed, self._keys_left)
        self._keys_left -= len(chain.keys) if chain is not None else 0
        return chain


def prompts_of(kind: Kind, body: dict[str, Any], walk: Walk) -> Iterator[Prompt]:
    """One for each sequence that runs; media are noted on the walk."""
    match kind:
        case Kind.COMPLETION:
            yield from _texts_or_ids(body.get("prompt"), walk)
            embeds = body.get("prompt_embeds")
            for _ in embeds if isinstance(embeds, list) else () if embeds is None else (embeds,):
                yield Prompt(open_ended=True)
        case Kind.GENERATE:
            yield from _texts_or_ids(body.get("token_ids"), walk)
        case Kind.CHAT | Kind.MESSAGES:
            talk = _conversation(body, body.get("messages"), walk)
            yield talk._replace(tokens=_forwarded(body)) if "kv_transfer_params" in body else talk
        case Kind.CHAT_BATCH:
            conversations = body.get("messages")
            for conversation in conversations if isinstance(conversations, list) else ():
                yield _conversation(body, conversation, walk)
        case Kind.RESPONSES:
            input_items = body.get("input")
            talk = _conversation(body, input_items if isinstance(input_items, list) else [input_items], walk)
            elsewhere = body.get("previous_response_id") is not None or body.get("prompt") is not None
            yield talk._replace(open_ended=True) if elsewhere else talk
        case Kind.POOLING:
            yield from _pooled(body, walk)
        case Kind.SCORE:
            yield from _pairs(body, walk)
        case Kind.DECISION:
            yield from _decisions(body, walk)


def _texts_or_ids(value: Any, walk: Walk) -> Iterator[Prompt]:
    """A text, token ids, or a list of either."""
    if isinstance(value, str):
        yield _text(value, walk)
    elif isinstance(value, list) and value:
        if isinstance(value[0], int):
            yield Prompt(tokens=len(value), chain=walk.chain_of(value))
            return
        for item in value:
            if isinstance(item, str):
                yield _text(item, walk)
            elif isinstance(item, list):
                yield Prompt(tokens=len(item), chain=walk.chain_of(item))
            else:
                yield _measured(item, walk, 1)


def _pooled(body: dict[str, Any], walk: Walk) -> Iterator[Prompt]:
    """Embeddings and their like, with Cohere's names for the same."""
    if isinstance(body.get("messages"), list):
        yield _conversation(body, body["messages"], walk)
        return
    named = next((body[key] for key in ("input", "texts", "inputs") if body.get(key) is not None), None)
    yield from _texts_or_ids(named, walk)
    images = body.get("images")
    for image in images if isinstance(images, list) else ():
        yield _measured({"image_url": image}, walk, 1)
    if named is None and body.get("data") is not None:  # what a plugin makes of it is not known
        yield Prompt(open_ended=True)


def _pairs(body: dict[str, Any], walk: Walk) -> Iterator[Prompt]:
    """Scores: each text of one side beside the query or its partner of the other."""
    first, second = _side(body, _FIRST, walk), _side(body, _SECOND, walk)
    each = _beside(body, ("instruction", "chat_template_kwargs"))
    if not second:
        first, second = [Prompt()], first
    longest = max(first, key=lambda prompt: prompt.text_bytes + prompt.tokens, default=Prompt())
    for partner in second:
        tokens, text = longest.tokens + partner.tokens, longest.text_bytes + partner.text_bytes + each.text_bytes
        if tokens and not text:
            yield Prompt(tokens=tokens)
        else:
            ascii_only = longest.ascii_only and partner.ascii_only and each.ascii_only
            open_ended = bool(tokens) or longest.open_ended or partner.open_ended or bool(body.get("chat_template"))
            yield Prompt(tokens, text, ascii_only, 1, open_ended)


def _side(body: dict[str, Any], keys: tuple[str, ...], walk: Walk) -> list[Prompt]:
    prompts: list[Prompt] = []
    for side in (body[key] for key in keys if key in body):
        if isinstance(side, list) and side and isinstance(side[0], int | list):
            prompts += islice(_texts_or_ids(side, walk), MOST_PROMPTS + 1)
        else:
            many = side[: MOST_PROMPTS + 1] if isinstance(side, list) else [side]
            prompts += [_measured(text, walk, 1) for text in many]
    return prompts


def _decisions(body: dict[str, Any], walk: Walk) -> Iterator[Prompt]:
    """Decisions (0.32): each question behind the state that all of them are about."""
    for key, kind in (("images", "image_url"), ("audio", "audio_url"), ("videos", "video_url")):
        named = body.get(key)
        for address in named if isinstance(named, list) else ():
            _measured({kind: address}, walk, 1)
    asked = body.get("questions")
    about = _text(json.dumps([body.get("state"), body.get("instructions")], ensure_ascii=False))
    for question in asked.items() if isinstance(asked, dict) else ():
        own = _text(json.dumps(question, ensure_ascii=False))
        yield Prompt(0, about.text_bytes + own.text_bytes, about.ascii_only and own.ascii_only, 1)


def _text(text: str, walk: Walk | None = None) -> Prompt:
    ascii_only = text.isascii()
    size = len(text) if ascii_only else len(text.encode("utf-8", "surrogatepass"))
    if not size:
        return Prompt(tokens=1)
    return Prompt(0, size, ascii_only, chain=walk.chain_of(text) if walk is not None else None)


def _conversation(body: dict[str, Any], messages: Any, walk: Walk) -> Prompt:
    turns = messages if isinstance(messages, list) else []
    talk = _measured(turns, walk, max(1, len(turns)))
    more = Prompt() if _ANY_BESIDE.isdisjoint(body) else _beside(body, _BESIDE)
    open_ended = talk.open_ended or bool(body.get("chat_template"))  # a template of the client's own may write anything
    return Prompt(
        0,
        talk.text_bytes + more.text_bytes,
        talk.ascii_only and more.ascii_only,
        talk.messages,
        open_ended,
        walk.chain_of(_beginning(body, turns)) if walk.chains and not open_ended else None,
    )


def _beginning(body: dict[str, Any], turns: list[Any]) -> str:
    """A conversation's text in its order, as templates write it: tools and documents, then the turns, up to the first
    that is not text.
    """
    beside = [body[key] for key in _BESIDE if body.get(key)]
    pieces = [json.dumps(beside, ensure_ascii=False)] if beside else []
    for turn in turns:
        text = _turn_text(turn)
        if text is None:
            break
        pieces.append(text)
    return "\0".join(pieces)


def _turn_text(turn: Any) -> str | None:
    """None: there is more in it than text."""
    if not isinstance(turn, dict):
        return turn if isinstance(turn, str) else None
    content, calls = turn.get("content"), turn.get("tool_calls")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and part.get("type") in _TEXT_PARTS]
        texts = [text for part in parts if isinstance(text := part.get("text"), str)]
        if len(texts) < len(content):
            return None
        content = "".join(texts)
    if content is not None and not isinstance(content, str):
        return None
    return f"{turn.get('role')}\0{content}{json.dumps(calls, ensure_ascii=False) if calls else ''}"


def _beside(body: dict[str, Any], keys: tuple[str, ...]) -> Prompt:
    """What stands beside the texts; templates write these as JSON, structure and all."""
    values = [body[key] for key in keys if body.get(key)]
    return _text(json.dumps(values, ensure_ascii=False)) if values else Prompt()


def _forwarded(body: dict[str, Any]) -> int:
    """Token ids that a prefill server hands on, which 0.32 takes in place of a chat's messages."""
    params = body["kv_transfer_params"]
    ids = params.get("prompt_token_ids") if isinstance(params, dict) else None
    return len(ids) if isinstance(ids, list) else 0


def _measured(value: Any, walk: Walk, messages: int) -> Prompt:
    """All text in a JSON value, keys included, with media set aside."""
    size, ascii_only, todo = 0, True, [value]
    while todo and walk.left:
        walk.left -= 1
        item = todo.pop()
        if isinstance(item, dict):
            media = media_of(item) if "role" not in item else None
            if media is not None:
                walk.media.append(media)
                walk.left = max(0, walk.left - _MEDIA_STEPS)
                todo += beside_media(item)
                continue
            todo += item.values()
            item = "".join(item)
        elif isinstance(item, list):
            todo += item
            continue
        if isinstance(item, str):
            if item.isascii():
                size += len(item)
            else:
                ascii_only = False
                size += len(item.encode("utf-8", "surrogatepass"))
        elif item is not None:
            size += len(str(item)) if isinstance(item, float | bool) else (item.bit_length() // 3 + 1)
    return Prompt(0, size, ascii_only, messages, open_ended=bool(todo))
