"""What a panel of the dashboard is, and what several of them share. No Grafana in here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from legroom.records import dataclass

if TYPE_CHECKING:
    from legroom.exports.prometheus.alert_levels import AlertLevels
    from legroom.exports.prometheus.measures import Measures

WINDOW = "$__rate_interval"
INSTANCE = 'cluster=~"$cluster", namespace=~"$namespace", job=~"$job", instance=~"$instance"'
"""A fleet has one name in several places: what is not labelled so matches `.*` as well."""
SELECTOR = f'model_name=~"$model", {INSTANCE}'
BY_INSTANCE = "by (cluster, namespace, job, instance)"
BY_SERVER = "by (cluster, namespace, job, instance, model_name)"
BY_ENGINE = "by (cluster, namespace, job, instance, model_name, engine)"
SERVER = "{{model_name}} {{instance}}"

Kind = Literal["timeseries", "stat", "bargauge", "table"]


@dataclass(frozen=True)
class Query:
    """One expression and the name of its line."""

    expr: str
    legend: str = SERVER


@dataclass(frozen=True)
class Panel:
    title: str
    description: str
    """What it shows and how to read it; Grafana shows it at the panel's `i`."""
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Kind = "timeseries"
    width: int = 12
    """Of 24 columns."""
    levels: tuple[tuple[float, str], ...] = ()
    """From which value on which colour; below the first it is green."""
    max: float | None = None


@dataclass(frozen=True)
class DashboardRow:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]
    needs: str = ""
    """What must run for it to have data; empty: vLLM alone."""


def pool_levels(levels: AlertLevels) -> tuple[tuple[float, str], ...]:
    """From where on a pool is filling, and full."""
    return ((levels.detect.pool_calm_ratio, "yellow"), (levels.detect.pool_full_ratio, "orange"))


def target_level(seconds: float | None) -> tuple[tuple[float, str], ...]:
    """A target that was named, as a line."""
    return ((seconds, "red"),) if seconds is not None else ()


def percentiles(measures: Measures, role: str) -> tuple[Query, ...]:
    """A latency by the percentiles that are shown of it."""
    shares = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
    return tuple(Query(measures.quantile(role, share, WINDOW), f"{name} {SERVER}") for share, name in shares)
