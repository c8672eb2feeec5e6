#!/usr/bin/env python3
"""What `legroom simulate --choose` takes, beside its former rule: the best throughput without preemption.

    choose_goodput.py [--requests 150] [--only WORD]

Every load is made up, with lengths after what is published of public traces where it says so: ShareGPT and Alpaca (mean
prompt and output of the vLLM paper, SOSP '23), Azure's code and conversation services (medians of the Splitwise paper,
ISCA '24), Mooncake (means of its paper, FAST '25). Both rules choose among the same replays. A row says what
each gives: goodput (tokens a second within the latency asked for, or all), p99 of the first token and of the answer,
preemptions, and whether it holds the load. Seconds are the roofline's estimates.
"""

from __future__ import annotations

import argparse
import json
from array import array
from typing import Any

from legroom.cli.simulate import add_parser, parse
from legroom.cli.simulate_pool import pool_of
from legroom.simulation.flag_search import choose
from legroom.simulation.replay_outcome import Goal, ReplayOutcome
from legroom.simulation.traces import synthetic

LOADS: dict[str, tuple[str, str, dict[str, float]]] = {
    "chat at 8/s, L4": ("poisson rate=8 prompt=lognormal(1200,0.8) output=lognormal(300,0.6)", "qwen3-8b l4 8192", {}),
    "ShareGPT-like chat, L4": (
        "poisson rate=1 prompt=lognormal(100,1) output=lognormal(250,0.8)",
        "qwen3-8b l4 4096",
        {},
    ),
    "ShareGPT-like chat, overloaded": (
        "poisson rate=6 prompt=lognormal(100,1) output=lognormal(250,0.8)",
        "qwen3-8b l4 4096",
        {},
    ),
    "Alpaca-like, A10": (
        "poisson rate=10 prompt=lognormal(15,0.6) output=lognormal(45,0.7)",
        "llama-3.1-8b a10 4096",
        {},
    ),
    "Azure conversation, A10": (
        "poisson rate=1 prompt=lognormal(1020,0.8) output=lognormal(129,0.8)",
        "llama-3.1-8b a10 8192",
        {},
    ),
    "Azure conversation, first token within 5 s": (
        "poisson rate=1.5 prompt=lognormal(1020,0.8) output=lognormal(129,0.8)",
        "llama-3.1-8b a10 8192",
        {"first_token_p99": 5.0},
    ),
    "Azure code, A100": (
        "poisson rate=8 prompt=lognormal(1500,0.7) output=lognormal(13,0.9)",
        "llama-3.1-8b a100-40gb 8192",
        {},
    ),
    "Mooncake-like long prompts, H100": (
        "poisson rate=2 prompt=lognormal(6000,0.7) output=lognormal(150,0.6) prefix=10,1024",
        "llama-3.1-8b h100 32768",
        {},
    ),
    "bursts of 20, L40S": (
        "bursts burst=20 rate=3 prompt=lognormal(600,0.9) output=lognormal(150,0.7)",
        "qwen3-8b l40s 8192",
        {},
    ),
    "retrieval with shared beginnings, L40S": (
        "poisson rate=4 prompt=lognormal(3000,0.4) output=lognormal(200,0.5) prefix=5,2000",
        "qwen3-8b l40s 8192",
        {},
    ),
    "reasoning, long answers, L40S": (
        "poisson rate=0.6 prompt=lognormal(300,0.7) output=lognormal(2500,0.6)",
        "qwen3-8b l40s 16384",
        {},
    ),
    "reasoning in a tight pool, RTX 4090": (
        "poisson rate=0.5 prompt=lognormal(300,0.7) output=lognormal(2500,0.6)",
        "qwen3-8b rtx4090 16384",
        {},
    ),
    "answers within 60 s, RTX 4090": (
        "poisson rate=1.5 prompt=lognormal(500,0.8) output=lognormal(300,0.6)",
        "qwen3-8b rtx4090 8192",
        {"latency_p99": 60.0},
    ),
    "a batch, all at once, L4": (
        "uniform rate=1e9 prompt=lognormal(500,0.8) output=lognormal(300,0.6)",
        "qwen3-8b l4 8192",
        {},
    ),
}


def former_choice(outcomes: list[ReplayOutcome], goal: Goal) -> ReplayOutcome | None:
    """The rule until now: no preemption, then the best throughput (rounded), then the shorter waits."""
    allowed = [o for o in outcomes if o.preemptions == 0 and goal.is_within(o.first_token_p99, o.latency_p99)]

    def rank(o: ReplayOutcome) -> tuple[float, ...]:
        return (o.finished, round(o.throughput, 2 - len(str(int(o.throughput)))), -o.latency_p99, -o.first_token_p99)

    return max(allowed, key=rank) if allowed else None


def brief(outcome: ReplayOutcome | None, goal: Goal) -> dict[str, Any] | None:
    if outcome is None:
        return None
    return {
        "max_num_seqs": outcome.flags["max_num_seqs"],
        "max_num_batched_tokens": outcome.flags["max_num_batched_tokens"],
        "goodput": round(outcome.goodput, 1),
        "first_token_p99_s": round(outcome.first_token_p99, 2),
        "latency_p99_s": round(outcome.latency_p99, 2),
        "preemptions": outcome.preemptions,
        "holds": goal.is_met(outcome),
    }


def compare(name: str, requests: int) -> dict[str, Any]:
    mix, deployment, limits = LOADS[name]
    model, gpu, length = deployment.split()
    parser = add_parser(argparse.ArgumentParser().add_subparsers())
    words = [
        "--synthetic",
        mix,
        "--model",
        model,
        "--gpu",
        gpu,
        "--max-model-len",
        length,
        "--choose",
        "--enable-chunked-prefill",
        "--enable-prefix-caching",
    ]
    args = parse(parser, words)
    trace = synthetic.read(f"{mix} requests={requests}").checked()
    if trace.arrivals[-1] < 1e-3:
        trace.arrivals = array("d", bytes(8 * len(trace)))
    goal = Goal(**limits)
    choice = choose(trace, pool_of(args, trace).candidates(), goal)
    return {
        "load": name,
        "tried": len(choice.outcomes),
        "before": brief(former_choice(choice.outcomes, goal), goal),
        "now": brief(choice.best, goal),
        "sustained": choice.sustained,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--only", default="", help="loads whose name has this word")
    args = parser.parse_args()
    for name in LOADS:
        if args.only in name:
            print(json.dumps(compare(name, args.requests)), flush=True)


if __name__ == "__main__":
    main()
