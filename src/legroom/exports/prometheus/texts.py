"""An alert's sentences with their values: what Prometheus fills in when it fires, and the levels when it is written."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from legroom.exports.prometheus import recording as record
from legroom.exports.prometheus.levels import duration
from legroom.units import human_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from legroom.exports.prometheus.levels import AlertLevels
    from legroom.planning.plan_document import PlanDocument

_SLOT = re.compile(r"<([a-z0-9_]+)>")
_RATE = 'printf "%.2f"'
"""Where `humanize` would say 100m for a tenth."""
WHERE = (
    "{{ $labels.model_name }} on {{ $labels.instance }}"
    '{{ with $labels.engine }}{{ if ne . "0" }}, engine {{ . }}{{ end }}{{ end }}'
)
"""A server with one engine calls it 0."""


def fill(text: str, slots: Mapping[str, str]) -> str:
    """`<name>` becomes its slot; a name that is no slot is a mistake in the data."""
    return _SLOT.sub(lambda match: slots[match[1]], text)


def level_words(levels: AlertLevels) -> dict[str, str]:
    """The levels as a sentence says them, in real time."""
    detect = levels.detect
    return {
        "pool_full": f"{detect.pool_full_ratio:.0%}",
        "preemptions_least": f"{detect.preemptions_least:g}",
        "preemption_over": duration(detect.preemption_over_s),
        "preemptions_per_request": f"{detect.preemptions_per_request:g}",
        "preemptions_per_s": f"{detect.alert_preemptions_per_s:g}",
        "queue_least": f"{detect.queue_least:g}",
        "queue_wait": f"{detect.queue_wait_s:g} s",
        "stuck_for": duration(levels.rate_window_s + detect.alert_stuck_for_s),
        "restarts": str(detect.crash_restarts),
        "restart_window": duration(detect.crash_over_s),
        "down_for": duration(levels.down_for_s),
        "traffic_window": duration(detect.no_traffic_s),
        "creep_per_hour": human_bytes(detect.creep_bytes_per_h),
        "creep_hours": f"{detect.creep_least_hours:g} hours",
        "fragmentation": f"{detect.fragmentation_ratio:.0%}",
        "fragmentation_least": human_bytes(detect.fragmentation_bytes),
        "turned_away": f"{levels.guard_turned_away_ratio:.0%}",
        "drain_for": duration(levels.drain_for_s),
        "ttft_level_words": _target(levels.ttft_p99_s, levels.ttft_floor_s, levels),
        "inter_token_level_words": _target(levels.inter_token_p99_s, levels.inter_token_floor_s, levels),
    }


def alert_slots(levels: AlertLevels, plan: PlanDocument | None = None) -> dict[str, str]:
    """The levels, and what Prometheus looks up when the alert fires."""
    return {
        **level_words(levels),
        **_planned(plan),
        "where": WHERE,
        "value": "{{ $value | humanize }}",
        "rate": "{{ $value | " + _RATE + " }}",
        "percent": "{{ $value | humanizePercentage }}",
        "size": "{{ $value | humanize1024 }}B",
        "seconds": "{{ $value | humanizeDuration }}",
        "waiting": looked_up(record.QUEUED),
        "running": looked_up(record.RUNNING),
        "preemptions": looked_up(record.PREEMPTIONS, _RATE),
    }


def _planned(plan: PlanDocument | None) -> dict[str, str]:
    """What the plan says of the pool and the batch, as a sentence to add; nothing without a plan, nor of a pool that
    the model does not have."""
    if plan is None:
        return {"plan_pool": "", "plan_batch": ""}
    full = f"{plan.kv.max_concurrency:.1f} requests of {plan.args['max_model_len']:,} tokens"
    each = " of an engine" if plan.engines > 1 else ""
    pool = f" By the plan the pool{each} holds {plan.kv.tokens:,} tokens: {full}."
    return {
        "plan_pool": pool if plan.kv.num_blocks else "",
        "plan_batch": f" By the plan {plan.args['max_num_seqs']:,}{each} may run at once (--max-num-seqs).",
    }


def looked_up(name: str, shown: str = "humanize") -> str:
    """A template that shows the value of another series of the same server; nothing known of it shows as 0."""
    labels = ("job", "instance", "model_name", "engine")
    selector = ",".join(f"{label}=%q" for label in labels)
    values = " ".join(f"$labels.{label}" for label in labels)
    query = f'printf "{name}{{{selector}}}" {values} | query'
    return f"{{{{ with {query} }}}}{{{{ . | first | value | {shown} }}}}{{{{ else }}}}0{{{{ end }}}}"


def _target(target_s: float | None, floor_s: float, levels: AlertLevels) -> str:
    if target_s is not None:
        return f"the target is {_seconds(target_s)}"
    return f"more than {levels.latency_factor:g} times its own day before, and more than {_seconds(floor_s)}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:g} ms" if seconds < 1 else f"{seconds:g} s"
