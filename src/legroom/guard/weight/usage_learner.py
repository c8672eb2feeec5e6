"""What answers teach: tokens a byte, the length of open-ended answers, tokens an image.

`usage` in an answer says it all. Streams rarely carry one; then some prompts are counted by the server's tokenizer
beside the request, never before it, and an answer's pieces are counted as they pass.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

from legroom.guard.request.body import Demand, parse_body
from legroom.guard.request.endpoints import Kind
from legroom.guard.weight.guarded_request import GuardedRequest
from legroom.guard.weight.output_lengths import AnswerLengths
from legroom.guard.weight.token_estimates import FEWEST, ModelTokens, TokenBook

_PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*(\d{1,9})')
_OUTPUT = re.compile(rb'"(?:completion_tokens|output_tokens)"\s*:\s*(\d{1,9})')
_MARK = b'"usage"'
LONGEST_BYTES = 1024
"""How far behind the mark the numbers stand at most."""


def usage_in(chunk: bytes) -> tuple[int, int] | None:
    """Prompt and output tokens, where this piece of an answer names them."""
    at = chunk.rfind(_MARK)
    if at < 0:
        return None
    piece = chunk[at : at + LONGEST_BYTES]
    prompt = _PROMPT.search(piece)
    if prompt is None:
        return None
    output = _OUTPUT.search(piece)
    return int(prompt[1]), int(output[1]) if output else 0


Tokenize = Callable[[bytes], Awaitable[int | None]]

SAMPLE_EVERY = 64
"""Of requests whose answers tell nothing, one in so many is counted once enough is known."""
EVENT_MARGIN = 1.5
"""A piece of a stream is one token, or a few where the server writes faster than it is read."""
_TOKENIZED = {
    Kind.COMPLETION: ("model", "prompt", "add_special_tokens"),
    Kind.CHAT: ("model", "messages", "tools", "add_special_tokens", "chat_template_kwargs"),
}
"""What the tokenizer is asked with. It takes any messages for a chat, so a completion sends none."""


class UsageLearner:
    """Learns from what passes, and counts prompts where it must."""

    def __init__(self, tokenize: Tokenize | None) -> None:
        self.calls = 0
        self._tokenize = tokenize
        self.lengths = AnswerLengths()
        self._book = TokenBook()
        self._silent = 0
        self._sampling: asyncio.Task[None] | None = None

    def of(self, model: str) -> ModelTokens:
        return self._book.of(model)

    async def count(self, request: GuardedRequest) -> int | None:
        """A prompt's tokens by the server's own tokenizer; None where it does not say."""
        return await self._count(request.demand, request.body)

    async def _count(self, demand: Demand, body: bytes) -> int | None:
        if self._tokenize is None or not is_countable(demand):
            return None
        document: dict[str, Any] = parse_body(body)
        asked = {key: document[key] for key in _TOKENIZED[demand.kind] if key in document}
        if isinstance(asked.get("prompt"), list):
            asked["prompt"] = asked["prompt"][0]
        self.calls += 1
        return await self._tokenize(json.dumps(asked, ensure_ascii=False).encode("utf-8", "surrogatepass"))

    def on_admitted(self, request: GuardedRequest) -> None:
        """A request goes in: count its prompt in passing, if its answer will not tell and too little is known."""
        demand = request.demand
        if not demand.streams or self._tokenize is None or self._sampling is not None or not is_countable(demand):
            return
        self._silent += 1
        known = self.of(demand.model).observations(demand.prompts[0].ascii_only)
        if known < FEWEST or self._silent % SAMPLE_EVERY == 0:
            self._sampling = asyncio.get_running_loop().create_task(self._sample(demand, request.body))
            self._sampling.add_done_callback(self._sampled)

    async def _sample(self, demand: Demand, body: bytes) -> None:
        """With the body as it was: a request that goes on lets go of it."""
        tokens = await self._count(demand, body)
        if tokens:
            self._observe(demand, tokens)

    def _sampled(self, task: asyncio.Task[None]) -> None:
        self._sampling = None
        if not task.cancelled():
            task.exception()  # looked at: a tokenizer that fails only means that nothing was learnt

    def on_chunk(self, request: GuardedRequest, piece: bytes) -> None:
        if request.demand.streams:
            request.events += piece.count(b"data:")
            if request.reservation is not None:
                request.reservation.steps_seen = request.events // request.copies
        usage = usage_in(piece)
        if usage is not None and usage[0]:
            request.usage = usage

    def on_finished(self, request: GuardedRequest) -> int:
        """A whole answer teaches once: a stream may name its usage so far in every piece (continuous_usage_stats).
        One that named none still has a length. The tokens of each of its sequences, 0 where nobody said.
        """
        demand, usage = request.demand, request.usage
        if not request.informative or (usage is None and not request.events):
            return 0
        length = (usage[1] if usage is not None else request.events) // request.copies
        if demand.generates:
            self.lengths.observe(demand.model, request.client, demand.output_tokens, length)
            if demand.output_tokens is None:
                margin = 1.0 if usage is not None else EVENT_MARGIN
                self._book.learnt(demand.model).outputs.add(int(length * margin))
        if usage is not None:
            self._observe(demand, usage[0])
        return length

    def _observe(self, demand: Demand, prompt_tokens: int) -> None:
        if demand.cut or not demand.prompts or not all(prompt.text_alone for prompt in demand.prompts):
            return
        learnt = self._book.learnt(demand.model)
        if demand.media:
            # The text's least share is not known, so all tokens go to the media: more than they take, never less.
            learnt.media_tokens.add(prompt_tokens / len(demand.media))
        else:
            learnt.observe(
                sum(prompt.text_bytes for prompt in demand.prompts),
                all(prompt.ascii_only for prompt in demand.prompts),
                sum(prompt.messages for prompt in demand.prompts),
                prompt_tokens,
            )


def is_countable(demand: Demand) -> bool:
    """Whether the server's tokenizer could say how long the prompt is: one, of text alone, all of it asked about."""
    prompt = demand.prompts[0] if len(demand.prompts) == 1 and demand.kind in _TOKENIZED else None
    return prompt is not None and prompt.text_alone and not demand.media and not demand.apart
