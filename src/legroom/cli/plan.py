"""`legroom plan`: will vLLM start, where does every byte go, and what would fix it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legroom.cli.output import note, print_json, write_file
from legroom.cli.server_options import (
    add_machine_options,
    add_source_options,
    described_machine,
    described_server,
    gpu_count,
    parse,
)
from legroom.errors import ANSWER_IS_NO, OK, LegroomError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legroom.api.plan_report import PlanReport
    from legroom.facts.releases import Release
    from legroom.memory.server_states import ServerState
    from legroom.planning.capacity_search import SearchAnswer
    from legroom.planning.file_plans import FileServer
    from legroom.planning.machine import Machine
    from legroom.planning.plan import Plan, Target
    from legroom.planning.search_space import CapacityGoal
    from legroom.vllm.args import ServeArgs

__all__ = ["add_parser", "parse", "run"]

_GIT_TIMEOUT_S = 30
_DIFF_HINT = "give a file, /dev/null for none, or REVISION:FILE inside a git repository"
_MOST_GPUS_TRIED = 8
"""How far to count up where no number of GPUs was given and one does not do."""

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
  legroom plan --diff HEAD:deploy.yaml deploy.yaml --markdown
  legroom plan llama-3.1-70b --gpu h100 --gpus 4 --want-context 32k --want-concurrency 16
  legroom plan llama-3.1-8b --gpu h100 --sleep

exit codes: 0 it fits or is tight, 1 it does not fit, 2 the call is wrong, 3 something needed was unreachable
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Describe the command's own options; vLLM's flags are not listed here."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        usage="legroom plan [MODEL] --gpu NAME [options] [any vLLM flag] [-- vllm serve ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    where = parser.add_argument_group("where it runs")
    add_machine_options(where)
    where.add_argument("--vllm", metavar="VERSION", help="vLLM release (default: the newest known)")
    add_source_options(parser)
    compared = parser.add_argument_group("two versions of a deployment file")
    compared.add_argument(
        "--diff",
        nargs=2,
        metavar=("OLD", "NEW"),
        help="what changes in flags, bytes and verdict; a file, or REVISION:FILE of git",
    )
    compared.add_argument("--markdown", action="store_true", help="with --diff: as a comment on a pull request")
    goal = parser.add_argument_group("wishes (search for flags instead)")
    goal.add_argument("--want-context", metavar="LEN", help="tokens a request may have (32k is 32,768)")
    goal.add_argument("--want-concurrency", metavar="N", help="requests of that length at once")
    goal.add_argument("--want-gpus", metavar="N", help="use at most this many GPUs")
    goal.add_argument(
        "--policy",
        choices=("safe", "balanced", "tight"),
        default="balanced",
        help="how much of the error band to keep as headroom (default: balanced)",
    )
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="one JSON document on stdout")
    out.add_argument("--svg", metavar="FILE", help="write the picture as SVG too")
    out.add_argument("--explain-math", action="store_true", help="show the working behind every figure")
    out.add_argument("--sleep", action="store_true", help="with sleep mode: what it holds awake, asleep, updating")
    out.add_argument("--host-bandwidth", metavar="SPEED", help="how fast the host's memory reaches the GPU (50GB/s)")
    out.add_argument("--cold", action="store_true", help="plan the first start, with a cold compile cache")
    out.add_argument("--no-advice", action="store_true", help="do not look for flags that would fix it")
    parser.set_defaults(prog="legroom plan")
    return parser


def run(args: argparse.Namespace) -> int:
    """Plan, print, and answer with 0 or 1."""
    from legroom.api.plan_report import PlanReport
    from legroom.planning.machine import make_plan

    if args.diff or args.markdown:
        return _run_diff(args)
    deployment = described_server(args)
    where = described_machine(args, deployment)
    if args.want_context or args.want_concurrency or args.want_gpus:
        return _run_search(args, deployment.args, deployment.release, where)
    if args.sleep:
        deployment = replace(deployment, args=_with_sleep_mode(deployment.args))
    made = make_plan(deployment.args, deployment.release, where, advice=not args.no_advice)
    made = replace(made, notes=tuple(dict.fromkeys((*deployment.notes, *made.notes))))
    if args.cold:
        from legroom.planning.plan import cold_start

        made = cold_start(made)
    show(PlanReport(made), args)
    return exit_code(made)


def _with_sleep_mode(args: ServeArgs) -> ServeArgs:
    from legroom.facts.sleep_mode import FLAG
    from legroom.vllm.args import is_given

    return args if is_given(args, FLAG) else replace(args, others=(*args.others, FLAG))


def exit_code(made: Plan) -> int:
    """0 where it starts, 1 where it does not."""
    return ANSWER_IS_NO if made.verdict == "does_not_fit" else OK


def show(report: PlanReport, args: argparse.Namespace) -> None:
    """The answer in the form that was asked for."""
    if args.svg:
        write_file(args.svg, report.svg(), "picture")
    states = _states(report.plan, args) if getattr(args, "sleep", False) else ()
    if args.json:
        print_json(report.json(args.explain_math) | _states_json(states))
        return
    from legroom.drawing.terminal import style_of

    style = style_of(sys.stdout)
    sys.stdout.write(report.text(style, args.explain_math))
    if states:
        from legroom.render.plan_text import sleep_text

        sys.stdout.write("\n" + sleep_text(states, style))


def _states_json(states: Sequence[ServerState]) -> dict[str, Any]:
    if not states:
        return {}
    from legroom.planning.plan_json import states_json

    return {"states": states_json(states)}


def _states(made: Plan, args: argparse.Namespace) -> tuple[ServerState, ...]:
    from legroom.planning.plan_json import plan_states
    from legroom.units import parse_speed

    return plan_states(made, parse_speed(args.host_bandwidth, "--host-bandwidth", 0.0) or None)


def _run_search(args: argparse.Namespace, serve_args: ServeArgs, release: Release, where: Machine) -> int:
    """Search, print, and answer with 0 where something holds the wish."""
    from legroom.planning.capacity_search import search_flags
    from legroom.planning.machine import make_target
    from legroom.planning.search_space import counts_up_to

    most = _most_gpus(args, serve_args, where)
    target = make_target(serve_args, release, replace(where, gpus=most))
    goal = _goal(args, serve_args, target, most)
    targets = _with_variants(target, serve_args)
    answer = search_flags(targets, serve_args, goal)
    if most == 1 and not _asked_gpus(args, where):
        for count in counts_up_to(_MOST_GPUS_TRIED)[1:]:  # GPUs that nobody offered: as few more as will do
            if answer.best is None:
                answer = search_flags(targets, serve_args, replace(goal, gpus=(count,)))
    answer = replace(
        answer,
        best=_used_only(answer.best) if answer.best else None,
        alternatives=tuple((_used_only(plan), losses) for plan, losses in answer.alternatives),
    )
    if target.gpu.note:
        note(f"note: {target.gpu.note}")
    _show_search(answer, target, serve_args, args)
    return OK if answer.best else ANSWER_IS_NO


def _most_gpus(args: argparse.Namespace, serve_args: ServeArgs, where: Machine) -> int:
    given = (serve_args.tensor_parallel_size or 1) * (serve_args.pipeline_parallel_size or 1)
    return _asked_gpus(args, where) or given


def _asked_gpus(args: argparse.Namespace, where: Machine) -> int | None:
    return gpu_count(args.want_gpus, "--want-gpus") or where.gpus


def _goal(args: argparse.Namespace, serve_args: ServeArgs, target: Target, most: int) -> CapacityGoal:
    from legroom.planning.search_space import CapacityGoal, counts_up_to
    from legroom.units import parse_count, parse_length

    usual = serve_args.max_model_len or target.model.max_position_embeddings
    context = parse_length(args.want_context, "--want-context") if args.want_context else usual
    concurrency = parse_count(args.want_concurrency, "--want-concurrency") if args.want_concurrency else 1
    if context < 1 or concurrency < 1:
        raise LegroomError(
            "--want-context and --want-concurrency must be at least 1",
            "write it like --want-context 32k --want-concurrency 16",
        )
    return CapacityGoal(context, float(concurrency), counts_up_to(most), args.policy)


def _with_variants(target: Target, serve_args: ServeArgs) -> list[Target]:
    """The model, and the quantized checkpoints of it that the card runs unless the user named a quantization."""
    from legroom.planning.checkpoints import quantized_checkpoints

    return [target, *(replace(target, model=model) for model in quantized_checkpoints(target, serve_args))]


def _used_only(plan: Plan) -> Plan:
    """The plan on just the GPUs that it uses."""
    settings = plan.settings
    used = settings.gpus_used
    return replace(plan, target=replace(plan.target, gpus=used))


def _show_search(answer: SearchAnswer, target: Target, serve_args: ServeArgs, args: argparse.Namespace) -> None:
    if args.svg and answer.best:
        from legroom.render.plan_svg import plan_svg

        write_file(args.svg, plan_svg(answer.best), "picture")
    if args.json:
        print_json(_search_json(answer, target, serve_args, args.explain_math))
        return
    from legroom.drawing.terminal import style_of
    from legroom.render.plan_text import search_text

    sys.stdout.write(search_text(answer, style_of(sys.stdout)))


def _search_json(answer: SearchAnswer, target: Target, serve_args: ServeArgs, explain_math: bool) -> dict[str, Any]:
    from legroom.planning.plan import plan
    from legroom.planning.plan_json import plan_json

    search = {
        "want_context": answer.goal.context,
        "want_concurrency": answer.goal.concurrency,
        "policy": answer.goal.policy,
        "considered": answer.considered,
        "gives_up": list(answer.losses),
        "short_by": answer.short_by or None,
        "alternatives": [_alternative_json(other, losses) for other, losses in answer.alternatives],
    }
    if answer.best:
        return plan_json(answer.best, explain_math) | {"search": search}
    # Nothing holds the wish: what the flags alone would do, with the answer to the wish on top.
    asked = replace(serve_args, max_model_len=serve_args.max_model_len or answer.goal.context)
    document = plan_json(plan(target, asked), explain_math)
    return document | {"verdict": "does_not_fit", "reason": answer.short_by, "search": search}


def _alternative_json(plan: Plan, losses: Sequence[str]) -> dict[str, Any]:
    from legroom.planning.plan import ready_command
    from legroom.planning.plan_json import layout_json

    return {
        "gpus": plan.target.gpus,
        "gives_up": list(losses),
        "verdict": plan.verdict,
        "max_concurrency": plan.memory.kv.max_concurrency,
        "layout": layout_json(plan.layout),
        "command": ready_command(plan),
    }


def _run_diff(args: argparse.Namespace) -> int:
    """Compare, print, and answer with 1 where a server of the new version does not start."""
    from legroom.planning.plan_diff import server_diffs
    from legroom.render.plan_diff_text import diff_markdown, diff_text

    if not args.diff:
        raise LegroomError("--markdown belongs to --diff", "legroom plan --diff OLD NEW --markdown")
    if args.vllm_words or args.command_words or args.line or args.file or args.python:
        raise LegroomError("--diff says what runs: two files", "leave the model and vLLM's flags out")
    old, new = args.diff
    diffs = server_diffs(_servers_of(old, args), _servers_of(new, args))
    if args.json:
        broken = any(diff.is_broken for diff in diffs)
        print_json({"old": old, "new": new, "ok": not broken, "servers": [diff.to_json() for diff in diffs]})
    elif args.markdown:
        sys.stdout.write(diff_markdown(_path(new), diffs))
    else:
        from legroom.drawing.terminal import style_of

        sys.stdout.write(diff_text(diffs, style_of(sys.stdout)))
    return ANSWER_IS_NO if any(diff.is_broken for diff in diffs) else OK


def _servers_of(named: str, args: argparse.Namespace) -> list[FileServer]:
    from legroom.facts.releases import release as known_release
    from legroom.planning.file_plans import planned_servers, started_servers

    text = _text(named)
    release = known_release(args.vllm) if args.vllm else None
    servers, unread = started_servers(_path(named), text, release) if text.strip() else ([], None)
    if unread is not None and not servers:
        raise LegroomError(f"{named} {unread.reason}", unread.hint)
    machine = _diff_machine(args)
    return list(planned_servers(servers, machine, release, advice=not args.no_advice, override_gpu=machine is not None))


def _diff_machine(args: argparse.Namespace) -> Machine | None:
    from legroom.planning.machine import Machine

    if args.gpu is None:
        return None
    return Machine(args.gpu, gpu_count(args.gpus, "--gpus"), args.gpu_memory, args.gpu_used, args.host_memory)


def _path(named: str) -> str:
    """The file's own name, which tells its kind."""
    return named if Path(named).exists() else named.partition(":")[2] or named


def _text(named: str) -> str:
    from legroom.deployments.source_text import read_text

    if named == "/dev/null":
        return ""
    if Path(named).exists() or ":" not in named:
        return read_text(Path(named))
    if named.startswith("-"):
        raise LegroomError(f"{named} is no file", _DIFF_HINT)
    import subprocess

    words = ["git", "show", "--end-of-options", named]
    try:
        done = subprocess.run(words, capture_output=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        raise LegroomError(f"{named} is no file, and git could not be asked for it", _DIFF_HINT) from None
    if done.returncode:
        reason = done.stderr.decode("utf-8", "replace").strip().partition("\n")[0]
        raise LegroomError(f"{named} is no file, and git says: {reason}", _DIFF_HINT)
    return done.stdout.decode("utf-8-sig", "replace")
