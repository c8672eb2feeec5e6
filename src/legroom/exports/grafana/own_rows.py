"""The dashboard's rows on legroom's own metrics: the guard's, the sidecar's, and those from inside the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.exports.grafana.panels import BY_INSTANCE, WINDOW, DashboardRow, Panel, Query
from legroom.exports.prometheus.alerts import NO_ROOM_REASONS, fragmentation, turned_away

if TYPE_CHECKING:
    from legroom.exports.prometheus.alert_levels import AlertLevels


def own_rows(levels: AlertLevels) -> tuple[DashboardRow, ...]:
    """Each says what must run for it to have data."""
    return (_guard(levels), _watch(), _workers(levels))


def _guard(levels: AlertLevels) -> DashboardRow:
    return DashboardRow("Guard", (*_admission(levels), *_inside()), "legroom.guard.Guard or legroom guard")


_BY_GUARD = f"sum {BY_INSTANCE}"


def _admission(levels: AlertLevels) -> tuple[Panel, ...]:
    return (
        Panel(
            "Admitted and refused",
            "Requests per second that reached the guard. No room means 429 with Retry-After; the others exceeded a "
            "limit of the policy.",
            (
                Query(f"{_BY_GUARD} (rate(legroom_guard_admitted_total[{WINDOW}]))", "admitted {{instance}}"),
                Query(
                    f'{_BY_GUARD} (rate(legroom_guard_rejected_total{{reason=~"{NO_ROOM_REASONS}"}}[{WINDOW}]))',
                    "no room {{instance}}",
                ),
                Query(
                    f'{_BY_GUARD} (rate(legroom_guard_rejected_total{{reason!~"{NO_ROOM_REASONS}"}}[{WINDOW}]))',
                    "refused {{instance}}",
                ),
            ),
            "reqps",
            "timeseries",
            8,
        ),
        Panel(
            "Share refused for lack of room",
            "Of all requests that kept to the limits of the policy.",
            (Query(turned_away(WINDOW, BY_INSTANCE), "{{instance}}"),),
            "percentunit",
            "timeseries",
            8,
            ((levels.guard_turned_away_ratio, "red"),),
            1.0,
        ),
    )


def _inside() -> tuple[Panel, ...]:
    waits = f"rate(legroom_guard_wait_seconds_bucket[{WINDOW}])"
    wait = f"histogram_quantile(0.99, sum by (le, cluster, namespace, job, instance) ({waits})) >= 0"
    return (
        Panel(
            "Reserved of the pool",
            "Tokens that admitted requests may grow to, compared with what the guard may hand out.",
            (
                Query(f"{_BY_GUARD} (legroom_guard_reserved_tokens)", "reserved {{instance}}"),
                Query(f"{_BY_GUARD} (legroom_guard_queued_tokens)", "queued {{instance}}"),
                Query(f"{_BY_GUARD} (legroom_guard_pool_tokens)", "pool {{instance}}"),
            ),
            "short",
            "timeseries",
            8,
        ),
        Panel(
            "Wait for admission",
            "99th percentile of how long admitted requests waited.",
            (Query(wait, "p99 {{instance}}"),),
            "s",
            "timeseries",
            12,
        ),
        Panel(
            "Requests inside and waiting",
            "As the guard counts them, and whether it is draining.",
            (
                Query(f"{_BY_GUARD} (legroom_guard_running)", "inside {{instance}}"),
                Query(f"{_BY_GUARD} (legroom_guard_waiting)", "waiting {{instance}}"),
                Query(f"max {BY_INSTANCE} (legroom_guard_draining)", "draining {{instance}}"),
            ),
            "short",
            "timeseries",
            12,
        ),
    )


def _watch() -> DashboardRow:
    return DashboardRow(
        "legroom watch",
        (
            Panel(
                "Open incidents",
                "What the sidecar's detectors have found and that is not over yet, by kind.",
                (Query("sum by (cluster, namespace, job, kind) (legroom_incidents_open)", "{{kind}}"),),
                "short",
                "timeseries",
                8,
            ),
            Panel(
                "Healthy servers",
                "1: the server answered the last scrape and nothing critical was found.",
                (Query("min by (cluster, namespace, job, server) (legroom_server_healthy)", "{{server}}"),),
                "short",
                "timeseries",
                8,
                (),
                1.0,
            ),
            Panel(
                "Scrapes",
                "Scrapes of servers per second, by result.",
                (
                    Query(
                        f"sum by (cluster, namespace, job, result) (rate(legroom_looks_total[{WINDOW}]))", "{{result}}"
                    ),
                ),
                "short",
                "timeseries",
                8,
            ),
        ),
        "legroom watch --daemon",
    )


def _workers(levels: AlertLevels) -> DashboardRow:
    return DashboardRow(
        "Inside the workers",
        (
            Panel(
                "Memory in use",
                "What the card shows as used, by worker; without a GPU, what the worker's process holds. The KV pool "
                "is part of it and never changes: growth is something else.",
                (Query("legroom_worker_used_bytes", "{{instance}} {{rank}}"),),
                "bytes",
            ),
            Panel(
                "Allocator fragmentation",
                "Share of what PyTorch reserves that is not in use.",
                (Query(fragmentation(), "{{instance}} {{rank}}"),),
                "percentunit",
                "timeseries",
                12,
                ((levels.detect.fragmentation_ratio, "orange"),),
                1.0,
            ),
        ),
        "LEGROOM_WORKER_MEMORY=1 where legroom is installed beside vLLM",
    )
