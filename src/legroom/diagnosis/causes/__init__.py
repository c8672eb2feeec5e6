"""The causes, one file each. A file defines `CAUSE`; being in this folder is all it takes to be asked."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from legroom.diagnosis.case import Case, Phase
from legroom.diagnosis.finding import Assessment, DeadEnd, Fix
from legroom.diagnosis.fixes.fix_planner import FixPlanner
from legroom.explain.entry import Localized
from legroom.records import dataclass

Domain = Literal["gpu", "host", "settings", "other"]


@dataclass(frozen=True)
class Cause:
    """How a cause is recognised, what fixes it and what does not; defined once in each file of this folder."""

    label: str
    """Also the name of its file."""
    entry: str
    """The catalog's general entry of it; a finding may name a more special one of the same label."""
    title: Localized
    examine: Callable[[Case], Assessment | None]
    """Looks at a case; an assessment if this cause may be behind it."""
    remedies: Callable[[FixPlanner], Iterator[Fix | None]]
    """What fixes it, the best first; None for one that does not apply here."""
    dead_ends: tuple[DeadEnd, ...]
    phase: Phase | None = None
    """Where it happens, if always there: the answer where the log itself does not show it."""
    usual_at: tuple[str, ...] = ()
    """The sites (`Case.site`) at which it is what usually fails: the guess where a traceback has lost its error."""
    domain: Domain = "gpu"
    """Whose memory is short; `settings` and `other`: nobody's."""
    priority: int = 0
    """Of causes that are equally sure the one with the lowest number is named first, then the one with the lowest
    entry, which is the order of a server's life."""

    @property
    def is_memory(self) -> bool:
        """Whether a change of memory use could fix it."""
        return self.domain in ("gpu", "host")


@cache
def causes() -> tuple[Cause, ...]:
    """Every cause, ordered by priority and entry."""
    names = (path.stem for folder in __path__ for path in Path(folder).glob("[a-z]*.py"))
    every: list[Cause] = [importlib.import_module(f"{__name__}.{name}").CAUSE for name in names]
    return tuple(sorted(every, key=lambda cause: (cause.priority, cause.entry)))


def cause_of(label: str) -> Cause:
    """The cause with this label."""
    return next(cause for cause in causes() if cause.label == label)
