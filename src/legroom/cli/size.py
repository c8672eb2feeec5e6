"""`legroom size`: which GPUs, and how many, hold a model at a context and a concurrency."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from legroom.cli.deployment import count_of, refuse, server_env, split
from legroom.cli.output import ProgressBar, note, print_json
from legroom.cli.sweeps import add_latency_goals, add_sweep_options, executor_of
from legroom.errors import ANSWER_IS_NO, OK, LegroomError

if TYPE_CHECKING:
    from legroom.planning.wish import Wish

_DESCRIPTION = """\
A table of GPUs that hold MODEL so that --concurrency requests of --context tokens run at once: how many it takes,
how the model is split over them, what stays free, and which part of the memory is the limit. Every row is a full plan.

With --rate or --trace in place of --concurrency, the load is replayed: how many GPUs, as replicas of one server, serve
it within --ttft and --tpot, and what they cost per hour and per million output tokens, each with a range."""

_EPILOG = """\
examples:
  legroom size llama-3.1-8b --context 4k --concurrency 16
  legroom size Qwen/Qwen3-32B --context 32k --concurrency 8 --gpu h100,l40s --max-gpus 4
  legroom size llama-3.1-8b llama-3.1-70b --context 8k --concurrency 32 --matrix
  legroom size llama-3.1-8b llama-3.1-70b deepseek-v3 --gpu all --matrix --ray auto
  legroom size llama-3.1-70b --context 8k --concurrency 4 --kv-cache-dtype fp8 --json
  legroom size llama-3.1-8b --rate 5 --prompt 1000 --answer 300 --ttft 2 --tpot 50
  legroom size llama-3.1-8b --trace requests.jsonl --ttft 2 --tpot 50 --prices prices.toml

prices.toml: one table per card, like [h100] with usd_per_hour = 2.49; without it, dated list prices are used

exit codes: 0 some GPU holds it, 1 none does, 2 the call is wrong, 3 something needed was unreachable
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Describe the command's own options; vLLM's flags are taken too."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "size",
        usage="legroom size MODEL... (--context LEN --concurrency N | --rate R --prompt LEN --answer LEN) [options] "
        "[any vLLM flag]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    load = parser.add_argument_group("the load")
    load.add_argument(
        "--context",
        metavar="LEN",
        help="tokens a request may have (default: 4k, which is 4,096; of a rate: its longest)",
    )
    load.add_argument("--concurrency", metavar="N", help="requests of that length at once (default: 1)")
    _add_rate_options(parser)
    where = parser.add_argument_group("where it may run")
    where.add_argument("--gpu", metavar="NAMES", help="GPUs to try: h100,l4 or `all` (default: the usual ones)")
    where.add_argument("--max-gpus", metavar="N", default="32", help="the most of one GPU to try (default: 32)")
    where.add_argument("--vllm", metavar="VERSION", help="vLLM release (default: the newest known)")
    where.add_argument(
        "--policy",
        choices=("safe", "balanced", "tight"),
        default="balanced",
        help="how much of the error band to keep as headroom (default: balanced)",
    )
    add_sweep_options(parser.add_argument_group("how it is computed"), "1; one per core with --matrix")
    out = parser.add_argument_group("output")
    out.add_argument("--matrix", action="store_true", help="models by GPUs, a count in each cell")
    out.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


def _add_rate_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a load over time, in place of --concurrency")
    group.add_argument("--rate", type=float, metavar="R", help="requests a second, arriving by chance (Poisson)")
    group.add_argument("--prompt", metavar="LEN", help="tokens of a prompt, or a distribution like lognormal(1000,0.8)")
    group.add_argument("--answer", metavar="LEN", help="tokens of an answer, or a distribution")
    group.add_argument("--trace", metavar="FILE", help="a trace of requests with their times, as simulate reads them")
    add_latency_goals(group, "seconds")
    group.add_argument("--prices", metavar="FILE", help="your prices of GPUs, as TOML (default: dated list prices)")


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Models and vLLM's flags stand beside the own options."""
    own, rest, after = split(parser, words)
    args = parser.parse_args(own)
    args.models = []
    while rest and not rest[0].startswith("-"):
        args.models.append(rest.pop(0))
    args.vllm_words = rest + after
    return args


def run(args: argparse.Namespace) -> int:
    """Work out every row, print, and answer with 0 where any GPU holds it."""
    import os

    from legroom.api import SizeReport
    from legroom.cli.size_rate import is_rate_asked, run_rate
    from legroom.facts.releases import latest, release
    from legroom.planning.sizing import named_gpus, size_models
    from legroom.vllm.parse import parse_flags

    by_rate = is_rate_asked(args)
    used = release(args.vllm) if args.vllm else latest()
    parsed = parse_flags(args.vllm_words, used)
    refuse(parsed.problems, used)
    models = args.models or ([parsed.args.model] if parsed.args.model else [])
    if not models:
        raise LegroomError("which model?", "legroom size MODEL --context 4k --concurrency 16")
    serve_args = replace(parsed.args, env={**server_env(os.environ), **parsed.args.env})
    cards = named_gpus(args.gpu)
    for remark in dict.fromkeys(card.note for card in cards if card.note and args.gpu != "all"):
        note(f"note: {remark}")
    if by_rate:
        return run_rate(args, models, used, serve_args, cards)
    wish = _wish(args)
    executor, bar = executor_of(args, workers=None if args.matrix else 1), ProgressBar("sizing")
    try:
        rows = size_models(models, used, serve_args, wish, cards, executor, bar)
    finally:
        bar.clear()
    report = SizeReport(tuple(rows), wish, used)
    if args.json:
        print_json(report.json())
    else:
        from legroom.drawing.terminal import style_of

        sys.stdout.write(report.text(style_of(sys.stdout), matrix=args.matrix))
    return OK if report.fits else ANSWER_IS_NO


def _wish(args: argparse.Namespace) -> Wish:
    from legroom.planning.wish import Wish, counts_up_to
    from legroom.units import parse_count, parse_length

    context = parse_length(args.context or "4k", "--context")
    concurrency = parse_count(args.concurrency or "1", "--concurrency")
    if context < 1 or concurrency < 1:
        raise LegroomError("a context and a concurrency are at least 1", "write it like --context 4k --concurrency 16")
    return Wish(context, float(concurrency), counts_up_to(count_of(args.max_gpus, "--max-gpus") or 32), args.policy)
