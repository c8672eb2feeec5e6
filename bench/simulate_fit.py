"""Fit the step-time model to measured steps, and show its error on steps and loads that did not make it.

    python bench/simulate_fit.py [--steps FILE] [--json] [--write]

FILE: steps of several models with their tokens, requests, context and seconds (`tests/fixtures/h200_steps_0.32.json`
says how they were measured). The numbers of `Efficiency` are searched for the least mean of |log(predicted/measured)|.
One model is held out as a whole, and of the others some loads; both are printed apart, and steps of prompts once more
by whether the GPU or the host decides how long they take: what the host needs for the same step differs by half from
one time to the next. Then every model is left out of a fit of its own. Two further checks take no part in the fit:
whole loads, their steps added up, and runs of `LLM.generate` under vLLM 0.26 that were measured earlier.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from bench_harness import ROOT, arguments

from legroom.facts.releases import release
from legroom.planning.machine import Machine, make_plan
from legroom.simulation.fast.accounting import min_host_seconds, step_seconds, weight_read_seconds
from legroom.simulation.fast.rows import StepCost
from legroom.simulation.from_plan import hardware, planned_scheduler
from legroom.simulation.scheduler_settings import SchedulerSettings
from legroom.simulation.step_time import Efficiency, Hardware, roofline
from legroom.simulation.trace import Trace
from legroom.simulation.trace_replay import StepByStepReplay
from legroom.vllm.args import ServeArgs

OUT = ROOT / "src/legroom/simulation/step_fit.json"
STEPS = ROOT / "tests/fixtures/h200_steps_0.32.json"
GENERATE_RUNS = ROOT / "tests/fixtures/h200_generate_0.26.jsonl"
HELD_OUT_MODEL = "mistral-7b-v0.3"
HELD_OUT_LOADS = ("arriving", "prefill 15000", "decode b8 p2048", "decode b16 p128")
START = Efficiency(0.9, 0.7, 0.75, 0.65, 0.55, 0.5, 4e-5, 5e-6, 2.2e-3, 2e-5, 8e-4, 4e-4, 3.0)
RATIOS = [name for name in asdict(START) if name.endswith("ratio")]
ROUNDS, TRIES = 4, 1500
GENERATE_REQUEST_S = 2e-4
"""What `LLM.generate` itself spends on a request, as an earlier fit to those runs found; no server's step has it."""


class Step(NamedTuple):
    model: str
    load: str
    tokens: int
    requests: int
    context: int
    pairs: float
    seconds: float

    @property
    def is_held_out(self) -> bool:
        return self.model == HELD_OUT_MODEL or self.load in HELD_OUT_LOADS

    @property
    def kind(self) -> str:
        return "prompts" if self.tokens > self.requests else "decode"


def machines(document: dict[str, Any]) -> dict[str, Hardware]:
    """The hardware of every model that was measured."""
    return {
        name: replace(
            hardware(_plan(model, document["gpu"], document["vllm"], {"max_model_len": 16384})),
            captured_tokens=document["captured_tokens"],
        )
        for name, model in document["models"].items()
    }


def _plan(model: str, gpu: str, vllm: str, args: dict[str, Any]) -> Any:
    return make_plan(ServeArgs(model=model, **args), release(vllm), Machine(gpu=gpu), advice=False)


def seconds(step: Step, machine: Hardware, reached: Efficiency) -> float:
    """The model's answer for one step whose pairs of tokens are known exactly."""
    return max(parts(step, roofline(machine, reached)))


def parts(step: Step, cost: StepCost) -> tuple[float, float]:
    """What the GPU needs, and what the host needs."""
    compute = cost.token * step.tokens + cost.pair * step.pairs
    read = weight_read_seconds(cost, step.tokens) + cost.kv_token * step.context
    busy = cost.overhead + cost.request * step.requests + max(compute, read)
    return float(busy), float(min_host_seconds(cost, step.tokens, step.requests))


def fit(steps: list[Step], machine: dict[str, Hardware]) -> Efficiency:
    """A random walk that keeps what is better, with ever smaller steps; the same seed, the same answer."""

    def loss(reached: Efficiency) -> float:
        costs = {model: roofline(hardware, reached) for model, hardware in machine.items()}
        return statistics.fmean(
            min(abs(math.log(max(parts(step, costs[step.model])) / step.seconds)), 0.5) for step in steps
        )

    draw, best = random.Random(0), START
    least = loss(best)
    for turn in range(ROUNDS):
        for _ in range(TRIES):
            name = draw.choice(list(asdict(best)))
            value = getattr(best, name) * math.exp(draw.gauss(0.0, 0.3 / 2**turn))
            if name in RATIOS and value > 1.0:
                continue
            tried = replace(best, **{name: value})
            if (error := loss(tried)) < least:
                least, best = error, tried
    return Efficiency(**{name: float(f"{value:.4g}") for name, value in asdict(best).items()})


def residuals(steps: list[Step], machine: dict[str, Hardware], reached: Efficiency) -> Iterator[dict[str, Any]]:
    """Median and worst error by model and kind of step, fitted and held out."""
    groups = sorted({(step.model, step.kind, step.is_held_out) for step in steps})
    whole = [("all", kind, True) for kind in ("decode", "prompts")]
    for model, kind, held_out in [*groups, *whole]:
        errors = [
            abs(seconds(step, machine[step.model], reached) / step.seconds - 1)
            for step in steps
            if (model in ("all", step.model)) and (step.kind, step.is_held_out) == (kind, held_out)
        ]
        if errors:
            yield {
                "model": model,
                "kind": kind,
                "is_held_out": held_out,
                "steps": len(errors),
                "median_error": round(statistics.median(errors), 4),
                "worst_error": round(max(errors), 4),
                "over_20_percent": sum(error > 0.2 for error in errors),
            }


def by_decider(steps: Iterable[Step], machine: dict[str, Hardware], reached: Efficiency) -> dict[str, dict[str, Any]]:
    """Steps of prompts: how far off where the GPU decides, and between which factors where the host does."""
    took: dict[str, list[float]] = {"gpu": [], "host": []}
    for step in steps:
        if step.kind == "prompts":
            gpu, host = parts(step, roofline(machine[step.model], reached))
            took["host" if host > gpu else "gpu"].append(step.seconds / max(gpu, host))
    return {
        decider: {
            "steps": len(factors),
            "median_error": round(statistics.median(abs(1 / factor - 1) for factor in factors), 4),
            "worst_error": round(max(abs(1 / factor - 1) for factor in factors), 4),
            "took": [round(min(factors), 2), round(max(factors), 2)],
        }
        for decider, factors in took.items()
        if factors
    }


def left_out_models(steps: Sequence[Step], machine: dict[str, Hardware]) -> Iterator[dict[str, Any]]:
    """Each model by a fit to the others."""
    for model, hardware_of_model in machine.items():
        if hardware_of_model.expert_bytes:
            continue  # the only one with experts: nothing else tells what they take
        reached = fit([step for step in steps if step.model != model], machine)
        yield {"model": model, **by_decider((step for step in steps if step.model == model), machine, reached)}


def whole_loads(
    document: dict[str, Any], machine: dict[str, Hardware], reached: Efficiency
) -> Iterator[dict[str, Any]]:
    """Loads of many steps, prompts and answers mixed: the sum against the clock."""
    for load in document["loads"]:
        steps = [Step(load["model"], load["load"], *numbers, 0.0) for numbers in load["steps"]]
        predicted = sum(seconds(step, machine[load["model"]], reached) for step in steps)
        yield _row(f"{load['model']}: {load['load']}", load["seconds"], predicted)


def generate_runs(lines: Iterable[str], reached: Efficiency) -> Iterator[dict[str, Any]]:
    """`LLM.generate` over equal prompts that arrive at once, replayed step by step."""
    for line in lines:
        run = json.loads(line)
        plan = _plan(run["model"], run["gpu"], run["vllm"], run["args"])
        flags = {**planned_scheduler(plan).flags, "async_scheduling": False, "enable_prefix_caching": False}
        trace = Trace()
        for _ in range(run["requests"]):
            trace.add(run["prompt_len"], run["output_len"])
        cost = roofline(hardware(plan), reached)
        total, stored = 0.0, dict[str, int]()

        def book(step: Any, cost: Any = cost, stored: dict[str, int] = stored) -> None:
            nonlocal total
            for name, tokens in step.scheduled.items():
                stored[name] = stored.get(name, 0) + tokens
            total += step_seconds(cost, sum(step.scheduled.values()), sum(stored.values()), len(stored))
            for name in step.finished:
                del stored[name]

        StepByStepReplay(trace, SchedulerSettings(**flags), book).run()
        what = f"{run['model']}: {run['requests']} x {run['prompt_len']} + {run['output_len']}"
        yield _row(what, run["seconds"], total + GENERATE_REQUEST_S * run["requests"])


def _row(what: str, measured: float, predicted: float) -> dict[str, Any]:
    return {
        "what": what,
        "measured_s": round(measured, 3),
        "predicted_s": round(predicted, 3),
        "error": round(predicted / measured - 1, 3),
    }


def main() -> None:
    args = arguments(__doc__, steps=STEPS, json=False, write=False)
    document = json.loads(args.steps.read_text(encoding="utf-8"))
    steps, machine = [Step(**row) for row in document["steps"]], machines(document)
    reached = fit([step for step in steps if not step.is_held_out], machine)
    result = {
        "fitted": asdict(reached),
        "measured_on": {"gpu": document["gpu"], "vllm": document["vllm"], "how": document["how"]},
        "residuals": list(residuals(steps, machine, reached)),
        "held_out_prompts": by_decider((step for step in steps if step.is_held_out), machine, reached),
        "left_out_models": list(left_out_models(steps, machine)),
        "whole_loads": list(whole_loads(document, machine, reached)),
        "generate_runs": list(generate_runs(GENERATE_RUNS.read_text(encoding="utf-8").splitlines(), reached)),
    }
    if args.write:
        OUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.json:
        json.dump(result, sys.stdout, indent=1)
        return
    print(reached)
    for row in result["residuals"]:
        part = "held out" if row["is_held_out"] else "fitted"
        print(
            f"{row['model']:28} {row['kind']:8} {part:9} {row['steps']:4} steps"
            f"  median {row['median_error']:6.1%}  worst {row['worst_error']:6.1%}  over 20 %: {row['over_20_percent']}"
        )
    print("held-out prompts, by what decides:", result["held_out_prompts"])
    for row in result["left_out_models"]:
        print("left out of the fit:", row)
    for row in [*result["whole_loads"], *result["generate_runs"]]:
        print(
            f"{row['what']:44} {row['measured_s']:8.3f} s  predicted {row['predicted_s']:8.3f} s  {row['error']:+.0%}"
        )


if __name__ == "__main__":
    main()
