"""The alerts on vLLM's metrics: when each fires. Their words are in `alerts.json`, their numbers in the levels."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legroom.exports.prometheus import recording as record
from legroom.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Mapping

    from legroom.exports.prometheus.levels import AlertLevels
    from legroom.exports.prometheus.promql import Measures

SERVER = "job, instance, model_name"
_DAY_S, _HOUR_S, _WEEK_S = 86_400, 3_600, 604_800


@dataclass(frozen=True)
class AlertCondition:
    """When an alert fires."""

    name: str
    expr: str
    for_s: float
    """How long it must hold first; 0: at once."""


@cache
def words() -> Mapping[str, Mapping[str, Any]]:
    """What every alert says, by its name."""
    text = Path(__file__).with_name("alerts.json").read_text("utf-8")
    return json.loads(text)["alerts"]  # type: ignore[no-any-return]


def vllm_conditions(measures: Measures, levels: AlertLevels, job: str) -> tuple[AlertCondition, ...]:
    """The alerts that the release has the metrics for."""
    conditions = [*_pool(measures, levels), *_engine(levels, job), _traffic(levels)]
    targets = (
        ("VllmTimeToFirstTokenHigh", "ttft", levels.ttft_p99_s, levels.ttft_floor_s),
        ("VllmInterTokenLatencyHigh", "inter_token", levels.inter_token_p99_s, levels.inter_token_floor_s),
    )
    conditions += [
        AlertCondition(name, _slow(role, target, floor, levels), levels.latency_for_s)
        for name, role, target, floor in targets
    ]
    return tuple(conditions)


def no_room(levels: AlertLevels) -> str:
    """The pool was full, or one more request like those that ran did not fit it: where requests are large to the pool,
    it is as full as it gets well below 1. The same as the detector of `legroom watch`.

    Looked at over the window of the rates: what a request held is free until the next one is computed, and one look
    into that gap would begin the time of the alert anew.
    """
    use, running = _most(record.KV_USE, levels), _most(record.RUNNING, levels)
    one_more = f"{use} * (1 + 1 / {running}) > 1"
    return f"({use} >= {levels.detect.pool_full_ratio:g} or ({use} > 0.5 and {one_more}))"


def _most(name: str, levels: AlertLevels) -> str:
    return f"max_over_time({name}[{levels.time(levels.rate_window_s)}])"


def _pool(measures: Measures, levels: AlertLevels) -> list[AlertCondition]:
    counted = measures.has("preemptions")  # not before 0.5.5
    detect = levels.detect
    full = no_room(levels)
    suffering = f"{record.QUEUED} > 0"
    if counted:
        suffering += f" or {record.PREEMPTIONS} >= {levels.preemptions_least_per_s:g}"
    per_running = f"{record.QUEUED} >= {detect.queue_per_running_ratio:g} * {record.RUNNING}"
    long = f"{record.QUEUED} >= {detect.queue_least:g} and {per_running}"
    slow = f"{record.QUEUED} > {detect.queue_wait_s:g} * {record.FINISHED}"
    conditions = [
        AlertCondition("VllmKvPressure", f"{full}\nand\n({suffering})", detect.alert_pool_for_s),
        AlertCondition("VllmKvPressureCritical", f"{full}\nand\n({long} and {slow})", levels.critical_for_s),
        AlertCondition("VllmQueueBacklog", f"({long} and {slow})\nunless\n{no_room(levels)}", detect.alert_queue_for_s),
    ]
    if counted:
        # A server that finishes nothing at all still gets a ratio: one request in ten minutes.
        ratio = f"{record.PREEMPTIONS} / clamp_min({record.FINISHED}, 1 / 600)"
        many = f"{record.PREEMPTIONS} >= {detect.alert_preemptions_per_s:g}"
        expr = f"{ratio} >= {detect.preemptions_per_request:g}\nand\n{many}"
        conditions.append(AlertCondition("VllmPreemptionThrash", expr, detect.alert_preemption_for_s))
    return conditions


def _engine(levels: AlertLevels, job: str) -> list[AlertCondition]:
    there = f"{record.RUNNING} + {record.WAITING} > 0"
    # A prompt counts with its first output (0.32): through one long prefill only the blocks it takes move.
    still = f"changes({record.KV_USE}[{levels.time(levels.rate_window_s)}]) == 0"
    stuck = f"({there})\nand\n{record.PROGRESS} == 0\nand\n{still}"
    return [
        AlertCondition("VllmEngineStuck", stuck, levels.detect.alert_stuck_for_s),
        AlertCondition("VllmCrashLoop", f"{record.RESTARTS} >= {levels.detect.crash_restarts}", 0),
        AlertCondition("VllmDown", f'up{{job="{job}"}} == 0', levels.down_for_s),
    ]


def _traffic(levels: AlertLevels) -> AlertCondition:
    """Nothing to do, while other servers of the model have requests or where this one had some a week ago."""
    served = f"sum by ({SERVER}) ({record.FINISHED_COUNT})"
    week = f"sum by ({SERVER}) ({record.FINISHED_COUNT} offset {levels.time(_WEEK_S)}) >= {levels.traffic_least:g}"
    busiest = f"max by (job, model_name) ({served})"
    others = f"0 * {served} + on (job, model_name) group_left () {busiest} >= {levels.traffic_least:g}"
    idle = f"sum by ({SERVER}) ({record.RUNNING} + {record.WAITING}) == 0"
    expr = f"(\n{week}\nor\n{others}\n)\nand\n{served} == 0\nand\n{idle}"
    return AlertCondition("VllmTrafficStopped", expr, levels.rate_window_s)


def _slow(role: str, target_s: float | None, floor_s: float, levels: AlertLevels) -> str:
    p99 = record.latency(role, "p99")
    enough = f"{record.observed(role)} >= {levels.latency_least}"
    if target_s is not None:
        return f"{p99} > {target_s:g}\nand\n{enough}"
    day, hour = levels.time(_DAY_S), levels.time(_HOUR_S)
    usual = f"quantile_over_time(0.5, {p99}[{day}] offset {hour})"
    return f"{p99} > {floor_s:g}\nand\n{p99} > {levels.latency_factor:g} * {usual}\nand\n{enough}"
