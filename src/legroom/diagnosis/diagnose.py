"""From pieces of a log to its diagnoses, the last run first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from legroom.diagnosis.repair import Hints
from legroom.diagnosis.report import Diagnosis, examine
from legroom.diagnosis.runs import gather, runs_of
from legroom.diagnosis.scan import Scanner
from legroom.records import dataclass


@dataclass(frozen=True)
class Reading:
    """Everything one log gave."""

    source: str
    lines: int
    bytes: int
    runs: tuple[Diagnosis, ...]
    """The last run that says something first, then the others backwards in time."""


def read_log(pieces: Iterable[bytes], source: str = "the log", hints: Hints | None = None) -> Reading:
    """Diagnose every run in one log."""
    scanner = Scanner()
    gathered = gather(scanner.passages(pieces))
    cases = runs_of(gathered, source, scanner.lines)
    runs = tuple(examine(case, hints) for case in reversed(cases))
    return Reading(source, scanner.lines, scanner.bytes, _telling_first(runs))


def in_order(readings: Sequence[Reading]) -> tuple[Reading, ...]:
    """Of several logs the one that failed first in time first, then those without a failure, as they were given."""

    def key(reading: Reading) -> tuple[bool, str]:
        findings = reading.runs[0].findings if reading.runs else ()
        failure = reading.runs[0].case.first_failure if findings else None
        return not findings, failure.time if failure else ""

    return tuple(sorted(readings, key=key))


def _telling_first(runs: tuple[Diagnosis, ...]) -> tuple[Diagnosis, ...]:
    """The last run first, unless the log ends before it says anything: then the one before it that does."""
    for number, run in enumerate(runs):
        if run.verdict != "not understood":
            return (run, *runs[:number], *runs[number + 1 :])
    return runs
