#!/usr/bin/env python3
"""How fast legroom simulate is, beside the scheduler of a real vLLM on the same trace in the same run.

    simulate_speed.py [VLLM_PYTHON] [--requests 100000] [--vllm-requests 3000] [--million] [--choose]

vLLM gets the first --vllm-requests of the trace (give it all of them for the full comparison; it takes many minutes),
and its time is that of its scheduler and block manager alone: imports, set-up and making prompts are not counted.
legroom's time is given likewise (the replay of a trace in memory) and for the whole command, from the start of Python
over reading the file to the answer. `times_faster` compares the replay, `times_faster_whole` the whole command; both
count processor time, so that other work on the machine does not matter. Numba compiles the replay once a machine;
that time is printed apart.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from legroom.simulation.fast.fast_replay import FastReplay
from legroom.simulation.fast.jit import is_compiled_before, numba_is_installed
from legroom.simulation.scheduler_settings import SchedulerSettings
from legroom.simulation.traces.trace_files import read_trace

HERE = Path(__file__).parent
SETTINGS: dict[str, Any] = {
    "num_blocks": 20000,
    "block_size": 16,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "max_model_len": 8192,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "long_prefill_token_threshold": 0,
    "scheduling_policy": "fcfs",
    "watermark": 0.0,
    "reserve_full_isl": True,
}
MIXES: dict[str, dict[str, Any]] = {
    "chat": {"rate": 0.9, "prompt": 400, "output": 150},
    "chat with shared prefixes": {"rate": 0.9, "prompt": 400, "output": 150, "prefixes": 50},
    "tight pool": {"rate": 3, "prompt": 400, "output": 150, "prefixes": 50, "num_blocks": 4000},
}


def write_trace(path: Path, count: int, mix: dict[str, Any]) -> list[dict[str, Any]]:
    rng = random.Random(0)
    rows = []
    at = 0.0
    for i in range(count):
        at += rng.expovariate(mix["rate"])
        row: dict[str, Any] = {
            "id": f"r{i}",
            "arrival_step": int(at),
            "prompt_len": max(4, min(6000, int(rng.lognormvariate(0, 0.8) * mix["prompt"]))),
            "output_len": max(1, min(1500, int(rng.lognormvariate(0, 0.8) * mix["output"]))),
        }
        if mix.get("prefixes") and rng.random() < 0.7:
            row |= {"prefix_id": f"p{rng.randrange(mix['prefixes'])}", "prefix_len": min(row["prompt_len"], 512)}
        rows.append(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows


def command(path: Path, settings: dict[str, Any], *more: str) -> dict[str, Any]:
    words = [
        sys.executable,
        "-m",
        "legroom",
        "simulate",
        str(path),
        "--blocks",
        str(settings["num_blocks"]),
        "--max-model-len",
        str(settings["max_model_len"]),
        "--json",
        *more,
    ]
    if "--choose" not in more:
        words += ["--max-num-seqs", str(settings["max_num_seqs"])]
        words += ["--max-num-batched-tokens", str(settings["max_num_batched_tokens"])]
    began = time.perf_counter()
    with tempfile.TemporaryFile() as out:
        child = subprocess.Popen(words, stdout=out)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - began
        if status:
            sys.exit(f"{' '.join(words)} ended with {status}")
        out.seek(0)
        answer = json.loads(out.read())
    return {
        "seconds": round(seconds, 2),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_mib": round(usage.ru_maxrss / 1024),
        "answer": answer,
    }


def replay_seconds(path: Path, settings: dict[str, Any]) -> float:
    """The replay alone, with compiled code loaded as after a first call."""
    from legroom.simulation.scheduler_settings import SchedulerSettings
    from legroom.simulation.trace_replay import simulate
    from legroom.simulation.traces.trace_files import read_trace

    trace, rules = read_trace(str(path)).checked(), SchedulerSettings(**settings)
    simulate(read_trace(str(path), limit=20_000).checked(), rules)
    began = time.process_time()
    simulate(trace, rules)
    return time.process_time() - began


def vllm(python: str, rows: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder, "q.jsonl"), Path(folder, "a.jsonl")
        question.write_text(json.dumps({"settings": settings, "requests": rows, "brief": True}) + "\n", "utf-8")
        subprocess.run(
            [python, str(HERE.parent / "tests/simulation/simulate_oracle.py"), str(question), str(answer)], check=True
        )
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found


def compare(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    table = []
    for name, mix in MIXES.items():
        settings = {**SETTINGS, **({"num_blocks": mix["num_blocks"]} if "num_blocks" in mix else {})}
        path = folder / "trace.jsonl"
        rows = write_trace(path, args.requests, mix)
        ours = command(path, settings)
        replay_s = replay_seconds(path, settings)
        row: dict[str, Any] = {
            "mix": name,
            "requests": args.requests,
            "replay_s": round(replay_s, 3),
            "whole_s": ours["seconds"],
            "whole_cpu_s": ours["cpu_s"],
            "replay_requests_s": round(args.requests / replay_s),
            "peak_mib": ours["peak_mib"],
            "preemptions": ours["answer"]["preemptions"],
        }
        if args.vllm_python:
            part = rows[: args.vllm_requests]
            theirs = vllm(args.vllm_python, part, settings)
            row["vllm_requests"] = len(part)
            row["vllm_s"] = theirs["seconds"]
            row["vllm_requests_s"] = round(len(part) / theirs["seconds"], 1)
            row["times_faster"] = round(args.requests / replay_s / row["vllm_requests_s"])
            row["times_faster_whole"] = round(args.requests / ours["cpu_s"] / row["vllm_requests_s"])
        table.append(row)
        print(row, flush=True)
    return table


def compile_once(folder: Path) -> float | None:
    """Seconds that Numba took to compile the replay on this machine; 0 where it lay compiled, None without Numba."""
    if not numba_is_installed():
        print("Numba is not installed (pip install 'legroom[simulate]'): plain Python is measured", flush=True)
        return None
    if is_compiled_before():
        return 0.0
    path = folder / "first.jsonl"
    write_trace(path, 100, MIXES["chat"])
    began = time.process_time()
    FastReplay(read_trace(str(path)), SchedulerSettings(num_blocks=4000), use_numba=True).run()
    took = round(time.process_time() - began, 1)
    print(f"compiled once in {took} s", flush=True)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vllm_python", nargs="?")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--vllm-requests", type=int, default=3_000)
    parser.add_argument("--million", action="store_true", help="a day of traffic too")
    parser.add_argument("--choose", action="store_true", help="the search over all settings too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result: dict[str, Any] = {"compile_s": compile_once(Path(folder)), "mixes": compare(args, Path(folder))}
        path = Path(folder, "trace.jsonl")
        if args.million:
            write_trace(path, 1_000_000, MIXES["chat with shared prefixes"])
            day = command(path, SETTINGS)
            result["million"] = {name: day[name] for name in ("seconds", "cpu_s", "peak_mib")}
            print("a million requests", result["million"], flush=True)
        if args.choose:
            write_trace(path, 10_000, MIXES["chat with shared prefixes"])
            search = command(path, SETTINGS, "--choose", "--workers", "2")
            result["choose"] = {"seconds": search["seconds"], "tried": search["answer"]["tried"]}
            print("search", result["choose"], flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
