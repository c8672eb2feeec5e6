"""The prompts in a request body: token ids are counted, text is measured in bytes."""

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from legroom.guard.request.endpoints import Kind
from legroom.guard.request.media import Media, media_of, values_beside_media
from legroom.guard.request.prefixes import MOST_KEYS_PER_REQUEST, PrefixChain, PrefixUnit, chain_of_ids, chain_of_text

MOST_PROMPTS = 1 << 16
"""Most prompts of one request, vLLM's own order of magnitude for a batch; one with more is refused."""

MOST_WALKED = 200_000
"""Most values inside messages that are measured; a request with more counts as long as the model's context."""

UNTOKENIZED = ("functions", "system", "instructions", "documents", "text", "response_format")
_PROMPT_KEYS = ("tools", "chat_template_kwargs", *UNTOKENIZED)
"""Keys besides `messages` that become part of a chat's prompt; `/tokenize` takes the first two."""
_PROMPT_KEY_SET = frozenset(_PROMPT_KEYS)

_TEXT_PARTS = frozenset(("text", "input_text", "output_text"))

_SCORE_LEFT = ("text_1", "queries", "query", "data_1")
_SCORE_RIGHT = ("text_2", "documents", "items", "data_2")
"""The two sides of a score, by their names in vLLM's and compatible APIs."""


class Prompt(NamedTuple):
    tokens: int = 0
    """Counted token ids; beside text, those that may replace it."""
    text_bytes: int = 0
    ascii_only: bool = True
    messages: int = 0
    open_ended: bool = False
    """Part of it is not in the request (an earlier response, embeddings): it may fill the model's context."""
    chain: PrefixChain | None = None
    """Keys of its prefix, where the server shares prefixes."""

    @property
    def exact(self) -> bool:
        """Whether its token count is exact (token ids given) rather than an upper bound."""
        return not self.text_bytes and not self.messages and not self.open_ended

    @property
    def text_alone(self) -> bool:
        """Whether the prompt is text alone: no token ids, and no part outside the request (`open_ended`)."""
        return not self.tokens and not self.open_ended


class BodyWalk:
    """State of reading one body: the media found, and how many more values and prefix keys are read."""

    __slots__ = ("_seed", "_unit", "keys_left", "media", "values_left")

    def __init__(self, unit: PrefixUnit | None = None, seed: int = 0) -> None:
        self.media: list[Media] = []
        self.values_left = MOST_WALKED
        self._unit = unit
        self._seed = seed
        self.keys_left = MOST_KEYS_PER_REQUEST if unit is not None else 0

    def chain_of(self, prompt: str | list[Any]) -> PrefixChain | None:
        """The prompt's prefix hashes; None without prefix caching, below a block, or past MOST_KEYS_PER_REQUEST."""
        if self._unit is None or self.keys_left <= 0:
            return None
        if isinstance(prompt, str):
            chain = chain_of_text(prompt, self._unit, self._seed, self.keys_left)
        else:
            chain = chain_of_ids(prompt, self._unit, self._seed, self.keys_left)
        self.keys_left -= len(chain.keys) if chain is not None else 0
        return chain


def prompts_of(kind: Kind, body: dict[str, Any], walk: BodyWalk) -> Iterator[Prompt]:
    """The prompts of a body, one for each input; media are appended to `walk.media`."""
    match kind:
        case Kind.COMPLETION:
            yield from _texts_or_ids(body.get("prompt"), walk)
            embeds = body.get("prompt_embeds")
            for _ in embeds if isinstance(embeds, list) else () if embeds is None else (embeds,):
                yield Prompt(open_ended=True)
        case Kind.GENERATE:
            yield from _texts_or_ids(body.get("token_ids"), walk)
        case Kind.CHAT | Kind.MESSAGES:
            chat = _chat_prompt(body, body.get("messages"), walk)
            yield chat._replace(tokens=_transferred_tokens(body)) if "kv_transfer_params" in body else chat
        case Kind.CHAT_BATCH:
            conversations = body.get("messages")
            for conversation in conversations if isinstance(conversations, list) else ():
                yield _chat_prompt(body, conversation, walk)
        case Kind.RESPONSES:
            input_items = body.get("input")
            chat = _chat_prompt(body, input_items if isinstance(input_items, list) else [input_items], walk)
            elsewhere = body.get("previous_response_id") is not None or body.get("prompt") is not None
            yield chat._replace(open_ended=True) if elsewhere else chat
        case Kind.POOLING:
            yield from _pooling_prompts(body, walk)
        case Kind.SCORE:
            yield from _score_prompts(body, walk)
        case Kind.DECISION:
            yield from _decision_prompts(body, walk)


def _texts_or_ids(value: Any, walk: BodyWalk) -> Iterator[Prompt]:
    """The prompts of a `prompt` or `input` value: a text, token ids, or a list of either."""
    if isinstance(value, str):
        yield _text_prompt(value, walk)
    elif isinstance(value, list) and value:
        if isinstance(value[0], int):
            yield Prompt(tokens=len(value), chain=walk.chain_of(value))
            return
        for item in value:
            if isinstance(item, str):
                yield _text_prompt(item, walk)
            elif isinstance(item, list):
                yield Prompt(tokens=len(item), chain=walk.chain_of(item))
            else:
                yield _measured_prompt(item, walk, 1)


def _pooling_prompts(body: dict[str, Any], walk: BodyWalk) -> Iterator[Prompt]:
    """Prompts of embeddings and similar, by OpenAI's or Cohere's keys."""
    if isinstance(body.get("messages"), list):
        yield _chat_prompt(body, body["messages"], walk)
        return
    named = next((body[key] for key in ("input", "texts", "inputs") if body.get(key) is not None), None)
    yield from _texts_or_ids(named, walk)
    images = body.get("images")
    for image in images if isinstance(images, list) else ():
        yield _measured_prompt({"image_url": image}, walk, 1)
    if named is None and body.get("data") is not None:  # input of a plugin
        yield Prompt(open_ended=True)


def _score_prompts(body: dict[str, Any], walk: BodyWalk) -> Iterator[Prompt]:
    """Prompts of scores: each right text with the longest left one as a bound; without a right side, each left text."""
    first, second = _score_side_prompts(body, _SCORE_LEFT, walk), _score_side_prompts(body, _SCORE_RIGHT, walk)
    each = _prompt_of_keys(body, ("instruction", "chat_template_kwargs"))
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


def _score_side_prompts(body: dict[str, Any], keys: tuple[str, ...], walk: BodyWalk) -> list[Prompt]:
    """The prompts of one side of a score, from all of `keys` in the body; per key at most MOST_PROMPTS + 1."""
    prompts: list[Prompt] = []
    for side in (body[key] for key in keys if key in body):
        if isinstance(side, list) and side and isinstance(side[0], int | list):
            prompts += islice(_texts_or_ids(side, walk), MOST_PROMPTS + 1)
        else:
            many = side[: MOST_PROMPTS + 1] if isinstance(side, list) else [side]
            prompts += [_measured_prompt(text, walk, 1) for text in many]
    return prompts


def _decision_prompts(body: dict[str, Any], walk: BodyWalk) -> Iterator[Prompt]:
    """Prompts of `/v1/systemone` (0.32): each question, after the state and instructions that all share."""
    for key, kind in (("images", "image_url"), ("audio", "audio_url"), ("videos", "video_url")):
        named = body.get(key)
        for address in named if isinstance(named, list) else ():
            _measured_prompt({kind: address}, walk, 1)
    asked = body.get("questions")
    about = _text_prompt(json.dumps([body.get("state"), body.get("instructions")], ensure_ascii=False))
    for question in asked.items() if isinstance(asked, dict) else ():
        own = _text_prompt(json.dumps(question, ensure_ascii=False))
        yield Prompt(0, about.text_bytes + own.text_bytes, about.ascii_only and own.ascii_only, 1)


def _text_prompt(text: str, walk: BodyWalk | None = None) -> Prompt:
    """A prompt of this text's UTF-8 bytes, with prefix hashes where `walk` is given; one token where it is empty."""
    ascii_only = text.isascii()
    size = len(text) if ascii_only else len(text.encode("utf-8", "surrogatepass"))
    if not size:
        return Prompt(tokens=1)
    return Prompt(0, size, ascii_only, chain=walk.chain_of(text) if walk is not None else None)


def _chat_prompt(body: dict[str, Any], messages: Any, walk: BodyWalk) -> Prompt:
    """A chat's messages and the other keys that enter its prompt, such as tools, as one prompt."""
    turns = messages if isinstance(messages, list) else []
    chat = _measured_prompt(turns, walk, max(1, len(turns)))
    more = Prompt() if _PROMPT_KEY_SET.isdisjoint(body) else _prompt_of_keys(body, _PROMPT_KEYS)
    open_ended = chat.open_ended or bool(body.get("chat_template"))  # a client's template may add any text
    chain = walk.chain_of(_prefix_text(body, turns)) if walk.keys_left and not open_ended else None
    ascii_only = chat.ascii_only and more.ascii_only
    return Prompt(0, chat.text_bytes + more.text_bytes, ascii_only, chat.messages, open_ended, chain)


def _prefix_text(body: dict[str, Any], turns: list[Any]) -> str:
    """A chat's text in the order of templates: tools and documents, then the messages up to the first with media."""
    beside = [body[key] for key in _PROMPT_KEYS if body.get(key)]
    pieces = [json.dumps(beside, ensure_ascii=False)] if beside else []
    for turn in turns:
        text = _message_text(turn)
        if text is None:
            break
        pieces.append(text)
    return "\0".join(pieces)


def _message_text(turn: Any) -> str | None:
    """A message's role, text and tool calls as one string; None where it has other content, such as media."""
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


def _prompt_of_keys(body: dict[str, Any], keys: tuple[str, ...]) -> Prompt:
    """A prompt of the body's values under `keys` (tools, documents), which chat templates write as JSON."""
    values = [body[key] for key in keys if body.get(key)]
    return _text_prompt(json.dumps(values, ensure_ascii=False)) if values else Prompt()


def _transferred_tokens(body: dict[str, Any]) -> int:
    """How many token ids a prefill server sent along, which 0.32 uses in place of a chat's messages; 0 for none."""
    params = body["kv_transfer_params"]
    ids = params.get("prompt_token_ids") if isinstance(params, dict) else None
    return len(ids) if isinstance(ids, list) else 0


def _measured_prompt(value: Any, walk: BodyWalk, messages: int) -> Prompt:
    """A prompt of `messages` messages, sized by all text and keys in a JSON value. Media are added to `walk.media`;
    past the limit of values the prompt is open-ended."""
    size, ascii_only, todo = 0, True, [value]
    while todo and walk.values_left:
        walk.values_left -= 1
        item = todo.pop()
        if isinstance(item, dict):
            media = media_of(item) if "role" not in item else None
            if media is not None:
                walk.media.append(media)
                walk.values_left = max(0, walk.values_left - 20)
                todo += values_beside_media(item)
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
