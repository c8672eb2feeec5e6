#!/usr/bin/env python3
"""legroom's seconds against measurements of vLLM that others published, and its error beside what they say of theirs.

    python bench/published_times.py [--all] [--json] [--fit-link]

Every run of `published_times.json` is a server under a fixed number of requests at once. The same load is replayed with
legroom's step times on the plan of that server: decodes first, prompts in chunks of what is left of a step. Printed by
card and split: the median errors of the time to the first token, of the time a token, and of the whole answer, and how
many of the whole answers lie in the band that legroom gives. `--all` prints every run. Servers for which legroom gives
no time are counted, and those with experts shown in brackets, with what it would have said. `--fit-link` fits what
cards send each other to the split servers on H200 alone and writes `step_link.json`: for the other cards, the figures
are a forecast.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shlex
import statistics
import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from legroom.facts.releases import release
from legroom.planning.machine import Machine, make_plan
from legroom.planning.plan import Plan
from legroom.simulation.fast.accounting import decode_steps_seconds, step_seconds
from legroom.simulation.fast.rows import StepCost
from legroom.simulation.from_plan import hardware
from legroom.simulation.step_time import LinkEfficiency, StepBand, roofline, step_band, why_untrusted
from legroom.vllm.parse import parse_flags

RUNS = Path(__file__).with_name("published_times.json")
LINK = Path(__file__).parent.parent / "src/legroom/simulation/step_link.json"
FITTED_ON = "h200"
LATENCIES_S = tuple(step / 1e6 for step in range(4, 15, 2))
RATIOS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
ROUNDS = 10
"""Requests of every client."""


@dataclass
class ClientRequest:
    prompt: int
    answer: int
    arrival: float
    computed: int = 0
    first_token: float | None = None
    answered: int = 0


@dataclass
class ClosedLoop:
    """So many clients, each of which sends its next request when it has its answer."""

    cost: StepCost
    pool_tokens: int
    step_tokens: int
    most_running: int
    lengths: Iterator[tuple[int, int]]
    now: float = 0.0
    waiting: deque[ClientRequest] = field(default_factory=deque)
    running: list[ClientRequest] = field(default_factory=list)
    done: list[tuple[float, float, float]] = field(default_factory=list)
    """Time to the first token, time a token, and the whole."""

    def run(self, clients: int) -> None:
        for _ in range(clients):
            self._send()
        while len(self.done) < clients * ROUNDS:
            self._admit()
            self._step()

    def _send(self) -> None:
        prompt, answer = next(self.lengths)
        self.waiting.append(ClientRequest(prompt, answer, self.now))

    def _admit(self) -> None:
        room = self.pool_tokens - sum(request.prompt + request.answer for request in self.running)
        while self.waiting and len(self.running) < self.most_running:
            room -= self.waiting[0].prompt + self.waiting[0].answer
            if room < 0 and self.running:
                return
            self.running.append(self.waiting.popleft())

    def _step(self) -> None:
        decodes = [request for request in self.running if request.computed >= request.prompt]
        prompts = [request for request in self.running if request.computed < request.prompt]
        stored = sum(request.computed for request in self.running)
        if not prompts:
            steps = min(request.answer - request.answered for request in decodes)
            self.now += decode_steps_seconds(self.cost, len(decodes), stored + len(decodes), steps)  # type: ignore[no-untyped-call]
            self._answer(decodes, steps)
            return
        left = tokens = self.step_tokens - len(decodes)
        for request in prompts:
            chunk = min(left, request.prompt - request.computed)
            request.computed += chunk
            left -= chunk
        scheduled = len(decodes) + tokens - left
        self.now += step_seconds(self.cost, scheduled, stored + scheduled, len(self.running))  # type: ignore[no-untyped-call]
        self._answer(decodes, 1)
        for request in prompts:
            if request.computed >= request.prompt:
                request.first_token, request.answered = self.now, 1
        self._finish()

    def _answer(self, decodes: Sequence[ClientRequest], steps: int) -> None:
        for request in decodes:
            request.answered += steps
            request.computed += steps
        self._finish()

    def _finish(self) -> None:
        ended = [request for request in self.running if request.answered >= request.answer]
        self.running = [request for request in self.running if request.answered < request.answer]
        for request in ended:
            assert request.first_token is not None
            first, rest = request.first_token - request.arrival, self.now - request.first_token
            self.done.append((first, rest / max(1, request.answer - 1), first + rest))
            self._send()


def planned(run: dict[str, Any]) -> Plan:
    used = release(run["vllm"])
    args = parse_flags(shlex.split(run["command"]), used).args
    return make_plan(args, used, Machine(run["gpu"]), advice=False)


def lengths(prompt: int, answer: int, spread: float) -> Iterator[tuple[int, int]]:
    draw = random.Random(0)
    while True:
        yield tuple(round(length * draw.uniform(1 - spread, 1)) for length in (prompt, answer))  # type: ignore[misc]


def predictions(plan: Plan, run: dict[str, Any], link: LinkEfficiency | None = None) -> Iterator[dict[str, Any]]:
    """The measured and the predicted seconds of every row."""
    work = hardware(plan)
    band, cost = step_band(plan, work), roofline(work, exchanged=link)
    settings = plan.settings
    for clients, prompt, answer, ttft_ms, tpot_ms in run["rows"]:
        loop = ClosedLoop(
            cost,
            plan.memory.kv.tokens,
            settings.max_num_batched_tokens,
            settings.max_num_seqs,
            lengths(prompt, answer, run.get("spread", 0.0)),
        )
        loop.run(clients)
        ttft, tpot, whole = (statistics.fmean(column) for column in zip(*loop.done, strict=True))
        mean_answer = answer * (1 - run.get("spread", 0.0) / 2)
        measured = ttft_ms / 1000, tpot_ms / 1000, (ttft_ms + tpot_ms * (mean_answer - 1)) / 1000
        yield _row(run, plan, (clients, prompt, answer), measured, (ttft, tpot, whole), band)


def _row(
    run: dict[str, Any],
    plan: Plan,
    load: tuple[int, int, int],
    measured: tuple[float, float, float],
    predicted: tuple[float, float, float],
    band: StepBand,
) -> dict[str, Any]:
    errors = [guess / truth - 1 for guess, truth in zip(predicted, measured, strict=True)]
    return {
        "model": plan.target.model.name,
        "gpu": run["gpu"],
        "tensor_parallel_size": plan.settings.tensor_parallel_size,
        "load": load,
        "measured": measured,
        "predicted": predicted,
        "ttft_error": errors[0],
        "tpot_error": errors[1],
        "end_to_end_error": errors[2],
        "in_band": band.low * predicted[2] <= measured[2] <= band.high * predicted[2],
        "factor": measured[2] / predicted[2],
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    factors = sorted(row["factor"] for row in rows)
    return {
        "runs": len(rows),
        **{
            name: round(statistics.median(abs(row[f"{name}_error"]) for row in rows), 3)
            for name in ("ttft", "tpot", "end_to_end")
        },
        "in_band": sum(row["in_band"] for row in rows),
        "took": [round(factors[0], 2), round(statistics.median(factors), 2), round(factors[-1], 2)],
    }


def fit_link(runs: Sequence[dict[str, Any]]) -> LinkEfficiency:
    """The least mean error of the whole answers, of split servers on one kind of card."""
    plans = [(planned(run), run) for run in runs if run["gpu"] == FITTED_ON]
    split = [
        (plan, run)
        for plan, run in plans
        if plan.settings.tensor_parallel_size > 1 and not why_untrusted(plan, hardware(plan))
    ]

    def error(link: LinkEfficiency) -> float:
        rows = (row for plan, run in split for row in predictions(plan, run, link))
        return statistics.fmean(abs(math.log(row["factor"])) for row in rows)

    return min((LinkEfficiency(latency, ratio) for latency in LATENCIES_S for ratio in RATIOS), key=error)


def write_link(document: dict[str, Any]) -> None:
    fitted = fit_link(document["runs"])
    source = (
        f"fitted by bench/published_times.py to the split servers on {FITTED_ON.upper()} that "
        f"{document['sources']['aiconfigurator']['url']} gives; other cards took no part"
    )
    LINK.write_text(json.dumps({"fitted": asdict(fitted), "source": source}, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every run")
    parser.add_argument("--json", action="store_true", help="one document")
    parser.add_argument("--fit-link", action="store_true", help=f"write {LINK.name}")
    args = parser.parse_args()
    document = json.loads(RUNS.read_text("utf-8"))
    if args.fit_link:
        write_link(document)
        return 0
    rows: list[dict[str, Any]] = []
    with_experts: list[dict[str, Any]] = []
    no_number: dict[str, int] = defaultdict(int)
    for run in document["runs"]:
        plan = planned(run)
        work = hardware(plan)
        if why := why_untrusted(plan, work):
            no_number[why] += len(run["rows"])
            with_experts += predictions(plan, run) if work.expert_bytes else ()
        else:
            rows += predictions(plan, run)
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[f"{row['gpu']}, {'one card' if row['tensor_parallel_size'] == 1 else 'split'}"].append(row)
    groups["all"] = rows
    for row in with_experts:
        groups[f"({row['gpu']}, experts)"].append(row)
    result = {"groups": {name: summary(each) for name, each in sorted(groups.items())}, "no_number": dict(no_number)}
    if args.json:
        print(json.dumps({**result, "theirs": document["theirs"]}))
        return 0
    if args.all:
        for row in (*rows, *with_experts):
            print(_line(row))
    for name, figures in result["groups"].items():
        print(
            f"{name:16} {figures['runs']:4} runs  first token {figures['ttft']:6.1%}  a token {figures['tpot']:6.1%}  "
            f"whole {figures['end_to_end']:6.1%}  in band {figures['in_band']}  took {figures['took']} x"
        )
    for why, count in no_number.items():
        print(f"no number for {count}: {why}")
    for theirs in document["theirs"]:
        print(
            f"{theirs['who']}, {theirs['what']}: first token {theirs['ttft']:.1%}, a token {theirs['tpot']:.1%}, "
            f"whole {theirs['end_to_end']:.1%}"
        )
    return 0


def _line(row: dict[str, Any]) -> str:
    pairs = "  ".join(
        f"{truth * 1000:9.1f}/{guess * 1000:9.1f}"
        for truth, guess in zip(row["measured"], row["predicted"], strict=True)
    )
    where = f"{row['model'][-22:]:22} {row['gpu']:5} tp{row['tensor_parallel_size']}"
    return f"{where} {row['load']!s:18} {pairs}  took {row['factor']:.2f} x"


if __name__ == "__main__":
    sys.exit(main())
