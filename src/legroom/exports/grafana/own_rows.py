"""The dashboard's rows of legroom's metrics: the guard, the sidecar and the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.exports.grafana.panels import BY_INSTANCE, WINDOW, DashboardRow, Panel
from legroom.exports.prometheus.alerts import NO_ROOM_REASONS, fragmentation, turned_away

if TYPE_CHECKING:
    from legroom.exports.prometheus.alert_levels import AlertLevels


def own_rows(levels: AlertLevels) -> tuple[DashboardRow, ...]:
    """The rows of the guard, the sidecar and the workers."""
    return (_guard(levels), _watch(), _workers(levels))


def _guard(levels: AlertLevels) -> DashboardRow:
    return DashboardRow("Guard", (*_admission(levels), *_inside()), "legroom.guard.Guard or legroom guard")


_BY_GUARD = f"sum {BY_INSTANCE}"


def _rejected(matches: str) -> str:
    return f'{_BY_GUARD} (rate(legroom_guard_rejected_total{{reason{matches}"{NO_ROOM_REASONS}"}}[{WINDOW}]))'


def _admission(levels: AlertLevels) -> tuple[Panel, ...]:
    return (
        Panel(
            "Admitted and refused",
            "Requests per second that reached the guard. No room means 429 with Retry-After; the others exceeded a "
            "limit of the policy.",
            {
                "admitted {{instance}}": f"{_BY_GUARD} (rate(legroom_guard_admitted_total[{WINDOW}]))",
                "no room {{instance}}": _rejected("=~"),
                "refused {{instance}}": _rejected("!~"),
            },
            unit="reqps",
            width=8,
        ),
        Panel(
            "Share refused for lack of room",
            "Of all requests that kept to the limits of the policy.",
            {"{{instance}}": turned_away(WINDOW, BY_INSTANCE)},
            unit="percentunit",
            width=8,
            levels=((levels.guard_turned_away_ratio, "red"),),
            max=1.0,
        ),
    )


def _inside() -> tuple[Panel, ...]:
    waits = f"rate(legroom_guard_wait_seconds_bucket[{WINDOW}])"
    wait = f"histogram_quantile(0.99, sum by (le, cluster, namespace, job, instance) ({waits})) >= 0"
    return (
        Panel(
            "Reserved of the pool",
            "Tokens that admitted requests may grow to, compared with what the guard may hand out.",
            {
                "reserved {{instance}}": f"{_BY_GUARD} (legroom_guard_reserved_tokens)",
                "queued {{instance}}": f"{_BY_GUARD} (legroom_guard_queued_tokens)",
                "pool {{instance}}": f"{_BY_GUARD} (legroom_guard_pool_tokens)",
            },
            width=8,
        ),
        Panel(
            "Wait for admission",
            "99th percentile of how long admitted requests waited.",
            {"p99 {{instance}}": wait},
            unit="s",
        ),
        Panel(
            "Requests inside and waiting",
            "As the guard counts them, and whether it is draining.",
            {
                "inside {{instance}}": f"{_BY_GUARD} (legroom_guard_running)",
                "waiting {{instance}}": f"{_BY_GUARD} (legroom_guard_waiting)",
                "draining {{instance}}": f"max {BY_INSTANCE} (legroom_guard_draining)",
            },
        ),
    )


def _watch() -> DashboardRow:
    return DashboardRow(
        "legroom watch",
        (
            Panel(
                "Open incidents",
                "What the sidecar's detectors have found and that is not over yet, by kind.",
                {"{{kind}}": "sum by (cluster, namespace, job, kind) (legroom_incidents_open)"},
                width=8,
            ),
            Panel(
                "Healthy servers",
                "1: the server answered the last scrape and nothing critical was found.",
                {"{{server}}": "min by (cluster, namespace, job, server) (legroom_server_healthy)"},
                width=8,
                max=1.0,
            ),
            Panel(
                "Scrapes",
                "Scrapes of servers per second, by result.",
                {"{{result}}": f"sum by (cluster, namespace, job, result) (rate(legroom_looks_total[{WINDOW}]))"},
                width=8,
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
                {"{{instance}} {{rank}}": "legroom_worker_used_bytes"},
                unit="bytes",
            ),
            Panel(
                "Allocator fragmentation",
                "Share of what PyTorch reserves that is not in use.",
                {"{{instance}} {{rank}}": fragmentation()},
                unit="percentunit",
                levels=((levels.detect.fragmentation_ratio, "orange"),),
                max=1.0,
            ),
        ),
        "LEGROOM_WORKER_MEMORY=1 where legroom is installed beside vLLM",
    )
