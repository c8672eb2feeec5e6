"""The causes, one file each. A file defines `CAUSE`, `examine(case)`, `remedies(planner)` and, where
arithmetic can exclude the cause or a remedy, `is_ruled_out(planner)` and `impossible(planner)`."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

from legroom.diagnosis.case import Case, Phase
from legroom.diagnosis.finding import Assessment, DeadEnd, Fix, Strength, known_fix, proof, reason
from legroom.diagnosis.fixes.fix_planner import FixPlanner
from legroom.explain.entry import Localized
from legroom.facts import read_data
from legroom.records import dataclass

__all__ = ["Assessment", "Case", "Cause", "DeadEnd", "Fix", "FixPlanner", "Localized", "Strength"]
__all__ += ["cause_of", "causes", "known_fix", "proof", "reason"]
"""Also what a file of this folder needs from other modules, so that it has one import."""

_RULES = ("examine", "is_ruled_out", "impossible", "remedies")

Domain = Literal["gpu", "host", "settings", "other"]


@dataclass(frozen=True)
class Cause:
    """How a cause is recognised, what fixes it and what does not."""

    entry: str
    """Id of its general catalog entry; a finding may name a more specific entry of the same label."""
    title: Localized = Localized("", "")
    """Of the bundled causes in `diagnosis_texts.json`, like the dead ends."""
    phase: Phase | None = None
    """The phase in which it always happens; used where the log does not show one."""
    usual_at: tuple[str, ...] = ()
    """The sites (`Case.site`) at which it is the usual cause, for a traceback without its error."""
    domain: Domain = "gpu"
    """Whose memory is short; with `settings` and `other` none is."""
    priority: int = 0
    """Among causes of equal strength the lowest number comes first, then the lowest entry id."""
    label: str = ""
    """The name of its file; set, like the rules below and the dead ends of `diagnosis_texts.json`, by `causes`."""
    dead_ends: tuple[DeadEnd, ...] = ()
    """What does not help; of the bundled causes in `diagnosis_texts.json`."""
    examine: Callable[[Case], Assessment | None] = lambda case: None
    """The assessment of a case; None where this cause does not apply."""
    is_ruled_out: Callable[[FixPlanner], bool] = lambda planner: False
    """Whether the model, the flags or the sizes of the failed run exclude this cause."""
    impossible: Callable[[FixPlanner], tuple[DeadEnd, ...]] = lambda planner: ()
    """Dead ends that the figures of the failed run show."""
    remedies: Callable[[FixPlanner], Iterator[Fix | None]] = lambda planner: iter(())
    """The fixes, best first; None for one that does not apply."""

    @property
    def is_memory(self) -> bool:
        """Whether the cause is a shortage of memory, which other memory settings can fix."""
        return self.domain in ("gpu", "host")


@cache
def causes() -> tuple[Cause, ...]:
    """Every cause legroom can diagnose, ordered by priority, then by catalog entry."""
    every: list[Cause] = []
    texts = read_data("diagnosis_texts.json")
    for name in (path.stem for folder in __path__ for path in Path(folder).glob("[a-z]*.py")):
        module = importlib.import_module(f"{__name__}.{name}")
        rules = {rule: getattr(module, rule) for rule in _RULES if hasattr(module, rule)}
        ends = module.CAUSE.dead_ends + tuple(DeadEnd(*row) for row in texts["dead_ends"].get(name, ()))
        title = Localized(*texts["titles"][name]) if name in texts["titles"] else module.CAUSE.title
        every.append(replace(module.CAUSE, label=name, title=title, dead_ends=ends, **rules))
    return tuple(sorted(every, key=lambda cause: (cause.priority, cause.entry)))


def cause_of(label: str) -> Cause:
    """The cause with this label, such as `weights_too_big`."""
    return next(cause for cause in causes() if cause.label == label)
