"""Prefill and decode on separate servers: a prefill pool, a link for the KV cache, and a decode pool."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from legroom.errors import LegroomError
from legroom.simulation.fast.rows import StepCost
from legroom.simulation.scheduler_settings import SchedulerSettings
from legroom.simulation.timeline import Clocks, Tally, Timeline, percentile
from legroom.simulation.trace import Trace
from legroom.simulation.trace_replay import simulate

if TYPE_CHECKING:
    from legroom.planning.plan import Plan


@dataclass(frozen=True)
class Disaggregation:
    """Servers of each pool, and the link over which each decode server receives KV cache."""

    prefill: int
    decode: int
    link_bytes_per_s: float
    token_bytes: float = 0.0
    """KV cache of one token, on all GPUs of a server."""

    @classmethod
    def parse(cls, text: str) -> Disaggregation:
        """Reads `prefill=1,decode=2,link=50`, the link in GB/s; LegroomError for other text."""
        try:
            given = dict(part.split("=") for part in text.split(","))
            pools = cls(int(given.pop("prefill")), int(given.pop("decode")), float(given.pop("link")) * 1e9)
            if given or pools.prefill < 1 or pools.decode < 1 or not 0 < pools.link_bytes_per_s < float("inf"):
                raise ValueError
        except (ValueError, KeyError):
            hint = "as in prefill=1,decode=2,link=50: servers, servers, GB/s"
            raise LegroomError(f"--disaggregate {text} does not name both pools and the link", hint) from None
        return pools

    def with_plan(self, plan: Plan) -> Disaggregation:
        """These pools, with the planned server's KV cache bytes per token, which is what their link transfers."""
        return replace(self, token_bytes=plan.memory.kv.bytes_per_token * plan.args.gpus_needed)


class DisaggregatedTimeline(NamedTuple):
    """The joint timeline of both pools (a request waits until its prefill begins), and parts of the first token."""

    timeline: Timeline
    prefill_p99_s: float
    """From arrival to the end of the prefill."""
    transfer_p99_s: float
    """From there to the last byte on the decode server."""
    link_busy_ratio: float
    """Of the busiest link."""

    def as_json(self) -> dict[str, float]:
        """Every figure but the timeline, rounded to four decimals, by name."""
        return {name: round(value, 4) for name, value in self._asdict().items() if name != "timeline"}


_Replays = list[tuple[Sequence[int], Timeline]]
"""Per server: its requests by their index in the trace, and their replay."""


def replay_disaggregated(
    trace: Trace, settings: SchedulerSettings, cost: StepCost | None, pools: Disaggregation
) -> DisaggregatedTimeline:
    """Replays prompts on the prefill servers and, after the KV transfer, answers on the decode servers."""
    if not trace.in_seconds:
        raise LegroomError(f"{trace.name} counts steps, and a link has a speed in seconds", "give arrivals in seconds")
    trace, prefills, decodes = trace.checked(), _Replays(), _Replays()
    prompts = replace(trace, output_lens=array("q", [1]) * len(trace))
    for order in _round_robin(range(len(trace)), pools.prefill):
        prefills.append((order, simulate(prompts.reordered(order), settings, cost=cost)))
    done = zip(_column(trace, prefills, "finish_steps", -1), _column(trace, prefills, "finish_s"), strict=True)
    ready_s = {i: end_s for i, (step, end_s) in enumerate(done) if step >= 0}
    arrived_s, busiest_s = dict[int, float](), 0.0
    for order in _round_robin(sorted(ready_s, key=ready_s.__getitem__), pools.decode):
        free_s, part = 0.0, trace.reordered(order)
        seconds = [length * pools.token_bytes / pools.link_bytes_per_s for length in part.prompt_lens]
        for i, transfer_s in zip(order, seconds, strict=True):
            free_s = arrived_s[i] = max(free_s, ready_s[i]) + transfer_s
        busiest_s = max(busiest_s, sum(seconds))
        part.arrivals = array("d", map(arrived_s.__getitem__, order))
        decodes.append((order, simulate(part, replace(settings, remote_prefill=True), cost=cost)))
    timeline = _joint_timeline(trace, settings, prefills, decodes)
    return DisaggregatedTimeline(
        timeline,
        percentile(sorted(ready_s[i] - trace.arrivals[i] for i in ready_s), 0.99),
        percentile(sorted(arrived_s[i] - ready_s[i] for i in ready_s), 0.99),
        busiest_s / timeline.makespan_s if timeline.makespan_s else 0.0,
    )


def _round_robin(indices: Sequence[int], servers: int) -> list[Sequence[int]]:
    """The requests (indices) that each server gets in turn; without the servers that get none."""
    return [indices[server::servers] for server in range(min(servers, len(indices)))]


def _column(trace: Trace, replays: _Replays, name: str, missing: float = 0) -> list[Any]:
    """A per-request field of the servers' timelines, by its name, in the order of `trace`; `missing` if not served."""
    values: list[Any] = [missing] * len(trace)
    for order, timeline in replays:
        for i, value in zip(order, getattr(timeline.clocks if name.endswith("_s") else timeline, name), strict=True):
            values[i] = value
    return values


def _joint_timeline(trace: Trace, settings: SchedulerSettings, prefills: _Replays, decodes: _Replays) -> Timeline:
    """One timeline of both pools: output tokens are the decode servers', totals and peaks those of all servers."""
    replays = [timeline for _, timeline in (*prefills, *decodes)]
    totals: dict[str, int] = {}
    for name in Tally.__dataclass_fields__:
        of_pool = {"prompt_tokens": prefills, "cached_tokens": prefills, "finished": decodes}.get(name)
        counts = [getattr(timeline.tally, name) for _, timeline in of_pool or (*prefills, *decodes)]
        totals[name] = max(counts) if name.startswith("peak") else sum(counts)
    names = ("first_sched_steps", "first_token_steps", "finish_steps")
    first_sched, first_token, finish = (_column(trace, decodes, name, -1) for name in names)
    waits, tokens, ends = (prefills, "sched_s"), (decodes, "token_s"), (decodes, "finish_s")
    return Timeline(
        settings,
        trace,
        Tally(**totals),
        first_sched,
        first_token,
        finish,
        _column(trace, decodes, "preemption_counts"),
        first_sched,
        decodes[0][1].samples if decodes else [],
        [rejection for timeline in replays for rejection in timeline.rejections],
        Clocks(*(_column(trace, *clock) for clock in (waits, tokens, ends))),
        any(timeline.interrupted for timeline in replays),
        max(timeline.last_step for timeline in replays),
    )
