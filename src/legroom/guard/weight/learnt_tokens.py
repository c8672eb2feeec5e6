"""What was learnt of token counts: prompt tokens per byte, tokens per image, output lengths.

Requests with max_tokens show which share of it answers use; those without show lengths. A client's few answers are
shrunk towards all answers of the model, and these towards the longest (for the quantiles of open-ended answers, towards
any length), as if 32 such answers had been seen: 40 short answers change little. When the newest run longer, they count
at once.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

GENERATION = 256
"""Observations that are forgotten together."""
FEWEST = 32
"""Observations before a learnt value replaces the bound."""
MARGIN = 1.1
"""On the largest ratio of tokens per byte that was observed."""
V = TypeVar("V")


class BoundedCache(Generic[V]):
    """Values by key, of which the least recently added or updated are dropped; keys come from requests."""

    def __init__(self, make: Callable[[], V], most: int) -> None:
        self._make, self._most = make, most
        self._values: OrderedDict[Any, V] = OrderedDict()

    def get(self, key: Any) -> V | None:
        """The key's value, None where missing; reading it does not keep it from being dropped."""
        return self._values.get(key)

    def get_or_add(self, key: Any) -> V:
        """The key's value, made where missing; past the limit the least recently used one is dropped."""
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
        self.count = self._seen = 0
        self.nth = nth
        self._current = [0.0] * nth
        self._previous = [0.0] * nth

    def add(self, value: float) -> None:
        """Count a value; those that are 512 values old or older are forgotten."""
        self.count += 1
        self._seen += 1
        if value > self._current[0]:
            self._current[0] = value
            self._current.sort()
        if self._seen >= GENERATION:
            self._previous, self._current, self._seen = self._current, [0.0] * self.nth, 0

    @property
    def value(self) -> float:
        """The `nth` largest of the last 256 to 512 values; 0.0 while fewer than `nth` were added."""
        return sorted(self._current + self._previous)[-self.nth]


class Quantiles:
    """Quantiles of the last 1,024 to 2,048 values, in buckets of a quarter of a power of two."""

    __slots__ = ("_current", "_newest", "_previous", "_seen", "count")

    _EDGES = tuple(math.ceil(2 ** (bucket / 4)) for bucket in range(128))

    def __init__(self) -> None:
        self.count = self._seen = 0
        self._current = [0] * len(self._EDGES)
        self._previous = [0] * len(self._EDGES)
        self._newest: deque[int] = deque(maxlen=16)

    def add(self, value: int) -> None:
        """Count a value in its bucket; those that are 2,048 values old or older are forgotten."""
        self.count += 1
        self._seen += 1
        self._newest.append(value)
        self._current[min(len(self._EDGES) - 1, math.ceil(4 * math.log2(max(1, value))))] += 1
        if self._seen >= 4 * GENERATION:
            self._previous, self._current, self._seen = self._current, [0] * len(self._EDGES), 0

    def at(self, share: float, prior: int = 0, prior_count: int = 0) -> int:
        """The quantile at `share`, rounded up to its bucket's edge, as if `prior` had been added `prior_count` times;
        `prior` where there are no values."""
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
        """The quantile at `share` of the newest 16 values, which shows a change at once; 0 before the first."""
        newest = sorted(self._newest)
        return newest[min(len(newest) - 1, int(share * len(newest)))] if newest else 0


class ModelTokens:
    """What was learnt of one model's token counts."""

    __slots__ = ("_ratios", "_template", "media_tokens", "outputs")

    def __init__(self) -> None:
        self._ratios = (RecentMaximum(), RecentMaximum())
        self._template = RecentMaximum(3)
        self.media_tokens = RecentMaximum()
        self.outputs = Quantiles()

    def bound(self, text_bytes: int, ascii_only: bool, messages: int) -> int:
        """The most prompt tokens that `text_bytes` of UTF-8 (or ASCII only) in so many chat messages can have."""
        return math.ceil(text_bytes * self.ratio(ascii_only)) + self.template_tokens(messages)

    def ratio(self, ascii_only: bool) -> float:
        """An upper bound of tokens per byte of ASCII-only or other text, with a margin; 1 before enough was seen."""
        learnt = self._ratios[0 if ascii_only else 1]
        return min(1.0, learnt.value * MARGIN) if learnt.count >= FEWEST else 1.0

    def observations(self, ascii_only: bool) -> int:
        """How many prompts of this kind (`ascii_only` or other text) were counted."""
        return self._ratios[0 if ascii_only else 1].count

    def template_tokens(self, messages: int) -> int:
        """The most tokens that the chat template adds to so many messages; for 0, the tokens that open a sequence."""
        if not messages:
            return 2
        assumed = 128 if self._template.count < FEWEST else 16
        return max(assumed, math.ceil(self._template.value)) + 8 * messages

    def observe(self, text_bytes: int, ascii_only: bool, messages: int, prompt_tokens: int) -> None:
        """Learn tokens per byte and template tokens from the true count of a prompt without media."""
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


def prior_length(share: float, longest: int) -> int:
    """The quantile at `share` of answer lengths before any was seen: log-uniform from 16 tokens to `longest`."""
    shortest = min(16, longest)
    return max(1, round(shortest * math.pow(longest / max(1, shortest), share)))


def prior_quantiles(longest: int) -> tuple[int, ...]:
    """Equally likely lengths, up to `longest` tokens, of open-ended answers before any was seen."""
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
        """Learn an answer's length in tokens: as such without max_tokens, otherwise as a share of max_tokens."""
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
    """What was learnt of answer lengths, per model and per client of it."""

    def __init__(self) -> None:
        self._learnt = BoundedCache(_LearntLengths, 1024)  # about 4 kB each

    def likely(self, model: str, client: str, max_tokens: int | None, longest: int) -> LikelyLengths:
        """Likely lengths of the client's next answer; without max_tokens, of at most `longest` tokens."""
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
        """The quantile at `share` of answer lengths, 1 to `most`: tokens if `is_open`, else per mille of max_tokens."""
        value = prior_length(share, most) if is_open and share != EXPECTED_SHARE else most
        for learnt in (self._learnt.get((model, None)), self._learnt.get((model, client))):
            if learnt is not None:
                lengths = learnt.open_tokens if is_open else learnt.shares
                value = lengths.at(share, value, FEWEST)
                if share >= EXPECTED_SHARE:
                    value = max(value, lengths.recent(share))
        return max(1, min(most, value))

    def observe(self, model: str, client: str, max_tokens: int | None, tokens: int) -> None:
        """Learn the length of a complete answer, for its model and client; `max_tokens`: the request's, or None."""
        for key in ((model, None), (model, client)):
            self._learnt.get_or_add(key).observe(max_tokens, tokens)
