"""Learns from finished answers: prompt tokens per byte, tokens per image, output lengths.

Streams rarely carry `usage`: some of their prompts are counted by the server's tokenizer while the request runs, and
their events count as output tokens.

Requests with max_tokens show which share of it answers use; those without show lengths. A client's few answers are
shrunk towards all answers of the model, and these towards the longest (for the quantiles of open-ended answers, towards
any length), as if 32 such answers had been seen: 40 short answers change little. When the newest run longer, they count
at once.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable
from typing import Any

from legroom.guard.request.body import Demand, parse_body
from legroom.guard.request.endpoints import Kind
from legroom.guard.weight.guarded_request import GuardedRequest
from legroom.guard.weight.token_estimates import FEWEST, BoundedCache, LikelyLengths, ModelTokens, Quantiles

EXPECTED_SHARE = 0.8
"""Share of answers that stay within the expected length."""
QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
PER_MILLE = 1000
"""Shares of max_tokens are counted in thousandths."""
SAMPLE_EVERY = 64
"""One in so many streamed prompts is still counted once enough are known."""

Tokenize = Callable[[bytes], Awaitable[int | None]]


def prior_length(share: float, longest: int) -> int:
    """A quantile of open-ended answers before any was seen: from 16 tokens on, each doubling is equally likely."""
    shortest = min(16, longest)
    return max(1, round(shortest * math.pow(longest / max(1, shortest), share)))


def prior_quantiles(longest: int) -> tuple[int, ...]:
    """Equally likely lengths of open-ended answers before any was seen."""
    return tuple([prior_length(share, longest) for share in QUANTILES])


class _LearntLengths:
    """Output lengths of one model, or of one client of it."""

    __slots__ = ("_age", "likely", "open_tokens", "shares")

    def __init__(self) -> None:
        self.open_tokens = Quantiles()
        self.shares = Quantiles()
        self.likely: dict[int, LikelyLengths] = {}
        """Cached by the longest possible answer; 0: per mille of max_tokens."""
        self._age = 0

    def observe(self, max_tokens: int | None, tokens: int) -> None:
        length, learnt = tokens, self.open_tokens
        if max_tokens is not None:
            length, learnt = min(PER_MILLE, math.ceil(PER_MILLE * tokens / max(1, max_tokens))), self.shares
        if max_tokens != 0:
            learnt.add(length)
        self._age += 1
        is_open = max_tokens is None
        is_longer = any(length > likely.expected for key, likely in self.likely.items() if bool(key) is is_open)
        if is_longer or self._age >= 16:  # quantiles move little with each answer
            self.likely.clear()
            self._age = 0


class AnswerLengths:
    """Output lengths by model and by client."""

    def __init__(self) -> None:
        self._learnt = BoundedCache(_LearntLengths, 1024)  # about 4 kB each

    def likely(self, model: str, client: str, max_tokens: int | None, longest: int) -> LikelyLengths:
        """Lengths of an answer; `longest` is what one without max_tokens may grow to."""
        if max_tokens == 0:
            return LikelyLengths(0, ())
        learnt = self._learnt.get((model, client)) or self._learnt.get((model, None))
        if learnt is None:
            return LikelyLengths(max(1, longest if max_tokens is None else max_tokens), ())
        key = longest if max_tokens is None else 0
        likely = learnt.likely.get(key)
        if likely is None:
            is_open, most = max_tokens is None, longest if max_tokens is None else PER_MILLE
            expected, *quantiles = [
                self._quantile(share, model, client, is_open, most) for share in (EXPECTED_SHARE, *QUANTILES)
            ]
            likely = learnt.likely[key] = LikelyLengths(expected, tuple(quantiles))
        if max_tokens is None:
            return likely
        tokens = [max(1, math.ceil(max_tokens * share / PER_MILLE)) for share in (likely.expected, *likely.quantiles)]
        return LikelyLengths(tokens[0], tuple(tokens[1:]))

    def _quantile(self, share: float, model: str, client: str, is_open: bool, most: int) -> int:
        value = prior_length(share, most) if is_open and share != EXPECTED_SHARE else most
        for learnt in (self._learnt.get((model, None)), self._learnt.get((model, client))):
            if learnt is not None:
                lengths = learnt.open_tokens if is_open else learnt.shares
                value = lengths.at(share, value, FEWEST)
                if share >= EXPECTED_SHARE:
                    value = max(value, lengths.recent(share))
        return max(1, min(most, value))

    def observe(self, model: str, client: str, max_tokens: int | None, tokens: int) -> None:
        """Learn from a complete answer."""
        for key in ((model, None), (model, client)):
            self._learnt.get_or_add(key).observe(max_tokens, tokens)


_NOTHING_LEARNT = ModelTokens()

_USAGE_KEY = b'"usage"'
_PROMPT_TOKENS = re.compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*(\d{1,9})')
_OUTPUT_TOKENS = re.compile(rb'"(?:completion_tokens|output_tokens)"\s*:\s*(\d{1,9})')


def usage_in(chunk: bytes) -> tuple[int, int] | None:
    """Prompt and output tokens, if this part of a response has them."""
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

    def of(self, model: str) -> ModelTokens:
        return self._models.get(model) or _NOTHING_LEARNT

    async def count(self, request: GuardedRequest) -> int | None:
        """A prompt's tokens by the server's tokenizer; None where it cannot say."""
        return await self._count(request.demand, request.body)

    async def _count(self, demand: Demand, body: bytes) -> int | None:
        if self._tokenize is None or not is_countable(demand):
            return None
        document: dict[str, Any] = parse_body(body)
        wanted = {key: document[key] for key in _TOKENIZE_KEYS[demand.kind] if key in document}
        if isinstance(wanted.get("prompt"), list):
            wanted["prompt"] = wanted["prompt"][0]
        self.calls += 1
        return await self._tokenize(json.dumps(wanted, ensure_ascii=False).encode("utf-8", "surrogatepass"))

    def on_admitted(self, request: GuardedRequest) -> None:
        """Count a streamed prompt in the background, if too few are known."""
        demand = request.demand
        if not demand.streams or self._tokenize is None or self._sampling is not None or not is_countable(demand):
            return
        self._streams += 1
        known = self.of(demand.model).observations(demand.prompts[0].ascii_only)
        if known < FEWEST or self._streams % SAMPLE_EVERY == 0:
            self._sampling = asyncio.get_running_loop().create_task(self._sample(demand, request.body))
            self._sampling.add_done_callback(self._on_sampled)

    async def _sample(self, demand: Demand, body: bytes) -> None:
        tokens = await self._count(demand, body)
        if tokens:
            self._observe_prompt(demand, tokens)

    def _on_sampled(self, task: asyncio.Task[None]) -> None:
        self._sampling = None
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it

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
        """Learn from a complete response; returns the tokens of each of its sequences, 0 where unknown."""
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
    """Whether `/tokenize` can count the prompt: it must be a single one, of text that `/tokenize` sees whole."""
    prompt = demand.prompts[0] if len(demand.prompts) == 1 and demand.kind in _TOKENIZE_KEYS else None
    return prompt is not None and prompt.text_alone and not demand.media and not demand.has_untokenized
