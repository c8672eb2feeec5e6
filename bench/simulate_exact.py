#!/usr/bin/env python3
"""legroom simulate against the scheduler of a real vLLM, step by step, on random workloads.

    simulate_exact.py VLLM_PYTHON [--workloads 1000] [--seed 0] [--record DIR] [--keep N]

VLLM_PYTHON is the interpreter of an environment with vLLM 0.32 (a CPU build will do). It runs simulate_oracle.py
of tests/simulation, which drives vLLM's own Scheduler without a model. Every step is compared: who is scheduled how
many tokens, who is preempted, who finishes, how many run and wait, how many blocks are free.
"""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_harness import ROOT, arguments
from random_workloads import workload


def ask_vllm(python: str, workloads: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps that vLLM's scheduler takes, one answer a workload."""
    with tempfile.TemporaryDirectory() as folder:
        questions, answers = Path(folder, "questions.jsonl"), Path(folder, "answers.jsonl")
        questions.write_text("".join(json.dumps(item) + "\n" for item in workloads), encoding="utf-8")
        subprocess.run(
            [python, str(ROOT / "tests/simulation/simulate_oracle.py"), str(questions), str(answers)], check=True
        )
        return [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]


def ask_legroom(item: dict[str, Any], engine: str) -> tuple[str, float]:
    """The first difference from what vLLM did, or nothing, and the seconds legroom took."""
    from legroom.simulation.scheduler_settings import LayerGroup, SchedulerSettings
    from legroom.simulation.trace_replay import simulate
    from legroom.simulation.traces import jsonl

    options = dict(item["settings"])
    options["groups"] = tuple(LayerGroup(window) for window in options.pop("windows", [None]))
    settings = SchedulerSettings(**options)
    trace = jsonl.read((json.dumps(row) for row in item["requests"]), "random").checked()
    steps: list[list[Any]] = []

    def keep(s: Any) -> None:
        steps.append(
            [s.step, s.scheduled, sorted(s.preempted), sorted(s.finished), s.running, s.waiting, s.free_blocks]
        )

    began = time.perf_counter()
    timeline = simulate(trace, settings, keep if engine == "reference" else None, engine=engine)
    seconds = time.perf_counter() - began
    if engine == "reference":
        return first_difference(steps, item["steps"]), seconds
    return different_lives(trace, timeline, item), seconds


def different_lives(trace: Any, timeline: Any, item: dict[str, Any]) -> str:
    """The engines that jump show no steps: compare every request's dates, and the pool's peak."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for step, scheduled, _, finished, *_ in item["steps"]:
        for name in scheduled:
            first.setdefault(name, step)
            # Asynchronous scheduling may end a request in a step without a token, which is not listed.
            last[name] = step + 1
        last.update(dict.fromkeys(finished, step))
    for i in range(len(trace)):
        name = trace.id_of(i)
        ours = (timeline.first_sched_steps[i], timeline.finish_steps[i], timeline.preemption_counts[i])
        theirs = (first.get(name, -1), last.get(name, -1), item["preempted"].get(name, 0))
        if tuple(map(int, ours)) != theirs:
            return f"{name}: first scheduled, finished, preempted {ours}, vllm {theirs}"
    peak = max(item["settings"]["num_blocks"] - 1 - step[6] for step in item["steps"])
    tokens = sum(sum(step[1].values()) for step in item["steps"])
    ours = (timeline.tally.peak_blocks, timeline.tally.scheduled_tokens)
    return "" if ours == (peak, tokens) else f"peak blocks and tokens {ours}, vllm {(peak, tokens)}"


def first_difference(ours: list[list[Any]], theirs: list[list[Any]]) -> str:
    """Empty if every step is the same."""
    for mine, vllm in zip(ours, theirs, strict=False):
        if mine != vllm:
            return f"legroom {mine} vllm {vllm}"
    return "" if len(ours) == len(theirs) else f"{len(ours)} steps, vllm {len(theirs)}"


def main() -> int:
    files = {"record": str, "recorded": str, "engines": ("reference", "fast")}
    args = arguments(__doc__, "vllm_python", workloads=1000, seed=0, kind="plain", **files)
    if args.recorded:
        with gzip.open(args.recorded, "rt", encoding="utf-8") as lines:
            recordings = [json.loads(line) for line in lines]
    else:
        rng = random.Random(args.seed)
        items = [workload(rng, args.kind) for _ in range(args.workloads)]
        answers = ask_vllm(args.vllm_python, items)
        recordings = [{**item, **answer} for item, answer in zip(items, answers, strict=True)]
    if args.record:
        with gzip.open(args.record, "wt", encoding="utf-8") as out:
            out.writelines(json.dumps(recording) + "\n" for recording in recordings)
    result: dict[str, Any] = {"workloads": len(recordings), "steps": sum(len(r["steps"]) for r in recordings)}
    result["preemptions"] = sum(len(step[2]) for r in recordings for step in r["steps"])
    vllm_seconds = sum(r["seconds"] for r in recordings)
    for engine in args.engines:
        same, seconds = 0, 0.0
        for number, recording in enumerate(recordings):
            difference, took = ask_legroom(recording, engine)
            seconds += took
            same += not difference
            if difference:
                print(f"{engine}: workload {number} differs: {difference[:400]}\n  {recording['settings']}")
        print(f"{engine:>10}: {same} of {len(recordings)} identical, {seconds:.1f} s (vLLM {vllm_seconds:.1f} s)")
        result[engine] = {"identical": same, "seconds": round(seconds, 2)}
    print(json.dumps(result))
    return 0 if all(result[engine]["identical"] == len(recordings) for engine in args.engines) else 1


if __name__ == "__main__":
    sys.exit(main())
