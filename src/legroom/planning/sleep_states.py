"""The states of a planned server that may sleep, and their JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from legroom.memory.server_states import ServerState, server_states

if TYPE_CHECKING:
    from legroom.figures import Figure
    from legroom.planning.plan import Plan


def plan_states(plan: Plan, host_bytes_s: float | None = None) -> tuple[ServerState, ...]:
    """What the planned server holds in each state; `host_bytes_s`: how fast the host's memory reaches a card."""
    target = plan.target
    return server_states(target.model, target.gpu, plan.settings, plan.memory, host_bytes_s)


def states_json(states: Sequence[ServerState]) -> list[dict[str, Any]]:
    """The `states` of `legroom plan --sleep --json`."""
    return [
        {
            "state": state.name,
            "device_bytes": state.device.bytes,
            "device": _figure(state.device),
            "host_bytes": state.host.bytes,
            "host": _figure(state.host),
            "wake_s": state.wake_s,
        }
        for state in states
    ]


def _figure(figure: Figure) -> dict[str, Any]:
    terms = [{"label": term.label, "bytes": term.bytes, "how": term.how} for term in figure.terms]
    return {"kind": figure.kind, "low": figure.low, "high": figure.high, "terms": terms}
