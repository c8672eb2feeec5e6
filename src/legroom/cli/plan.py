"""`legroom plan`: will vLLM start, where does every byte go, and what would fix it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from legroom.api.plan_report import PlanReport, search
from legroom.cli import shared_options
from legroom.cli.output import note, print_answer, write_file
from legroom.cli.shared_options import parse
from legroom.deployments.deployment import Deployment
from legroom.deployments.source_text import read_text
from legroom.errors import ANSWER_IS_NO, OK, LegroomError
from legroom.facts.release_support import SLEEP_FLAG
from legroom.facts.releases import release as known_release
from legroom.planning.machine import Machine, make_plan
from legroom.planning.plan import cold_start
from legroom.planning.plan_json import plan_states, states_json
from legroom.render.plan_text import sleep_text
from legroom.units import parse_length, parse_speed, parse_whole
from legroom.vllm.args import is_given

if TYPE_CHECKING:
    from legroom.planning.file_plans import FileServer

__all__ = ["add_options", "parse", "run"]

_DIFF_HINT = "give a file, /dev/null for none, or REVISION:FILE inside a git repository"

USAGE = "legroom plan [MODEL] --gpu NAME [options] [any vLLM flag] [-- vllm serve ...]"
DESCRIPTION = """\
Predict what `vllm serve MODEL` does on a GPU: whether it starts, where every byte of the card goes, how many KV
blocks, tokens and requests it holds; if it will not start, the error vLLM raises and the flags that would fix it.
Needs no GPU, no torch and no weights. Every flag of the vLLM release is taken as it is."""

EPILOG = """\
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

exit codes: 0 it fits or is tight (may not start), 1 it does not fit, 2 the call is wrong, 3 something was unreachable
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("where it runs")
    shared_options.add_machine_options(where)
    where.add_argument("--vllm", metavar="VERSION", help="vLLM release (default: the newest known)")
    shared_options.add_source_options(parser)
    compared = parser.add_argument_group("two versions of a deployment file")
    compared.add_argument("--diff", nargs=2, metavar=("OLD", "NEW"), help="what changes; files, or REVISION:FILE")
    compared.add_argument("--markdown", action="store_true", help="with --diff: as a comment on a pull request")
    goal = parser.add_argument_group("wishes (search for flags instead)")
    goal.add_argument("--want-context", "--context", metavar="LEN", help="tokens a request may have (32k is 32,768)")
    goal.add_argument("--want-concurrency", "--concurrency", "--users", metavar="N", help="requests at once")
    shared_options.add_policy_option(goal, "balanced")
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="one JSON document on stdout")
    out.add_argument("--svg", metavar="FILE", help="write the picture as SVG too")
    out.add_argument("--explain-math", action="store_true", help="show the working behind every figure")
    out.add_argument("--sleep", action="store_true", help="with sleep mode: what it holds awake, asleep, updating")
    out.add_argument("--host-bandwidth", metavar="SPEED", help="how fast the host's memory reaches the GPU (50GB/s)")
    out.add_argument("--cold", action="store_true", help="plan the first start, with a cold compile cache")
    out.add_argument("--no-advice", action="store_true", help="do not look for flags that would fix it")


def run(args: argparse.Namespace) -> int:
    """Prints the plan of the described server; exit status 1 where it does not fit. --diff compares two files."""
    if args.diff or args.markdown:
        return _run_diff(args)
    deployment = shared_options.described_server(args)
    where = shared_options.described_machine(args, deployment)
    if args.want_context or args.want_concurrency:
        return _run_search(args, deployment, where)
    if args.sleep and not is_given(deployment.args, SLEEP_FLAG):
        serve = replace(deployment.args, others=(*deployment.args.others, SLEEP_FLAG))
        deployment = replace(deployment, args=serve)
    made = make_plan(deployment.args, deployment.release, where, advice=not args.no_advice)
    made = replace(made, notes=tuple(dict.fromkeys((*deployment.notes, *made.notes))))
    if args.cold:
        made = cold_start(made)
    report, math = PlanReport(made), args.explain_math
    if args.svg:
        write_file(args.svg, report.svg(), "picture")
    speed = parse_speed(args.host_bandwidth, "--host-bandwidth", 0.0) or None
    states = plan_states(made, speed) if args.sleep else ()
    asleep = {"states": states_json(states)} if states else {}
    print_answer(
        args.json,
        lambda: report.json(math) | asleep,
        lambda style: report.text(style, math) + (f"\n{sleep_text(states, style)}" if states else ""),
    )
    return ANSWER_IS_NO if made.verdict == "does_not_fit" else OK


def _run_search(args: argparse.Namespace, deployment: Deployment, where: Machine) -> int:
    """Prints flags that hold the wanted load; exit status 1 for none, or if without --gpus one GPU is too few."""
    context = parse_length(args.want_context, "--want-context") if args.want_context else None
    concurrency = parse_whole(args.want_concurrency or "1", "--want-concurrency", 1, 10**6)
    report = search(deployment.args, deployment.release, where, context, float(concurrency), args.policy)
    if report.target.gpu.note and not report.answer.best:
        note(f"note: {report.target.gpu.note}")
    if args.svg and report.answer.best:
        from legroom.render.plan_svg import plan_svg

        write_file(args.svg, plan_svg(report.answer.best), "picture")
    print_answer(args.json, lambda: report.json(args.explain_math), report.text)
    return OK if report.answer.best and not report.answer.one_gpu_lacks else ANSWER_IS_NO


def _run_diff(args: argparse.Namespace) -> int:
    """Compares two versions of a file; the exit code is 1 where a server of the new one does not start."""
    from legroom.planning.plan_diff import server_diffs
    from legroom.render.file_plan_text import diff_markdown, diff_text

    if not args.diff:
        raise LegroomError("--markdown belongs to --diff", "legroom plan --diff OLD NEW --markdown")
    if args.vllm_words or args.command_words or args.line or args.file or args.python:
        raise LegroomError("--diff says what runs: two files", "leave the model and vLLM's flags out")
    old, new = args.diff
    diffs = server_diffs(_plans_of_file(old, args), _plans_of_file(new, args))
    broken = any(diff.new is not None and diff.new.verdict == "does_not_fit" for diff in diffs)
    print_answer(
        args.json,
        lambda: {"old": old, "new": new, "ok": not broken, "servers": [diff.to_json() for diff in diffs]},
        lambda style: diff_markdown(_path_without_revision(new), diffs) if args.markdown else diff_text(diffs, style),
    )
    return ANSWER_IS_NO if broken else OK


def _plans_of_file(named: str, args: argparse.Namespace) -> list[FileServer]:
    """A plan of each vLLM server that the named file (or its git revision) starts."""
    from legroom.planning.file_plans import planned_servers, started_servers

    text = _file_text(named)
    release = known_release(args.vllm) if args.vllm else None
    path = _path_without_revision(named)
    servers, _, unread = started_servers(path, text, release) if text.strip() else ([], [], None)
    if unread is not None and not servers:
        raise LegroomError(f"{named} {unread.reason}", unread.hint)
    machine = None
    if args.gpu is not None:
        count = shared_options.gpu_count(args.gpus, "--gpus")
        machine = Machine(args.gpu, count, args.gpu_memory, args.gpu_used, args.host_memory)
    return list(planned_servers(servers, machine, release, advice=not args.no_advice, override_gpu=machine is not None))


def _path_without_revision(rev_path: str) -> str:
    """The PATH of git's `REV:PATH`; a path that exists stays as it is."""
    return rev_path if Path(rev_path).exists() else rev_path.partition(":")[2] or rev_path


def _file_text(rev_path: str) -> str:
    """The text at PATH or git's REV:PATH (`rev_path`); empty for /dev/null, LegroomError where there is neither."""
    if rev_path == "/dev/null":
        return ""
    if Path(rev_path).exists() or ":" not in rev_path:
        return read_text(Path(rev_path))
    if rev_path.startswith("-"):
        raise LegroomError(f"{rev_path} is no file", _DIFF_HINT)
    import subprocess

    words = ["git", "show", "--end-of-options", rev_path]
    try:
        done = subprocess.run(words, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        raise LegroomError(f"{rev_path} is no file, and git could not be asked for it", _DIFF_HINT) from None
    if done.returncode:
        reason = done.stderr.decode("utf-8", "replace").strip().partition("\n")[0]
        raise LegroomError(f"{rev_path} is no file, and git says: {reason}", _DIFF_HINT)
    return done.stdout.decode("utf-8-sig", "replace")
