#!/usr/bin/env python3
"""Goodput of the guard's admission against vLLM alone, on vLLM's own scheduler in simulation: many rounds, no server.

    guard_goodput.py [--card MODEL] [--gpu H200] [--rounds 3] [--seed 0] [--set LEAD_S=0 ...] [--loads long ...]

The pool is `legroom.guard`'s own, driven by a simulated clock. A step takes what `legroom simulate` says of that model
on that GPU; the loads are those of guard_loads.py. --set adds a row with another value of a constant of the pool or of
its projection: the ablation of docs/decisions/0025. --streams: the guard sees tokens as they pass.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice

from bench_harness import arguments
from guard_loads import CARD_LOADS, CARD_POOL, LoadRequest

from legroom.guard.pool import admission_pool, projection
from legroom.guard.pool.admission_pool import RECHECK_INTERVAL_S, Pool, PoolLimits
from legroom.guard.pool.projection import BlockNeed, Growth, Reservation, ReservationState
from legroom.guard.request.prefixes import PrefixUnit, chain_of_ids
from legroom.simulation.fast.accounting import step_seconds
from legroom.simulation.fast.rows import StepCost
from legroom.simulation.request import Request
from legroom.simulation.scheduler import Scheduler
from legroom.simulation.scheduler_settings import SchedulerSettings
from legroom.simulation.trace import TraceRequest
from legroom.units import cdiv

LONGEST = 1024
QUANTILES = tuple(min(800, round(-200 * math.log(1 - (part + 0.5) / 5))) for part in range(5))
"""Of open-ended answers, as they are learnt."""


BLOCKS, BLOCK_SIZE = CARD_POOL
STEP_TOKENS = 8192
"""max_num_batched_tokens."""
HOP_S = 0.015
"""From the guard to the engine, and from an answer's end to the guard."""
SCRAPE_INTERVAL_S = 0.25
OWN_IDS = itertools.count(1 << 20)


@dataclass(frozen=True)
class SimulatedRequest(LoadRequest):
    """A request with the length that the guard expects of its answer."""

    expected: int = 0

    def token_ids(self) -> list[int]:
        return [*range(self.prefix), *islice(OWN_IDS, self.prompt - self.prefix)]

    def need(self, ids: list[int]) -> BlockNeed:
        steps = self.expected or self.output
        most = LONGEST - self.prompt if self.expected else self.output

        def blocks(tokens: int) -> int:
            return cdiv(tokens, BLOCK_SIZE) * self.copies

        quantiles = QUANTILES if self.expected else ()
        start, size = blocks(self.prompt + 1), BLOCK_SIZE
        chain = chain_of_ids(ids, PrefixUnit(size), 0)
        shared = max(0, self.prompt - 1) // size * (self.copies - 1)
        first = cdiv(self.prompt + 1, size) * size - self.prompt
        growth = Growth(start - shared, blocks(self.prompt + steps) - shared, steps, most, quantiles, first, size)
        most_blocks = min(BLOCKS, blocks(self.prompt + most) - shared)
        return BlockNeed(most_blocks, self.copies, growth, self.prompt, (chain,) if chain else ())


def requests_of(name: str, rnd: random.Random) -> list[SimulatedRequest]:
    count, make = CARD_LOADS[name]
    made = [make(rnd) for _ in range(count)]
    return [SimulatedRequest(**asdict(each), expected=200 if each.is_open else 0) for each in made]


@dataclass
class Run:
    tokens_per_s: float
    preemptions: int
    p50_s: float
    worst_s: float


def step_s(scheduled: dict[Request, int], cost: StepCost) -> float:
    stored = sum(request.num_computed_tokens for request in scheduled)
    return float(step_seconds(cost, sum(scheduled.values()), stored, len(scheduled)))


def run(load: list[SimulatedRequest], limits: PoolLimits | None, cost: StepCost, streams: bool) -> Run:
    """`limits` None: everything goes straight to the server."""
    scheduler = Scheduler(
        SchedulerSettings(
            BLOCKS + 1,
            BLOCK_SIZE,
            max_num_batched_tokens=STEP_TOKENS,
            max_model_len=LONGEST,
            enable_prefix_caching=True,
        )
    )
    pool, now_s, next_check_s, next_scrape_s = Pool(limits or PoolLimits()), 0.0, 0.0, 0.0
    prompts = [sent.token_ids() for sent in load]
    waiting = [(sent, ids, pool.acquire(sent.need(ids), 0.0)) for sent, ids in zip(load, prompts, strict=True)]
    inside: dict[Request, tuple[int, SimulatedRequest]] = {}
    left: dict[int, int] = {}
    preemptions = tokens = number = steps = 0
    ends_s: list[float] = []
    reservations = {}
    on_the_way: deque[tuple[float, Request]] = deque()
    ended: deque[tuple[float, SimulatedRequest, Reservation]] = deque()
    while waiting or inside or ended:
        admitted = [entry for entry in waiting if entry[2].state is ReservationState.ADMITTED]
        waiting = [entry for entry in waiting if entry[2].state is not ReservationState.ADMITTED]
        for sent, ids, reservation in admitted:
            number += 1
            reservations[number], left[number] = reservation, sent.copies
            for copy in range(sent.copies):
                row = TraceRequest(f"{number}-{copy}", 0, sent.prompt, sent.output)
                request = Request(row, number * 64 + copy, LONGEST)
                # Copies part at the last token: the simulated ones would all sample the same.
                request.token_ids = [*ids[:-1], next(OWN_IDS)]
                inside[request] = number, sent
                on_the_way.append((now_s + HOP_S, request))
        if not scheduler.running and not scheduler.waiting:
            now_s = max(now_s, min([entry[0] for entry in (*islice(on_the_way, 1), *islice(ended, 1))], default=now_s))
        while on_the_way and on_the_way[0][0] <= now_s:
            scheduler.add_request(on_the_way.popleft()[1])
        batch = scheduler.schedule()
        preemptions += len(batch.preempted)
        now_s, steps = now_s + step_s(batch.scheduled, cost), steps + 1
        finished = scheduler.update_from_output(batch)[1]
        for request in batch.scheduled if streams else ():
            reservations[inside[request][0]].steps_seen = request.num_output_tokens
        for request in finished:
            which, sent = inside.pop(request)
            tokens += sent.output
            left[which] -= 1
            if not left[which]:
                ended.append((now_s + HOP_S, sent, reservations[which]))
                ends_s.append(now_s)
        while ended and ended[0][0] <= now_s:
            seen_s, sent, reservation = ended.popleft()
            pool.learn_pace(sent.output, seen_s - reservation.admitted_s)
            pool.release(reservation, now_s)
        if now_s >= next_scrape_s:
            next_scrape_s = now_s + min(SCRAPE_INTERVAL_S, max(0.05, now_s))
            pool.learn_steps(steps, now_s)
        if now_s >= next_check_s:
            pool.admit_waiting(now_s)
            next_check_s = now_s + RECHECK_INTERVAL_S
    return Run(tokens / max(ends_s), preemptions, statistics.median(ends_s), max(ends_s))


def card_cost(model: str, gpu: str) -> StepCost:
    """What steps of a model take on a card, as `legroom simulate` has it."""
    from legroom import plan
    from legroom.simulation.from_plan import hardware
    from legroom.simulation.step_time import roofline

    return roofline(hardware(plan(model, gpu, max_model_len=LONGEST, advice=False).plan))


@contextlib.contextmanager
def constant(change: str) -> Iterator[None]:
    """Give a constant of the guard's pool another value, like `LEAD_S=0`."""
    name, _, value = change.partition("=")
    module = projection if hasattr(projection, name) else admission_pool
    before = getattr(module, name, None)
    if change:
        setattr(module, name, float(value))
    yield
    if change:
        setattr(module, name, before)


def main() -> None:
    card = {"card": "meta-llama/Llama-3.1-8B-Instruct", "gpu": "H200"}
    args = arguments(__doc__, rounds=3, seed=0, set=(), streams=False, loads=tuple(CARD_LOADS), **card)
    cost = card_cost(args.card, args.gpu)
    projected = PoolLimits(BLOCKS, None, 10_000, is_strict=False)
    policies: dict[str, tuple[PoolLimits | None, str]] = {
        "direct": (None, ""),
        "strict": (PoolLimits(BLOCKS, None, 10_000), ""),
        "goodput": (projected, ""),
    }
    policies |= {change: (projected, change) for change in args.set}
    for name in args.loads:
        runs_of: dict[str, list[Run]] = {policy: [] for policy in policies}
        for seed in range(args.seed, args.seed + args.rounds):
            for policy, (limits, change) in policies.items():
                with constant(change):
                    load = requests_of(name, random.Random(seed))
                    runs_of[policy].append(run(load, limits, cost, args.streams))
        for policy, runs in runs_of.items():
            pairs = zip(runs, runs_of["direct"], strict=True)
            ratios = [run.tokens_per_s / direct.tokens_per_s for run, direct in pairs]
            preemptions = sum(result.preemptions for result in runs)
            print(
                f"{name:13}{policy:18} goodput {statistics.median(ratios):.3f} (least {min(ratios):.3f})  "
                f"preemptions {preemptions:4}  p50 {runs[0].p50_s:5.1f} s  last {runs[0].worst_s:5.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
