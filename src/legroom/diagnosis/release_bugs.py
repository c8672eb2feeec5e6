"""Where the release itself is at fault: the known bug behind a finding, and the release or setting that avoids it."""

from __future__ import annotations

from dataclasses import replace

from legroom.diagnosis.finding import Finding, Fix
from legroom.diagnosis.fix_planner import FixPlanner
from legroom.facts.known_bugs import KnownBug, bugs_with

_SHOWS_BY_ITSELF = frozenset({"leak_over_time"})
"""Causes that are bugs as a rule; for others a bug may be one reason among several."""
_MOST_BUGS = 2


def with_known_bugs(finding: Finding, planner: FixPlanner) -> Finding:
    """The finding with the bugs of its release named, and how to be rid of them; as it is where none fits."""
    bugs = _bugs_of(finding, planner)
    if not bugs:
        return finding
    version = planner.known.release.version
    told = " ".join(f"vLLM {version} has a known bug here: {bug.title} ({bug.source}). {bug.effect}" for bug in bugs)
    fixes = [fix for bug in bugs if (fix := _fix(bug, finding))]
    # A bug that the log itself proves, or that is the usual reason, goes first; elsewhere what the plan computed does.
    sure = finding.cause in _SHOWS_BY_ITSELF or any(bug.evidence for bug in bugs)
    ordered = (*fixes, *finding.fixes) if sure else (*finding.fixes, *fixes)
    return replace(finding, why=f"{finding.why} {told}", fixes=ordered)


def _bugs_of(finding: Finding, planner: FixPlanner) -> list[KnownBug]:
    known = planner.known
    if not known.release_known:
        return []
    platform = known.gpu.vendor if known.gpu else _platform(planner)
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
        from legroom.planning.notes import traits_of  # noqa: PLC0415 - only where the deployment is known

        groups = {"several kv groups"} if len(base.memory.kv.groups) > 1 else set()
        return set(bug.model) <= traits_of(base.target.model) | groups and bug.memory == "gpu"
    return bool(bug.platform)


def _platform(planner: FixPlanner) -> str | None:
    if planner.case.has("cpu_below_desired", "cpu_kv_short"):
        return "cpu"
    return None


def _fix(bug: KnownBug, finding: Finding) -> Fix | None:
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
