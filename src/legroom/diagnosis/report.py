"""A diagnosis: the verdict over one run, and over everything that was read."""

from __future__ import annotations

from typing import Literal

from legroom.diagnosis.case import Case
from legroom.diagnosis.causes import examine_all, with_remedies
from legroom.diagnosis.cut_short import guess
from legroom.diagnosis.finding import Finding
from legroom.diagnosis.repair import Hints
from legroom.diagnosis.workbench import Workbench
from legroom.records import dataclass

Verdict = Literal["cause found", "not a memory problem", "no problem found", "not understood"]

NOT_MEMORY = frozenset({"not_memory", "driver_or_cuda_mismatch", "wrong_flag", "request_too_long"})
"""Causes that no amount of memory changes."""
_WORTH_SHOWING = 0.15
MOST_FINDINGS = 4


@dataclass(frozen=True)
class Diagnosis:
    """One run, explained."""

    case: Case
    verdict: Verdict
    findings: tuple[Finding, ...]

    @property
    def phase(self) -> str | None:
        """Where the first failure happened; none where nothing failed."""
        return self.case.phase if self.findings else None


def examine(case: Case, hints: Hints | None = None) -> Diagnosis:
    """Weigh the causes of one run and work out what mends the likely ones."""
    bench = Workbench(case, hints)
    weighed = [finding for finding in examine_all(case) if finding.confidence >= _WORTH_SHOWING][:MOST_FINDINGS]
    if not weighed and not _is_up(case):
        guessed = guess(case)
        weighed = [guessed] if guessed else []
    findings = tuple(with_remedies(finding, bench) for finding in weighed)
    return Diagnosis(case, _verdict(case, findings), findings)


def _verdict(case: Case, findings: tuple[Finding, ...]) -> Verdict:
    if findings:
        first = findings[0]
        if first.cause in ("not_memory", "driver_or_cuda_mismatch"):
            return "not a memory problem"
        return "cause found"
    return "no problem found" if _is_up(case) else "not understood"


def _is_up(case: Case) -> bool:
    started = case.startup.outcome == "started"
    return started or case.has("server_ready", "engine_ready", "request_served", "engine_stats")
