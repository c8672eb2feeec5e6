"""What `legroom run` launches: a command, its variables, and what is expected of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from legroom.records import dataclass


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
        """From what counsel says."""
        return cls(tuple(answer["words"]), dict(answer["env"]), answer["line"], answer["expected"])

    def is_like(self, other: Setup) -> bool:
        """Whether both launch the same, whatever was expected of it."""
        return (self.words, self.env) == (other.words, other.env)

    def is_among(self, others: Iterable[Setup]) -> bool:
        """Whether one of them launches the same."""
        return any(self.is_like(other) for other in others)
