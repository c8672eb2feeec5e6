"""Shell lines that let running requests end before a server is told to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.exports.deploy.times import ENDPOINT_S
from legroom.facts.metrics import name_of

if TYPE_CHECKING:
    from legroom.exports.deploy.server import ExportedServer

_TURN_S = 2


def guard_drain(server: ExportedServer) -> str:
    """Tell the guard to turn new requests away, then wait until nothing runs; no wait where it does not answer."""
    bearer = '-H "Authorization: Bearer $LEGROOM_GUARD_TOKEN"'
    on = """-H "Content-Type: application/json" -d '{"on": true}'"""
    drain, status = (server.address.curl(f"/-/legroom/{what}") for what in ("drain", "status"))
    return (
        f"""{drain} -X POST {bearer} {on} """
        f"""|| exit 0; for turn in $(seq {_turns(server)}); do {status} {bearer} """
        f"""| grep -Eq '"running": *0[^0-9]' && exit 0; sleep {_TURN_S}; done"""
    )


def metrics_drain(server: ExportedServer) -> str:
    """Wait until routers know that it leaves, then until vLLM's own metrics say that nothing runs."""
    running = name_of("running", server.release, _engine(server)) or "vllm:num_requests_running"
    waiting = name_of("waiting", server.release, _engine(server)) or "vllm:num_requests_waiting"
    return (
        f"sleep {ENDPOINT_S}; for turn in $(seq {_turns(server)}); do "
        f"{server.address.curl('/metrics')} | grep -E '^({running}|{waiting})[{{ ]' "
        f"| grep -Eqv ' 0(\\.0)?$' || exit 0; sleep {_TURN_S}; done"
    )


def _turns(server: ExportedServer) -> int:
    return max((server.times.drain_s if server.times else 0) // _TURN_S, 1)


def _engine(server: ExportedServer) -> str:
    return "v0" if server.plan and server.plan.args.get("engine") == "V0" else "v1"
