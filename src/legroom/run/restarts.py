"""Starting the server again: with which set-up, how often, and after how long a wait."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from legroom.records import dataclass

WINDOW_S = 3600.0
LONGEST_DELAY_S = 300.0
_MOST_DOUBLINGS = 64
"""By then the longest delay is reached from any first one; many more are no float."""


@dataclass(frozen=True)
class Setup:
    """One way to start the server."""

    words: tuple[str, ...]
    env: Mapping[str, str]
    """What stands before the command."""
    line: str
    """As it may be printed."""
    expected: Mapping[str, Any]

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Setup:
        return cls(tuple(answer["words"]), dict(answer["env"]), answer["line"], answer["expected"])

    def is_like(self, other: Setup) -> bool:
        """Whether both launch the same, whatever was expected of it."""
        return (self.words, self.env) == (other.words, other.env)

    def is_among(self, others: Iterable[Setup]) -> bool:
        """Whether one of them launches the same."""
        return any(self.is_like(other) for other in others)


class Setups:
    """The set-up in use, and what became of those before it."""

    def __init__(self, first: Setup) -> None:
        self.current = first
        self._tried: list[Setup] = []
        self._served: list[Setup] = []
        self._taken_away: dict[str, str] = {}
        """Variables that a change took from the environment, until it has served."""

    @property
    def tried(self) -> Sequence[Setup]:
        """Every set-up that was launched: none of them is the fix of a failure."""
        return self._tried

    @property
    def any_has_served(self) -> bool:
        return bool(self._served)

    @property
    def current_has_served(self) -> bool:
        return self.current.is_among(self._served)

    def mark_launched(self) -> None:
        if not self.current.is_among(self._tried):
            self._tried.append(self.current)

    def mark_served(self) -> None:
        """It came up: what to go back to, from now on."""
        self._served = [*(setup for setup in self._served if not setup.is_like(self.current)), self.current]
        self._taken_away.clear()

    def change(self, answer: Mapping[str, Any]) -> None:
        """To what somebody left for this restart. The server inherits the environment, so what goes is taken away."""
        self.current = Setup.of(answer)
        self._taken_away |= {name: os.environ.pop(name) for name in answer["unset"] if name in os.environ}

    def go_back(self) -> None:
        """To what has served last."""
        self.current = self._served[-1]
        os.environ.update(self._taken_away)


class RestartBudget:
    """Counts restarts after crashes. Never a loop: what crashes more often than the budget stays down."""

    def __init__(self, per_hour: int, first_delay_s: float) -> None:
        self.per_hour, self.first_delay_s = per_hour, first_delay_s
        self._taken: list[float] = []

    def left(self, now_s: float) -> int:
        """How many more the last hour allows."""
        self._taken = [taken for taken in self._taken if now_s - taken < WINDOW_S]
        return max(self.per_hour - len(self._taken), 0)

    def take(self, now_s: float) -> float | None:
        """How long to wait before the restart that is begun now; None where the budget is spent."""
        if not self.left(now_s):
            return None
        doublings = min(len(self._taken), _MOST_DOUBLINGS)
        delay_s = min(self.first_delay_s * 2.0**doublings, LONGEST_DELAY_S)
        self._taken.append(now_s)
        return delay_s
