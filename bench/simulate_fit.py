"""Fit the step-time model to measured runs: what of a card's matrix rate is reached, and the host's share of a step.

    python bench/simulate_fit.py RUNS.jsonl [--write]

A line of RUNS: {"model", "gpu", "vllm", "args": {flags}, "requests", "prompt_len", "output_len", "seconds"}: an offline
`LLM.generate` over equal prompts that all arrive at once. Every run is replayed step by step; then four numbers are
searched for the least squares of log(predicted / measured): the model's three, and the seconds that `generate` itself
spends on a request, which a server's step does not have. Models with experts are predicted, not fitted: such runs with
made-up weights choose experts in no natural way. The bandwidth reached is assumed where the runs do not tell: short
answers hardly depend on it, which the errors by bandwidth show.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from legroom.facts.releases import release
from legroom.planning.machine import Machine, make_plan
from legroom.simulation.deployment import deployed, hardware
from legroom.simulation.fast.accounting import step_seconds
from legroom.simulation.replay import Reference
from legroom.simulation.settings import SchedulerSettings
from legroom.simulation.steptime import Efficiency, Hardware, roofline
from legroom.simulation.trace import Trace
from legroom.vllm.args import ServeArgs

OUT = Path(__file__).parent.parent / "src/legroom/simulation/step_fit.json"
ASSUMED_BANDWIDTH = 0.8
BANDWIDTHS = [0.5 + 0.1 * i for i in range(6)]
RATES = [0.4 + 0.02 * i for i in range(26)]
HOSTS_S = [0.001 * i for i in range(1, 20)]
REQUESTS_S = [0.0001 * i for i in range(6)]


class Work(NamedTuple):
    """One run: its hardware, and tokens, tokens held and requests running of every step."""

    run: dict[str, Any]
    hardware: Hardware
    steps: list[tuple[int, int, int]]


def work_of(run: dict[str, Any]) -> Work:
    """Replay one run."""
    serve = ServeArgs(model=run["model"], **run["args"])
    plan = make_plan(serve, release(run["vllm"]), Machine(gpu=run["gpu"]), advice=False)
    flags = {**deployed(plan).flags, "async_scheduling": False, "enable_prefix_caching": False}
    trace = Trace()
    for _ in range(run["requests"]):
        trace.add(run["prompt_len"], run["output_len"])
    steps: list[tuple[int, int, int]] = []
    held: dict[str, int] = {}
    settings = SchedulerSettings(**flags)

    def book(step: Any) -> None:
        for name, tokens in step.scheduled.items():
            held[name] = held.get(name, 0) + tokens
        steps.append((sum(step.scheduled.values()), sum(held.values()), len(held)))
        for name in step.finished:
            del held[name]

    Reference(trace, settings, book).run()
    return Work(run, hardware(plan), steps)


def seconds(work: Work, reached: Efficiency, request_s: float) -> float:
    """The model's answer."""
    cost = roofline(work.hardware, reached)
    return request_s * work.run["requests"] + sum(step_seconds(cost, *step) for step in work.steps)


def error(works: list[Work], reached: Efficiency, request_s: float) -> float:
    """Root mean square of log(predicted / measured)."""
    logs = [math.log(seconds(work, reached, request_s) / work.run["seconds"]) for work in works]
    return math.sqrt(statistics.fmean(log * log for log in logs))


def fit(works: list[Work], bandwidths: list[float]) -> tuple[float, Efficiency, float]:
    """The best of the grid."""
    found = min(
        (error(works, Efficiency(bandwidth, rate, host), request), bandwidth, rate, host, request)
        for bandwidth, rate, host, request in itertools.product(bandwidths, RATES, HOSTS_S, REQUESTS_S)
    )
    return found[0], Efficiency(*(round(value, 4) for value in found[1:4])), round(found[4], 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--write", action="store_true", help=f"write {OUT.name}")
    args = parser.parse_args()
    works = [work_of(json.loads(line)) for line in args.runs.read_text(encoding="utf-8").splitlines() if line.strip()]
    dense = [work for work in works if not work.hardware.expert_bytes]
    tried = {round(bandwidth, 2): fit(dense, [bandwidth]) for bandwidth in BANDWIDTHS}
    for bandwidth, found in tried.items():
        print(f"bandwidth {bandwidth:.2f}:", *found)
    rms, reached, request_s = tried[ASSUMED_BANDWIDTH]
    rows = []
    for work in works:
        predicted = seconds(work, reached, request_s)
        rows.append({**work.run, "predicted_seconds": round(predicted, 3),
                     "error": round(predicted / work.run["seconds"] - 1, 3), "is_fitted": work in dense})  # fmt: skip
        print(f"{work.run['model']:20} {work.run['seconds']:6.2f} s {predicted:6.2f} s {rows[-1]['error']:+.0%}")
    print(f"rms of log {rms:.3f}; {reached}; {request_s} s a request")
    if args.write:
        document = {
            "fitted": vars(reached), "assumed": ["bandwidth_ratio"], "request_s": request_s,
            "rms_log_error": round(rms, 3),
            "rms_log_error_by_bandwidth_ratio": {str(ratio): round(found[0], 3) for ratio, found in tried.items()},
            "runs": rows,
        }  # fmt: skip
        OUT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
