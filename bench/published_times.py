#!/usr/bin/env python3
"""legroom's seconds against measurements of vLLM that others published, and its error beside what they say of theirs.

    python bench/published_times.py [--runs FILE] [--all] [--json] [--fit-link] [--fit-band] [--aiconfigurator PYTHON]

Every run of `tests/fixtures/published_times.json` (or FILE) is a server under a fixed number of requests at once. The
same load is replayed with legroom's step times on the plan of that server: decodes first, prompts in chunks of what is
left of a step. Printed by class of model, card and split: the median errors of the time to the first token, of the time
a token, and of the whole answer, and how many of the whole answers lie in the band that legroom gives. `--all` prints
every run. `--fit-link` fits what cards send each other to the split servers of dense models on H200 alone and writes
`step_link.json`: for the others, the figures are a forecast. `--fit-band` writes `step_band.json`: the band of every
class, as wide as it takes for nine of ten loads of a model that took no part (`known` cards), or of a card that did
not. `--aiconfigurator` names the interpreter of an environment with NVIDIA's aiconfigurator: the loads that it answers
are printed by class with its error beside legroom's.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

from bench_harness import ROOT, arguments
from closed_loop import PUBLISHED, plan_of_run, predictions

from legroom.simulation.from_plan import hardware
from legroom.simulation.step_time import LinkEfficiency, why_untrusted

LINK = ROOT / "src/legroom/simulation/step_link.json"
BAND = LINK.with_name("step_band.json")
INSIDE = 0.9
WIDENED = tuple(1 + step / 10 for step in range(31))
FITTED_ON = "h200"
LATENCIES_S = tuple(step / 1e6 for step in range(4, 15, 2))
RATIOS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

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
    """Factors around nine of ten loads, each pair of model and card counting alike, widened from their median."""
    count = Counter((row["model"], row["gpu"]) for row in rows)
    ordered = sorted((math.log(row["factor"]), 1 / count[row["model"], row["gpu"]]) for row in rows)
    below = list(accumulate(weight for _, weight in ordered))
    low, middle, high = (ordered[bisect_left(below, share * below[-1])][0] for share in (0.05, 0.5, 0.95))
    return math.exp(middle + (low - middle) * widened), math.exp(middle + (high - middle) * widened)


def inside_left_out(rows: Sequence[dict[str, Any]], key: str, widened: float) -> float:
    """The share of loads inside the band of the others, where a model is left out; the mean share, where a card is."""
    shares = {}
    for name in {row[key] for row in rows}:
        low, high = band([row for row in rows if row[key] != name], widened)
        shares[name] = statistics.fmean(low <= row["factor"] <= high for row in rows if row[key] == name)
    return statistics.fmean(shares.values() if key == "card" else (shares[row[key]] for row in rows))


def write_band(rows: Sequence[dict[str, Any]]) -> None:
    document = json.loads(BAND.read_text("utf-8"))
    document["published"] = {}
    for name in sorted({row["class"] for row in rows}):
        mine = [row for row in rows if row["class"] == name and not row["is_elsewhere"]]
        if min(len({row[key] for row in mine}) for key in ("model", "card")) < 3:
            continue  # too few to leave one out
        found: dict[str, Any] = {"gpus": sorted({row["card"] for row in mine}), "loads": len(mine)}
        widened = 1.0
        for kind, key in (("known", "model"), ("unknown", "card")):
            wider = [each for each in WIDENED if each >= widened]
            widened = next((each for each in wider if inside_left_out(mine, key, each) >= INSIDE), WIDENED[-1])
            found[kind] = [round(edge, 2) for edge in band(mine, widened)]
            found[f"{kind}_inside_left_out"] = round(inside_left_out(mine, key, widened), 3)
        document["published"][name] = found
    others = [row["factor"] for row in rows if row["is_elsewhere"]]
    document["elsewhere"] = {"took": [round(min(others), 2), round(max(others), 2)], "loads": len(others)}
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
    print(f"aiconfigurator answers {answered} of {len(rows)} loads, the first after {first_s} s")
    for name, pairs in sorted(both.items()):
        figures = []
        for factors in zip(*pairs, strict=True):
            errors = statistics.median(abs(1 / factor - 1) for factor in factors)
            spread = statistics.median(math.exp(abs(math.log(factor))) for factor in factors)
            figures.append(f"error {errors:.1%}, factor {spread:.2f}, took {statistics.median(factors):.2f} x")
        print(f"{name:10} {len(pairs):4} loads: aiconfigurator {figures[0]}; legroom {figures[1]}")
    for why, count in refused.most_common(5):
        print(f"no answer for {count}: {why}")


def fit_link(runs: Sequence[dict[str, Any]]) -> LinkEfficiency:
    """The least mean error of the whole answers, of split servers on one kind of card."""
    plans = [(plan_of_run(run), run) for run in runs if run["gpu"] == FITTED_ON]
    split = [
        (plan, run)
        for plan, run in plans
        if plan.settings.tensor_parallel_size > 1 and not hardware(plan).expert_layers
    ]

    def error(link: LinkEfficiency) -> float:
        rows = (row for plan, run in split for row in predictions(plan, run, link))
        return statistics.fmean(abs(math.log(row["factor"])) for row in rows)

    return min((LinkEfficiency(latency, ratio) for latency in LATENCIES_S for ratio in RATIOS), key=error)


def write_link(document: dict[str, Any]) -> None:
    fitted = fit_link(document["runs"])
    source = (
        f"fitted by bench/published_times.py to the split servers of dense models on {FITTED_ON.upper()} that "
        f"{document['sources']['aiconfigurator']['url']} gives; other cards took no part"
    )
    LINK.write_text(json.dumps({"fitted": asdict(fitted), "source": source}, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    options = {"all": False, "json": False, "fit_link": False, "fit_band": False, "aiconfigurator": str}
    args = arguments(__doc__, runs=PUBLISHED, **options)
    document = json.loads(args.runs.read_text("utf-8"))
    if args.fit_link:
        write_link(document)
        return 0
    rows: list[dict[str, Any]] = []
    no_number: dict[str, int] = defaultdict(int)
    for run in document["runs"]:
        plan = plan_of_run(run)
        if why := why_untrusted(hardware(plan)):
            no_number[why] += len(run["rows"])
        else:
            rows += predictions(plan, run)
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
