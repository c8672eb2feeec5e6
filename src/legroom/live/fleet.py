"""`watch --fleet`: KV use by model, node pool and release, outliers, and servers to spare. Pure functions."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from legroom.live.thresholds import DEFAULT, Thresholds
from legroom.planning.autoscaling_policy import scaling_policy
from legroom.records import dataclass

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class GroupKey:
    model: str
    pool: str = UNKNOWN
    release: str = UNKNOWN


@dataclass(frozen=True, slots=True)
class ServerUse:
    """One server's figures over the window."""

    server: str
    group: GroupKey
    kv_tokens: int = 0
    """Pool size; 0: not reported."""
    mean_kv_use: float = 0.0
    peak_kv_use: float = 0.0
    peak_running: float = 0.0
    peak_waiting: float = 0.0
    mean_waiting: float = 0.0
    preemptions_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetAdvice:
    server: str
    why: str
    flags: Mapping[str, str]
    """Flag -> value, or a direction such as `below 12`."""


@dataclass(frozen=True, slots=True)
class FleetGroup:
    key: GroupKey
    servers: int
    kv_tokens: int
    mean_kv_use: float
    peak_demand: float
    """The highest simultaneous KV use of all servers, in pools."""
    queued: bool
    needed: int
    advice: tuple[FleetAdvice, ...] = ()

    @property
    def spare(self) -> int:
        """How many of the group's servers are more than it needs."""
        return max(0, self.servers - self.needed)

    @property
    def wasted_kv_tokens(self) -> int:
        """KV pool tokens, over all servers of the group, that were never in use within the window."""
        return round(self.kv_tokens * max(0.0, 1 - self.peak_demand / self.servers))

    def to_json(self, gpus_per_server: int) -> dict[str, Any]:
        """The group's entry of `watch --fleet --json`; `gpus_per_server`: to count spare GPUs."""
        return {
            **asdict(self.key),
            "servers": self.servers,
            "kv_tokens": self.kv_tokens,
            "mean_kv_use": round(self.mean_kv_use, 4),
            "peak_kv_use": round(self.peak_demand / self.servers, 4),
            "wasted_kv_tokens": self.wasted_kv_tokens,
            "queued": self.queued,
            "needed_servers": self.needed,
            "spare_servers": self.spare,
            "spare_gpus": self.spare * gpus_per_server,
            "advice": [asdict(advice) for advice in self.advice],
        }


@dataclass(frozen=True, slots=True)
class FleetView:
    window_s: float
    gpus_per_server: int
    groups: tuple[FleetGroup, ...]

    @property
    def spare_gpus(self) -> int:
        """GPUs of the servers that no group needs."""
        return self.gpus_per_server * sum(group.spare for group in self.groups)

    def to_json(self) -> dict[str, Any]:
        return {
            "window_s": self.window_s,
            "servers": sum(group.servers for group in self.groups),
            "gpus_per_server": self.gpus_per_server,
            "spare_gpus": self.spare_gpus,
            "groups": [group.to_json(self.gpus_per_server) for group in self.groups],
        }


def fleet_view(
    servers: Iterable[ServerUse],
    peak_demand: Mapping[GroupKey, float],
    window_s: float,
    gpus_per_server: int = 1,
    start_s: float = 300.0,
    levels: Thresholds = DEFAULT,
) -> FleetView:
    """The fleet in groups of equal servers, most spare servers first. `peak_demand`: a group's peak KV use in pools, by
    default the sum of its servers' peaks; `start_s`: seconds that a server takes to start."""
    by_group: dict[GroupKey, list[ServerUse]] = {}
    for use in servers:
        by_group.setdefault(use.group, []).append(use)
    target = scaling_policy(1, 2, start_s, 0).kv_target_ratio
    groups = [
        _fleet_group(key, members, peak_demand.get(key, sum(use.peak_kv_use for use in members)), target, levels)
        for key, members in by_group.items()
    ]
    ordered = sorted(groups, key=lambda group: (-group.spare, -group.servers, group.key.model, group.key.pool))
    return FleetView(window_s, gpus_per_server, tuple(ordered))


def _fleet_group(
    key: GroupKey, members: Sequence[ServerUse], peak_demand: float, kv_target_ratio: float, levels: Thresholds
) -> FleetGroup:
    """The group's KV use and the servers it needs: peak demand / `kv_target_ratio`, or all where requests queue."""
    full = (use.peak_waiting >= levels.queue_least and use.peak_kv_use >= levels.pool_full_ratio for use in members)
    queued = any(full) or any(use.mean_waiting >= 1.0 for use in members)
    # Queued requests are demand beyond KV use, so all servers are needed.
    needed = len(members) if queued else min(len(members), max(1, math.ceil(peak_demand / kv_target_ratio)))
    tokens, mean = sum(use.kv_tokens for use in members), statistics.fmean(use.mean_kv_use for use in members)
    advice = tuple(_group_advice(members, levels))
    return FleetGroup(key, len(members), tokens, mean, peak_demand, queued, needed, advice)


def _group_advice(members: Sequence[ServerUse], levels: Thresholds) -> Iterator[FleetAdvice]:
    """Advice on servers whose pool differs from the others', that preempt often, or queue with a half-empty pool."""
    pools = [use.kv_tokens for use in members if use.kv_tokens]
    usual = statistics.median(pools) if pools else 0
    for use in sorted(members, key=lambda each: each.server):
        if usual and use.kv_tokens and abs(use.kv_tokens / usual - 1) > levels.drift_pool_ratio and len(pools) > 2:
            tokens = f"{use.kv_tokens:,} tokens, that of the others {usual:,.0f}"
            yield FleetAdvice(use.server, f"its pool holds {tokens}: other flags or another card", {})
        if use.preemptions_per_s >= levels.alert_preemptions_per_s:
            why = f"{use.preemptions_per_s:.2f} preemptions a second: more run at once than its pool holds"
            yield FleetAdvice(use.server, why, {"--max-num-seqs": f"below {use.peak_running:.0f}"})
        elif use.peak_waiting >= levels.queue_least and use.peak_kv_use < 0.5:
            why = f"{use.peak_waiting:.0f} waited while at most {use.peak_kv_use:.0%} of the pool was in use"
            yield FleetAdvice(use.server, why, {"--max-num-seqs": f"above {use.peak_running:.0f}"})
