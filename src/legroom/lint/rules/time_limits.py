"""Probes and timeouts that end a healthy start, and grace periods that are shorter than the drain."""

from __future__ import annotations

from dataclasses import replace

from legroom.deployments.subjects import StartedServer
from legroom.exports.deploy.exported_server import planned_server
from legroom.exports.deploy.start_times import IMPORT_S, SAFETY, SHORTEST_ENGINE_S
from legroom.lint.rule import Context, Findings, Rule, checks, finding, flag_word
from legroom.lint.server_plan import plan_of_server
from legroom.planning.plan_json import plan_document
from legroom.units import human_bytes
from legroom.vllm.args import other_value

_WHY_START = "A probe or a timeout that is shorter than the load restarts the server forever."
START = Rule("start-too-short", "warning", "A start is called dead before it can be done", _WHY_START)
_WHY_STOP = (
    "--shutdown-timeout lets running requests end; a shorter grace period kills them, and may leave GPU memory held."
)
STOP = Rule("stop-too-short", "warning", "The kill comes before the drain is over", _WHY_STOP)
_FASTEST_DISK_BYTES_S, _NVME_BYTES_S = 10e9, 2e9
"""An upper bound of what a server's disks read, and what one local NVMe drive reads."""
_SHORTEST_START_S = IMPORT_S + SHORTEST_ENGINE_S
"""The fastest measured start, without the time to read weights."""


@checks(StartedServer, START)
def start_limit_too_short(server: StartedServer, context: Context) -> Findings:
    """A startup probe or start timeout that is shorter than the server's expected start."""
    limit = server.start_limit
    if limit is None:
        return
    plan, own = context.plan_of(server), plan_of_server(server, context.release_of(server))
    is_restarted = server.runs != "compose"  # Compose only marks the container unhealthy; it keeps serving.
    size = own.checkpoint_bytes if own is not None else 0
    least_s = _SHORTEST_START_S + size / _FASTEST_DISK_BYTES_S
    needed_s, why = least_s, f"imports alone take about {IMPORT_S} s, and no weights are loaded then"
    if plan is None and own is not None and is_restarted:
        plan = plan_document(own.plan)
    if plan is not None:
        times = planned_server(plan).times
        if "LLMInferenceService" in server.read_as:  # KServe downloads the model in an init container
            times = replace(times, download_bytes_s=0.0)
        needed_s, why = times.expected_s, times.sentence()
    elif size:
        needed_s = _SHORTEST_START_S + size / _NVME_BYTES_S
        why = f"imports take about {IMPORT_S} s, and {human_bytes(size)} are read from a local NVMe drive"
    if limit.seconds < needed_s:
        about = "about" if size or plan else "at least"
        message = f"a start is given {limit.seconds:.0f} s and takes {about} {needed_s:.0f} s: {why}"
        found = finding(START, limit.place, message, f"allow at least {SAFETY * needed_s:.0f} s")
        yield replace(found, severity="error") if size and limit.seconds < least_s and is_restarted else found


@checks(StartedServer, STOP)
def stop_limit_too_short(server: StartedServer, context: Context) -> Findings:
    """A stop timeout that is not longer than --shutdown-timeout."""
    limit, drain_s = server.stop_limit, other_value(context.parsed_args(server).args, "--shutdown-timeout")
    if limit is None or drain_s is None or not drain_s.isdigit() or flag_word(server, "--shutdown-timeout") is None:
        return
    if limit.seconds <= int(drain_s):
        message = f"it is killed {limit.seconds:.0f} s after the stop, --shutdown-timeout drains for {drain_s} s"
        yield finding(STOP, limit.place, message, f"allow at least {int(drain_s) + 30} s")
