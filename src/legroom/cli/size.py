"""`legroom size`: which GPUs, and how many, hold a model at a context and a concurrency."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from legroom.cli.deployment import count_of, refuse, server_env, split
from legroom.cli.output import print_json
from legroom.errors import ANSWER_IS_NO, OK, LegroomError
from legroom.records import dataclass

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.facts.releases import Release
    from legroom.planning.sizing import Fit
    from legroom.planning.wish import Wish
    from legroom.vllm.args import ServeArgs

USUAL_GPUS = (
    "b200", "h200", "mi300x", "h100", "a100-80gb", "a100-40gb", "l40s", "rtx-a6000", "rtx5090", "rtx4090", "a10", "l4",
    "t4",
)  # fmt: skip
"""What the table shows unless told otherwise: cards that people rent or have."""

_DESCRIPTION = """\
A table of GPUs that hold MODEL so that --concurrency requests of --context tokens run at once: how many it takes,
split how, what stays free, and which part of the memory is the limit. Every row is a full plan."""

_EPILOG = """\
examples:
  legroom size llama-3.1-8b --context 4k --concurrency 16
  legroom size Qwen/Qwen3-32B --context 32k --concurrency 8 --gpu h100,l40s --max-gpus 4
  legroom size llama-3.1-8b llama-3.1-70b --context 8k --concurrency 32 --matrix
  legroom size llama-3.1-70b --context 8k --concurrency 4 --kv-cache-dtype fp8 --json

exit codes: 0 some GPU holds it, 1 none does, 2 the call is wrong, 3 something needed was unreachable
"""


@dataclass(frozen=True)
class Row:
    """One model on one GPU."""

    model: str
    fit: Fit


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Describe the command's own options; vLLM's flags are taken too."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "size",
        usage="legroom size MODEL... --context LEN --concurrency N [options] [any vLLM flag]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--context", metavar="LEN", default="4k", help="tokens a request may have (default: 4k)")
    parser.add_argument("--concurrency", metavar="N", default="1", help="requests of that length at once (default: 1)")
    parser.add_argument("--gpu", metavar="NAMES", help="GPUs to try: h100,l4 or `all` (default: the usual ones)")
    parser.add_argument("--max-gpus", metavar="N", default="8", help="the most of one GPU to try (default: 8)")
    parser.add_argument("--vllm", metavar="VERSION", help="vLLM release (default: the newest known)")
    parser.add_argument("--policy", choices=("safe", "balanced", "tight"), default="balanced",
                        help="how much of the error band to keep as headroom (default: balanced)")  # fmt: skip
    parser.add_argument("--matrix", action="store_true", help="models by GPUs, a count in each cell")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


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

    from legroom.facts.releases import latest, release
    from legroom.vllm.parse import parse_flags

    used = release(args.vllm) if args.vllm else latest()
    parsed = parse_flags(args.vllm_words, used)
    refuse(parsed.problems, used)
    models = args.models or ([parsed.args.model] if parsed.args.model else [])
    if not models:
        raise LegroomError("which model?", "legroom size MODEL --context 4k --concurrency 16")
    serve_args = replace(parsed.args, env={**server_env(os.environ), **parsed.args.env})
    wish = _wish(args)
    rows = list(_rows(models, used, serve_args, wish, _gpus(args.gpu)))
    _show(rows, wish, used, args)
    return OK if any(row.fit.count for row in rows) else ANSWER_IS_NO


def _wish(args: argparse.Namespace) -> Wish:
    from legroom.cli.wish import counts_up_to
    from legroom.planning.wish import Wish
    from legroom.units import parse_count, parse_length

    context, concurrency = parse_length(args.context, "--context"), parse_count(args.concurrency, "--concurrency")
    if context < 1 or concurrency < 1:
        raise LegroomError("a context and a concurrency are at least 1", "write it like --context 4k --concurrency 16")
    return Wish(context, float(concurrency), counts_up_to(count_of(args.max_gpus, "--max-gpus") or 8), args.policy)


def _gpus(names: str | None) -> list[Gpu]:
    from legroom.facts.gpus import all_gpus, gpu

    if names == "all":
        return list(all_gpus())
    chosen = [name.strip() for name in names.split(",") if name.strip()] if names else list(USUAL_GPUS)
    if not chosen:
        raise LegroomError("no GPU was named", "write it like --gpu h100,l4")
    return [gpu(name) for name in chosen]


def _rows(
    models: Sequence[str], release: Release, serve_args: ServeArgs, wish: Wish, gpus: Sequence[Gpu]
) -> Iterator[Row]:
    from legroom.planning.sizing import size
    from legroom.vllm.served_model import served_model

    for name in models:
        asked = replace(serve_args, model=name)
        model = served_model(asked)
        for fit in size(model, release, asked, wish, gpus):
            yield Row(model.name, fit)


def _show(rows: Sequence[Row], wish: Wish, release: Release, args: argparse.Namespace) -> None:
    if args.json:
        asked = {"context": wish.context, "concurrency": wish.concurrency, "policy": wish.policy}
        print_json({"vllm": release.version, **asked, "rows": [row_json(row) for row in rows]})
        return
    from legroom.drawing.terminal import style_of
    from legroom.render.size_text import matrix_text, size_text

    style = style_of(sys.stdout)
    noun = "request" if wish.concurrency == 1 else "requests"
    requests = f"{wish.concurrency:g} {noun} of {wish.context:,} tokens at once"
    title = f"{requests}, vLLM {release.version}, policy {wish.policy}"
    draw = matrix_text if args.matrix else size_text
    sys.stdout.write(draw([(row.model, row.fit) for row in rows], title, style))


def row_json(row: Row) -> dict[str, Any]:
    """One row of the table."""
    from legroom.planning.plan import ready_command
    from legroom.planning.plan_document import layout_json

    fit, plan = row.fit, row.fit.plan
    document: dict[str, Any] = {
        "model": row.model,
        "gpu": fit.gpu.name,
        "total_bytes": fit.gpu.total_bytes,
        "count": fit.count,
        "verdict": plan.verdict if plan else "does_not_fit",
        "limiting": fit.limiting,
        "gives_up": list(fit.losses),
        "tensor_parallel_size": plan.settings.tensor_parallel_size if plan else None,
        "pipeline_parallel_size": plan.settings.pipeline_parallel_size if plan else None,
        "max_concurrency": plan.memory.kv.max_concurrency if plan else None,
        "layout": layout_json(plan.layout) if plan else None,
        "command": ready_command(plan) if plan else None,
    }
    return document
