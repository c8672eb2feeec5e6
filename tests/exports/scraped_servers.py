"""Servers as Prometheus would have scraped them, told by what is measured.

`Server.series` writes one in the names and labels of a release, every name that the release shows at once, so that a
rule that counts one measure twice is seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from legroom.facts.metrics import Metric, metrics_of, roles
from legroom.facts.releases import release

MINUTES = 30
"""How long a case lasts."""
BOUNDS = ("0.05", "0.1", "0.25", "0.5", "1", "2.5", "5", "10", "+Inf")


def level(value: float, minutes: int = MINUTES) -> str:
    """A gauge that stays where it is."""
    return f"{value:g}x{minutes}"


def in_turn(values: tuple[float, ...], minutes: int = MINUTES) -> str:
    """A gauge that goes round and round."""
    return " ".join(f"{values[minute % len(values)]:g}" for minute in range(minutes + 1))


def growing(per_minute: float, minutes: int = MINUTES, start: float = 100) -> str:
    """A counter."""
    return f"{start:g}+{per_minute:g}x{minutes}"


class Latency:
    """Observations a minute that all lie in one bucket; and after that, others."""

    def __init__(
        self, per_minute: float, below: str = "0.25", minutes: int = MINUTES, then: Latency | None = None
    ) -> None:
        self.parts = [(per_minute, below, minutes), *(then.parts if then else ())]

    @property
    def bounds(self) -> list[str]:
        """Those of the buckets that hold something, and of those just below them: a percentile depends on no others."""
        filled = {BOUNDS.index(below) for _, below, _ in self.parts}
        return [bound for i, bound in enumerate(BOUNDS) if i in filled or i + 1 in filled or bound == "+Inf"]

    def bucket(self, bound: str) -> str:
        """The running total of one bucket."""
        words, total = [], 0.0
        for per_minute, below, minutes in self.parts:
            step = per_minute if BOUNDS.index(bound) >= BOUNDS.index(below) else 0
            words.append(growing(step, minutes, total))
            total += step * (minutes + 1)
        return " ".join(words)

    def lasting(self, minutes: int) -> Latency:
        """The same for longer."""
        per_minute, below, _ = self.parts[0]
        return Latency(per_minute, below, minutes)


@dataclass(frozen=True)
class Server:
    """What one server measures, by role: promtool's notation, or a Latency."""

    measures: Mapping[str, Any]
    instance: str = "a:8000"
    engine: str = "0"
    other: Mapping[str, str] = field(default_factory=dict)
    """Series without a role, by name: up, process_start_time_seconds, legroom_*."""
    from_minute: int = 0
    """Before it nothing was scraped."""

    def but(self, other: Mapping[str, str] | None = None, **measures: Any) -> Server:
        return replace(self, measures={**self.measures, **measures}, other={**self.other, **(other or {})})

    def series(self, version: str, model: str) -> list[dict[str, str]]:
        """What is scraped. Cases share one Prometheus, so the case is the model and the namespace."""
        target = {"job": "vllm", "namespace": model, "instance": self.instance}
        by_metric = [
            self._one(metric, self.measures[role], target, model)
            for metric in shown(version)
            if (role := role_of_declared(metric.name)) in self.measures
        ]
        rows = [row for rows_of_metric in by_metric for row in rows_of_metric]
        for name, values in self.other.items():
            labels = {label: value for label, value in target.items() if f'{label}="' not in name}
            rows.append({"series": with_labels(name, labels), "values": values})
        not_yet = f"_x{self.from_minute} " if self.from_minute else ""
        return [{**row, "values": not_yet + row["values"]} for row in rows]

    def _one(self, metric: Metric, measured: Any, target: dict[str, str], model: str) -> list[dict[str, str]]:
        labels = dict(target)
        if "model_name" in metric.labels:
            labels["model_name"] = model
        if "engine" in metric.labels:
            labels["engine"] = self.engine
        if metric.type == "histogram":
            return self._histogram(metric.name, labels, measured)
        if isinstance(measured, dict):
            label = "finished_reason" if metric.name.startswith("vllm:request_success") else "reason"
            return [
                {"series": with_labels(metric.series, {**labels, label: part}), "values": values}
                for part, values in measured.items()
            ]
        if metric.name.startswith("vllm:request_success"):
            # Two reasons, half of the requests each: the rules must add them up.
            return [
                {"series": with_labels(metric.series, {**labels, "finished_reason": reason}), "values": measured}
                for reason in ("stop", "length")
            ]
        return [{"series": with_labels(metric.series, labels), "values": measured}]

    @staticmethod
    def _histogram(name: str, labels: dict[str, str], measured: Latency) -> list[dict[str, str]]:
        rows = [
            {"series": with_labels(f"{name}_bucket", {**labels, "le": bound}), "values": measured.bucket(bound)}
            for bound in measured.bounds
        ]
        total = measured.bucket("+Inf")
        return [*rows, *({"series": with_labels(name + end, labels), "values": total} for end in ("_count", "_sum"))]


@cache
def shown(version: str) -> list[Metric]:
    """What a server of a release shows by default, of its usual engine."""
    known = release(version)
    engine = "v1" if known.at_least("0.8.0") else "v0"
    return [metric for metric in metrics_of(known, engine) if not metric.hidden]


@cache
def role_of_declared(name: str) -> str | None:
    return next((role for role, names in roles().items() if name in names), None)


def with_labels(name: str, labels: Mapping[str, str]) -> str:
    inner = ",".join(f'{label}="{value}"' for label, value in labels.items())
    separator = "," if name.endswith("}") else "{"
    return f"{name.removesuffix('}')}{separator}{inner}}}"


HEALTHY = Server(
    {
        "kv_use": level(0.55),
        "running": level(8),
        "waiting": level(0),
        "preemptions": growing(0),
        "prefix_queries": growing(6000),
        "prefix_hits": growing(3000),
        "prefix_hit_rate": level(0.5),
        "prompt_tokens": growing(6000),
        "generation_tokens": growing(3000),
        "request_success": growing(15),
        "ttft": Latency(30),
        "inter_token": Latency(3000, "0.05"),
        "e2e_latency": Latency(30, "5"),
        "queue_time": Latency(30, "0.05"),
    },
    other={"up": level(1), "process_start_time_seconds": level(1000)},
)
STILL = {
    "prompt_tokens": growing(0),
    "generation_tokens": growing(0),
    "request_success": growing(0),
    "prefix_queries": growing(0),
    "prefix_hits": growing(0),
    "ttft": Latency(0),
    "inter_token": Latency(0),
    "e2e_latency": Latency(0),
    "queue_time": Latency(0),
}
IDLE = HEALTHY.but(kv_use=level(0), running=level(0), **STILL)


def second(server: Server, **measures: Any) -> Server:
    """Another engine of the same server (data parallel), which has no page of its own."""
    return replace(server.but(**measures), engine="1", other={})


def lasting(server: Server, minutes: int) -> Server:
    """The same server, watched for longer."""
    measures = {
        role: value.lasting(minutes) if isinstance(value, Latency) else value.replace(f"x{MINUTES}", f"x{minutes}")
        for role, value in server.measures.items()
    }
    other = {name: value.replace(f"x{MINUTES}", f"x{minutes}") for name, value in server.other.items()}
    return replace(server, measures=measures, other=other)
