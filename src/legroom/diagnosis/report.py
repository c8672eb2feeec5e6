"""A diagnosis: the causes of one run weighed, with what fixes the likely ones, and the verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from legroom.diagnosis.beyond_flags import other_hardware
from legroom.diagnosis.case import BOILERPLATE, FAILING, Case
from legroom.diagnosis.cause import Cause
from legroom.diagnosis.causes import cause_of, causes
from legroom.diagnosis.finding import Assessment, Finding, proof
from legroom.diagnosis.fix_planner import FixPlanner
from legroom.diagnosis.fix_vetting import vetted
from legroom.diagnosis.release_bugs import with_known_bugs
from legroom.diagnosis.starting_plan import Hints
from legroom.errors import LegroomError
from legroom.records import dataclass

Verdict = Literal["cause found", "not a memory problem", "no problem found", "cause above", "not understood"]

MOST_FINDINGS = 4
MOST_FIXES = 5
_WORTH_SHOWING = 0.15
_GUESSED = 0.3
_SURE_WITHOUT_ERROR = 0.5
"""Frames or counters alone assert a cause from here on; below, the error itself has to be seen."""
_ECHO = 0.8
"""What is left of the confidence in a cause that only later failures prove."""


@dataclass(frozen=True)
class Diagnosis:
    """One run, explained."""

    case: Case
    verdict: Verdict
    findings: tuple[Finding, ...]
    """With the verdict "cause above" these are possibilities, not answers."""

    @property
    def proven_findings(self) -> tuple[Finding, ...]:
        """What is sure enough to act on."""
        return () if self.verdict == "cause above" else self.findings

    @property
    def needed(self) -> tuple[str, ...]:
        """What else to give, where the lines that decide are not in this text."""
        return tuple(_needed(self.case)) if self.verdict == "cause above" else ()

    @property
    def phase(self) -> str | None:
        """Where the first failure happened; none where nothing failed."""
        if not self.findings:
            return None
        failure = self.case.first_failure
        if self.case.is_traced or (failure is not None and failure.phase):
            return self.case.phase
        # Neither a traceback nor the message itself tells: the cause does, where it has a phase of its own.
        return cause_of(self.findings[0].cause).phase or self.case.phase


def diagnose_run(case: Case, hints: Hints | None = None) -> Diagnosis:
    """Weigh the causes of one run and work out what fixes the likely ones."""
    planner = FixPlanner(case, hints)
    likely = _likely_causes(case) or ([] if case.is_up else _guessed_cause(case))
    findings = tuple(_finding(cause, assessment, planner) for cause, assessment in likely)
    return Diagnosis(case, _verdict(case, findings), findings)


def _likely_causes(case: Case) -> list[tuple[Cause, Assessment]]:
    """The likeliest first; of equally likely ones, in the order of the causes."""
    assessed = [(cause, _in_time(assessment, case)) for cause in causes() if (assessment := cause.examine(case))]
    assessed.sort(key=lambda pair: -pair[1].confidence)
    return [pair for pair in assessed if pair[1].confidence >= _WORTH_SHOWING][:MOST_FINDINGS]


def _in_time(assessment: Assessment, case: Case) -> Assessment:
    """The first failure over all ranks wins: a cause that is proven by later failures only is likely its echo."""
    first = case.first_failure
    failing = [evidence for evidence in assessment.evidence if evidence.role in FAILING]
    if first is None or not failing or first.role not in FAILING:
        return assessment
    if first in failing or min(evidence.line for evidence in failing) <= first.line:
        return assessment
    return replace(assessment, confidence=round(assessment.confidence * _ECHO, 3))


def _guessed_cause(case: Case) -> list[tuple[Cause, Assessment]]:
    """What usually fails at the place that a traceback without its error goes through."""
    frames = [item for item in case.evidence if item.role == "frame" and _of_traceback(item.text)]
    usual = next((cause for cause in causes() if case.site in cause.usual_at), None)
    if not frames or usual is None:
        return []
    why = (
        "The log breaks off before the error itself. If memory "
        "ran out at this place it was this; the traceback's last "
        "line, which names the error, would tell."
    )
    return [(usual, Assessment(_GUESSED, proof(frames[-3:]), why))]


def _of_traceback(text: str) -> bool:
    return 'File "' in text or "ERROR" in text or "[rank" in text or ".py" in text


def _finding(cause: Cause, assessment: Assessment, planner: FixPlanner) -> Finding:
    fixes = vetted(planner, cause.remedies(planner))[:MOST_FIXES]
    if cause.domain == "gpu" and not fixes:
        fixes = (other_hardware(planner),)  # no lever is left that the numbers of this log do not refuse
    finding = Finding(
        cause.label, _entry(cause, assessment), assessment.confidence, assessment.evidence, assessment.why,
        fixes, cause.dead_ends,
    )  # fmt: skip
    return with_known_bugs(finding, planner)


def _entry(cause: Cause, assessment: Assessment) -> str:
    """Several entries of the catalog may be about one cause: the one whose messages these are, else the cause's own."""
    from legroom.explain.catalog import best_entry  # noqa: PLC0415 - reads the catalog

    message_ids = frozenset(evidence.id for evidence in assessment.evidence)
    try:
        return best_entry(cause.label, message_ids, cause.entry).id
    except LegroomError:
        return cause.entry  # a record that the user imported cannot be read; that is not this log's trouble


def _verdict(case: Case, findings: tuple[Finding, ...]) -> Verdict:
    unsaid = _needed(case) and case.last_error is None
    if findings and not (unsaid and findings[0].confidence < _SURE_WITHOUT_ERROR):
        return "not a memory problem" if cause_of(findings[0].cause).domain == "other" else "cause found"
    if unsaid:
        return "cause above"
    if case.is_up:
        return "no problem found"
    return "cause above" if case.startup.vllm or case.startup.args_known else "not understood"


def _needed(case: Case) -> list[str]:
    """The lines that would decide, by what this text ends with."""
    needed = []
    broken, echo, stop = case.broken_traceback, case.echo, case.stops_short
    if broken is not None:
        needed.append(f"the rest of the traceback that begins at line {broken.line}: its last line names the error")
    if echo is not None and echo.id in BOILERPLATE:
        needed.append("the log of the worker that died, and `dmesg | grep -i oom` of its node: Ray lists every reason")
    elif echo is not None:
        needed.append(
            f"the lines above line {echo.line}, from the start of the server on: it only repeats that a process failed "
            "before; the first error of EngineCore or of a worker is the cause"
        )
    if not needed and (stop is not None or not case.is_up):
        needed.append(
            "what ended the process, if it ended: its exit code (137 is SIGKILL), `kubectl describe pod` or `docker "
            "inspect` (OOMKilled, a failed probe), `dmesg | grep -i oom`"
        )
    return needed
