"""How long answers get: what most of a client's answers from a model stay within.

Requests that name max_tokens show which share of it they use; those that name none show their length. Both are shrunk:
what a client's few answers say towards what all of the model's say, and these towards the worst, as if so many answers
of that length had been seen (`PRIOR`). Forty short answers therefore move nothing; and when the newest run long, they
count at once (`Quantile.recent`).
"""

from __future__ import annotations

import math
from collections import OrderedDict

from legroom.guard.tokens import Quantile

EXPECTED_SHARE = 0.8
"""Of answers, how many stay within what is expected of one."""
PRIOR = 32
WHOLE = 1000
"""Shares of max_tokens are counted in thousandths."""
LIFE_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Where an answer may end, each as likely as the others: of answers, how many stay within."""
STALE_AFTER = 16
"""Answers until what was worked out from a page is worked out again, unless one is longer than all of it."""
MOST_PAGES = 1024
"""Models and clients of models that something was learnt about. A page takes about 4 kB."""


class _LearntLengths:
    __slots__ = ("known_lives", "lives_age", "open_tokens", "shares")

    def __init__(self) -> None:
        self.open_tokens = Quantile()
        self.shares = Quantile()
        self.known_lives: dict[int, tuple[int, ...]] = {}
        """By the longest answer there can be; 0: in shares of max_tokens."""
        self.lives_age = 0


class AnswerLengths:
    """Per model and client, with a bound on how many: both names come from requests."""

    def __init__(self) -> None:
        self._pages: OrderedDict[tuple[str, str | None], _LearntLengths] = OrderedDict()

    def expected(self, model: str, client: str, max_tokens: int | None, worst: int) -> int:
        """Tokens that most answers like this one stay within; `worst` is what one without max_tokens may grow to."""
        return self._within(EXPECTED_SHARE, model, client, max_tokens, worst)

    def lives(self, model: str, client: str, max_tokens: int | None, worst: int) -> tuple[int, ...]:
        """Lengths that an answer may have, each as likely as the others; empty where nothing was learnt."""
        page = self._pages.get((model, client)) or self._pages.get((model, None))
        if page is None or max_tokens == 0:
            return ()
        key = worst if max_tokens is None else 0
        lives = page.known_lives.get(key)
        if lives is None or page.lives_age >= STALE_AFTER:
            whole = None if max_tokens is None else WHOLE
            lives = tuple(self._within(share, model, client, whole, worst) for share in LIFE_SHARES)
            page.known_lives = {key: lives}
            page.lives_age = 0
        if max_tokens is None:
            return lives
        return tuple([max(1, math.ceil(max_tokens * share / WHOLE)) for share in lives])

    def _within(self, share: float, model: str, client: str, max_tokens: int | None, worst: int) -> int:
        pages = [page for page in (self._pages.get((model, None)), self._pages.get((model, client))) if page]
        value = WHOLE if max_tokens is not None else worst
        for page in pages:
            learnt = page.shares if max_tokens is not None else page.open_tokens
            value = learnt.at(share, value, PRIOR)
            if share >= EXPECTED_SHARE:
                value = max(value, learnt.recent(share))
        if max_tokens is None:
            return max(1, min(worst, value))
        return max(1, min(max_tokens, math.ceil(max_tokens * value / WHOLE))) if max_tokens else 0

    def observe(self, model: str, client: str, max_tokens: int | None, tokens: int) -> None:
        """An answer that ended. Call it for what the server served, not for names that a client sent."""
        for key in ((model, None), (model, client)):
            page = self._pages.get(key)
            if page is None:
                page = self._pages[key] = _LearntLengths()
                if len(self._pages) > MOST_PAGES:
                    self._pages.popitem(last=False)
            self._pages.move_to_end(key)
            page.lives_age += 1
            share = math.ceil(WHOLE * tokens / max_tokens) if max_tokens else 0
            if any(tokens > lives[-1] if longest else share > lives[-1] for longest, lives in page.known_lives.items()):
                page.known_lives.clear()
            if max_tokens is None:
                page.open_tokens.add(tokens)
            elif max_tokens:
                page.shares.add(min(WHOLE, math.ceil(WHOLE * tokens / max_tokens)))
