"""What readers find in files and rules look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from legroom.deployments.shell.scan import Word
from legroom.deployments.text import Place, Unread

Owner = Literal["alert", "record", "panel", "variable", "text", "family", "sample"]
"""`text`: a string that may be a name; `family`: one that may be a family's name; `sample`: a line of /metrics."""
Runs = Literal["shell", "docker", "compose", "kubernetes", "systemd", "config", "python"]
"""`python`: an engine inside the program itself, without a command line."""


@dataclass(frozen=True)
class Expression:
    """PromQL, or names of series in a text."""

    text: str
    locate: Callable[[int], Place]
    """From an offset in the text to its place in the file."""
    owner: Owner = "panel"
    name: str = ""
    """The alert's or the recorded series' name."""
    beside: frozenset[str] = frozenset()
    """Names that the same text asks for too."""


@dataclass(frozen=True)
class At:
    """A value and its place."""

    value: float
    place: Place


@dataclass(frozen=True)
class Started:
    """One vLLM server that a file starts."""

    runs: Runs
    words: tuple[Word, ...]
    """`vllm serve ...` and everything after it."""
    env: Mapping[str, Word]
    locate: Callable[[int], Place]
    place: Place
    image: str = ""
    in_container: bool = False
    shm: str | None = None
    """What the file says about /dev/shm: a size, `host`, or None where it says nothing."""
    gpus: int | None = None
    start_limit: At | None = None
    """Seconds after which the file calls a start dead; None where nothing limits it or it is not known."""
    stop_limit: At | None = None
    """Seconds between the request to stop and the kill."""

    def place_of(self, word: Word) -> Place:
        """Where one of its words or variables stands."""
        return word.place or self.locate(word.offset)


@dataclass(frozen=True)
class Invoked:
    """Any simple command of a script, a unit or a container."""

    words: tuple[Word, ...]
    line: str
    locate: Callable[[int], Place]

    def texts(self) -> tuple[str, ...]:
        """The words alone."""
        return tuple(word.text for word in self.words)


@dataclass(frozen=True)
class Unit:
    """A systemd unit with its settings."""

    settings: Mapping[str, Word]
    locate: Callable[[int], Place]


Subject = Expression | Started | Invoked | Unit


@dataclass(frozen=True)
class Found:
    """Everything in one part of a file."""

    subjects: tuple[Subject, ...] = ()
    records: Mapping[str, str] = field(default_factory=dict)
    """Series that the part itself records, each with its expression."""
    nothing: str = ""
    """Why there is nothing to check."""
    cut: Unread | None = None
    """From where on it was not read, and why."""
