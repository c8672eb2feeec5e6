"""Learns token counts from responses: prompt tokens per byte, tokens per image, output lengths.

A tokenizer makes at most one token per byte, so that is the first bound. The `usage` of each answer then shows the real
count; the bound becomes the largest ratio of the last 256 to 512 answers plus a margin, for ASCII and other text apart,
so that a rare script is not taken for English. Streams rarely carry `usage`: some of their prompts are counted by the
server's tokenizer while the request runs, and their events count as output tokens.

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
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from legroom.guard.request.body import Demand, parse_body
from legroom.guard.request.endpoints import Kind

if TYPE_CHECKING:
    from legroom.guard.weight.guarded_request import GuardedRequest

GENERATION = 256
"""Observations that are forgotten together."""
FEWEST = 32
"""Observations before a learnt value replaces the bound."""
MARGIN = 1.1
"""On the largest ratio of tokens per byte that was observed."""
V = TypeVar("V")


class BoundedCache(Generic[V]):
    """The most recently written values by key; keys come from requests, so their number is bounded."""

    def __init__(self, make: Callable[[], V], most: int) -> None:
        self._make, self._most = make, most
        self._values: OrderedDict[Any, V] = OrderedDict()

    def get(self, key: Any) -> V | None:
        return self._values.get(key)

    def get_or_add(self, key: Any) -> V:
        value = self._values.get(key)
        if value is None:
            value = self._values[key] = self._make()
            if len(self._values) > self._most:
                self._values.popitem(last=False)
        else:
            self._values.move_to_end(key)
        return value


class RecentMaximum:
    """The largest of the last 256 to 512 values, or the n-th largest, so that n-1 outliers are ignored."""

    __slots__ = ("_current", "_previous", "_seen", "count", "nth")

    def __init__(self, nth: int = 1) -> None:
        self.count = 0
        self._seen = 0
        self.nth = nth
        self._current = [0.0] * nth
        self._previous = [0.0] * nth

    def add(self, value: float) -> None:
        self.count += 1
        self._seen += 1
        if value > self._current[0]:
            self._current[0] = value
            self._current.sort()
        if self._seen >= GENERATION:
            self._previous, self._current, self._seen = self._current, [0.0] * self.nth, 0

    @property
    def value(self) -> float:
        return sorted(self._current + self._previous)[-self.nth]


class Quantiles:
    """Quantiles of the last 1,024 to 2,048 values, in buckets of a quarter of a power of two."""

    __slots__ = ("_current", "_newest", "_previous", "_seen", "count")

    _EDGES = tuple(math.ceil(2 ** (bucket / 4)) for bucket in range(128))

    def __init__(self) -> None:
        self.count = 0
        self._seen = 0
        self._current = [0] * len(self._EDGES)
        self._previous = [0] * len(self._EDGES)
        self._newest: deque[int] = deque(maxlen=16)

    def add(self, value: int) -> None:
        self.count += 1
        self._seen += 1
        self._newest.append(value)
        self._current[min(len(self._EDGES) - 1, math.ceil(4 * math.log2(max(1, value))))] += 1
        if self._seen >= 4 * GENERATION:
            self._previous, self._current, self._seen = self._current, [0] * len(self._EDGES), 0

    def at(self, share: float, prior: int = 0, prior_count: int = 0) -> int:
        """The quantile as the upper edge of its bucket, with `prior` added as `prior_count` further values."""
        total = sum(self._current) + sum(self._previous) + prior_count
        reached, wanted, counted = 0, share * total, not prior_count
        for edge, new, old in zip(self._EDGES, self._current, self._previous, strict=True):
            if not counted and edge >= prior:
                reached, counted = reached + prior_count, True
                if reached >= wanted and not new + old:
                    return prior
            reached += new + old
            if reached >= wanted and reached:
                return edge
        return prior

    def recent(self, share: float) -> int:
        """The quantile of the newest 16 values, which shows a change at once."""
        newest = sorted(self._newest)
        return newest[min(len(newest) - 1, int(share * len(newest)))] if newest else 0


class ModelTokens:
    """What was learnt about one model's tokens."""

    __slots__ = ("_ratios", "_template", "media_tokens", "outputs")

    def __init__(self) -> None:
        self._ratios = (RecentMaximum(), RecentMaximum())
        self._template = RecentMaximum(3)
        self.media_tokens = RecentMaximum()
        self.outputs = Quantiles()

    def bound(self, text_bytes: int, ascii_only: bool, messages: int) -> int:
        """The most tokens that this text can have."""
        return math.ceil(text_bytes * self.ratio(ascii_only)) + self.template_tokens(messages)

    def ratio(self, ascii_only: bool) -> float:
        """The most tokens per byte."""
        learnt = self._ratios[0 if ascii_only else 1]
        return min(1.0, learnt.value * MARGIN) if learnt.count >= FEWEST else 1.0

    def observations(self, ascii_only: bool) -> int:
        """How many prompts of this kind of text were counted."""
        return self._ratios[0 if ascii_only else 1].count

    def template_tokens(self, messages: int) -> int:
        """The most tokens that the chat template adds; without messages, those that open a sequence."""
        if not messages:
            return 2
        assumed = 128 if self._template.count < FEWEST else 16
        return max(assumed, math.ceil(self._template.value)) + 8 * messages

    def observe(self, text_bytes: int, ascii_only: bool, messages: int, prompt_tokens: int) -> None:
        """Learn from the prompt tokens of a request without media."""
        if messages:  # more tokens than bytes can only come from the template
            self._template.add(max(0, prompt_tokens - text_bytes))
        if text_bytes >= 64:  # shorter prompts are mostly template
            own = max(1, prompt_tokens - (math.ceil(self._template.value) if messages else 0))
            self._ratios[0 if ascii_only else 1].add(own / text_bytes)


class LikelyLengths(NamedTuple):
    """How many tokens an answer will likely have."""

    expected: int
    """What four of five answers stay within."""
    quantiles: tuple[int, ...]
    """Equally likely lengths, ascending; empty where nothing was learnt."""


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
                self._length_quantile(share, model, client, is_open, most) for share in (EXPECTED_SHARE, *QUANTILES)
            ]
            likely = learnt.likely[key] = LikelyLengths(expected, tuple(quantiles))
        if max_tokens is None:
            return likely
        tokens = [max(1, math.ceil(max_tokens * share / PER_MILLE)) for share in (likely.expected, *likely.quantiles)]
        return LikelyLengths(tokens[0], tuple(tokens[1:]))

    def _length_quantile(self, share: float, model: str, client: str, is_open: bool, most: int) -> int:
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
        """A prompt's tokens by the server's tokenizer; None where it does not count them."""
        return await self._count_tokens(request.demand, request.body)

    async def _count_tokens(self, demand: Demand, body: bytes) -> int | None:
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
            self._sampling = asyncio.get_running_loop().create_task(self._count_in_background(demand, request.body))
            self._sampling.add_done_callback(self._on_counted)

    async def _count_in_background(self, demand: Demand, body: bytes) -> None:
        tokens = await self._count_tokens(demand, body)
        if tokens:
            self._observe_prompt(demand, tokens)

    def _on_counted(self, task: asyncio.Task[None]) -> None:
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
