"""Tokens from bytes: an upper bound that starts certain and tightens with what responses report.

A tokenizer never makes more tokens than there are bytes, so one a byte is where it starts. Each answer's `usage` then
shows how many there really were. The bound is the largest ratio among the last few hundred answers, with a margin,
kept apart for plain ASCII and other text: a script that was rare so far does not hide behind English.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque

GENERATION = 256
"""Observations until the oldest are forgotten: the bound looks back over one to two of these."""
FEWEST = 32
"""Observations before the learnt ratio is believed."""
MARGIN = 1.1
CHAT_TOKENS = 128
"""A chat template's own words (system prompt, dates, tool preamble) before anything was observed."""
MESSAGE_TOKENS = 8
CONFIRMED = 3
"""Answers that must show what a template adds: one odd request does not weigh on all the others."""
MOST_MODELS = 512
"""Names that something was learnt about: adapters have one each. A name takes about 3 kB."""
SHORTEST_BYTES = 64
"""Shorter prompts say more about the template than about the text."""


class Highest:
    """The largest of the last one to two generations of values: what at least `times` of them reached."""

    __slots__ = ("_current", "_previous", "_seen", "_times", "count")

    def __init__(self, times: int = 1) -> None:
        self.count = 0
        self._seen = 0
        self._times = times
        self._current = [0.0] * times
        self._previous = [0.0] * times

    def add(self, value: float) -> None:
        self.count += 1
        self._seen += 1
        if value > self._current[0]:
            self._current[0] = value
            self._current.sort()
        if self._seen >= GENERATION:
            self._previous, self._current, self._seen = self._current, [0.0] * self._times, 0

    @property
    def value(self) -> float:
        """The largest lately."""
        if self._times == 1:
            return max(self._current[0], self._previous[0])
        return sorted(self._current + self._previous)[self._times]


_BUCKETS = 128
_EDGES = tuple(math.ceil(2 ** (bucket / 4)) for bucket in range(_BUCKETS))


class Quantile:
    """A high quantile of whole numbers, in buckets a quarter of a power of two wide, over one to two generations."""

    __slots__ = ("_current", "_newest", "_previous", "_seen", "count")

    _NEWEST = 16

    def __init__(self) -> None:
        self.count = 0
        self._seen = 0
        self._current = [0] * _BUCKETS
        self._previous = [0] * _BUCKETS
        self._newest: deque[int] = deque(maxlen=self._NEWEST)

    def add(self, value: int) -> None:
        self.count += 1
        self._seen += 1
        self._newest.append(value)
        self._current[min(_BUCKETS - 1, math.ceil(4 * math.log2(max(1, value))))] += 1
        if self._seen >= 4 * GENERATION:
            self._previous, self._current, self._seen = self._current, [0] * _BUCKETS, 0

    def at(self, share: float, prior: int = 0, prior_count: int = 0) -> int:
        """The upper edge of the bucket that this share of the values reaches, as if `prior_count` more values of
        `prior` had been seen.
        """
        total = sum(self._current) + sum(self._previous) + prior_count
        reached, wanted, counted = 0, share * total, not prior_count
        for edge, new, old in zip(_EDGES, self._current, self._previous, strict=True):
            if not counted and edge >= prior:
                reached, counted = reached + prior_count, True
                if reached >= wanted and not new + old:
                    return prior
            reached += new + old
            if reached >= wanted and reached:
                return edge
        return prior

    def recent(self, share: float) -> int:
        """What this share of the newest few stayed within: a change shows here long before it moves `at`."""
        newest = sorted(self._newest)
        return newest[min(len(newest) - 1, int(share * len(newest)))] if newest else 0


class ModelTokens:
    """What was learnt about one model's tokens."""

    __slots__ = ("_overhead", "_ratios", "media_tokens", "outputs")

    def __init__(self) -> None:
        self._ratios = (Highest(), Highest())
        self._overhead = Highest(CONFIRMED)
        self.media_tokens = Highest()
        self.outputs = Quantile()

    def bound(self, text_bytes: int, ascii_only: bool, messages: int) -> int:
        """The most tokens this text can be."""
        ratio = self.ratio(ascii_only)
        return math.ceil(text_bytes * ratio) + self.overhead(messages)

    def ratio(self, ascii_only: bool) -> float:
        """Tokens a byte, at most."""
        learnt = self._ratios[0 if ascii_only else 1]
        return min(1.0, learnt.value * MARGIN) if learnt.count >= FEWEST else 1.0

    def observations(self, ascii_only: bool) -> int:
        """How often text of this kind was counted."""
        return self._ratios[0 if ascii_only else 1].count

    def overhead(self, messages: int) -> int:
        """What the template adds."""
        if not messages:
            return 2  # the tokens that open a sequence
        start = CHAT_TOKENS if self._overhead.count < FEWEST else 16
        return max(start, math.ceil(self._overhead.value)) + MESSAGE_TOKENS * messages

    def observe(self, text_bytes: int, ascii_only: bool, messages: int, prompt_tokens: int) -> None:
        """Learn from the `usage` of an answer without media."""
        if messages:
            # More tokens than bytes can only come from the template.
            self._overhead.add(max(0, prompt_tokens - text_bytes))
        if text_bytes >= SHORTEST_BYTES:
            own = max(1, prompt_tokens - (math.ceil(self._overhead.value) if messages else 0))
            self._ratios[0 if ascii_only else 1].add(own / text_bytes)


class TokenBook:
    """Per model, with a bound on how many models: names come from requests."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, ModelTokens] = OrderedDict()

    def of(self, model: str) -> ModelTokens:
        """What is known of a model, to read; an empty page where nothing is."""
        return self._models.get(model, _NOTHING)

    def learnt(self, model: str) -> ModelTokens:
        """The page to write to, kept. Call it for answers the server gave, not for names a client sent."""
        page = self._models.get(model)
        if page is None:
            page = self._models[model] = ModelTokens()
            if len(self._models) > MOST_MODELS:
                self._models.popitem(last=False)
        else:
            self._models.move_to_end(model)  # who answered last is forgotten last
        return page


_NOTHING = ModelTokens()
