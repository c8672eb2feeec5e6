"""The result of a setting under a load, and the goal that it must meet."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal, NamedTuple

from legroom.simulation.timeline import Timeline, percentile
from legroom.simulation.trace import Trace

OVERLOAD_RATIO = 0.05
"""A server is overloaded when waits grow by more than this per second of load, and end more than this share of its
duration late. Smaller figures cannot be told from the filling of an empty server and random arrivals."""


@dataclass(frozen=True)
class ReplayOutcome:
    """Results of one setting under the load. Times are seconds, or steps where the trace counts steps."""

    flags: dict[str, Any]
    num_blocks: int
    finished: int
    rejected: int
    preemptions: int
    throughput: float
    """Output tokens a second, or a step."""
    goodput: float
    """Output tokens of requests within the latency goal, per second or step."""
    good_ratio: float
    """Share of the finished requests within the latency goal."""
    first_token_p99: float
    latency_p99: float
    wait_growth_ratio: float
    """Growth of the time to first token per second of load."""
    keeps_up: bool
    """Whether requests are served as fast as they arrive."""
    peak_ratio: float
    hit_ratio: float
    time_per_token_p99: float = 0.0
    """Of the mean time per output token of a request, without the first token."""
    time_per_token_p50: float = 0.0
    latency_p50: float = 0.0
    requests_per_s: float = 0.0
    """Arriving at all servers; of users, at the rate at which they ask."""

    def as_json(self) -> dict[str, Any]:
        """The outcome as JSON, with floats rounded: a row of `legroom simulate --choose --json`."""
        return {
            name: round(value, _DIGITS.get(name, 4)) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


_DIGITS = {"throughput": 3, "goodput": 3, "time_per_token_p50": 5, "time_per_token_p99": 5}


@dataclass(frozen=True)
class Goal:
    """The latency that a load must be served within."""

    first_token_p99: float | None = None
    latency_p99: float | None = None
    most_preemptions: int | None = None
    """None: any number; their cost shows in latency and goodput."""
    time_per_token_p99: float | None = None

    def is_met(self, outcome: ReplayOutcome) -> bool:
        """Whether requests finished, the server kept up with the arrivals, and no limit of the goal was exceeded."""
        return outcome.finished > 0 and outcome.keeps_up and not any(self.missed_by(outcome))

    def missed_by(self, outcome: ReplayOutcome) -> Iterator[tuple[str, float, float]]:
        """(what is measured, value reached, limit) of each limit of the goal that the outcome exceeds."""
        for what, reached, limit in (
            ("first token", outcome.first_token_p99, self.first_token_p99),
            ("whole answer", outcome.latency_p99, self.latency_p99),
            ("time per token", outcome.time_per_token_p99, self.time_per_token_p99),
            ("preemptions", outcome.preemptions, self.most_preemptions),
        ):
            if limit is not None and reached > limit:
                yield what, reached, limit

    def is_within(self, first_token: float, latency: float, time_per_token: float) -> bool:
        """Whether the latencies, in seconds (or steps), are at most the goal's limits; a limit of None always holds."""
        limits = (self.first_token_p99, self.latency_p99, self.time_per_token_p99)
        reached = (first_token, latency, time_per_token)
        return all(limit is None or value <= limit for value, limit in zip(reached, limits, strict=True))


NO_GOAL = Goal()
Verdict = Literal["holds", "holds_with_waiting", "serves_late", "misses_limits", "falls_behind", "turns_away"]
LATE_S = 30
"""Google Cloud's load balancer ends a request that has no answer after 30 s by default."""
LONG_QUEUE_S = 10.0  # A longer wait is a backlog for the detectors and alerts, too.


@dataclass(frozen=True)
class LoadVerdict:
    """Whether one server holds a load, and the rates that decide it: per second, or per step."""

    verdict: Verdict
    arriving: float
    """Requests that arrive per second while the load lasts."""
    served: float
    """Requests that finish per second until the last one is served."""
    time_per_token_p50: float
    missed: tuple[tuple[str, float, float], ...] = ()
    """What is above its limit, as `Goal.missed_by` tells it."""
    sustained: bool | None = None
    """Whether the server would keep up with a longer load of this kind; None where this one is long enough."""
    slowest: tuple[float, bool] | None = None
    """(the most that a step may take, as a multiple of its estimate; whether the load is held at that, as
    `legroom size` counts servers); None where the load is not held anyway, or step times are no estimate."""

    @property
    def is_held(self) -> bool:
        """Whether the load is served within the goal and without falling behind; requests may wait meanwhile."""
        return self.verdict not in ("falls_behind", "turns_away", "misses_limits")

    def as_json(self) -> dict[str, Any]:
        """The fields of `legroom simulate --json` that say whether the load is held."""
        rates = {name: round(getattr(self, name), 5) for name in ("arriving", "served", "time_per_token_p50")}
        slowest = self.slowest and dict(zip(("step_time_ratio", "holds"), self.slowest, strict=True))
        return {"verdict": self.verdict, "load": rates, "sustained": self.sustained, "slowest": slowest}


def load_verdict(timeline: Timeline, goal: Goal = NO_GOAL) -> LoadVerdict:
    """`falls_behind` if waits keep growing, `turns_away` if over 1 % are rejected, `misses_limits` if the goal is not
    met, `serves_late` if the median first token takes over 30 s, `holds_with_waiting` if requests queue (over
    10 s, or longer than their prompts take) or are preempted, otherwise `holds`."""
    outcome = outcome_of({}, [timeline], goal)
    arrivals: Sequence[float] = timeline.trace.arrivals if timeline.clocks else timeline.arrival_steps
    starts = timeline.clocks.sched_s if timeline.clocks else timeline.first_sched_steps
    pairs = zip(arrivals, starts, timeline.finish_steps, strict=True)
    queued = percentile(sorted(float(start - arrival) for arrival, start, step in pairs if step >= 0), 0.99)
    waits, missed = queued > outcome.first_token_p99 - queued, tuple(goal.missed_by(outcome))
    verdict: Verdict = "holds"
    if waits and not outcome.keeps_up:
        verdict = "falls_behind"
    elif 100 * len(timeline.rejections) > len(timeline.trace):
        verdict = "turns_away"
    elif missed:
        verdict = "misses_limits"
    elif timeline.clocks and percentile(timeline.seconds["first_token_s"], 0.5) > LATE_S:
        verdict = "serves_late"
    elif waits or outcome.preemptions or (timeline.clocks and queued > LONG_QUEUE_S):
        verdict = "holds_with_waiting"
    lasted = max(arrivals) - min(arrivals)
    offered = (len(arrivals) - 1) / lasted if lasted else float(len(arrivals))
    offered = outcome.requests_per_s if timeline.trace.users else offered
    served = list(_served_requests(timeline))
    rate = len(served) / _load_duration([timeline], served)
    return LoadVerdict(verdict, offered, rate, outcome.time_per_token_p50, missed)


class ServedRequest(NamedTuple):
    arrival: float
    first_token: float
    """Time to first token."""
    latency: float
    output_len: int

    @property
    def time_per_token(self) -> float:
        """Mean time for each output token after the first, in the unit of `latency`."""
        return (self.latency - self.first_token) / max(1, self.output_len - 1)


def outcome_of(flags: dict[str, Any], timelines: Sequence[Timeline], goal: Goal, servers: int = 1) -> ReplayOutcome:
    """The joint result of `servers` servers with these flags; `timelines`: of all servers or of an even sample."""
    served = [request for timeline in timelines for request in _served_requests(timeline)]
    good = [r for r in served if goal.is_within(r.first_token, r.latency, r.time_per_token)]
    settings, tallies = timelines[0].settings, [timeline.tally for timeline in timelines]
    sampled = servers / len(timelines)
    duration = _load_duration(timelines, served)
    growth, keeps_up = _wait_growth(served, timelines[0].trace)
    prompt_tokens = sum(tally.prompt_tokens for tally in tallies)
    token_times = sorted(request.time_per_token for request in served)
    latencies = sorted(request.latency for request in served)
    return ReplayOutcome(
        flags,
        settings.num_blocks,
        round(sum(tally.finished for tally in tallies) * sampled),
        round(sum(len(timeline.rejections) for timeline in timelines) * sampled),
        round(sum(tally.preemptions for tally in tallies) * sampled),
        sum(request.output_len for request in served) * sampled / duration,
        sum(request.output_len for request in good) * sampled / duration,
        len(good) / len(served) if served else 0.0,
        percentile(sorted(request.first_token for request in served), 0.99),
        percentile(latencies, 0.99),
        growth,
        keeps_up,
        max(tally.peak_blocks for tally in tallies) / settings.usable_blocks,
        sum(tally.cached_tokens for tally in tallies) / prompt_tokens if prompt_tokens else 0.0,
        percentile(token_times, 0.99),
        percentile(token_times, 0.5),
        percentile(latencies, 0.5),
        sum(timeline.requests_per_s for timeline in timelines) * sampled,
    )


def _served_requests(timeline: Timeline) -> Iterator[ServedRequest]:
    """The finished requests with their latencies, in seconds, or in steps if the trace counts steps."""
    clocks, finished, output_lens = timeline.clocks, timeline.finish_steps, timeline.trace.output_lens
    times: tuple[Sequence[float], ...] = (timeline.arrival_steps, timeline.first_token_steps, finished)
    if clocks is not None:
        times = (timeline.trace.arrivals, clocks.token_s, clocks.finish_s)
    for arrival, token, end, step, output_len in zip(*times, finished, output_lens, strict=True):
        if step >= 0:
            yield ServedRequest(float(arrival), float(token - arrival), float(end - arrival), output_len)


def _load_duration(timelines: Sequence[Timeline], served: Sequence[ServedRequest]) -> float:
    """Seconds from the first arrival to the last token; if the trace counts steps, the number of the last step."""
    if timelines[0].clocks is None:
        return max(1, *(timeline.last_step for timeline in timelines))
    first = min(timeline.trace.arrivals[0] for timeline in timelines)
    return max((request.arrival + request.latency for request in served), default=first) - first or 1.0


def _wait_growth(served: Sequence[ServedRequest], trace: Trace) -> tuple[float, bool]:
    """(how much the time to first token grows per second of load, whether the server keeps up with the arrivals)."""
    # A server that gets twice the load it can serve makes its newest request wait as long as the load has lasted: the
    # slope is 1. The slope of a server that keeps up is 0, however long its bursts make requests wait.
    if not served:
        return 0.0, False
    middle, mean_wait = fmean(r.arrival for r in served), fmean(r.first_token for r in served)
    spread = sum((r.arrival - middle) ** 2 for r in served)
    if spread == 0 or trace.users:
        return 0.0, True  # all requests arrive at once, or no faster than they are answered
    growth = sum((r.arrival - middle) * (r.first_token - mean_wait) for r in served) / spread
    first, last = min(r.arrival for r in served), max(r.arrival for r in served)
    behind = max(r.arrival + r.first_token for r in served) - last
    return growth, growth <= OVERLOAD_RATIO or behind <= OVERLOAD_RATIO * (last - first)
