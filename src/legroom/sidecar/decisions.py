"""The decision about an incident and the flags a restart would change, for the sidecar and for its dry run."""

from __future__ import annotations

from collections.abc import Sequence

from legroom.actions.platform import FlagChange
from legroom.actions.server_drain import PlatformDrain
from legroom.errors import LegroomError
from legroom.facts.flags import flag_name
from legroom.facts.releases import Release, latest
from legroom.live.detectors import Watcher
from legroom.live.remedies import ProposedRemedy
from legroom.planning.plan_document import PlanDocument
from legroom.sidecar.action_policy import RESTARTS, Decision, GroupState, ServerProblem, decide, refuse
from legroom.sidecar.open_incidents import OpenIncident
from legroom.sidecar.watch_config import GroupConfig, ServerConfig
from legroom.vllm.command_line import setting_words

_SCALE_HELPS = ("queue_backlog", "pool_pressure")
_RECENT_S = 300.0
_BY_PEOPLE = frozenset({"model", "tensor_parallel_size", "pipeline_parallel_size"})
"""Settings that legroom never changes by itself."""


def decision_about(
    incident: OpenIncident, watcher: Watcher, server: ServerConfig | None, settings: GroupConfig, group: GroupState
) -> Decision:
    """The policy's decision, limited to actions that this server's platform supports."""
    finding = incident.finding
    assert finding is not None
    problem = ServerProblem(
        incident.server,
        incident.kind,
        restart_helps=finding.restart_helps,
        failing=finding.restart_helps and finding.severity == "critical",
        has_flags=incident.change is not None,
        scale_helps=incident.kind in _SCALE_HELPS,
        expected_drain_s=expected_drain_s(watcher),
    )
    possible = _possible(server, settings.act)
    decision = decide(problem, group, settings.limits, possible)
    if decision.action is not None or possible == settings.act:
        return decision
    wanted = decide(problem, group, settings.limits, settings.act)
    return wanted if wanted.action is None else refuse("impossible", _lacking(incident.server, wanted.action))


def expected_drain_s(watcher: Watcher) -> float | None:
    """Seconds until no request is left: the queue at the present rate, plus the p95 latency."""
    latest, window = watcher.window.latest, watcher.window
    if latest is None or latest.running is None:
        return None
    if not latest.running and not latest.waiting:
        return 0.0
    (longest_s,), rate = window.quantiles("e2e_latency", (0.95,), _RECENT_S), window.rate("finished", _RECENT_S)
    if longest_s is None:
        return None
    return longest_s + (latest.waiting / rate if latest.waiting and rate else 0.0)


def _possible(server: ServerConfig | None, act: frozenset[str]) -> frozenset[str]:
    """The allowed actions that this server supports: restart and scale need a platform, drain a drain method."""
    if server is None or server.platform is None:
        act = act - {*RESTARTS, "scale"}
    can_drain = (
        server is not None and server.drain_method is not None and not isinstance(server.drain_method, PlatformDrain)
    )
    return act if can_drain else act - {"drain"}


def _lacking(server: str, action: str) -> str:
    if action == "drain":
        return f"no way to stop new work at {server} is named, so legroom cannot drain it"
    verb = "restart" if action in RESTARTS else action
    return f"no platform is named for {server}, so legroom cannot {verb} it"


def change_of(remedies: Sequence[ProposedRemedy], plan: PlanDocument | None) -> FlagChange | None:
    """The flags of the first remedy that the server's release accepts; None without a plan."""
    if plan is None:
        return None
    try:
        used = plan.release if plan.vllm else latest()
    except LegroomError:
        return None  # which flags it takes is not known
    changes = (
        _change(remedy, used)
        for remedy in remedies
        if (remedy.flags or remedy.env) and not remedy.flags.keys() & _BY_PEOPLE
    )
    return next((change for change in changes if change is not None), None)


def _change(answer: ProposedRemedy, used: Release) -> FlagChange | None:
    flags: dict[str, str | None] = {}
    for dest, value in answer.flags.items():
        words = setting_words(dest, value, used)
        if words is None or len(words) > 2:
            return None
        name, _, joined = words[0].partition("=") if words else (flag_name(dest), "", None)
        flags[name] = words[1] if len(words) == 2 else joined
    return FlagChange(flags, dict(answer.env))
