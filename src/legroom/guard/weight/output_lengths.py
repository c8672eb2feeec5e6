"""How long answers get: what most of a client's answers from a model stay within.

Requests that name max_tokens show which share of it they use; those that name none show their length. Both are shrunk:
what a client's few answers say towards what all of the model's say, and these towards the worst (where the likely
lengths of open-ended answers are asked for, towards any length), as if so many answers of that length had been seen
(`PRIOR`). Forty short answers therefore move nothing; and when the newest run long, they
count at once (`Quantile.recent`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import NamedTuple

from legroom.guard.weight.token_estimates import Quantile

EXPECTED_SHARE = 0.8
"""Of answers, how many stay within what is expected of one."""
PRIOR = 32
WHOLE = 1000
"""Shares of max_tokens are counted in thousandths."""
QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Where an answer may end, each as likely as the others: of answers, how many stay within."""
STALE_AFTER = 16
"""Answers until what was worked out from a page is worked out again, unless one is longer than all of it."""
MOST_MAX_TOKENS = 64
"""Values of max_tokens that this was worked out for."""
MOST_PAGES = 1024
"""Models and clients of models that something was learnt about. A page takes about 4 kB."""


SHORTEST_PRIOR = 16
"""Of answers without max_tokens of which nothing is known, the shortest length that is thought of."""


def prior_length(share: float, worst: int) -> int:
    """What this share of open-ended answers stays within as far as anybody knows beforehand: each doubling of the
    length is as likely as the next. To count each at its worst holds nine of ten back from an idle server.
    """
    shortest = min(SHORTEST_PRIOR, worst)
    return max(1, round(shortest * math.pow(worst / max(1, shortest), share)))


def prior_quantiles(worst: int) -> tuple[int, ...]:
    return tuple([prior_length(share, worst) for share in QUANTILES])


class LikelyLengths(NamedTuple):
    """In tokens, or in shares of max_tokens."""

    expected: int
    """What most answers stay within."""
    quantiles: tuple[int, ...]
    """Lengths that are each as likely as the others."""


class _LearntLengths:
    __slots__ = ("age", "in_tokens", "likely", "open_tokens", "shares")

    def __init__(self) -> None:
        self.open_tokens = Quantile()
        self.shares = Quantile()
        self.likely: dict[int, LikelyLengths] = {}
        """Worked out by the longest answer there can be; 0: in shares of max_tokens."""
        self.in_tokens: dict[int, LikelyLengths] = {}
        """The shares for one max_tokens or another, until they are worked out again."""
        self.age = 0
        """Answers since then."""

    def observe(self, max_tokens: int | None, tokens: int) -> None:
        length, learnt = tokens, self.open_tokens
        if max_tokens is not None:
            length, learnt = min(WHOLE, math.ceil(WHOLE * tokens / max(1, max_tokens))), self.shares
        if max_tokens != 0:
            learnt.add(length)
        self.age += 1
        longer = any(
            length > likely.expected for key, likely in self.likely.items() if bool(key) is (max_tokens is None)
        )
        if longer or self.age >= STALE_AFTER:
            self.likely.clear()
            self.in_tokens.clear()
            self.age = 0


class AnswerLengths:
    """Per model and client, with a bound on how many: both names come from requests."""

    def __init__(self) -> None:
        self._pages: OrderedDict[tuple[str, str | None], _LearntLengths] = OrderedDict()

    def expected(self, model: str, client: str, max_tokens: int | None, worst: int) -> int:
        """Tokens that most answers like this one stay within; `worst` is what one without max_tokens may grow to."""
        return self.likely(model, client, max_tokens, worst).expected

    def quantiles(self, model: str, client: str, max_tokens: int | None, worst: int) -> tuple[int, ...]:
        """Lengths that an answer may have, each as likely as the others; empty where nothing was learnt."""
        return self.likely(model, client, max_tokens, worst).quantiles

    def likely(self, model: str, client: str, max_tokens: int | None, worst: int) -> LikelyLengths:
        if max_tokens == 0:
            return LikelyLengths(0, ())
        page = self._pages.get((model, client)) or self._pages.get((model, None))
        if page is None:
            return LikelyLengths(max(1, worst if max_tokens is None else max_tokens), ())
        key = worst if max_tokens is None else 0
        likely = page.likely.get(key)
        if likely is None:
            most = worst if max_tokens is None else WHOLE
            quantiles = tuple([self._within(share, model, client, max_tokens is None, most) for share in QUANTILES])
            likely = LikelyLengths(self._within(EXPECTED_SHARE, model, client, max_tokens is None, most), quantiles)
            page.likely[key] = likely
        if max_tokens is None:
            return likely
        in_tokens = page.in_tokens.get(max_tokens)
        if in_tokens is None:
            if len(page.in_tokens) >= MOST_MAX_TOKENS:
                page.in_tokens.clear()
            tokens = [max(1, math.ceil(max_tokens * share / WHOLE)) for share in (likely.expected, *likely.quantiles)]
            in_tokens = page.in_tokens[max_tokens] = LikelyLengths(tokens[0], tuple(tokens[1:]))
        return in_tokens

    def _within(self, share: float, model: str, client: str, is_open: bool, most: int) -> int:
        value = prior_length(share, most) if is_open and share != EXPECTED_SHARE else most
        for page in (self._pages.get((model, None)), self._pages.get((model, client))):
            if page is not None:
                learnt = page.open_tokens if is_open else page.shares
                value = learnt.at(share, value, PRIOR)
                if share >= EXPECTED_SHARE:
                    value = max(value, learnt.recent(share))
        return max(1, min(most, value))

    def observe(self, model: str, client: str, max_tokens: int | None, tokens: int) -> None:
        """An answer that ended. Call it for what the server served, not for names that a client sent."""
        for key in ((model, None), (model, client)):
            page = self._pages.get(key)
            if page is None:
                page = self._pages[key] = _LearntLengths()
                if len(self._pages) > MOST_PAGES:
                    self._pages.popitem(last=False)
            self._pages.move_to_end(key)
            page.observe(max_tokens, tokens)
