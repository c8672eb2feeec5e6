"""The alerts on legroom's own metrics: the guard's, the sidecar's, and those from inside the workers.

A rule over a metric that nobody exposes never fires, so these are written whether or not the guard or the sidecar runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.exports.prometheus.alerts import AlertCondition

if TYPE_CHECKING:
    from legroom.exports.prometheus.levels import AlertLevels

GUARD = "by (job, instance)"
NO_ROOM = "queue_full|queue_timeout"
"""Reasons of `legroom_guard_rejected_total` that say the pool, not the request, was the limit."""
UPSTREAM = "upstream_down|upstream_timeout"
UNSEEN_KINDS = ("fragmentation", "memory_creep", "plan_drift", "prefix_cache_waste")
"""Incidents of the sidecar that no rule over vLLM's metrics can see."""


def own_conditions(levels: AlertLevels) -> tuple[AlertCondition, ...]:
    return (*_memory(levels), *_guard(levels), *_sidecar(levels))


def turned_away(window: str, keep: str = GUARD, selector: str = "") -> str:
    """The share of requests that the guard refused for want of room."""
    more = f", {selector}" if selector else ""
    matching = f"{{{selector}}}" if selector else ""
    refused = f'sum {keep} (rate(legroom_guard_rejected_total{{reason=~"{NO_ROOM}"{more}}}[{window}]))'
    admitted = f"sum {keep} (rate(legroom_guard_admitted_total{matching}[{window}]))"
    return f"{refused} / ({refused} + {admitted} > 0)"


def fragmentation(selector: str = "") -> str:
    """The share of what PyTorch reserves that it has not handed out."""
    matching = f"{{{selector}}}" if selector else ""
    reserved = f"legroom_worker_reserved_bytes{matching}"
    return f"({reserved} - legroom_worker_allocated_bytes{matching}) / ({reserved} > 0)"


def _memory(levels: AlertLevels) -> list[AlertCondition]:
    detect = levels.detect
    window = levels.time(detect.creep_least_hours * 3600)
    used, reserved = 'legroom_worker_used_bytes{gpu!="cpu"}', "legroom_worker_reserved_bytes"
    # The value of two hours ago must be there: a start and its warm-up are no leak.
    growing = f"3600 * deriv({used}[{window}]) >= {detect.creep_bytes_per_h:.0f}\nand\n{used} offset {window}"
    large = f"{reserved} - legroom_worker_allocated_bytes >= {detect.fragmentation_bytes}"
    pieces = f"{fragmentation()} >= {detect.fragmentation_ratio:g}\nand\n{large}"
    return [
        AlertCondition("VllmMemoryCreep", growing, levels.rate_window_s),
        AlertCondition("VllmAllocatorFragmentation", pieces, detect.fragmentation_hold.seconds),
    ]


def _guard(levels: AlertLevels) -> list[AlertCondition]:
    window = levels.time(levels.guard_for_s)
    upstream = f'sum {GUARD} (rate(legroom_guard_rejected_total{{reason=~"{UPSTREAM}"}}[{window}]))'
    broken = f"sum {GUARD} (increase(legroom_guard_policy_reload_errors_total[{levels.time(3600)}]))"
    return [
        AlertCondition(
            "LegroomGuardTurnsAway", f"{turned_away(window)} >= {levels.guard_turned_away_ratio:g}", levels.guard_for_s
        ),
        AlertCondition("LegroomGuardUpstreamDown", f"{upstream} > 0", levels.detect.alert_unreachable_for_s),
        AlertCondition("LegroomGuardFailsOpen", f"max {GUARD} (legroom_guard_fail_open) == 1", levels.guard_for_s),
        AlertCondition("LegroomGuardDraining", f"max {GUARD} (legroom_guard_draining) == 1", levels.drain_for_s),
        AlertCondition("LegroomGuardPolicyBroken", f"{broken} > 0", 0),
    ]


def _sidecar(levels: AlertLevels) -> list[AlertCondition]:
    kinds = "|".join(UNSEEN_KINDS)
    return [
        AlertCondition(
            "LegroomIncident",
            f'sum by (job, instance, kind) (legroom_incidents_open{{kind=~"{kinds}"}}) > 0',
            levels.detect.alert_unreachable_for_s,
        ),
        AlertCondition(
            "LegroomJournalNotWritable", "max by (job, instance) (legroom_journal_writable) == 0", levels.guard_for_s
        ),
    ]
