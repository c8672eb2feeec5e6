"""Probes and timeouts that end a healthy start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legroom.deployments.subjects import At, StartedServer
from legroom.exports.deploy.server import planned_server
from legroom.exports.deploy.times import IMPORT_S, SAFETY, SHORTEST_ENGINE_S
from legroom.lint.own_plan import OwnPlan, own_plan
from legroom.lint.rule import Context, LintFinding, Rule, Severity, finding
from legroom.units import human_bytes

RULE = Rule(
    "start-too-short",
    "warning",
    "A start is called dead before it can be done",
    "A probe or a timeout that is shorter than the load restarts the server forever.",
)
RULES = (RULE,)
_FASTEST_BYTES_S, _LOCAL_BYTES_S = 10e9, 2e9
"""What no disk of a server reads faster than (weights in the page cache may be), and a local NVMe drive."""
_LEAST_S = IMPORT_S + SHORTEST_ENGINE_S
"""The fastest start, without a single byte of weights."""


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """The limit against the planned load, or against a load of nothing where there is no plan."""
    if not isinstance(subject, StartedServer) or subject.start_limit is None:
        return
    limit = subject.start_limit
    plan = context.plan_of(subject)
    own = own_plan(subject, context.release_of(subject)) if plan is None else None
    if own is not None:
        yield from _by_own_plan(limit, own, is_restarted=subject.runs != "compose")
        return
    if plan is not None:
        times = planned_server(plan).times
        needed, why = (times.expected_s, times.sentence()) if times else (float(_LEAST_S), "")
    else:
        needed = float(_LEAST_S)
        why = f"imports alone take about {IMPORT_S} s, and no weights are loaded then"
    if limit.value < needed:
        about = "about" if plan else "at least"
        message = f"a start is given {limit.value:.0f} s and takes {about} {needed:.0f} s: {why}"
        suggestion = f"allow at least {2 * needed:.0f} s" + ("" if context.plan else "; --plan FILE computes it")
        yield finding(RULE, limit.place, message, suggestion)


def _by_own_plan(limit: At, own: OwnPlan, is_restarted: bool) -> Iterator[LintFinding]:
    """Against the weights of the model that the file itself names."""
    size = own.checkpoint_bytes
    least, usual = (_LEAST_S + size / speed for speed in (_FASTEST_BYTES_S, _LOCAL_BYTES_S))
    if limit.value >= usual:
        return
    # Compose only calls the container unhealthy; what waits for it may give up, and it serves all the same.
    severity: Severity = "error" if limit.value < least and is_restarted else "warning"
    message = (
        f"a start is given {limit.value:.0f} s, and {human_bytes(size)} of weights alone take "
        f"{size / _LOCAL_BYTES_S:.0f} s from a local NVMe drive, after imports of about {IMPORT_S} s"
    )
    suggestion = f"allow at least {SAFETY * usual:.0f} s; --plan FILE computes it"
    yield finding(RULE, limit.place, message, suggestion, severity=severity)
