#!/usr/bin/env python3
"""Goodput of the guard's admission against vLLM alone, on vLLM's own scheduler in simulation: many rounds, no server.

    guard_goodput.py [--rounds 3] [--set SEQUENCE_GAIN=0.3] [--step-ms 10 1 0.15] [--caching] [--loads long]
    guard_goodput.py --card [MODEL] [--gpu H200] ...

The pool is `legroom.guard`'s own, driven by a simulated clock. A step takes a constant, a part for each sequence that
decodes and a part for each prompt token; the defaults are in the proportions of a tiny model on two cores, where strict
admission measured 1.06, 0.75 and 0.78 of direct. With --card a step takes what `legroom simulate` says of that model on
that GPU, and the loads are those of guard_loads.py. --set adds a row with another value of a constant of the pool or of
its projection: the ablation of docs/decisions/0025.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice

from guard_loads import CARD_LOADS, CARD_POOL, Asked

from legroom.guard.pool import block_pool, projection
from legroom.guard.pool.block_pool import RECHECK_INTERVAL_S, Pool, PoolLimits
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


@dataclass
class BenchPool:
    blocks: int = 32
    block_size: int = 128
    streams: bool = False
    """Whether the guard sees tokens as they pass, or goes by the clock."""
    caching: bool = False
    """Whether the server has a prefix cache."""
    hop_s: float = 0.0
    """From the guard's word to the engine, and from an answer's end to the guard."""
    pace: float = 0.0
    """Tokens a second of a sequence, as known from before; 0: not known."""
    scrape_s: float = 0.1
    """Interval between scrapes of the step counter: 0.1 inside vLLM, 0.25 as a proxy."""
    step_tokens: int = 2048
    """max_num_batched_tokens."""


OWN_IDS = itertools.count(1 << 20)
POOL = BenchPool()


@dataclass(frozen=True)
class SimulatedRequest(Asked):
    """With what the guard expects of its answer."""

    expected: int = 0

    def token_ids(self) -> list[int]:
        return [*range(self.prefix), *islice(OWN_IDS, self.prompt - self.prefix)]

    def need(self, ids: list[int]) -> BlockNeed:
        steps = self.expected or self.output
        most = LONGEST - self.prompt if self.expected else self.output

        def blocks(tokens: int) -> int:
            return cdiv(tokens, POOL.block_size) * self.copies

        quantiles = QUANTILES if self.expected else ()
        start, size = blocks(self.prompt + 1), POOL.block_size
        chain = chain_of_ids(ids, PrefixUnit(size), 0) if POOL.caching else None
        shared = max(0, self.prompt - 1) // size * (self.copies - 1) if POOL.caching else 0
        first = cdiv(self.prompt + 1, size) * size - self.prompt
        growth = Growth(start - shared, blocks(self.prompt + steps) - shared, steps, most, quantiles, first, size)
        most_blocks = min(POOL.blocks, blocks(self.prompt + most) - shared)
        return BlockNeed(most_blocks, self.copies, growth, self.prompt, (chain,) if chain else ())


def prefixed(rnd: random.Random) -> SimulatedRequest:
    prefix = rnd.choice([256, 384])
    return SimulatedRequest(prefix + 40, rnd.choice([100, 200]), prefix=prefix)


def open_ended(rnd: random.Random) -> SimulatedRequest:
    return SimulatedRequest(rnd.choice([40, 200]), min(800, 1 + int(rnd.expovariate(1 / 200))), expected=320)


LOADS: dict[str, Callable[[random.Random], list[SimulatedRequest]]] = {
    "short": lambda rnd: [SimulatedRequest(100, 40)] * 80,
    "long": lambda rnd: [SimulatedRequest(60, 700)] * 40,
    "mixed": lambda rnd: [SimulatedRequest(rnd.choice([60, 300]), rnd.choice([30, 150, 600])) for _ in range(50)],
    "several": lambda rnd: [SimulatedRequest(50, 60, 8)] * 12,
    "several long": lambda rnd: [SimulatedRequest(50, 300, 4)] * 20,
    "open-ended": lambda rnd: [open_ended(rnd) for _ in range(100)],
    "half prompts": lambda rnd: [SimulatedRequest(200, 300)] * 100,
    "prefix": lambda rnd: [prefixed(rnd) for _ in range(60)],
}


@dataclass
class Run:
    tokens_per_s: float
    preemptions: int
    p50_s: float
    worst_s: float


StepMs = tuple[float, float, float]


def step_s(scheduled: dict[Request, int], cost: StepMs | StepCost) -> float:
    """Seconds of a step."""
    decoding = sum(count == 1 for count in scheduled.values())
    prompt_tokens = sum(count for count in scheduled.values() if count > 1)
    if isinstance(cost, StepCost):
        stored = sum(request.num_computed_tokens for request in scheduled)
        seconds = step_seconds(cost, decoding + prompt_tokens, stored, len(scheduled))  # type: ignore[no-untyped-call]
        return float(seconds)
    return (cost[0] + cost[1] * decoding + cost[2] * prompt_tokens) / 1000


def pool_of(limits: PoolLimits | None) -> Pool:
    pool = Pool(limits or PoolLimits())
    if POOL.pace:
        pool.learn_pace(1000, 1000 / POOL.pace)
    return pool


def run(load: list[SimulatedRequest], limits: PoolLimits | None, cost: StepMs | StepCost) -> Run:
    """`limits` None: everything goes straight to the server."""
    scheduler = Scheduler(
        SchedulerSettings(
            POOL.blocks + 1,
            POOL.block_size,
            max_num_batched_tokens=POOL.step_tokens,
            max_model_len=LONGEST,
            enable_prefix_caching=POOL.caching,
        )
    )
    pool, now_s, next_check_s, next_scrape_s = pool_of(limits), 0.0, 0.0, 0.0
    prompts = [asked.token_ids() for asked in load]
    waiting = [(asked, ids, pool.acquire(asked.need(ids), 0.0)) for asked, ids in zip(load, prompts, strict=True)]
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
        for asked, ids, reservation in admitted:
            number += 1
            reservations[number], left[number] = reservation, asked.copies
            for copy in range(asked.copies):
                row = TraceRequest(f"{number}-{copy}", 0, asked.prompt, asked.output)
                request = Request(row, number * 64 + copy, LONGEST)
                # Copies part at the last token: the simulated ones would all sample the same.
                request.token_ids = [*ids[:-1], next(OWN_IDS)]
                inside[request] = number, asked
                on_the_way.append((now_s + POOL.hop_s, request))
        if not scheduler.running and not scheduler.waiting:
            now_s = max(now_s, min([entry[0] for entry in (*islice(on_the_way, 1), *islice(ended, 1))], default=now_s))
        while on_the_way and on_the_way[0][0] <= now_s:
            scheduler.add(on_the_way.popleft()[1])
        batch = scheduler.schedule()
        preemptions += len(batch.preempted)
        now_s, steps = now_s + step_s(batch.scheduled, cost), steps + 1
        finished = scheduler.update(batch)[1]
        for request in batch.scheduled if POOL.streams else ():
            reservations[inside[request][0]].steps_seen = request.num_output_tokens
        for request in finished:
            which, asked = inside.pop(request)
            tokens += asked.output
            left[which] -= 1
            if not left[which]:
                ended.append((now_s + POOL.hop_s, asked, reservations[which]))
                ends_s.append(now_s)
        while ended and ended[0][0] <= now_s:
            seen_s, asked, reservation = ended.popleft()
            pool.learn_pace(asked.output, seen_s - reservation.admitted_s)
            pool.release(reservation, now_s)
        if now_s >= next_scrape_s:
            next_scrape_s = now_s + min(POOL.scrape_s, max(0.05, now_s))
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


def use_card_loads() -> None:
    """In place of those for a small pool, with the pool of these."""

    def loader(name: str) -> Callable[[random.Random], list[SimulatedRequest]]:
        count, make = CARD_LOADS[name]

        def load(rnd: random.Random) -> list[SimulatedRequest]:
            made = [make(rnd) for _ in range(count)]
            return [SimulatedRequest(**asdict(asked), expected=200 if asked.is_open else 0) for asked in made]

        return load

    POOL.blocks, POOL.block_size = CARD_POOL
    POOL.step_tokens, POOL.caching = 8192, True
    LOADS.clear()
    LOADS.update({name: loader(name) for name in CARD_LOADS})


@contextlib.contextmanager
def constant(change: str) -> Iterator[None]:
    """Give a constant of the guard's pool another value, like `LEAD_S=0`."""
    name, _, value = change.partition("=")
    module = projection if hasattr(projection, name) else block_pool
    before = getattr(module, name, None)
    if change:
        setattr(module, name, float(value))
    yield
    if change:
        setattr(module, name, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="other values of constants")
    parser.add_argument("--pool", type=int, nargs=2, default=(32, 128), help="blocks, and tokens in each")
    parser.add_argument("--seed", type=int, default=0, help="of the first round: others than those it was tuned on")
    parser.add_argument("--streams", action="store_true", help="tokens are seen as they pass")
    parser.add_argument("--requests", type=int, default=1, help="times those of each load")
    parser.add_argument("--step-ms", type=float, nargs=3, default=(10.0, 1.0, 0.15))
    parser.add_argument("--caching", action="store_true", help="the server has a prefix cache, as is vLLM's default")
    parser.add_argument("--hop-ms", type=float, default=0.0, help="from the guard to the engine, and back")
    parser.add_argument("--pace", type=float, default=0.0, help="tokens a second that earlier answers have shown")
    parser.add_argument(
        "--card", nargs="?", const="meta-llama/Llama-3.1-8B-Instruct", help="a model on a card, its step times"
    )
    parser.add_argument("--gpu", default="H200", help="the card")
    parser.add_argument("--loads", nargs="+")
    args = parser.parse_args()
    cost = args.step_ms
    POOL.blocks, POOL.block_size, POOL.streams = *args.pool, args.streams
    POOL.caching, POOL.hop_s, POOL.pace = args.caching, args.hop_ms / 1000, args.pace
    if args.card:
        use_card_loads()
        cost, POOL.hop_s, POOL.scrape_s = card_cost(args.card, args.gpu), (args.hop_ms or 15.0) / 1000, 0.25
    projected = PoolLimits(POOL.blocks, None, 10_000, is_strict=False)
    policies: dict[str, tuple[PoolLimits | None, str]] = {
        "direct": (None, ""),
        "strict": (PoolLimits(POOL.blocks, None, 10_000), ""),
        "goodput": (projected, ""),
    }
    policies |= {change: (projected, change) for change in args.set}
    for name in args.loads or LOADS:
        seen: dict[str, list[Run]] = {}
        for seed in range(args.seed, args.seed + args.rounds):
            for policy, (limits, change) in policies.items():
                load = [asked for part in range(args.requests) for asked in LOADS[name](random.Random(seed + part))]
                with constant(change):
                    seen.setdefault(policy, []).append(run(load, limits, cost))
        for policy, runs in seen.items():
            ratios = [
                ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in zip(runs, seen["direct"], strict=True)
            ]
            preemptions = sum(result.preemptions for result in runs)
            print(
                f"{name:13}{policy:18} goodput {statistics.median(ratios):.3f} (least {min(ratios):.3f})  "
                f"preemptions {preemptions:4}  p50 {runs[0].p50_s:5.1f} s  last {runs[0].worst_s:5.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
