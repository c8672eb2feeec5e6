#!/usr/bin/env python3
"""legroom's seconds against measurements of vLLM that others published, and its error beside what they say of theirs.

    python bench/published_times.py [--all] [--json] [--fit-link]

Every run of `tests/fixtures/published_times.json` is a server under a fixed number of requests at once. The same load
is replayed with legroom's step times on the plan of that server: decodes first, prompts in chunks of what is left of a
step. Printed by card and split: the median errors of the time to the first token, of the time a token, and of the whole
answer, and how many of the whole answers lie in the band that legroom gives. `--all` prints every run. Servers for
which legroom gives no time are counted, and those with experts shown in brackets, with what it would have said.
`--fit-link` fits what cards send each other to the split servers on H200 alone and writes `step_link.json`: for the
other cards, the figures are a forecast.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench_harness import ROOT, arguments
from closed_loop import PUBLISHED, plan_of_run, predictions

from legroom.simulation.from_plan import hardware
from legroom.simulation.step_time import LinkEfficiency, why_untrusted

LINK = ROOT / "src/legroom/simulation/step_link.json"
FITTED_ON = "h200"
LATENCIES_S = tuple(step / 1e6 for step in range(4, 15, 2))
RATIOS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


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
    plans = [(plan_of_run(run), run) for run in runs if run["gpu"] == FITTED_ON]
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
    args = arguments(__doc__, all=False, json=False, fit_link=False)
    document = json.loads(PUBLISHED.read_text("utf-8"))
    if args.fit_link:
        write_link(document)
        return 0
    rows: list[dict[str, Any]] = []
    with_experts: list[dict[str, Any]] = []
    no_number: dict[str, int] = defaultdict(int)
    for run in document["runs"]:
        plan = plan_of_run(run)
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
