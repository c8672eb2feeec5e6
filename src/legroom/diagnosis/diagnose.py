"""From pieces of a log to its diagnoses, the last run first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from legroom.diagnosis.repair import Hints
from legroom.diagnosis.report import Diagnosis, examine
from legroom.diagnosis.runs import gather, runs_of
from legroom.diagnosis.scan import Scanner


@dataclass(frozen=True)
class Reading:
    """Everything one log gave."""

    source: str
    lines: int
    bytes: int
    runs: tuple[Diagnosis, ...]
    """The last run first."""


def read_log(pieces: Iterable[bytes], source: str = "the log", hints: Hints | None = None) -> Reading:
    """Diagnose every run in one log."""
    scanner = Scanner()
    gathered = gather(scanner.passages(pieces))
    cases = runs_of(gathered, source, scanner.lines)
    return Reading(source, scanner.lines, scanner.bytes, tuple(examine(case, hints) for case in reversed(cases)))
