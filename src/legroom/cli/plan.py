"""`legroom plan`: will vLLM start, where does every byte go, and what would fix it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from legroom.cli.deployment import add_source_options, machine, parse, requested
from legroom.cli.output import print_json, write_file
from legroom.errors import ANSWER_IS_NO, OK

if TYPE_CHECKING:
    from legroom.api import PlanReport
    from legroom.planning.plan import Plan

__all__ = ["add_parser", "parse", "run"]

_DESCRIPTION = """\
Predict what `vllm serve MODEL` does on a GPU: whether it starts, where every byte of the card goes, how many KV
blocks, tokens and requests it holds; if it will not start, the error vLLM raises and the flags that would fix it.
Needs no GPU, no torch and no weights. Every flag of the vLLM release is taken as it is."""

_EPILOG = """\
examples:
  legroom plan llama-3.1-8b --gpu h100
  legroom plan Qwen/Qwen3-32B --gpu l40s --tensor-parallel-size 2 --max-model-len 32768
  legroom plan ./my-model --gpu 24GiB --vllm 0.10.2 --json
  legroom plan --gpu a100-80gb -- vllm serve mistralai/Mistral-7B-v0.1 --max-num-seqs 64
  legroom plan --gpu h100 --command 'docker run --gpus all vllm/vllm-openai:v0.11.0 --model Qwen/Qwen3-8B'
  legroom plan --gpu l4 --file deploy.yaml
  legroom plan --gpu l4 --python 'LLM("Qwen/Qwen3-8B", max_model_len=8192)'
  legroom plan llama-3.1-70b --gpu h100 --gpus 4 --want-context 32k --want-concurrency 16

exit codes: 0 it fits or is tight, 1 it does not fit, 2 the call is wrong, 3 something needed was unreachable
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Describe the command's own options; vLLM's flags are not listed here."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        usage="legroom plan [MODEL] --gpu NAME [options] [any vLLM flag] [-- vllm serve ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    where = parser.add_argument_group("where it runs")
    where.add_argument("--gpu", metavar="NAME", help="a GPU (h100, a100-80gb, rtx4090, l4 ...) or a size (24GiB)")
    where.add_argument("--gpus", metavar="N", help="how many (default: what the parallel sizes need)")
    where.add_argument(
        "--gpu-memory", metavar="SIZE", help="total memory of one GPU as your machine reports it (79.10GiB)"
    )
    where.add_argument("--gpu-used", metavar="SIZE", help="memory of that GPU that other processes use (2GiB)")
    where.add_argument("--host-memory", metavar="SIZE", help="host memory it may use: a container's limit (16GiB)")
    where.add_argument("--vllm", metavar="VERSION", help="vLLM release (default: the newest known)")
    add_source_options(parser)
    wish = parser.add_argument_group("wishes (search for flags instead)")
    wish.add_argument("--want-context", metavar="LEN", help="tokens a request may have (32k is 32,768)")
    wish.add_argument("--want-concurrency", metavar="N", help="requests of that length at once")
    wish.add_argument("--want-gpus", metavar="N", help="use at most this many GPUs")
    wish.add_argument("--policy", choices=("safe", "balanced", "tight"), default="balanced",
                      help="how much of the error band to keep as headroom (default: balanced)")  # fmt: skip
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="one JSON document on stdout")
    out.add_argument("--svg", metavar="FILE", help="write the picture as SVG too")
    out.add_argument("--explain-math", action="store_true", help="show the working behind every figure")
    out.add_argument("--cold", action="store_true", help="plan the first start, with a cold compile cache")
    out.add_argument("--no-advice", action="store_true", help="do not look for flags that would fix it")
    parser.set_defaults(prog="legroom plan")
    return parser


def run(args: argparse.Namespace) -> int:
    """Plan, print, and answer with 0 or 1."""
    from legroom.api import PlanReport
    from legroom.planning.machine import make_plan

    meant = requested(args)
    where = machine(args, meant)
    if args.want_context or args.want_concurrency or args.want_gpus:
        from legroom.cli.wish import run_wish

        return run_wish(args, meant.args, meant.release, where)
    made = make_plan(meant.args, meant.release, where, advice=not args.no_advice)
    made = replace(made, notes=tuple(dict.fromkeys((*meant.notes, *made.notes))))
    if args.cold:
        from legroom.planning.plan import cold_start

        made = cold_start(made)
    show(PlanReport(made), args)
    return exit_code(made)


def exit_code(made: Plan) -> int:
    """0 where it starts, 1 where it does not."""
    return ANSWER_IS_NO if made.verdict == "does_not_fit" else OK


def show(report: PlanReport, args: argparse.Namespace) -> None:
    """The answer in the form that was asked for."""
    if args.svg:
        write_file(args.svg, report.svg(), "picture")
    if args.json:
        print_json(report.json(args.explain_math))
        return
    from legroom.drawing.terminal import style_of

    sys.stdout.write(report.text(style_of(sys.stdout), args.explain_math))
