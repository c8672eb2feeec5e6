#!/usr/bin/env python3
"""legroom's seconds against measurements of vLLM that others published, and its error beside what they say of theirs.

    python bench/published_times.py [--runs FILE] [--all] [--json] [--fit-server] [--fit-band] [--aiconfigurator PYTHON]

Every run of `tests/fixtures/published_times.json` (or FILE) is a server under a fixed number of requests at once. The
same load is replayed with legroom's step times on the plan of that server: decodes first, prompts in chunks of what is
left of a step. Printed by class of model, card and split: the median errors of the time to the first token, of the time
a token, and of the whole answer, and how many of the whole answers lie in the band that legroom gives. `--all` prints
every run. `--fit-server` fits how servers differ from the measured process to all of them and writes
`step_server.json`, with the error on sources that were left out in turn. `--fit-band` writes `step_band.json`: the band
of every class, as wide as it takes for nine of ten loads of a source, a family of models or a release line that took no
part (`known`: card, kernels and link are familiar), or of a card that took none (`unknown`).
`--aiconfigurator` names the interpreter of an environment with NVIDIA's aiconfigurator or AISimulate: the loads that it
answers are printed by class with its error beside legroom's.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, NamedTuple

from bench_harness import ROOT, arguments
from closed_loop import PUBLISHED, measured_seconds, plan_of_run, predictions

from legroom.planning.plan import Plan
from legroom.simulation.fast.accounting import step_seconds
from legroom.simulation.fast.rows import StepCost
from legroom.simulation.from_plan import hardware
from legroom.simulation.step_time import Hardware, ServerEfficiency, model_class, roofline, why_no_step_time

SERVER = ROOT / "src/legroom/facts/data/step_server.json"
BAND = SERVER.with_name("step_band.json")
INSIDE = 0.93
"""More than nine of ten: the fit to servers has seen the loads."""
LEFT_OUT = ("source", "family", "release")
WIDENED = tuple(1 + step / 10 for step in range(31))
START = ServerEfficiency(1.2e-5, 0.8, 1.2e-5, 0.5, 1e-3, 2e-5, 1.0, 1.0, 1.0, 5e-5, 32.0, 4e-5, 1.0, 1.5)
"""A first guess: the fit keeps what the loads hardly tell near it."""
AT_MOST_ONE = ("bandwidth_ratio", "pcie_ratio", "choice_exponent")
OF_EXPERTS = ("choice_exponent", "unpacked_rows", "deep_gemm_layer_s", "expert_launch_ratio")
OF_ALL = (*OF_EXPERTS, "pcie_hop_s", "pcie_ratio", "network_hop_s")
UNTOLD = ("host_request_ratio",)
"""One load alone tells it, so it stays that of the typical measured host."""
TRIES, FOLDS = 30, 4

AIC_SYSTEMS = {
    "a100 80gb": "a100_sxm",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "h100": "h100_sxm",
    "h100 pcie": "h100_pcie",
    "h200": "h200_sxm",
    "l4": "l4",
    "l40s": "l40s",
    "rtx pro 6000 server": "rtx_pro_6000_server",
}
AIC_SCRIPT = """
import json, sys, time
began = time.perf_counter()
try:
    from aisimulate.legacy_cli.api import cli_estimate
except ImportError:
    from aiconfigurator.cli.api import cli_estimate
for line in sys.stdin:
    question, answer = json.loads(line), {}
    try:
        result = cli_estimate(backend_name="vllm", database_mode="HYBRID", **question)
        answer = {"ttft": result.ttft / 1000, "tpot": result.tpot / 1000}
    except BaseException as error:
        answer = {"error": repr(error)[:200]}
    print("answer:" + json.dumps({**answer, "after_s": round(time.perf_counter() - began, 1)}), flush=True)
"""


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    factors = sorted(row["factor"] for row in rows)
    return {
        "runs": len(rows),
        **{
            name: round(statistics.median(errors), 3) if (errors := _errors(rows, name)) else math.nan
            for name in ("ttft", "tpot", "end_to_end")
        },
        "in_band": sum(row["in_band"] for row in rows),
        "took": [round(factors[0], 2), round(statistics.median(factors), 2), round(factors[-1], 2)],
        "band": [round(statistics.median(row["band"][side] for row in rows), 2) for side in (0, 1)],
    }


def _errors(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [abs(row[f"{name}_error"]) for row in rows if row[f"{name}_error"] is not None]


def band(rows: Sequence[dict[str, Any]], widened: float) -> tuple[float, float]:
    """Factors around nine of ten loads, each model of a source and card counting alike, widened from their median."""
    groups = [(row["source"], row["model"], row["card"]) for row in rows]
    count = Counter(groups)
    ordered = sorted((math.log(row["factor"]), 1 / count[group]) for row, group in zip(rows, groups, strict=True))
    below = list(accumulate(weight for _, weight in ordered))
    low, middle, high = (ordered[bisect_left(below, share * below[-1])][0] for share in (0.05, 0.5, 0.95))
    return math.exp(middle + (low - middle) * widened), math.exp(middle + (high - middle) * widened)


def inside_left_out(rows: Sequence[dict[str, Any]], key: str, widened: float) -> float:
    """The share of loads inside the band of the others where a source or card is left out, each counting alike."""
    shares = []
    for name in {row[key] for row in rows}:
        low, high = band([row for row in rows if row[key] != name], widened)
        shares.append(statistics.fmean(low <= row["factor"] <= high for row in rows if row[key] == name))
    return statistics.fmean(shares)


def calibrated_band(rows: Sequence[dict[str, Any]], *keys: str) -> dict[str, Any]:
    """As wide as `INSIDE` of the loads of what is left out by each key asks for."""

    def inside(widened: float) -> float:
        return min(inside_left_out(rows, key, widened) for key in keys)

    # No wider than helps, where a source is further off than all others.
    widened = max(WIDENED, key=lambda each: (min(INSIDE, inside(each)), -each))
    took = [round(edge, 2) for edge in band(rows, widened)]
    return {"took": took, "loads": len(rows), "inside_left_out": round(inside(widened), 3)}


def write_band(rows: Sequence[dict[str, Any]]) -> None:
    document = json.loads(BAND.read_text("utf-8"))
    document["published"] = {}
    for name in sorted({row["class"] for row in rows}):
        mine = [row for row in rows if row["class"] == name and not row["is_elsewhere"]]
        if min(len({row[key] for row in mine}) for key in ("source", "card")) < 3:
            continue  # too few to leave one out
        familiar = [row for row in mine if row["is_familiar"]]
        is_told = min(len({row[key] for row in familiar}) for key in LEFT_OUT) > 3
        known = calibrated_band(familiar if is_told else mine, *LEFT_OUT)
        unknown = calibrated_band(mine, *LEFT_OUT, "card")
        unknown["took"] = [pick(known["took"][i], unknown["took"][i]) for i, pick in enumerate((min, max))]
        gpus = sorted({row["card"] for row in mine})
        document["published"][name] = {"gpus": gpus, "known": known, "unknown": unknown}
    document["elsewhere"] = calibrated_band([row for row in rows if row["is_elsewhere"]], "source")
    BAND.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def ask_aiconfigurator(python: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print its median error of the whole answers beside legroom's, by class, on the loads that it answers."""
    asked = [row for row in rows if row["gpu"] in AIC_SYSTEMS and row["end_to_end_error"] is not None]
    questions = []
    folder = tempfile.TemporaryDirectory()
    for row in asked:
        model = Path(folder.name, row["model"].replace("/", "--"))
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(dict(row["config"])), encoding="utf-8")
        clients, prompt, answer = row["load"]
        parts = {name: row[name] for name in ("tp_size", "pp_size", "moe_tp_size", "moe_ep_size")}
        load = {"batch_size": clients, "isl": prompt, "osl": answer, **parts}
        questions.append({"model_path": str(model), "system_name": AIC_SYSTEMS[row["gpu"]], **load})
    said = subprocess.run(
        [python, "-W", "ignore", "-c", AIC_SCRIPT],
        input="".join(json.dumps(question) + "\n" for question in questions),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    folder.cleanup()
    answers = [json.loads(line[7:]) for line in said.splitlines() if line.startswith("answer:")]
    both: dict[str, list[tuple[float, float]]] = defaultdict(list)
    refused: Counter[str] = Counter()
    for row, answer in zip(asked, answers, strict=True):
        if "error" in answer:
            refused[answer["error"]] += 1
            continue
        theirs = (answer["ttft"] + answer["tpot"] * (row["load"][2] - 1)) / row["measured"][2]
        both[row["class"]].append((1 / theirs, row["factor"]))
    answered, first_s = sum(map(len, both.values())), answers[0]["after_s"]
    print(f"it answers {answered} of {len(rows)} loads, the first after {first_s} s")
    for name, pairs in sorted(both.items()):
        figures = []
        for factors in zip(*pairs, strict=True):
            errors = statistics.median(abs(1 / factor - 1) for factor in factors)
            spread = statistics.median(math.exp(abs(math.log(factor))) for factor in factors)
            figures.append(f"error {errors:.1%}, factor {spread:.2f}, took {statistics.median(factors):.2f} x")
        print(f"{name:10} {len(pairs):4} loads: theirs {figures[0]}; legroom {figures[1]}")
    for why, count in refused.most_common(5):
        print(f"no answer for {count}: {why}")


class Load(NamedTuple):
    """A published load of one server."""

    work: Hardware
    running: float
    prompt: float
    answer: float
    prompts_together: float
    step_tokens: int
    taken: float
    """Seconds of a whole answer, without waiting for other requests to end."""
    weight: float

    def factor(self, cost: StepCost) -> float:
        """Seconds against those of a steady state: decodes, and the prompts of all requests that interrupt them."""
        context = self.prompt + self.answer / 2
        decode = step_seconds(cost, self.running, self.running * context, self.running)
        tokens = min(self.step_tokens, self.prompts_together * self.prompt)
        others = self.running - self.prompts_together
        stored = self.running * context / 2 + tokens
        prefill = step_seconds(cost, tokens + others, stored, self.running)
        extra = max(0.0, prefill - (decode if others else 0.0))
        return self.taken / float((self.answer - 1) * decode + self.running * self.prompt / tokens * extra)


def why_no_number(plan: Plan, run: dict[str, Any]) -> str:
    """Why the loads of a run are not predicted, as a clause; else empty."""
    if plan.memory.kv.tokens < min(sum(row[1:3]) for row in run["rows"]):
        return "the plan's KV cache holds none of the requests, so the server is not as its record says"
    return why_no_step_time(hardware(plan))


def loads_of(run: dict[str, Any]) -> Iterator[Load]:
    plan = plan_of_run(run)
    work, settings, spread = hardware(plan), plan.settings, run.get("spread", 0.0)
    if why_no_number(plan, run) or model_class(work) == "latent attention":
        return
    for clients, *lengths, times in ((*row[:3], row[3:]) for row in run["rows"]):
        prompt, answer = (max(2.0, length * (1 - spread / 2)) for length in lengths)
        running = max(1.0, min(clients, settings.max_num_seqs, plan.memory.kv.tokens / (prompt + answer)))
        _, token, whole = measured_seconds(times, answer, clients)
        if taken := whole or (token or 0.0) * (answer - 1):
            # Requests of equal lengths stay in step with each other.
            together = max(1.0, running / 4) if spread else running
            limits = together, settings.max_num_batched_tokens
            yield Load(work, running, prompt, answer, *limits, taken * running / clients, len(run["rows"]) ** -0.5)


def factors(loads: Sequence[Load], server: ServerEfficiency) -> Iterator[float]:
    for work, same_server in groupby(loads, lambda load: load.work):
        cost = roofline(work, server=server)
        yield from (load.factor(cost) for load in same_server)


def fit_server(loads: Sequence[Load]) -> ServerEfficiency:
    """Models without experts tell what does not depend on experts; all tell of PCIe, which few of the others use."""
    of_nvidia = [load for load in loads if not load.work.is_other_maker]
    others = [load for load in of_nvidia if not load.work.expert_layers]
    names = [name for name in asdict(START) if name not in (*OF_EXPERTS, *UNTOLD, "other_maker_ratio")]
    fitted = walk(of_nvidia, OF_ALL, walk(others, names, START))
    return walk([load for load in loads if load.work.is_other_maker], ["other_maker_ratio"], fitted)


def walk(loads: Sequence[Load], names: Sequence[str], begin: ServerEfficiency) -> ServerEfficiency:
    """A random walk to the least sum of |log(measured/predicted)|, every server counting as the root of its loads."""

    def error(server: ServerEfficiency) -> float:
        moved = sum(math.log(getattr(server, name) / getattr(START, name)) ** 2 for name in names)
        errors = (min(1.0, abs(math.log(factor))) for factor in factors(loads, server))
        return 0.3 * moved + sum(load.weight * error for load, error in zip(loads, errors, strict=True))

    draw, best = random.Random(0), begin
    least, size = error(best), dict.fromkeys(names, 0.4)
    for turn in range(TRIES * len(names)):
        name = names[turn % len(names)]
        value = getattr(best, name) * math.exp(draw.gauss(0.0, size[name]))
        tried = replace(best, **{name: min(value, 1.0) if name in AT_MOST_ONE else value})
        is_better = (found := error(tried)) < least
        size[name] = min(0.6, max(0.02, size[name] * (1.3 if is_better else 0.88)))
        if is_better:
            least, best = found, tried
    return ServerEfficiency(**{name: float(f"{value:.3g}") for name, value in asdict(best).items()})


def loads_by_source(document: dict[str, Any]) -> dict[str, list[Load]]:
    loads: dict[str, list[Load]] = defaultdict(list)
    for run in document["runs"]:
        loads[run["source"]] += loads_of(run)
    return loads


def fits_without(loads: dict[str, list[Load]]) -> Iterator[tuple[list[str], ServerEfficiency]]:
    """Each part of the sources, and a fit to the others. The largest source always takes part: it alone has most of
    the splits."""
    largest = max(loads, key=lambda name: len(loads[name]))
    others = sorted(set(loads) - {largest})
    for first in range(FOLDS):
        out = others[first::FOLDS]
        yield out, fit_server([load for name, rows in loads.items() if name not in out for load in rows])


def left_out(loads: dict[str, list[Load]]) -> Iterator[tuple[str, float, float]]:
    """Class and factor, by `START` and by a fit to the sources of the other parts."""
    for out, server in fits_without(loads):
        rows = [load for name in out for load in loads[name]]
        for load, before, now in zip(rows, factors(rows, START), factors(rows, server), strict=True):
            yield "other makers" if load.work.is_other_maker else model_class(load.work), before, now


def write_server(document: dict[str, Any]) -> None:
    loads = loads_by_source(document)
    fitted = fit_server([load for rows in loads.values() for load in rows])
    errors: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for name, *took in left_out(loads):
        errors[name].append(tuple(abs(1 / factor - 1) for factor in took))
    unseen = {}
    for name, rows in errors.items():
        start, end = (round(statistics.median(column), 3) for column in zip(*rows, strict=True))
        unseen[name] = {"loads": len(rows), "median_error_at_start": start, "median_error": end}
    source = "fitted by bench/published_times.py --fit-server to published loads"
    result = {"fitted": asdict(fitted), "source": source, "left_out_sources": unseen}
    SERVER.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    options = {"all": False, "json": False, "fit_server": False, "fit_band": False, "aiconfigurator": str}
    args = arguments(__doc__, runs=PUBLISHED, **options)
    document = json.loads(args.runs.read_text("utf-8"))
    if args.fit_server:
        write_server(document)
        return 0
    # Ranges are as wide as the errors of fits that a source took no part in.
    fits = fits_without(loads_by_source(document)) if args.fit_band else ()
    servers = {source: server for out, server in fits for source in out}
    rows: list[dict[str, Any]] = []
    no_number: dict[str, int] = defaultdict(int)
    for run in document["runs"]:
        plan = plan_of_run(run)
        if why := why_no_number(plan, run):
            no_number[why] += len(run["rows"])
        else:
            rows += predictions(plan, run, servers.get(run["source"]))
    if args.fit_band:
        write_band(rows)
        return 0
    if args.aiconfigurator:
        ask_aiconfigurator(args.aiconfigurator, rows)
        return 0
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        split = "one card" if row["tensor_parallel_size"] == 1 else "split"
        groups[f"{row['class']}, {row['gpu']}, {split}"].append(row)
        groups[f"all, {row['class']}"].append(row)
    groups["all"] = rows
    result: dict[str, Any] = {
        "groups": {name: summary(each) for name, each in sorted(groups.items())},
        "no_number": dict(no_number),
    }
    if args.json:
        print(json.dumps({**result, "theirs": document.get("theirs", [])}))
        return 0
    for row in rows if args.all else ():
        print(_line(row))
    for name, figures in result["groups"].items():
        print(
            f"{name:26} {figures['runs']:4} runs  first token {figures['ttft']:6.1%}  a token {figures['tpot']:6.1%}  "
            f"whole {figures['end_to_end']:6.1%}  in band {figures['in_band']}  took {figures['took']} x, "
            f"band {figures['band']}"
        )
    for why, count in no_number.items():
        print(f"no number for {count}: {why}")
    for theirs in document.get("theirs", []):
        print(
            f"{theirs['who']}, {theirs['what']}: first token {theirs['ttft']:.1%}, a token {theirs['tpot']:.1%}, "
            f"whole {theirs['end_to_end']:.1%}"
        )
    return 0


def _line(row: dict[str, Any]) -> str:
    pairs = "  ".join(
        f"{math.nan if truth is None else truth * 1000:9.1f}/{guess * 1000:9.1f}"
        for truth, guess in zip(row["measured"], row["predicted"], strict=True)
    )
    where = f"{row['model'][-22:]:22} {row['gpu']:5} tp{row['tensor_parallel_size']}"
    return f"{where} {row['load']!s:18} {pairs}  took {row['factor']:.2f} x"


if __name__ == "__main__":
    sys.exit(main())
