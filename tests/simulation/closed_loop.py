"""A closed loop of clients replayed on a plan's step times, for runs of vLLM that others measured and published."""

from __future__ import annotations

import random
import shlex
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from legroom.facts.releases import release
from legroom.planning.machine import Machine, make_plan
from legroom.planning.plan import Plan
from legroom.simulation.fast.accounting import decode_steps_seconds, step_seconds
from legroom.simulation.fast.rows import StepCost
from legroom.simulation.from_plan import hardware
from legroom.simulation.step_time import (
    ServerEfficiency,
    StepBand,
    model_class,
    roofline,
    step_band,
    why_other_maker,
    why_unfamiliar,
)
from legroom.vllm.parse import parse_flags

PUBLISHED = Path(__file__).parents[1] / "fixtures/published_times.json"
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
    """Clients that each send the next request when the answer to the last one is complete."""

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
            self.now += decode_steps_seconds(self.cost, len(decodes), stored + len(decodes), steps)
            self._answer(decodes, steps)
            return
        left = tokens = self.step_tokens - len(decodes)
        for request in prompts:
            chunk = min(left, request.prompt - request.computed)
            request.computed += chunk
            left -= chunk
        scheduled = len(decodes) + tokens - left
        self.now += step_seconds(self.cost, scheduled, stored + scheduled, len(self.running))
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


def plan_of_run(run: dict[str, Any]) -> Plan:
    used = release(run["vllm"])
    args = parse_flags(shlex.split(run["command"]), used).args
    return make_plan(args, used, Machine(run["gpu"]), advice=False)


def request_lengths(prompt: int, answer: int, spread: float) -> Iterator[tuple[int, int]]:
    draw = random.Random(0)
    while True:
        yield tuple(round(length * draw.uniform(1 - spread, 1)) for length in (prompt, answer))


def predictions(plan: Plan, run: dict[str, Any], server: ServerEfficiency | None = None) -> Iterator[dict[str, Any]]:
    """The measured and the predicted seconds of every row."""
    work = hardware(plan)
    band, cost = step_band(plan, work), roofline(work, server=server)
    settings = plan.settings
    for clients, prompt, answer, *times in run["rows"]:
        loop = ClosedLoop(
            cost,
            plan.memory.kv.tokens,
            settings.max_num_batched_tokens,
            settings.max_num_seqs,
            request_lengths(prompt, answer, run.get("spread", 0.0)),
        )
        loop.run(clients)
        ttft, tpot, whole = (statistics.fmean(column) for column in zip(*loop.done, strict=True))
        mean_answer = answer * (1 - run.get("spread", 0.0) / 2)
        measured = measured_seconds(times, mean_answer, clients)
        yield _row(run, plan, (clients, prompt, answer), measured, (ttft, tpot, whole), band)


def measured_seconds(times: Sequence[float | None], answer: float, clients: int) -> tuple[float | None, ...]:
    """Seconds to the first token, a token, and of the whole answer, which output tokens a second tell as well."""
    ttft, tpot = (None if time is None else time / 1000 for time in times[:2])
    if ttft is not None and tpot is not None:
        return ttft, tpot, ttft + tpot * (answer - 1)
    return ttft, tpot, clients * answer / times[2] if len(times) > 2 and times[2] else None


def _row(
    run: dict[str, Any],
    plan: Plan,
    load: tuple[int, int, int],
    measured: tuple[float | None, ...],
    predicted: tuple[float, float, float],
    band: StepBand,
) -> dict[str, Any]:
    settings = plan.settings
    is_split = settings.enable_expert_parallel
    errors = [None if truth is None else guess / truth - 1 for guess, truth in zip(predicted, measured, strict=True)]
    truth, guess = next((truth, guess) for truth, guess in zip(measured[::-1], predicted[::-1], strict=True) if truth)
    return {
        "source": run["source"],
        "model": plan.target.model.name,
        "class": model_class(hardware(plan)),
        "gpu": run["gpu"],
        "card": plan.target.gpu.name,
        "family": plan.target.model.architecture,
        "release": ".".join(settings.release.version.split(".")[:2]),
        "is_elsewhere": bool(why_other_maker(plan)),
        "is_familiar": not why_unfamiliar(plan, hardware(plan)),
        "tensor_parallel_size": settings.tensor_parallel_size,
        "config": plan.target.model.config,
        "tp_size": settings.tensor_parallel_size,
        "pp_size": settings.pipeline_parallel_size,
        "moe_tp_size": 1 if is_split else settings.tensor_parallel_size,
        "moe_ep_size": settings.tensor_parallel_size if is_split else 1,
        "load": load,
        "measured": measured,
        "predicted": predicted,
        "ttft_error": errors[0],
        "tpot_error": errors[1],
        "end_to_end_error": errors[2],
        "band": (band.low, band.high),
        "in_band": band.low * guess <= truth <= band.high * guess,
        "factor": truth / guess,
    }
