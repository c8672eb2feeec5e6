"""`legroom plan --want-...`: the flags that hold a wish."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from legroom.cli.output import note, print_json, write_file
from legroom.errors import ANSWER_IS_NO, OK, LegroomError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legroom.facts.releases import Release
    from legroom.planning.machine import Machine
    from legroom.planning.plan import Plan, Target
    from legroom.planning.search import WishResult
    from legroom.planning.wish import Wish
    from legroom.vllm.args import ServeArgs

MOST_GPUS = 8
"""How far to count up where no number of GPUs was given and one does not do."""


def run_wish(args: argparse.Namespace, serve_args: ServeArgs, release: Release, machine: Machine) -> int:
    """Search, print, and answer with 0 where something holds the wish."""
    from legroom.planning.machine import make_target
    from legroom.planning.search import find
    from legroom.planning.wish import counts_up_to

    most = _most_gpus(args, serve_args, machine)
    target = make_target(serve_args, release, replace(machine, gpus=most))
    wish = _wish(args, serve_args, target, most)
    targets = with_variants(target, serve_args)
    answer = find(targets, serve_args, wish)
    if most == 1 and not _asked_gpus(args, machine):
        for count in counts_up_to(MOST_GPUS)[1:]:  # GPUs that nobody offered: as few more as will do
            if answer.best is None:
                answer = find(targets, serve_args, replace(wish, gpus=(count,)))
    answer = replace(
        answer,
        best=used_only(answer.best) if answer.best else None,
        alternatives=tuple((used_only(plan), losses) for plan, losses in answer.alternatives),
    )
    if target.gpu.note:
        note(f"note: {target.gpu.note}")
    _show(answer, target, serve_args, args)
    return OK if answer.best else ANSWER_IS_NO


def _most_gpus(args: argparse.Namespace, serve_args: ServeArgs, machine: Machine) -> int:
    given = (serve_args.tensor_parallel_size or 1) * (serve_args.pipeline_parallel_size or 1)
    return _asked_gpus(args, machine) or given


def _asked_gpus(args: argparse.Namespace, machine: Machine) -> int | None:
    from legroom.cli.deployment import count_of

    return count_of(args.want_gpus, "--want-gpus") or machine.gpus


def _wish(args: argparse.Namespace, serve_args: ServeArgs, target: Target, most: int) -> Wish:
    from legroom.planning.wish import Wish, counts_up_to
    from legroom.units import parse_count, parse_length

    usual = serve_args.max_model_len or target.model.max_position_embeddings
    context = parse_length(args.want_context, "--want-context") if args.want_context else usual
    concurrency = parse_count(args.want_concurrency, "--want-concurrency") if args.want_concurrency else 1
    if context < 1 or concurrency < 1:
        raise LegroomError(
            "--want-context and --want-concurrency must be at least 1",
            "write it like --want-context 32k --want-concurrency 16",
        )
    return Wish(context, float(concurrency), counts_up_to(most), args.policy)


def with_variants(target: Target, serve_args: ServeArgs) -> list[Target]:
    """The model, and the quantized checkpoints of it that the card runs unless the user named a quantization."""
    from legroom.planning.checkpoints import quantized_checkpoints

    return [target, *(replace(target, model=model) for model in quantized_checkpoints(target, serve_args))]


def used_only(plan: Plan) -> Plan:
    """The plan on just the GPUs that it uses."""
    settings = plan.settings
    used = settings.tensor_parallel_size * settings.pipeline_parallel_size * settings.data_parallel_size
    return replace(plan, target=replace(plan.target, gpus=used))


def _show(answer: WishResult, target: Target, serve_args: ServeArgs, args: argparse.Namespace) -> None:
    if args.svg and answer.best:
        from legroom.render.plan_svg import plan_svg

        write_file(args.svg, plan_svg(answer.best), "picture")
    if args.json:
        print_json(_document(answer, target, serve_args, args.explain_math))
        return
    from legroom.drawing.terminal import style_of
    from legroom.render.plan_text import wish_text

    sys.stdout.write(wish_text(answer, style_of(sys.stdout)))


def _document(answer: WishResult, target: Target, serve_args: ServeArgs, explain_math: bool) -> dict[str, Any]:
    from legroom.planning.plan import plan
    from legroom.planning.plan_json import plan_json

    search = {
        "want_context": answer.wish.context,
        "want_concurrency": answer.wish.concurrency,
        "policy": answer.wish.policy,
        "considered": answer.considered,
        "gives_up": list(answer.losses),
        "short_by": answer.short_by or None,
        "alternatives": [_alternative(other, losses) for other, losses in answer.alternatives],
    }
    if answer.best:
        return plan_json(answer.best, explain_math) | {"search": search}
    # Nothing holds the wish: what the flags alone would do, with the answer to the wish on top.
    asked = replace(serve_args, max_model_len=serve_args.max_model_len or answer.wish.context)
    document = plan_json(plan(target, asked), explain_math)
    return document | {"verdict": "does_not_fit", "reason": answer.short_by, "search": search}


def _alternative(plan: Plan, losses: Sequence[str]) -> dict[str, Any]:
    from legroom.planning.plan import ready_command
    from legroom.planning.plan_document import layout_json

    return {
        "gpus": plan.target.gpus,
        "gives_up": list(losses),
        "verdict": plan.verdict,
        "max_concurrency": plan.memory.kv.max_concurrency,
        "layout": layout_json(plan.layout),
        "command": ready_command(plan),
    }
