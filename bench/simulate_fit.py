"""Fit the step-time model to measured steps, and show its error on steps and loads that did not make it.

    python bench/simulate_fit.py [--json] [--write]

The steps are those of `tests/fixtures/h200_steps*_0.32.json`, which say how they were measured. The numbers of
`Efficiency` are searched for the least mean of |log(predicted/measured)|. Then every model, every family of models and
every class (dense, experts, latent attention, state-space) is left out of a fit of its own: what is printed for it took
no part. How fast each host was is fitted beside that, and told by the other models measured on it; with a host left out
it is as fast as the typical one. Steps are printed once more by whether the GPU or the host decides how long they take.
A batch is the recorded steps of one load together. A further check: whole loads, their steps added up.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from bench_harness import ROOT, arguments

from legroom.facts.releases import release
from legroom.planning.machine import Machine, make_plan
from legroom.simulation.fast.accounting import expert_read_seconds, kv_read_seconds, min_host_seconds
from legroom.simulation.fast.rows import StepCost
from legroom.simulation.from_plan import hardware
from legroom.simulation.step_time import Efficiency, Hardware, ServerEfficiency, model_class, roofline
from legroom.vllm.args import ServeArgs

OUT = ROOT / "src/legroom/facts/data/step_fit.json"
STEPS = (ROOT / "tests/fixtures/h200_steps_0.32.json", ROOT / "tests/fixtures/h200_steps_experts_0.32.json")
SAME_LAYERS = {"mistral": "llama"}
"""Families whose layers are those of another."""
START = Efficiency(
    *(0.9, 0.7, 0.8, 0.5, 0.6, 0.4, 5.0, 0.65, 0.55, 0.3, 0.8, 0.5),
    *(4e-5, 2e-5, 2e-5, 4e-5, 4e-6, 2e-8, 2.2e-3, 2e-5, 1e-4, 8e-6, 2e-3, 8e-4, 8e-4, 8e-4, 4e-4, 4e-4),
)
RATIOS = [name for name in asdict(START) if name.endswith("ratio") and not name.startswith("scan")]
OF_HOST = ("host_ratio", "host_request_ratio")
TRIES = 80


class Fit(NamedTuple):
    reached: Efficiency
    hosts: dict[str, float]
    """How long each host that steps were measured on takes, against the typical one."""

    def cost(self, work: Measured) -> StepCost:
        ratios = {name: self.hosts.get(f"{work.host} {name}", 1.0) for name in OF_HOST}
        return roofline(work.rank, self.reached, ServerEfficiency(**ratios))


class Measured(NamedTuple):
    """A model on the card, and the host that it was measured on."""

    rank: Hardware
    host: str
    is_odd: bool
    """Its kernels are like no other's, so it takes part in no fit."""


class Step(NamedTuple):
    model: str
    load: str
    tokens: int
    requests: int
    context: int
    pairs: float
    seconds: float

    @property
    def family(self) -> str:
        name = self.model.split("-")[0]
        return SAME_LAYERS.get(name, name)

    @property
    def kind(self) -> str:
        return "prompts" if self.tokens > self.requests else "decode"


def machines(document: dict[str, Any]) -> Iterator[tuple[str, Measured]]:
    """The hardware of every model that was measured."""
    hosts = {name: day for day, names in document["hosts"].items() for name in names}
    for name, described in document["models"].items():
        with TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(described.get("config")), encoding="utf-8")
            args = {"model": folder} if "config" in described else described
            work = hardware(_plan(document["gpu"], document["vllm"], {"max_model_len": 16384, **args}))
        if name in document["one_choice"]:
            work = replace(work, expert_bytes=work.expert_bytes * work.expert_share, expert_share=1.0)
        yield (
            name,
            Measured(replace(work, captured_tokens=document["captured_tokens"]), hosts[name], name in document["odd"]),
        )


def _plan(gpu: str, vllm: str, args: dict[str, Any]) -> Any:
    return make_plan(ServeArgs(**args), release(vllm), Machine(gpu=gpu), advice=False)


def parts(step: Step, cost: StepCost) -> tuple[float, float]:
    """What the GPU needs, and what the host needs."""
    windowed = min(step.pairs, cost.window * step.tokens)
    compute = cost.token * step.tokens + cost.pair * step.pairs + cost.window_pair * windowed
    read = cost.weights + kv_read_seconds(cost, step.context, step.requests)
    busy = cost.overhead + cost.request * step.requests + max(compute, read) + expert_read_seconds(cost, step.tokens)
    return float(busy), float(min_host_seconds(cost, step.tokens, step.requests))


class Took(NamedTuple):
    """A step against its prediction."""

    name: str
    step: Step
    predicted: float
    is_host_bound: bool

    @classmethod
    def of(cls, step: Step, work: Measured, fitted: Fit) -> Took:
        gpu, host = parts(step, fitted.cost(work))
        return cls(model_class(work.rank), step, max(gpu, host), host > gpu)

    @property
    def factor(self) -> float:
        return self.step.seconds / self.predicted


def fit(steps: Sequence[Step], machine: dict[str, Measured]) -> Fit:
    """A random walk that keeps what is better, with steps as long as help; the same seed, the same answer."""

    steps = [step for step in steps if not machine[step.model].is_odd]
    names = sorted({step.model for step in steps})
    rows = [names.index(step.model) for step in steps]
    tokens, requests, context, pairs, taken = np.array([step[2:] for step in steps], dtype=float).T
    is_decode = tokens <= requests

    def errors(costs: Sequence[StepCost]) -> float:
        """`parts` of all steps at once."""
        cost = StepCost(*np.array(costs).T[:, rows])
        read = cost.weights + cost.kv_token * context + cost.window_token * np.minimum(context, cost.window * requests)
        compute = cost.token * tokens + cost.pair * pairs + cost.window_pair * np.minimum(pairs, cost.window * tokens)
        busy = cost.overhead + cost.request * requests + np.maximum(compute, read) + expert_read_seconds(cost, tokens)
        launch = np.where(tokens <= cost.captured, cost.launch_captured, cost.launch)
        host = np.where(is_decode, cost.host + cost.host_request * requests, launch)
        return float(np.minimum(np.abs(np.log(np.maximum(busy, host) / taken)), 0.5).sum())

    def fit_of(values: dict[str, float]) -> Fit:
        rounded = {name: float(f"{value:.4g}") for name, value in values.items()}
        return Fit(Efficiency(**{name: rounded.pop(name) for name in asdict(START)}), rounded)

    def loss(values: dict[str, float]) -> float:
        # A number that these steps hardly tell stays near where the search begins.
        moved = sum(math.log(values[name] / value) ** 2 for name, value in start.items())
        fitted = fit_of(values)
        return moved + errors([fitted.cost(machine[name]) for name in names])

    start = asdict(START) | {f"{machine[name].host} {part}": 1.0 for name in names for part in OF_HOST}
    draw, best, size = random.Random(0), start, dict.fromkeys(start, 0.2)
    least = loss(best)
    for turn in range(TRIES * len(start)):
        name = list(start)[turn % len(start)]
        tried = {**best, name: best[name] * math.exp(draw.gauss(0.0, size[name]))}
        is_better = not (name in RATIOS and tried[name] > 1.0) and (error := loss(tried)) < least
        size[name] = min(0.5, max(0.01, size[name] * (1.5 if is_better else 0.9)))
        if is_better:
            least, best = error, tried
    return fit_of(best)


def summary(factors: Iterable[float]) -> dict[str, Any]:
    """The error of predictions, and between which factors of them nine of ten measurements lie."""
    took = sorted(factors)
    errors = [abs(1 / factor - 1) for factor in took]
    edges = [took[round(share * (len(took) - 1))] for share in (0, 0.05, 0.95, 1)]
    return {
        "count": len(took),
        "median_error": round(statistics.median(errors), 4),
        "worst_error": round(max(errors), 4),
        "over_25_percent": sum(error > 0.25 for error in errors),
        "took": [round(edge, 2) for edge in edges],
    }


def by_class(took: Sequence[Took]) -> dict[str, dict[str, Any]]:
    """The summary of every class: by what decides how long a step takes, and for the steps of a load together."""
    found = {}
    for name in dict.fromkeys(each.name for each in took):
        mine = [each for each in took if each.name == name]
        loads: dict[tuple[str, str], list[Took]] = defaultdict(list)
        for each in mine:
            loads[each.step.model, each.step.load].append(each)
        found[name] = {
            "steps": summary(each.factor for each in mine),
            **{
                decider: summary(factors)
                for decider, is_host in (("gpu", False), ("host", True))
                if (factors := [each.factor for each in mine if each.is_host_bound == is_host])
            },
            "batches": summary(
                sum(each.step.seconds for each in rows) / sum(each.predicted for each in rows)
                for rows in loads.values()
            ),
        }
    return found


def left_out(
    steps: Sequence[Step], machine: dict[str, Measured], fits: dict[frozenset[str], Fit], group: Callable[[Step], str]
) -> Iterator[tuple[str, list[Took]]]:
    """Each group of steps by a fit to the others; `fits` are those made so far, by the models left out."""
    for name in dict.fromkeys(map(group, steps)):
        out = frozenset(step.model for step in steps if group(step) == name)
        fitted = fits.setdefault(out, fits.get(out) or fit([step for step in steps if step.model not in out], machine))
        yield name, [Took.of(step, machine[step.model], fitted) for step in steps if group(step) == name]


def whole_loads(document: dict[str, Any], machine: dict[str, Measured], fitted: Fit) -> Iterator[dict[str, Any]]:
    """Loads of many steps, prompts and answers mixed: the sum against the clock."""
    for load in document["loads"]:
        steps = [Step(load["model"], load["load"], *numbers, 0.0) for numbers in load["steps"]]
        predicted = sum(Took.of(step, machine[load["model"]], fitted).predicted for step in steps)
        yield _row(f"{load['model']}: {load['load']}", load["seconds"], predicted)


def _row(what: str, measured: float, predicted: float) -> dict[str, Any]:
    return {
        "what": what,
        "measured_s": round(measured, 3),
        "predicted_s": round(predicted, 3),
        "error": round(predicted / measured - 1, 3),
    }


def main() -> None:
    args = arguments(__doc__, json=False, write=False)
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in STEPS]
    steps = [Step(**row) for document in documents for row in document["steps"]]
    machine = dict(pair for document in documents for pair in machines(document))
    fitted, fits = fit(steps, machine), dict[frozenset[str], Fit]()
    models = dict(left_out(steps, machine, fits, lambda step: step.model))
    families = dict(left_out(steps, machine, fits, lambda step: step.family))
    classes = dict(left_out(steps, machine, fits, lambda step: model_class(machine[step.model].rank)))
    hosts = dict(left_out(steps, machine, fits, lambda step: machine[step.model].host))
    result: dict[str, Any] = {
        "fitted": asdict(fitted.reached),
        "hosts": fitted.hosts,
        "measured_on": [{name: document[name] for name in ("gpu", "vllm", "how")} for document in documents],
        "fitted_steps": by_class([Took.of(step, machine[step.model], fitted) for step in steps]),
        "left_out_models": by_class([took for rows in models.values() for took in rows]),
        "left_out_families": by_class([took for rows in families.values() for took in rows]),
        "left_out_family": {name: summary(took.factor for took in rows) for name, rows in families.items()},
        "left_out_classes": {name: summary(took.factor for took in rows) for name, rows in classes.items()},
        "left_out_hosts": by_class([took for rows in hosts.values() for took in rows]),
        "whole_loads": list(whole_loads(documents[0], machine, fitted)),
    }
    if args.write:
        OUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.json:
        json.dump(result, sys.stdout, indent=1)
        return
    print(*fitted)
    for part in ("fitted_steps", "left_out_models", "left_out_families", "left_out_hosts"):
        for name, figures in result[part].items():
            for what, figure in figures.items():
                print(f"{part:18} {name:16} {what:8} {_line(figure)}")
    for part in ("left_out_family", "left_out_classes"):
        for name, figure in result[part].items():
            print(f"{part:18} {name:25} {_line(figure)}")
    for row in result["whole_loads"]:
        print(
            f"{row['what']:44} {row['measured_s']:8.3f} s  predicted {row['predicted_s']:8.3f} s  {row['error']:+.0%}"
        )


def _line(figure: dict[str, Any]) -> str:
    return (
        f"{figure['count']:4}  median {figure['median_error']:6.1%}  worst {figure['worst_error']:6.1%}  over 25 %: "
        f"{figure['over_25_percent']:3}  took {figure['took']} x"
    )


if __name__ == "__main__":
    main()
