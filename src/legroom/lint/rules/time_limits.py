"""Probes and timeouts that end a healthy start, and grace periods that are shorter than the drain."""

from __future__ import annotations

from dataclasses import replace

from legroom.deployments.subjects import StartedServer, TimeLimit
from legroom.exports.deploy.exported_server import planned_server
from legroom.exports.deploy.start_times import IMPORT_S, SAFETY, SHORTEST_ENGINE_S
from legroom.lint.rule import Context, Findings, Rule, checks, finding, flag_word
from legroom.lint.server_plan import ServerPlan, plan_of_server
from legroom.units import human_bytes
from legroom.vllm.args import other_value

START = Rule(
    "start-too-short",
    "warning",
    "A start is called dead before it can be done",
    "A probe or a timeout that is shorter than the load restarts the server forever.",
)
STOP = Rule(
    "stop-too-short",
    "warning",
    "The kill comes before the drain is over",
    "--shutdown-timeout lets running requests end; a shorter grace period kills them, and may leave GPU memory held.",
)
_FASTEST_DISK_BYTES_S, _NVME_BYTES_S = 10e9, 2e9
"""An upper bound of what a server's disks read, and what one local NVMe drive reads."""
_SHORTEST_START_S = IMPORT_S + SHORTEST_ENGINE_S
"""The fastest measured start, without the time to read weights."""


@checks(StartedServer, START)
def start_limit_too_short(server: StartedServer, context: Context) -> Findings:
    limit = server.start_limit
    if limit is None:
        return
    plan = context.plan_of(server)
    own = plan_of_server(server, context.release_of(server)) if plan is None else None
    if own is not None:
        yield from _shorter_than_load(limit, own, is_restarted=server.runs != "compose")
        return
    needed_s, why = float(_SHORTEST_START_S), f"imports alone take about {IMPORT_S} s, and no weights are loaded then"
    if plan is not None:
        times = planned_server(plan).times
        needed_s, why = (times.expected_s, times.sentence()) if times else (needed_s, "")
    if limit.seconds < needed_s:
        about = "about" if plan else "at least"
        message = f"a start is given {limit.seconds:.0f} s and takes {about} {needed_s:.0f} s: {why}"
        suggestion = f"allow at least {2 * needed_s:.0f} s" + ("" if context.plan else "; --plan FILE computes it")
        yield finding(START, limit.place, message, suggestion)


def _shorter_than_load(limit: TimeLimit, own: ServerPlan, is_restarted: bool) -> Findings:
    """Compare the limit with the time to read the weights of the model that the file names."""
    size = own.checkpoint_bytes
    least_s, usual_s = (_SHORTEST_START_S + size / speed for speed in (_FASTEST_DISK_BYTES_S, _NVME_BYTES_S))
    if limit.seconds >= usual_s:
        return
    # Compose only marks the container unhealthy; it keeps serving.
    message = (
        f"a start is given {limit.seconds:.0f} s, and {human_bytes(size)} of weights alone take "
        f"{size / _NVME_BYTES_S:.0f} s from a local NVMe drive, after imports of about {IMPORT_S} s"
    )
    suggestion = f"allow at least {SAFETY * usual_s:.0f} s; --plan FILE computes it"
    found = finding(START, limit.place, message, suggestion)
    yield replace(found, severity="error") if limit.seconds < least_s and is_restarted else found


@checks(StartedServer, STOP)
def stop_limit_too_short(server: StartedServer, context: Context) -> Findings:
    limit, drain_s = server.stop_limit, other_value(context.parsed_args(server).args, "--shutdown-timeout")
    if limit is None or drain_s is None or not drain_s.isdigit() or flag_word(server, "--shutdown-timeout") is None:
        return
    if limit.seconds <= int(drain_s):
        message = f"it is killed {limit.seconds:.0f} s after the stop, --shutdown-timeout drains for {drain_s} s"
        yield finding(STOP, limit.place, message, f"allow at least {int(drain_s) + 30} s")
