"""The number of servers per GPU model and tensor-parallel size that hold a load within a latency, and their price."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, inf
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.gpus import Gpu, GpuPrice
from legroom.facts.model import Model
from legroom.facts.releases import Release
from legroom.planning.plan import Plan, Target, cold_start, ready_command
from legroom.planning.plan import plan as make_plan
from legroom.simulation import flag_search as search
from legroom.simulation.disaggregation import Disaggregation
from legroom.simulation.fast.rows import StepCost
from legroom.simulation.from_plan import as_one_group, hardware, planned_scheduler
from legroom.simulation.replay_outcome import OVERLOAD_RATIO, Goal, LoadVerdict, ReplayOutcome, load_verdict, outcome_of
from legroom.simulation.scheduler_settings import LayerGroup, SchedulerSettings
from legroom.simulation.step_time import StepBand, roofline, step_band, why_no_step_time
from legroom.simulation.timeline import Timeline
from legroom.simulation.trace import Trace
from legroom.sweeps import ProcessExecutor, SweepExecutor, sweep
from legroom.units import round_up
from legroom.vllm.args import ServeArgs
from legroom.vllm.resolve import served_model

_LENGTH_STEP = 1024
"""Tokens to which the longest request is rounded up for --max-model-len: the next prompt may be a little longer."""
_SPLITS = (1, 2, 4, 8)  # Tensor-parallel sizes that are tried: up to a node of eight.


@dataclass(frozen=True)
class ServingLoad:
    """Requests with their arrival times, and the latency goal."""

    trace: Trace
    goal: Goal
    requests_per_s: float
    """Arrival rate; of users, the rate at which they would ask if answers took no time."""
    pools: Disaggregation | None = None
    """Set where a replica is a set of prefill and decode servers."""

    @classmethod
    def of_trace(cls, trace: Trace, goal: Goal, pools: Disaggregation | None = None) -> "ServingLoad":
        """The load of a trace at the mean rate of its arrivals."""
        return cls(trace, goal, trace.requests_per_s, pools)

    @property
    def mean_prompt_tokens(self) -> float:
        """Prompt tokens of a request, on average."""
        return sum(self.trace.prompt_lens) / len(self.trace)

    @property
    def mean_output_tokens(self) -> float:
        """Output tokens of a request, on average."""
        return sum(self.trace.output_lens) / len(self.trace)

    @property
    def least_requests_per_s(self) -> float:
        """The arrival rate; of users, the rate at which they send if answers are as slow as the goal allows."""
        first, each = self.goal.first_token_p99, self.goal.time_per_token_p99
        if not self.trace.users:
            return self.requests_per_s
        return self.trace.users.rate(first + each * self.mean_output_tokens) if first and each else 0.0

    def with_step_factor(self, factor: float) -> "ServingLoad":
        """The load as if steps took `factor` times as long: arrival times and latency goals are divided by it."""
        first, each = self.goal.first_token_p99, self.goal.time_per_token_p99
        pools = self.pools and replace(self.pools, link_bytes_per_s=self.pools.link_bytes_per_s * factor)
        goal = replace(self.goal, first_token_p99=first and first / factor, time_per_token_p99=each and each / factor)
        return ServingLoad(self.trace.faster(factor), goal, self.requests_per_s * factor, pools)


@dataclass(frozen=True)
class CountBand:
    """An estimated number, and its bounds under the error band of step times."""

    low: int | None
    middle: int | None
    high: int | None
    """None: more than the maximum."""

    def times(self, factor: float) -> tuple[float | None, float | None, float | None]:
        """(low, middle, high) counts multiplied by `factor`; None stays None."""
        low, middle, high = (None if count is None else count * factor for count in (self.low, self.middle, self.high))
        return low, middle, high


NO_COUNT = CountBand(None, None, None)


@dataclass(frozen=True)
class SizedFleet:
    """Equal servers on one GPU model and tensor-parallel size."""

    gpu: Gpu
    tensor_parallel_size: int
    plan: Plan | None
    """None: vLLM refuses these settings."""
    band: StepBand | None
    """None: no time could be estimated."""
    replicas: CountBand
    outcome: ReplayOutcome | None
    """Of `replicas.high` servers, with steps as estimated; of `replicas.middle` where the high end is not known."""
    reason: str
    """Why there is no number, or why the plan is tight; else empty."""
    servers: int = 1
    """Of each replica: several where prefill and decode are separate."""

    @property
    def holds(self) -> bool:
        """Whether some number of replicas up to the maximum serves the load within the goal."""
        return self.replicas.middle is not None

    @property
    def gpus_per_replica(self) -> int:
        """GPUs of one replica, with all its servers; by its plan, or without one by the tensor-parallel size."""
        return self.servers * (self.plan.args.gpus_needed if self.plan else self.tensor_parallel_size)

    @property
    def is_tight(self) -> bool:
        """Whether the plan is not sure to start."""
        return self.plan is not None and self.plan.verdict != "fits"

    @property
    def gpus(self) -> int:
        """GPUs of all replicas together; 0 where no number of servers holds the load."""
        return (self.replicas.middle or 0) * self.gpus_per_replica


@dataclass(frozen=True)
class FleetTask:
    """The constant inputs of every GPU model's sizing."""

    models: tuple[Model, ...]
    release: Release
    args: tuple[ServeArgs, ...]
    """Those of each model."""
    load: ServingLoad
    most_gpus: int

    @classmethod
    def of(cls, models: Sequence[str], release: Release, args: ServeArgs, load: ServingLoad, gpus: int) -> "FleetTask":
        """The task for models by name, with at most `gpus` GPUs; reads configs here, as workers may run elsewhere."""
        each_args = tuple(replace(args, model=name) for name in models)
        return cls(tuple(map(served_model, each_args)), release, each_args, load, gpus)


def size_fleet(task: FleetTask, cell: tuple[int, Gpu]) -> tuple[SizedFleet, ...]:
    """The fleets of one `cell`, (model's index in the task, GPU), at each tensor-parallel size, the best first."""
    number, card = cell
    args, model, longest = task.args[number], task.models[number], task.load.trace.longest
    length = min(round_up(longest, _LENGTH_STEP), model.max_position_embeddings)
    with_length = replace(args, max_model_len=args.max_model_len or max(length, longest))
    fleets = _fleets_by_tp_size(Target(model, card, 1, task.release), with_length, task.load, task.most_gpus)
    return tuple(sorted(fleets, key=_fleet_sort_key))


def _fleet_sort_key(fleet: SizedFleet) -> tuple[bool, bool, int, bool, int]:
    """Sort key: fleets that hold the load first, tight plans after others, then those with the fewest GPUs."""
    # Of those that do not hold the load, the largest replayed split explains most.
    is_tight = fleet.holds and fleet.is_tight
    return not fleet.holds, is_tight, fleet.gpus, fleet.band is None, -fleet.tensor_parallel_size


def _fleets_by_tp_size(target: Target, args: ServeArgs, load: ServingLoad, most_gpus: int) -> Iterator[SizedFleet]:
    """A fleet for each tensor-parallel size, up to the size after the first that holds the load and surely starts."""
    worth_gpus, is_last = most_gpus, False
    for size in (args.tensor_parallel_size,) if args.tensor_parallel_size else _SPLITS:
        split = replace(args, tensor_parallel_size=size)
        if split.gpus_needed > worth_gpus:
            return
        fleet = _sized_fleet(target, split, load, most_gpus, worth_gpus)
        yield fleet
        if is_last:
            return
        if fleet.holds and not fleet.is_tight:
            worth_gpus, is_last = fleet.gpus - 1, True


def _sized_fleet(target: Target, args: ServeArgs, load: ServingLoad, most_gpus: int, worth_gpus: int) -> SizedFleet:
    """The fleet of this GPU and flags with its replica count; where it cannot be sized, `reason` says why. More than
    `worth_gpus` GPUs are not tried, as another tensor-parallel size needs no more."""
    size = args.tensor_parallel_size or 1
    servers = load.pools.prefill + load.pools.decode if load.pools else 1
    unsized = SizedFleet(target.gpu, size, None, None, NO_COUNT, None, "", servers)
    try:
        plan = make_plan(replace(target, gpus=args.gpus_needed), args)
        unsized = replace(unsized, plan=plan)
        if plan.verdict == "does_not_fit":
            gpus, why = plan.target.gpus, plan.reason.replace("_", " ")
            where, more = (
                (f"{gpus} GPUs of one node", "; --concurrency tries several nodes") if gpus > 1 else ("one GPU", "")
            )
            return replace(unsized, reason=f"does not start on {where} ({why}){more}")
        if plan.verdict == "tight" and not (plan.starts and cold_start(plan).starts):
            return replace(unsized, reason=f"is tight and may not start: {plan.reason}")
        if (has := load.trace.longest) > (takes := plan.settings.max_model_len):
            return replace(unsized, reason=f"a request has {has:,} tokens, more than --max-model-len {takes:,}")
        work = hardware(plan)
        if untrusted := why_no_step_time(work):
            return replace(unsized, reason=untrusted)
        load = replace(load, pools=load.pools and load.pools.with_plan(plan))
        flags = planned_scheduler(plan).flags
        if flags.get("groups", (LayerGroup(),)) != (LayerGroup(),):
            flags = as_one_group(load.trace, flags)
        candidate = search.Candidate({}, SchedulerSettings(**flags), roofline(work))
    except LegroomError as error:
        return replace(unsized, reason=error.message)
    return _with_replicas(replace(unsized, band=step_band(plan, work)), load, candidate, most_gpus, worth_gpus)


def _with_replicas(
    unsized: SizedFleet, load: ServingLoad, candidate: search.Candidate, most_gpus: int, worth_gpus: int
) -> SizedFleet:
    """The fleet with low, middle and high replica counts, or why none of up to `worth_gpus` GPUs holds the load."""
    band = unsized.band
    assert band is not None
    most, worth = most_gpus // unsized.gpus_per_replica, worth_gpus // unsized.gpus_per_replica
    per_s = _lasting_requests_per_s(load, candidate)
    middle, outcome = _fewest_replicas(load, candidate, per_s, 1, worth)
    if middle is None and worth_gpus < most_gpus:
        return replace(unsized, reason="takes no fewer GPUs than a smaller split")
    low, high = middle, None
    if middle != 1:
        low, _ = _fewest_replicas(load.with_step_factor(band.low), candidate, per_s, 1, middle or worth)
    if middle is None:
        reason = _why_no_fleet_holds(load, candidate, most_gpus)
        return replace(unsized, replicas=CountBand(low, None, None), reason=reason)
    high, _ = _fewest_replicas(load.with_step_factor(band.high), candidate, per_s, middle, most)
    if high is not None and high > middle:
        outcome = search.replay_candidate(
            search.ReplayTask(load.trace.checked(), load.goal, high, load.pools), candidate
        )
    reason = f"tight: {unsized.plan.reason}" if unsized.plan and unsized.is_tight else ""
    return replace(unsized, replicas=CountBand(low, middle, high), outcome=outcome, reason=reason)


def lasting_verdict(timeline: Timeline, goal: Goal, cost: StepCost | None, band: StepBand | None = None) -> LoadVerdict:
    """The verdict on a replay that also asks whether the server keeps up with a longer load of this kind and, with a
    `band`, holds this load if steps are at their slowest."""
    load, candidate, trace = load_verdict(timeline, goal), search.Candidate({}, timeline.settings, cost), timeline.trace
    if not load.is_held or timeline.interrupted:
        return load
    if not trace.users and load.verdict.startswith("holds"):
        lasts = search.is_sustained(search.ReplayTask(trace, goal), candidate, outcome_of({}, [timeline], goal))
        load = replace(load, sustained=lasts)
    if cost is None or band is None or trace.arrives_at_once or load.sustained is False:
        return load
    serving = ServingLoad.of_trace(trace, goal)
    per_s = _lasting_requests_per_s(serving, candidate)
    held, _ = _fewest_replicas(serving.with_step_factor(band.high), candidate, per_s, 1, 1)
    return replace(load, slowest=(band.high, held is not None))


def _lasting_requests_per_s(load: ServingLoad, candidate: search.Candidate) -> float:
    """Requests per second that one replica keeps up with: its capacity, less a margin for random arrivals."""
    task = search.ReplayTask(load.trace.checked(), load.goal, 1, load.pools)
    return (1 - OVERLOAD_RATIO) * search.capacity_per_s(task, candidate)


def _fewest_replicas(
    load: ServingLoad, candidate: search.Candidate, per_s: float, least: int, most: int
) -> tuple[int, ReplayOutcome] | tuple[None, None]:
    """(fewest of `least` to `most` replicas that hold `per_s` requests/s each; the outcome), or (None, None)."""
    # A replay is too short to show a queue that grows slowly, so the rate alone sets the least.
    least = max(least, ceil(load.least_requests_per_s / per_s) if per_s else most + 1)
    outcomes: dict[int, ReplayOutcome] = {}

    def is_held_by(replicas: int) -> bool:
        """Whether so many replicas meet the goal."""
        task = search.ReplayTask(load.trace.checked(), load.goal, replicas, load.pools)
        outcome = outcomes[replicas] = search.replay_candidate(task, candidate)
        is_overloaded = load.trace.users is not None and outcome.requests_per_s > replicas * per_s
        return not (outcome.rejected or is_overloaded) and load.goal.is_met(outcome)

    count = search.fewest_replicas(is_held_by, least, min(most, len(load.trace)))
    return (None, None) if count is None else (count, outcomes[count])


def _why_no_fleet_holds(load: ServingLoad, candidate: search.Candidate, most_gpus: int) -> str:
    """Why no fleet within `most_gpus` holds the load: even a lone request is too slow, or the GPUs are too few."""
    goal = load.goal
    alone = search.replay_candidate(search.ReplayTask(next(load.trace.shares(len(load.trace), 1)), goal), candidate)
    if goal.first_token_p99 is not None and alone.first_token_p99 > goal.first_token_p99:
        return f"a request that is served alone waits {alone.first_token_p99:.2g} s for its first token"
    if goal.time_per_token_p99 is not None and alone.time_per_token_p99 > goal.time_per_token_p99:
        return f"a request that is served alone takes {alone.time_per_token_p99 * 1000:.0f} ms a token"
    return f"{most_gpus} GPUs are too few"


Money = tuple[float | None, float | None, float | None]
"""Low, middle and high; None: unknown."""


@dataclass(frozen=True)
class CardFleets:
    """The fleets of one model on one GPU model, one per tensor-parallel size, the best first."""

    model: str
    fleets: tuple[SizedFleet, ...]


@dataclass(frozen=True)
class FleetReport:
    """Every model on every GPU, with prices where they are known."""

    load: ServingLoad
    release: Release
    cards: tuple[CardFleets, ...]
    prices: Mapping[str, GpuPrice]
    most_gpus: int
    budget: float = inf

    @property
    def holds(self) -> bool:
        """Whether any model's fleet on any GPU holds the load within the budget."""
        return any(self.by_cost([card]) for card in self.cards)

    def price_of(self, fleet: SizedFleet) -> GpuPrice | None:
        """The hourly price of the fleet's GPU model; None where no price is known."""
        return self.prices.get(fleet.gpu.name)

    def requests_per_s(self, fleet: SizedFleet) -> float:
        """The arrival rate; of users, the rate at which they send given this fleet's time to answer."""
        return fleet.outcome.requests_per_s if self.load.trace.users and fleet.outcome else self.load.requests_per_s

    def requests_at_once(self, fleet: SizedFleet) -> float | None:
        """Requests of the users that wait or run at a time: those who do not pause; None of other loads."""
        users = self.load.trace.users
        return max(0.0, users.count - self.requests_per_s(fleet) * users.think_s) if users and fleet.outcome else None

    def usd_per_hour(self, fleet: SizedFleet) -> Money | None:
        """(low, middle, high) dollars per hour of the whole fleet; None without a price or if it does not hold."""
        price = self.price_of(fleet)
        return fleet.replicas.times(fleet.gpus_per_replica * price.usd_per_hour) if price and fleet.holds else None

    def users_per_usd(self, fleet: SizedFleet) -> float | None:
        """Users served per dollar an hour, at the high cost or else the middle; None without users or a cost."""
        hourly, users = self.usd_per_hour(fleet), self.load.trace.users
        usd = hourly and (hourly[2] or hourly[1])
        return users.count / usd if users and usd else None

    def usd_per_million_tokens(self, fleet: SizedFleet) -> Money | None:
        """(low, middle, high) dollars per million output tokens at the load's rate; None without an hourly cost."""
        hourly = self.usd_per_hour(fleet)
        if hourly is None:
            return None
        millions = self.requests_per_s(fleet) * self.load.mean_output_tokens * 3600 / 1e6
        low, middle, high = (None if usd is None else usd / millions for usd in hourly)
        return low, middle, high

    def by_cost(self, cards: Sequence[CardFleets]) -> list[SizedFleet]:
        """The best fleet of each card, if it holds the load and its cost at each known count is within the budget: the
        cheapest first, by `replicas.high`, then by `replicas.middle`, then those without a price by their GPUs. After
        them come fleets without a high end, and last the tight ones."""

        def cost_key(fleet: SizedFleet) -> tuple[float, ...]:
            """Sort key: sure before tight ones, then high cost, then middle cost, then GPUs if there is no price."""
            usd, gpus = self.usd_per_hour(fleet) or NO_COUNT.times(1), fleet.replicas.times(fleet.gpus_per_replica)
            figures = (gpus[2] and 0, usd[2], usd[1], gpus[2], gpus[1])
            return fleet.is_tight, *(inf if each is None else each for each in figures)

        first = sorted((card.fleets[0] for card in cards if card.fleets and card.fleets[0].holds), key=cost_key)
        return [fleet for fleet in first if not self.over_budget(fleet)]

    def over_budget(self, fleet: SizedFleet) -> str:
        """Why a fleet that holds the load is over the budget: its cost, or no known price; empty if it is within."""
        usd = max(filter(None, self.usd_per_hour(fleet) or ()), default=inf)
        if not fleet.holds or usd <= self.budget:
            return ""
        if usd == inf:
            return "no price is known"
        estimated = (self.usd_per_hour(fleet) or NO_COUNT.times(1))[1]
        less = f" (${estimated:,.2f} with steps as estimated)" if estimated is not None and estimated < usd else ""
        return f"${usd:,.2f} an hour{less} is above the budget"

    def as_json(self) -> dict[str, Any]:
        """The document of `legroom size --rate --json`."""
        load, users = self.load, self.load.trace.users
        rates = {
            "requests_per_s": load.requests_per_s,
            "output_tokens_per_s": load.requests_per_s * load.mean_output_tokens,
        }
        return {
            "vllm": self.release.version,
            "load": {
                **{name: None if users else round(rate, 4) for name, rate in rates.items()},
                "users": users and asdict(users),
                "requests": len(load.trace),
                "mean_prompt_tokens": round(load.mean_prompt_tokens, 1),
                "mean_output_tokens": round(load.mean_output_tokens, 1),
            },
            "goal": {
                "first_token_p99_s": load.goal.first_token_p99,
                "time_per_token_p99_s": load.goal.time_per_token_p99,
            },
            "max_gpus": self.most_gpus,
            "disaggregation": load.pools and {"prefill": load.pools.prefill, "decode": load.pools.decode},
            "rows": [self._fleet_json(card.model, fleet) for card in self.cards for fleet in card.fleets],
        }

    def _fleet_json(self, model: str, fleet: SizedFleet) -> dict[str, Any]:
        """One fleet as an entry of `legroom size --rate --json`: layout, replicas, GPUs, cost and latency."""
        plan, band, outcome, price = fleet.plan, fleet.band, fleet.outcome, self.price_of(fleet)
        over_budget = self.over_budget(fleet)
        return {
            "model": model,
            "gpu": fleet.gpu.name,
            "tensor_parallel_size": fleet.tensor_parallel_size,
            "holds": fleet.holds,
            "within_budget": not over_budget,
            "reason": fleet.reason or over_budget or None,
            "replicas": _band_json(fleet.replicas.times(1)),
            "gpus": _band_json(fleet.replicas.times(fleet.gpus_per_replica)),
            "basis": band.basis if band else None,
            "step_time_band": {"low": band.low, "high": band.high} if band else None,
            "first_token_p99_s": round(outcome.first_token_p99, 4) if outcome else None,
            "time_per_token_p99_s": round(outcome.time_per_token_p99, 5) if outcome else None,
            "requests_per_s": round(outcome.requests_per_s, 4) if outcome else None,
            "tokens_per_s_each": round(1 / (outcome.time_per_token_p50 or inf), 2) if outcome else None,
            "requests_at_once": (at_once := self.requests_at_once(fleet)) and round(at_once, 1),
            "answer_p50_s": round(outcome.latency_p50, 3) if outcome else None,
            "price": price and {"usd_per_hour": price.usd_per_hour, "date": price.date or None, "source": price.source},
            "usd_per_hour": _band_json(self.usd_per_hour(fleet)),
            "users_per_usd": (per_usd := self.users_per_usd(fleet)) and round(per_usd, 2),
            "usd_per_million_tokens": _band_json(self.usd_per_million_tokens(fleet)),
            "command": ready_command(plan) if plan and fleet.holds else None,
        }


def fleet_report(
    task: FleetTask,
    cards: Sequence[Gpu],
    prices: Mapping[str, GpuPrice],
    executor: SweepExecutor | None = None,
    progress: Callable[[float], None] | None = None,
) -> FleetReport:
    """The fleets of every model on every GPU type, model by model; LegroomError for a load that cannot be replayed."""
    load = task.load
    if any((args.data_parallel_size or 1) > 1 for args in task.args):
        why = "replicas are what is counted here, so --data-parallel-size has no place"
        raise LegroomError(why, "leave it out of the flags")
    if not load.trace.in_seconds or load.trace.arrives_at_once:
        raise LegroomError(
            f"{load.trace.name} does not tell when its requests arrive, so there is no rate to size for",
            'give a trace with "arrival" in seconds, or --rate with --prompt and --answer in place of a trace',
        )
    cells = [(number, card) for number in range(len(task.models)) for card in cards]
    sized = sweep(size_fleet, task, cells, executor or ProcessExecutor(1), progress)
    rows = (CardFleets(task.models[cell[0]].name, fleets) for cell, fleets in zip(cells, sized, strict=True))
    return FleetReport(task.load, task.release, tuple(rows), prices, task.most_gpus)


def _band_json(band: Money | None) -> dict[str, float | None] | None:
    """(low, middle, high) figures by these names, rounded to four decimals; None for None."""
    names = ("low", "middle", "high")
    return band and {name: figure and round(figure, 4) for name, figure in zip(names, band, strict=True)}
