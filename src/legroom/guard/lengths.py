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
MOST_PAGES = 1024
"""Models and clients of models that something was learnt about. A page takes about 4 kB."""


class _LearntLengths:
    __slots__ = ("open_tokens", "shares")

    def __init__(self) -> None:
        self.open_tokens = Quantile()
        self.shares = Quantile()


class AnswerLengths:
    """Per model and client, with a bound on how many: both names come from requests."""

    def __init__(self) -> None:
        self._pages: OrderedDict[tuple[str, str | None], _LearntLengths] = OrderedDict()

    def expected(self, model: str, client: str, max_tokens: int | None, worst: int) -> int:
        """Tokens that most answers like this one stay within; `worst` is what one without max_tokens may grow to."""
        pages = [page for page in (self._pages.get((model, None)), self._pages.get((model, client))) if page]
        value = WHOLE if max_tokens is not None else worst
        for page in pages:
            learnt = page.shares if max_tokens is not None else page.open_tokens
            value = max(learnt.at(EXPECTED_SHARE, value, PRIOR), learnt.recent(EXPECTED_SHARE))
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
            if max_tokens is None:
                page.open_tokens.add(tokens)
            elif max_tokens:
                page.shares.add(min(WHOLE, math.ceil(WHOLE * tokens / max_tokens)))
