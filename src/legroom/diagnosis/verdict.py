"""A diagnosis: the causes of one run weighed, their fixes vetted, the known bugs of the release, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from legroom.diagnosis.case import BOILERPLATE, FAILING, Case
from legroom.diagnosis.causes import Cause, cause_of, causes
from legroom.diagnosis.finding import Assessment, Finding, Fix, proof
from legroom.diagnosis.fixes.failed_run import Hints
from legroom.diagnosis.fixes.fix_planner import FixPlanner
from legroom.diagnosis.fixes.hardware_fixes import other_hardware
from legroom.errors import LegroomError
from legroom.facts.flags import env_history, env_names, flags_of
from legroom.facts.known_bugs import KnownBug, bugs_with
from legroom.records import dataclass
from legroom.units import gib
from legroom.vllm.args import ServeArgs

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
    notes: tuple[str, ...] = ()
    """How what the user said beside the log was read."""

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
    return Diagnosis(case, _verdict(case, findings), findings, _notes(planner) if findings else ())


def _notes(planner: FixPlanner) -> tuple[str, ...]:
    """Which card was meant, where the log names none or its name leaves that open, and it prints no total."""
    card, total = planner.known.gpu, planner.known.total_bytes
    if planner.known.total_deduced and total:
        return (f"The log does not name the GPU; its own numbers add up to a card of {gib(total)}.",)
    if card is None or not card.larger:
        return ()
    # Planning takes the larger card of a name where the smaller one cannot hold the weights.
    card = planner.base.target.gpu if planner.base is not None else card
    return (card.note,)


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
    fixes = _vetted(planner, cause.remedies(planner))[:MOST_FIXES]
    if cause.domain == "gpu" and not fixes:
        fixes = (other_hardware(planner),)  # no lever is left that the numbers of this log do not refuse
    finding = Finding(
        cause.label,
        _entry(cause, assessment),
        assessment.confidence,
        assessment.evidence,
        assessment.why,
        fixes,
        cause.dead_ends,
    )
    return _with_known_bugs(finding, planner)


def _entry(cause: Cause, assessment: Assessment) -> str:
    """Several entries of the catalog may be about one cause: the one whose messages these are, else the cause's own."""
    from legroom.explain.catalog_entries import best_entry  # reads the catalog

    message_ids = frozenset(evidence.id for evidence in assessment.evidence)
    try:
        return best_entry(cause.label, message_ids, cause.entry).id
    except LegroomError:
        return cause.entry  # a record that the user imported cannot be read; that is not this log's trouble


def _verdict(case: Case, findings: tuple[Finding, ...]) -> Verdict:
    unsaid = _needed(case) and (case.last_error is None or _is_placeless(case))
    if findings and not (unsaid and findings[0].confidence < _SURE_WITHOUT_ERROR):
        return "not a memory problem" if cause_of(findings[0].cause).domain == "other" else "cause found"
    if unsaid:
        return "cause above"
    if case.is_up:
        return "no problem found"
    return "cause above" if case.startup.vllm or case.startup.args_known else "not understood"


def _is_placeless(case: Case) -> bool:
    """Memory of the card ran out, and neither a frame nor a start-up line tells during what."""
    return case.is_oom and not case.site


def _needed(case: Case) -> list[str]:
    """The lines that would decide, by what this text ends with."""
    needed = []
    broken, echo, stop = case.broken_traceback, case.echo, case.stops_short
    if case.broken_message is not None:
        needed.append(f"the rest of line {case.broken_message.line}: the error breaks off in the middle")
    elif broken is not None:
        needed.append(f"the rest of the traceback at line {broken.line}: its last line names the error")
    if _is_placeless(case):
        needed.append(
            "the lines above the error: frames (load_model, profile_run, capture_model, execute_model) or the last "
            "line of the start-up tell whether memory ran out while loading, profiling, capturing graphs or serving"
        )
        return needed
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


_SHOWS_BY_ITSELF = frozenset({"leak_over_time"})
"""Causes that are bugs as a rule; for others a bug may be one reason among several."""
_MOST_BUGS = 2


def _with_known_bugs(finding: Finding, planner: FixPlanner) -> Finding:
    """The finding with the bugs of its release named, and how to be rid of them; as it is where none fits."""
    bugs = _bugs_of(finding, planner)
    if not bugs:
        return finding
    version = planner.known.release.version
    bug_notes = " ".join(
        f"vLLM {version} has a known bug here: {bug.title} ({bug.source}). {bug.effect}" for bug in bugs
    )
    fixes = [fix for bug in bugs if (fix := _bug_fix(bug, finding))]
    # A bug that the log itself proves, or that is the usual reason, goes first; elsewhere what the plan computed does.
    sure = finding.cause in _SHOWS_BY_ITSELF or any(bug.evidence for bug in bugs)
    ordered = (*fixes, *finding.fixes) if sure else (*finding.fixes, *fixes)
    return replace(finding, why=f"{finding.why} {bug_notes}", fixes=ordered)


def _bugs_of(finding: Finding, planner: FixPlanner) -> list[KnownBug]:
    known = planner.known
    if not known.release_known:
        return []
    platform = known.gpu.vendor if known.gpu else _logged_platform(planner)
    bugs = [
        bug
        for bug in bugs_with(known.release, known.args, platform)
        if finding.cause in bug.causes
        and (not bug.evidence or planner.case.has(*bug.evidence))
        and _specific(bug, finding, planner)
    ]
    return bugs[:_MOST_BUGS]


def _specific(bug: KnownBug, finding: Finding, planner: FixPlanner) -> bool:
    """Whether more than the release speaks for it: growth, a message, a setting, or the kind of model."""
    if finding.cause in _SHOWS_BY_ITSELF or bug.evidence or (bug.settings and "not off" not in bug.settings.values()):
        return True
    base = planner.base
    if bug.model and base is not None:
        from legroom.planning.plan_notes import traits_of  # only where the deployment is known

        groups = {"several kv groups"} if len(base.memory.kv.groups) > 1 else set()
        return set(bug.model) <= traits_of(base.target.model) | groups and bug.memory == "gpu"
    return bool(bug.platform)


def _logged_platform(planner: FixPlanner) -> str | None:
    if planner.case.has("cpu_below_desired", "cpu_kv_short"):
        return "cpu"
    return None


def _bug_fix(bug: KnownBug, finding: Finding) -> Fix | None:
    steps = tuple(step for step in (bug.upgrade_step, *bug.steps) if step)
    if not steps and not bug.env:
        return None
    until = "Until then" if bug.fixed_in else "Avoid it"
    variables = " ".join(f"{name}={value}" for name, value in bug.env.items())
    if variables:
        steps = (*steps, f"{until}: {variables} before the same command")
    fixed = f"The bug is fixed in {bug.fixed_in}." if bug.fixed_in else "The bug is open; avoid what sets it off."
    return Fix(
        "engine_version_or_V0", fixed, steps=steps, confidence=0.6 if finding.cause in _SHOWS_BY_ITSELF else 0.45
    )


_NOT_OF_MEMORY = frozenset({"flag", "report", "driver", "request", "disable_custom_allreduce_or_nccl_env"})

_NOT_MOVED_UP = frozenset({"more_or_fewer_gpus_tp_pp", "cpu_offload"})
"""Kinds that are not put first for their certainty: GPUs that may not be there, and weights that every step fetches."""


def _vetted(planner: FixPlanner, fixes: Iterable[Fix | None]) -> tuple[Fix, ...]:
    """The fixes that hold, in their order, but for the first: it has to start across the band, if one does that
    may be put first for it."""
    passed = [checked for fix in fixes if fix is not None and (checked := _checked(planner, fix))]
    if passed and _is_doubtful(passed[0]):
        sure = next((fix for fix in passed if _is_sure(fix)), None)
        passed = [sure, *(fix for fix in passed if fix is not sure)] if sure else passed
    return tuple(passed)


def _is_doubtful(fix: Fix) -> bool:
    return fix.plan is not None and fix.plan.verdict == "tight" and not fix.proven


def _is_sure(fix: Fix) -> bool:
    if fix.kind in _NOT_MOVED_UP:
        return False
    return fix.proven or (fix.plan is not None and not _is_doubtful(fix))


def _checked(planner: FixPlanner, fix: Fix) -> Fix | None:
    """The fix with its command and plan; None where the release, the run or the memory model speaks against it."""
    if not (fix.flags or fix.env):
        return fix
    if fix.kind != "flag" and (not _release_takes(planner, fix) or _in_force(planner, fix)):
        return replace(fix, flags={}, env={}, command=()) if fix.steps and not fix.flags else None
    planned = fix if fix.kind in _NOT_OF_MEMORY else _planned(planner, fix)
    if planned is None:
        return None
    line = planned.command or planner.command(planned.flags, planned.env)
    return replace(planned, command=line, comment=planner.known.rebuilt.remark(planned.flags, planned.env))


def _release_takes(planner: FixPlanner, fix: Fix) -> bool:
    """Whether the release has every flag and variable of a fix; yes where the release is not known."""
    if not planner.known.release_known:
        return True
    release = planner.known.release
    dests = {flag.dest for flag in flags_of(release).values()}
    if any(value is not None and name not in dests for name, value in fix.flags.items()):
        return False
    return all(name in env_names(release) for name in fix.env if env_history(name) is not None)


def _in_force(planner: FixPlanner, fix: Fix) -> bool:
    """Whether the server already ran like this."""
    given = planner.given_args
    flags = all(
        name in ServeArgs.__dataclass_fields__ and getattr(given, name) == value for name, value in fix.flags.items()
    )
    return flags and all(given.env.get(name) == value for name, value in fix.env.items())


def _planned(planner: FixPlanner, fix: Fix) -> Fix | None:
    """The fix with its plan; None where the memory model, or the log's own numbers, refuse it."""
    memory_flags = {name: value for name, value in fix.flags.items() if name in ServeArgs.__dataclass_fields__}
    if fix.plan is not None or fix.proven or not memory_flags:
        return fix
    if planner.base is not None:
        made = planner.plan_with(memory_flags)
        return None if made is None else replace(fix, plan=made, before=planner.base.layout)
    return None if planner.accounting.refuses(memory_flags) else fix
