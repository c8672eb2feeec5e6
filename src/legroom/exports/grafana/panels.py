"""The panels and rows of the dashboard, independent of Grafana's SDK."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from legroom.records import dataclass

if TYPE_CHECKING:
    from legroom.exports.prometheus.alert_levels import AlertLevels
    from legroom.exports.prometheus.measures import Measures

WINDOW = "$__rate_interval"
INSTANCE = 'cluster=~"$cluster", namespace=~"$namespace", job=~"$job", instance=~"$instance"'
"""A series without one of these labels matches `.*` as well."""
SELECTOR = f'model_name=~"$model", {INSTANCE}'
BY_INSTANCE = "by (cluster, namespace, job, instance)"
BY_SERVER = "by (cluster, namespace, job, instance, model_name)"
BY_ENGINE = "by (cluster, namespace, job, instance, model_name, engine)"
SERVER = "{{model_name}} {{instance}}"

Kind = Literal["timeseries", "stat", "bargauge", "table"]


@dataclass(frozen=True)
class Panel:
    title: str
    description: str
    """The help text of the panel."""
    queries: Mapping[str, str]
    """The expression of each legend."""
    unit: str = "short"
    kind: Kind = "timeseries"
    width: int = 12
    """Columns of 24."""
    levels: tuple[tuple[float, str], ...] = ()
    """Thresholds with their colours; below the first it is green."""
    max: float | None = None


@dataclass(frozen=True)
class DashboardRow:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]
    needs: str = ""
    """What must run besides vLLM for it to have data."""


def pool_levels(levels: AlertLevels) -> tuple[tuple[float, str], ...]:
    return ((levels.detect.pool_calm_ratio, "yellow"), (levels.detect.pool_full_ratio, "orange"))


def target_level(seconds: float | None) -> tuple[tuple[float, str], ...]:
    return ((seconds, "red"),) if seconds is not None else ()


def percentiles(measures: Measures, role: str) -> dict[str, str]:
    """The queries of a latency's p50, p90 and p99."""
    shares = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
    return {f"{name} {SERVER}": measures.quantile(role, share, WINDOW) for share, name in shares}
