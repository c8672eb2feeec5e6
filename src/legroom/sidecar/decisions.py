"""The decision about an incident, asked of the policy in the same way while watching and while rehearsing."""

from __future__ import annotations

from legroom.actions.drain import PlatformDrain
from legroom.live.detectors import Watcher
from legroom.sidecar.config import GroupConfig, ServerConfig
from legroom.sidecar.incidents import OpenIncident
from legroom.sidecar.policy import RESTARTS, Decision, GroupState, Trouble, decide, refuse

_SCALE_HELPS = ("queue_backlog", "pool_pressure")
_RECENT_S = 300.0


def decision_about(
    incident: OpenIncident, watcher: Watcher, server: ServerConfig | None, settings: GroupConfig, group: GroupState
) -> Decision:
    """What to do about an incident that is seen now, with what can be done to this server."""
    finding = incident.finding
    assert finding is not None  # nothing is asked about what was not seen again
    trouble = Trouble(
        incident.server,
        incident.kind,
        restart_helps=finding.restart_helps,
        failing=finding.restart_helps and finding.severity == "critical",
        has_flags=incident.change is not None,
        scale_helps=incident.kind in _SCALE_HELPS,
        expected_drain_s=expected_drain_s(watcher),
    )
    possible = _possible(server, settings.act)
    decision = decide(trouble, group, settings.limits, possible)
    if decision.action is not None or possible == settings.act:
        return decision
    wanted = decide(trouble, group, settings.limits, settings.act)
    return wanted if wanted.action is None else refuse("impossible", _lacking(incident.server, wanted.action))


def expected_drain_s(watcher: Watcher) -> float | None:
    """Until nothing runs any more: the queue at the present rate, then the slow end of the requests themselves."""
    latest, window = watcher.window.latest, watcher.window
    if latest is None or latest.running is None:
        return None
    if not latest.running and not latest.waiting:
        return 0.0
    longest_s, rate = window.quantile("e2e_latency", 0.95, _RECENT_S), window.rate("finished", _RECENT_S)
    if longest_s is None:
        return None
    return longest_s + (latest.waiting / rate if latest.waiting and rate else 0.0)


def _possible(server: ServerConfig | None, act: frozenset[str]) -> frozenset[str]:
    """A server that Prometheus or Kubernetes lists has neither a platform nor a way to be drained: it is only reported.

    A platform that drains by itself does so when it restarts, and cannot keep work from a server that goes on.
    """
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
