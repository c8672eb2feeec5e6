"""Learns token counts from responses.

A tokenizer makes at most one token per byte, so that is the first bound. The `usage` of each answer then shows the real
count; the bound becomes the largest ratio of the last 256 to 512 answers plus a margin, for ASCII and other text apart,
so that a rare script is not taken for English. Streams rarely carry `usage`: some of their prompts are counted by the
server's tokenizer while the request runs, and their events count as output tokens.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

from legroom.guard.request.body import Demand, parse_body
from legroom.guard.request.endpoints import Kind
from legroom.guard.weight.guarded_request import GuardedRequest
from legroom.guard.weight.learnt_tokens import FEWEST, AnswerLengths, BoundedCache, ModelTokens

SAMPLE_EVERY = 64
"""One in so many streamed prompts is still counted once enough are known."""

Tokenize = Callable[[bytes], Awaitable[int | None]]
_NOTHING_LEARNT = ModelTokens()

_USAGE_KEY = b'"usage"'
_PROMPT_TOKENS = re.compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*(\d{1,9})')
_OUTPUT_TOKENS = re.compile(rb'"(?:completion_tokens|output_tokens)"\s*:\s*(\d{1,9})')


def usage_in(chunk: bytes) -> tuple[int, int] | None:
    """(prompt, output) tokens from the `usage` in this part of a response; None where it has none."""
    at = chunk.rfind(_USAGE_KEY)
    if at < 0:
        return None
    prompt = _PROMPT_TOKENS.search(chunk, at, at + 1024)
    output = _OUTPUT_TOKENS.search(chunk, at, at + 1024)
    return None if prompt is None else (int(prompt[1]), int(output[1]) if output else 0)


_TOKENIZE_KEYS = {
    Kind.COMPLETION: ("model", "prompt", "add_special_tokens"),
    Kind.CHAT: ("model", "messages", "tools", "add_special_tokens", "chat_template_kwargs"),
}
"""Keys of a body that `/tokenize` is called with."""


class UsageLearner:
    """Learns from the responses that pass, and counts prompts with the server's tokenizer."""

    def __init__(self, tokenize: Tokenize | None) -> None:
        self.calls = 0
        self._tokenize = tokenize
        self.lengths = AnswerLengths()
        # An adapter has a name of its own; a model takes about 3 kB.
        self._models = BoundedCache(ModelTokens, 512)
        self._streams = 0
        self._sampling: asyncio.Task[None] | None = None

    def model_tokens(self, model: str) -> ModelTokens:
        """What was learnt of the model's token counts; nothing yet for a model not seen before."""
        return self._models.get(model) or _NOTHING_LEARNT

    async def count(self, demand: Demand, body: bytes) -> int | None:
        """Prompt tokens by the server's tokenizer; None where it cannot be asked or the request cannot be counted."""
        if self._tokenize is None or not is_countable(demand):
            return None
        document: dict[str, Any] = parse_body(body)
        wanted = {key: document[key] for key in _TOKENIZE_KEYS[demand.kind] if key in document}
        if isinstance(wanted.get("prompt"), list):
            wanted["prompt"] = wanted["prompt"][0]
        self.calls += 1
        return await self._tokenize(json.dumps(wanted, ensure_ascii=False).encode("utf-8", "surrogatepass"))

    def on_admitted(self, request: GuardedRequest) -> None:
        """Have the server's tokenizer count a streamed prompt in the background, if too few were counted so far."""
        demand = request.demand
        if not demand.streams or self._tokenize is None or self._sampling is not None or not is_countable(demand):
            return
        self._streams += 1
        known = self.model_tokens(demand.model).observations(demand.prompts[0].ascii_only)
        if known < FEWEST or self._streams % SAMPLE_EVERY == 0:
            self._sampling = asyncio.get_running_loop().create_task(self._count_in_background(demand, request.body))

    async def _count_in_background(self, demand: Demand, body: bytes) -> None:
        """Learn from the prompt's count by the server's tokenizer, if it gives one; then another count may start."""
        with contextlib.suppress(Exception):
            if tokens := await self.count(demand, body):
                self._observe_prompt(demand, tokens)
        self._sampling = None

    def on_chunk(self, request: GuardedRequest, chunk: bytes) -> None:
        """Read the usage of a part of a response, and count its events."""
        if request.demand.streams:
            request.events += chunk.count(b"data:")
            if request.reservation is not None:
                request.reservation.steps_seen = request.events // request.copies
        usage = usage_in(chunk)
        if usage is not None and usage[0]:
            request.usage = usage

    def on_finished(self, request: GuardedRequest) -> int:
        """Learn from a complete response; returns the output tokens of each of its answers, 0 where unknown."""
        demand, usage = request.demand, request.usage
        if not request.informative or (usage is None and not request.events):
            return 0
        length = (usage[1] if usage is not None else request.events) // request.copies
        if demand.generates:
            self.lengths.observe(demand.model, request.client, demand.output_tokens, length)
            if demand.output_tokens is None:
                # An event has one token, or a few where the server writes faster than the client reads.
                bound = length if usage is not None else int(1.5 * length)
                self._models.get_or_add(demand.model).outputs.add(bound)
        if usage is not None:
            self._observe_prompt(demand, usage[0])
        return length

    def _observe_prompt(self, demand: Demand, prompt_tokens: int) -> None:
        """Learn tokens per byte, or per media input, from a prompt's true count; truncated prompts are ignored."""
        prompts = demand.prompts
        if demand.is_truncated or not prompts or not all(prompt.text_alone for prompt in prompts):
            return
        learnt = self._models.get_or_add(demand.model)
        if demand.media:
            # All tokens are attributed to the media, because those of the text are only known as a bound.
            learnt.media_tokens.add(prompt_tokens / len(demand.media))
        else:
            text_bytes, messages = sum(each.text_bytes for each in prompts), sum(each.messages for each in prompts)
            learnt.observe(text_bytes, all(prompt.ascii_only for prompt in prompts), messages, prompt_tokens)


def is_countable(demand: Demand) -> bool:
    """Whether `/tokenize` can count the prompt: it is the request's only one, of text, in keys that it takes."""
    prompt = demand.prompts[0] if len(demand.prompts) == 1 and demand.kind in _TOKENIZE_KEYS else None
    return prompt is not None and prompt.text_alone and not demand.media and not demand.has_untokenized
