"""The causes, one file each: every file of this folder that defines `CAUSE` is examined."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from legroom.diagnosis.case import Case, Phase
from legroom.diagnosis.finding import Assessment, DeadEnd, Fix, proof
from legroom.diagnosis.fixes.fix_planner import FixPlanner
from legroom.explain.entry import Localized
from legroom.records import dataclass

__all__ = ["Assessment", "Case", "Cause", "DeadEnd", "Fix", "FixPlanner", "Localized", "cause_of", "causes", "proof"]
"""Also what a file of this folder needs from other modules, so that it has one import."""

Domain = Literal["gpu", "host", "settings", "other"]


@dataclass(frozen=True)
class Cause:
    """How a cause is recognised, what fixes it and what does not; defined once in each file of this folder."""

    label: str
    """Also the name of its file."""
    entry: str
    """Id of its general catalog entry; a finding may name a more specific entry of the same label."""
    title: Localized
    examine: Callable[[Case], Assessment | None]
    """Returns an assessment if this cause may explain the case."""
    remedies: Callable[[FixPlanner], Iterator[Fix | None]]
    """Yields the fixes, best first; None for one that does not apply."""
    dead_ends: tuple[DeadEnd, ...]
    phase: Phase | None = None
    """The phase in which it always happens; used where the log does not show one."""
    usual_at: tuple[str, ...] = ()
    """The sites (`Case.site`) at which it is the usual cause, for a traceback without its error."""
    domain: Domain = "gpu"
    """Whose memory is short; with `settings` and `other` none is."""
    priority: int = 0
    """Among causes of equal confidence the lowest number comes first, then the lowest entry id."""

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
