"""Searches the flags, the number of servers or the GPU that hold a load: replays the trace under many settings."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import product
from math import ceil
from operator import le
from typing import Any

from legroom.errors import LegroomError
from legroom.simulation.disaggregation import Disaggregation, replay_disaggregated
from legroom.simulation.fast.jit import is_compiled_before, numba_is_installed
from legroom.simulation.fast.rows import StepCost
from legroom.simulation.replay_outcome import Goal, ReplayOutcome, outcome_of
from legroom.simulation.scheduler_settings import SchedulerSettings
from legroom.simulation.tiers.host_tier import TierSettings
from legroom.simulation.timeline import Timeline
from legroom.simulation.trace import Trace
from legroom.simulation.trace_replay import ReplayEngine, simulate
from legroom.sweeps import ProcessExecutor, SweepExecutor

MAX_REPLICAS = 1024


@dataclass(frozen=True)
class HoldingFleet:
    """Equal servers that hold the load together."""

    gpu: str
    """The card of each; empty where the pool was given as a number of blocks."""
    replicas: int
    outcome: ReplayOutcome

    def as_json(self, command: Sequence[str]) -> dict[str, Any]:
        """The fleet as JSON, with the `command` of each server as words."""
        return {
            "gpu": self.gpu or None,
            "replicas": self.replicas,
            "outcome": self.outcome.as_json(),
            "command": list(command),
        }


def promising_candidates(trace: Trace, choice: Choice, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Up to four candidates to try on more servers: the best outcome's, then the best with another max_num_seqs (or, if
    that was not searched, max_num_batched_tokens) than those before."""
    by_flags = {tuple(candidate.flags.items()): candidate for candidate in candidates}
    rivals, few = list(choice.outcomes), list[Candidate]()
    while rivals and len(few) < 4:
        best = best_outcome(rivals, choice.goal, trace.arrives_at_once)
        few.append(by_flags[tuple(best.flags.items())])
        rivals = [outcome for outcome in rivals if _searched_limit(outcome.flags) != _searched_limit(best.flags)]
    return few


def _searched_limit(flags: dict[str, Any]) -> int | None:
    """The max_num_seqs among a candidate's flags, else the max_num_batched_tokens; None where it has neither."""
    return flags.get("max_num_seqs", flags.get("max_num_batched_tokens"))


def replicas_that_hold(trace: Trace, choice: Choice, gpu: str, candidates: Sequence[Candidate]) -> HoldingFleet | None:
    """The fewest servers, at least two, with which one of `candidates` meets the goal; None where none does."""
    if not choice.best.finished:
        return None
    most = min(len(trace), MAX_REPLICAS)
    task = ReplayTask(trace.checked(), choice.goal)

    def is_held_by(replicas: int) -> bool:
        """Whether so many replicas meet the goal with any of the candidates."""
        share = replace(task, replicas=replicas)
        return any(choice.goal.is_met(replay_candidate(share, candidate)) for candidate in candidates)

    # A server whose waits grow by 2 s a second gets three times what it can serve.
    least = min(most, max(2, ceil(1 + choice.best.wait_growth_ratio)))
    fewest = fewest_replicas(is_held_by, least, most)
    if fewest is None:
        return None
    share = replace(task, replicas=fewest)
    tried = [replay_candidate(share, candidate) for candidate in candidates]
    return HoldingFleet(gpu, fewest, best_outcome(tried, choice.goal, task.trace.arrives_at_once))


def fewest_replicas(is_held_by: Callable[[int], bool], least: int, most: int) -> int | None:
    """The smallest count from `least` to `most` (included) for which `is_held_by` holds, by bisection; None if none."""
    if most < least:
        return None
    low, high = least - 1, least
    while not is_held_by(high):
        if high == most:
            return None
        low, high = high, min(most, 2 * high)
    return low + 1 + bisect_left(range(low + 1, high), True, key=is_held_by)


def card_that_holds(
    trace: Trace, choice: Choice, cards: Iterable[tuple[str, Sequence[Candidate]]]
) -> HoldingFleet | None:
    """The first of `cards` (GPU name, candidates) one server of which meets the goal, also with the trace repeated."""
    task = ReplayTask(trace.checked(), choice.goal)
    for gpu, candidates in cards:
        if not candidates:
            continue
        tried = [replay_candidate(task, candidate) for candidate in candidates]
        best = best_outcome(tried, choice.goal, task.trace.arrives_at_once)
        if choice.goal.is_met(best) and is_sustained(task, candidates[tried.index(best)], best) is not False:
            return HoldingFleet(gpu, 1, best)
    return None


SEARCHED: dict[str, tuple[Any, ...]] = {
    "max_num_seqs": (8, 16, 32, 64, 128, 256, 512),
    "max_num_batched_tokens": (2048, 4096, 8192, 16384, 32768),
    "block_size": (16, 32),
    "enable_prefix_caching": (True, False),
    "enable_chunked_prefill": (True, False),
}
"""280 settings, less those that vLLM refuses (without chunked prefill a prompt must fit in a step). Flags that the user
gives are not searched."""
Figure = Callable[[ReplayOutcome], float]
"""A figure to maximize."""
_TIE_RATIO = 0.01  # Figures this close are a tie: less than the difference between two seeds of one load.
_MIN_LATENCIES, _MAX_REPEATS = 3, 20
"""A load that lasts this many latencies shows whether a server keeps up; a shorter one is repeated."""
_SATURATED_WAVES = 4  # Batches whose ends give a server's capacity: twice as many move it by less than 4 %.
_MAX_SAMPLED_REPLICAS = 16
"""Of more replicas this many are replayed: round robin gives all of them the same distribution."""


@dataclass(frozen=True)
class Candidate:
    flags: dict[str, Any]
    settings: SchedulerSettings
    cost: StepCost | None = None
    tier: TierSettings | None = None
    """Host memory behind the GPU's prefix cache; replayed step by step."""


@dataclass(frozen=True)
class Choice:
    """The best setting, the frontier, and all that were tried."""

    best: ReplayOutcome
    holds: bool
    """Whether the best setting meets the goal; where it does not, none does."""
    frontier: list[ReplayOutcome]
    outcomes: list[ReplayOutcome] = field(repr=False)
    goal: Goal
    in_seconds: bool
    interrupted: bool = False
    """Whether some candidates were not tried."""
    sustained: bool | None = None
    """Whether the server would keep up with a longer load; None where the load is long enough or does not hold."""

    def as_json(self) -> dict[str, Any]:
        """The document of `legroom simulate --choose --json`."""
        return {
            "tried": len(self.outcomes),
            "unit": "s" if self.in_seconds else "steps",
            "goal": asdict(self.goal),
            "holds": self.holds,
            "sustained": self.sustained,
            "chosen": self.best.as_json(),
            "frontier": [outcome.as_json() for outcome in self.frontier],
            "interrupted": self.interrupted,
        }


def flag_combinations(
    given: Iterable[str], searched: dict[str, tuple[Any, ...]] | None = None
) -> Iterator[dict[str, Any]]:
    """Every combination of values of the searched flags (by dest) that are not among `given`."""
    free = {name: values for name, values in (searched or SEARCHED).items() if name not in set(given)}
    return (dict(zip(free, values, strict=True)) for values in product(*free.values()))


@dataclass(frozen=True)
class ReplayTask:
    """The constant inputs of every candidate's replay."""

    trace: Trace
    goal: Goal
    replicas: int = 1
    """Servers that share the load, round robin."""
    pools: Disaggregation | None = None
    """Set where each of them is a set of prefill and decode servers."""


def choose(
    trace: Trace,
    candidates: Sequence[Candidate],
    goal: Goal,
    *,
    executor: SweepExecutor | None = None,
    progress: Callable[[float], None] | None = None,
) -> Choice:
    """Replays the candidates, until Ctrl-C at most, and picks the `best_outcome`; LegroomError without candidates."""
    if not candidates:
        raise LegroomError("no setting is left to try", "give fewer flags, or a larger pool")
    task = ReplayTask(trace.checked(), goal)
    by_number: dict[int, ReplayOutcome] = {}
    try:
        with closing((executor or ProcessExecutor()).run(replay_candidate, task, candidates)) as results:
            for number, outcome in results:
                by_number[number] = outcome
                if progress:
                    progress(len(by_number) / len(candidates))
    except KeyboardInterrupt:
        if not by_number:
            raise
    # In the candidates' order, so that ties do not depend on how the sweep was divided.
    tried = sorted(by_number)
    outcomes = [by_number[number] for number in tried]
    best = best_outcome(outcomes, goal, task.trace.arrives_at_once)
    interrupted = len(outcomes) < len(candidates)
    sustained = None
    if goal.is_met(best) and not interrupted:
        sustained = is_sustained(task, candidates[tried[outcomes.index(best)]], best)
    return Choice(best, goal.is_met(best), frontier(outcomes), outcomes, goal, trace.in_seconds, interrupted, sustained)


@cache
def _replay_engine() -> ReplayEngine:
    """`compiled` where compiled code is already cached on disk (a search is long enough to load it), else `auto`."""
    return "compiled" if numba_is_installed() and is_compiled_before() else "auto"


def best_outcome(outcomes: Sequence[ReplayOutcome], goal: Goal, arrives_at_once: bool = False) -> ReplayOutcome:
    """The best outcome that meets the goal (of all, where none does): most finished requests; then, with 1 % as a tie,
    the largest share within the goal's latencies (where none meets it or all arrive at once: goodput, throughput),
    lowest p99 latency, lowest p99 time to first token, fewest preemptions."""
    # Settings that keep up serve the load at its own rate, so their goodput is the share of requests within the latency
    # goal; the time until the last answer ends is chance.
    holding = [outcome for outcome in outcomes if goal.is_met(outcome)]
    rivals = holding or list(outcomes)
    rates: tuple[Figure, ...] = (lambda o: o.goodput, lambda o: o.throughput)
    if holding and not arrives_at_once:
        rates = (lambda o: o.good_ratio,)
    waits: tuple[Figure, ...] = (lambda o: -o.latency_p99, lambda o: -o.first_token_p99, lambda o: -o.preemptions)
    most = max(outcome.finished for outcome in rivals)
    rivals = [outcome for outcome in rivals if outcome.finished == most]
    for figure in (*rates, *waits):
        top = max(map(figure, rivals))
        rivals = [outcome for outcome in rivals if figure(outcome) >= top - _TIE_RATIO * abs(top)]
    return rivals[0]


def frontier(outcomes: Sequence[ReplayOutcome]) -> list[ReplayOutcome]:
    """The Pareto front by finished requests, goodput, p99 time to first token and p99 latency; of equals one. What
    serves no request within the limits is no rival of what serves some."""

    def costs(outcome: ReplayOutcome) -> tuple[float, ...]:
        """The four figures, smaller is better."""
        return -outcome.finished, -outcome.goodput, outcome.first_token_p99, outcome.latency_p99

    kept: list[ReplayOutcome] = []
    serving = [outcome for outcome in outcomes if outcome.goodput > 0] or outcomes
    for outcome in sorted(serving, key=lambda each: (*costs(each), each.preemptions)):
        if not any(all(map(le, costs(other), costs(outcome))) for other in kept):
            kept.append(outcome)
    return kept


def replay_candidate(task: ReplayTask, candidate: Candidate) -> ReplayOutcome:
    """The outcome of one candidate on all of the task's replicas; KeyboardInterrupt if the user interrupts it."""
    timelines: list[Timeline] = []
    for share in task.trace.shares(task.replicas, _MAX_SAMPLED_REPLICAS):
        timelines.append(_candidate_timeline(share, candidate, task.pools))
        if timelines[-1].interrupted:
            raise KeyboardInterrupt
    return outcome_of(candidate.flags, timelines, task.goal, task.replicas)


def _candidate_timeline(part: Trace, candidate: Candidate, pools: Disaggregation | None) -> Timeline:
    """The replay of the requests that one replica gets (`part`); tokens loaded from a host tier count as cache hits."""
    if pools:
        return replay_disaggregated(part, candidate.settings, candidate.cost, pools).timeline
    if candidate.tier is None:
        return simulate(part, candidate.settings, cost=candidate.cost, engine=_replay_engine())
    from legroom.simulation.tiers.tiered_replay import simulate_with_tier  # most searches have no tier

    tiered = simulate_with_tier(part, candidate.settings, candidate.tier, cost=candidate.cost)
    timeline = tiered.timeline
    hits = replace(timeline.tally, cached_tokens=timeline.tally.cached_tokens + tiered.tally.hit_tokens)
    return replace(timeline, tally=hits)


def capacity_per_s(task: ReplayTask, candidate: Candidate) -> float:
    """Requests a second that one replica finishes when there are always others waiting; 0 where it serves none."""
    settings, trace = candidate.settings, task.trace
    prompts = settings.usable_blocks * settings.block_size * len(trace) // sum(trace.prompt_lens) + 1
    needed = (_SATURATED_WAVES + 1) * min(settings.max_num_seqs, prompts) * (task.pools.decode if task.pools else 1)
    trace = next(trace.shares(ceil(len(trace) / needed), 1))
    trace = replace(trace, arrivals=array("d", bytes(8 * len(trace))), users=None).repeated(ceil(needed / len(trace)))
    timeline = _candidate_timeline(trace, candidate, task.pools)
    assert timeline.clocks is not None, "a rate is in seconds"
    ends = sorted(at for at, step in zip(timeline.clocks.finish_s, timeline.finish_steps, strict=True) if step >= 0)
    if not ends:
        return 0.0
    # Requests that start together end together, so whole waves are counted, without the last, which runs emptier.
    together = max(1, sum(at < ends[0] for at in timeline.clocks.sched_s))
    last = (len(ends) // together - 1) * together
    return last / (ends[last] - ends[0]) if last > 0 else len(ends) / ends[-1]


def is_sustained(task: ReplayTask, candidate: Candidate, outcome: ReplayOutcome) -> bool | None:
    """Whether the candidate keeps up with the trace repeated; None where that is long enough or arrives at once."""
    # An empty server accepts more than it can sustain: until its first answers end, nothing waits.
    trace = task.trace
    duration, needed = trace.arrivals[-1] - trace.arrivals[0], _MIN_LATENCIES * outcome.latency_p99
    if trace.arrives_at_once or duration >= needed:
        return None
    times = min(_MAX_REPEATS, ceil(needed / duration))
    return replay_candidate(replace(task, trace=trace.repeated(times)), candidate).keeps_up
