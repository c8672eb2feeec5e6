"""`legroom simulate`: how a pool and a scheduler hold a load."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from legroom.cli.output import print_json
from legroom.errors import OK, LegroomError


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Describe the command's options."""
    parser: argparse.ArgumentParser = subparsers.add_parser("simulate", help="replay a trace")
    parser.add_argument("trace", nargs="?")
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--no-enable-prefix-caching", dest="prefix", action="store_false")
    parser.add_argument("--scheduling-policy", choices=("fcfs", "priority"), default="fcfs")
    parser.add_argument("--timeline")
    parser.add_argument("--json", action="store_true")
    return parser


def run(args: argparse.Namespace) -> int:
    """Replay and report."""
    from legroom.simulation.replay import simulate
    from legroom.simulation.settings import SchedulerSettings
    from legroom.simulation.traces import jsonl

    if args.blocks is None:
        raise LegroomError("how large is the pool?", "give --blocks N")
    with Path(args.trace).open(encoding="utf-8") as lines:
        trace = jsonl.read(lines, args.trace)
    longest = max(p + o for p, o in zip(trace.prompt_lens, trace.output_lens, strict=True))
    settings = SchedulerSettings(
        args.blocks, args.block_size, args.max_num_seqs, args.max_num_batched_tokens,
        args.max_model_len or longest, args.prefix, scheduling_policy=args.scheduling_policy,
    )  # fmt: skip
    if args.timeline:
        with Path(args.timeline).open("w", encoding="utf-8") as out:
            timeline = simulate(trace, settings, lambda step: out.write(json.dumps(step.as_json()) + "\n") and None)
    else:
        timeline = simulate(trace, settings)
    print_json(timeline.as_json())
    return OK
