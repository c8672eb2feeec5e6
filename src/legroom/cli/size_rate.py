"""`legroom size --rate`: how many of which GPUs hold a rate of requests within a latency, and what they cost."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from legroom.cli.deployment import count_of
from legroom.cli.output import ProgressBar, print_json
from legroom.cli.sweeps import executor_of
from legroom.errors import ANSWER_IS_NO, OK, LegroomError

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.facts.releases import Release
    from legroom.simulation.fleet_size import ServingLoad
    from legroom.simulation.trace import Trace
    from legroom.vllm.args import ServeArgs

_MADE_UP_S = 60
"""A made-up load lasts so long: a few answers of most servers. Where it is too short, the replay repeats it."""
_FEWEST, _MOST = 200, 5000
"""Requests of a made-up load: enough for a p99, and no more than replay quickly."""
_EXAMPLE = "as in legroom size MODEL --rate 5 --prompt 1000 --answer 300 --ttft 2 --tpot 50"


def is_rate_asked(args: argparse.Namespace) -> bool:
    """Whether the load is a rate or a trace, and not a number of requests at once."""
    named = ("rate", "prompt", "answer", "trace", "ttft", "tpot", "prices")
    given = [name for name in named if getattr(args, name) is not None]
    if given and args.rate is None and args.trace is None:
        raise LegroomError(f"--{given[0]} needs a rate of requests", _EXAMPLE)
    if not given:
        return False
    for name, is_given in (("--concurrency", args.concurrency is not None), ("--matrix", args.matrix)):
        if is_given:
            raise LegroomError(f"{name} has no place beside {'--rate' if args.rate else '--trace'}", _EXAMPLE)
    return True


def run_rate(
    args: argparse.Namespace, models: Sequence[str], release: Release, serve: ServeArgs, cards: Sequence[Gpu]
) -> int:
    """Size, print, and answer with 0 where any card holds the load."""
    from legroom.facts.gpus import list_prices
    from legroom.planning.price_file import read_price_file
    from legroom.simulation.fleet_size import CardFleets, FleetReport, FleetTask, size_fleets
    from legroom.units import parse_length
    from legroom.vllm.resolve import served_model

    load = _load(args)
    prices = read_price_file(args.prices) if args.prices else list_prices()
    most = count_of(args.max_gpus, "--max-gpus") or 32
    if args.context is not None and serve.max_model_len is None:
        serve = replace(serve, max_model_len=parse_length(args.context, "--context"))
    asked = tuple(replace(serve, model=name) for name in models)
    # Read here, not where a card is sized: files and the Hub's cache are this machine's.
    task = FleetTask(tuple(map(served_model, asked)), release, asked, load, most)
    executor, bar = executor_of(args, workers=1), ProgressBar("sizing")
    try:
        sized = size_fleets(task, cards, executor, bar)
    finally:
        bar.clear()
    names = [model.name for model in task.models for _ in cards]
    rows = tuple(CardFleets(name, fleets) for name, fleets in zip(names, sized, strict=True))
    report = FleetReport(load, release, rows, prices, most, not args.prices)
    if args.json:
        print_json(report.as_json())
    else:
        from legroom.drawing.terminal import style_of
        from legroom.render.fleet_size_text import fleet_size_text

        sys.stdout.write(fleet_size_text(report, style_of(sys.stdout)))
    return OK if report.holds else ANSWER_IS_NO


def _load(args: argparse.Namespace) -> ServingLoad:
    from legroom.simulation.fleet_size import ServingLoad
    from legroom.simulation.replay_outcome import Goal

    for option, limit in (("--ttft", args.ttft), ("--tpot", args.tpot)):
        if limit is not None and not limit > 0:
            raise LegroomError(f"{option} {limit:g}: a limit is above 0", _EXAMPLE)
    goal = Goal(args.ttft, None, None, None if args.tpot is None else args.tpot / 1000)
    if args.trace is None:
        return ServingLoad(_made_up(args), goal, args.rate)
    for name in ("rate", "prompt", "answer"):
        if getattr(args, name) is not None:
            raise LegroomError(f"both --trace and --{name} say what the load is", "give one of them")
    from legroom.simulation.traces.trace_files import read_trace

    trace = read_trace(args.trace).checked()
    duration = trace.arrivals[-1] - trace.arrivals[0]
    return ServingLoad(trace, goal, (len(trace) - 1) / duration if duration else 0.0)


def _made_up(args: argparse.Namespace) -> Trace:
    from legroom.simulation.traces import synthetic

    if not 0 < args.rate < 1e6:
        raise LegroomError(f"--rate {args.rate:g} is not a number of requests a second", _EXAMPLE)
    if args.prompt is None or args.answer is None:
        missing = "--prompt" if args.prompt is None else "--answer"
        raise LegroomError(f"how long are the requests? {missing} is missing", _EXAMPLE)
    requests = round(min(_MOST, max(_FEWEST, args.rate * _MADE_UP_S)))
    lengths = f"prompt={_length(args.prompt, '--prompt')} output={_length(args.answer, '--answer')}"
    return synthetic.read(f"poisson rate={args.rate!r} {lengths} requests={requests}").checked()


def _length(text: str, option: str) -> str:
    """A number of tokens, or a law of lengths as --synthetic takes it."""
    from legroom.units import parse_length

    if "(" in text:
        return text.replace(" ", "")
    tokens = parse_length(text, option)
    if tokens < 1:
        raise LegroomError(f"{option} {text}: a request has at least 1 token of it", _EXAMPLE)
    return str(tokens)
