"""`legroom run -- vllm serve ...`: plan it, start it, fix it, keep it serving."""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from legroom.cli.output import print_json
from legroom.errors import ANSWER_IS_NO, OK, LegroomError
from legroom.run.restart_policy import RunOptions
from legroom.run.run_file import check_writable
from legroom.run.supervisor import Announcer, Supervisor
from legroom.run.task_process import run_task
from legroom.units import parse_length, parse_whole

USAGE = "legroom run [options] -- vllm serve MODEL [flags]"
DESCRIPTION = """\
Plan a vLLM server, start it as a child with its output passed on, and see it through: if the start-up fails, the log is
diagnosed, the computed fix is applied and the server is started again; once it is healthy it is verified, what it
measured is kept for later plans, and the final command is printed. Signals are passed on, SIGTERM drains, a crash is
journalled and restarted under a budget, and nothing is ever left behind. legroom's own lines begin with `legroom:`."""

EPILOG = """\
examples:
  legroom run -- vllm serve Qwen/Qwen3-8B --max-model-len 32768
  legroom run --keep --max-model-len --min-concurrency 4 -- vllm serve Qwen/Qwen3-8B --max-model-len 32768
  legroom run --dry-run -- vllm serve ./my-model --tensor-parallel-size 2
  legroom run --save start.sh --on-crash exit -- /venv/bin/vllm serve ./my-model

exit codes: vLLM's own; never 0 if it ended by itself. Before it is started: 2 the call is wrong, 3 vLLM is not there
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    fixing = parser.add_argument_group("fixing a start-up that fails")
    fixing.add_argument("--tries", metavar="N", default="3", help="how many times to start again (default: 3)")
    fixing.add_argument("--keep", metavar="FLAG", action="append", default=[], help="never change this flag of vLLM's")
    fixing.add_argument("--min-context", metavar="LEN", help="never go below this max_model_len (8k)")
    fixing.add_argument("--min-concurrency", metavar="N", help="never go below this many requests at once")
    fixing.add_argument("--ready-timeout", metavar="S", default="1800", help="seconds to become healthy (1800)")
    serve = parser.add_argument_group("while it serves")
    serve.add_argument("--on-crash", choices=("restart", "exit"), default="restart", help="default: restart")
    serve.add_argument("--restarts", metavar="N", default="5", help="at most this many restarts an hour (default: 5)")
    serve.add_argument("--restart-delay", metavar="S", default="2", help="before a restart; doubles each time (2)")
    serve.add_argument("--drain", metavar="S", default="60", help="for running requests after SIGTERM (default: 60)")
    about = "seconds without progress or an answer after which it counts as hung; 0: never (default: 120)"
    serve.add_argument("--hang-timeout", metavar="S", default="120", help=about)
    what = parser.add_argument_group("input and output")
    what.add_argument("--gpu", metavar="NAME", help="the GPU, if legroom does not know the driver's name for it")
    what.add_argument("--vllm", metavar="VERSION", help="the vLLM release, if it cannot be detected")
    what.add_argument("--no-verify", action="store_true", help="do not send it requests once it is healthy")
    what.add_argument("--save", metavar="FILE", help="write the final settings as a start script")
    what.add_argument("--dry-run", action="store_true", help="show the plan and the first command, start nothing")
    what.add_argument("--json", action="store_true", help="one JSON document at the end; vLLM's output goes to stderr")


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """The namespace of the options up to `--`, with the server's `command_words`."""
    own = list[str]()
    rest = list(words)
    while rest and rest[0] != "--":
        action = parser._option_string_actions.get(rest[0].partition("=")[0])
        if action is None:
            break
        # argparse would read the flag after --keep as an option.
        if action.nargs == 0 or "=" in rest[0]:
            own.append(rest.pop(0))
        elif rest[1:2] in ([], ["--"]):
            raise LegroomError(f"{rest[0]} needs a value", "see legroom run --help")
        else:
            own.append(f"{rest.pop(0)}={rest.pop(0)}")
    if rest and rest[0] != "--" and rest[0].startswith("-"):
        raise LegroomError(f"legroom run has no option {rest[0]}", "vLLM's own flags follow `-- vllm serve MODEL`")
    args = parser.parse_args(own)
    args.command_words = rest[1:] if rest[:1] == ["--"] else rest
    return args


def run(args: argparse.Namespace) -> int:
    """Plans, starts and supervises the server until it ends; --dry-run only prints the planned command."""
    # Opens closed standard streams (`>&-`) on /dev/null, so that no other file gets their descriptors.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", closefd=False))
    options = _run_options(args)
    task_input = {name: getattr(options, name) for name in ("words", "vllm", "gpu", "drain_s", "keep")}
    prepared = run_task("prepare", task_input)
    with Announcer() as announcer:
        where = prepared["gpus"]["name"] or "no GPU"
        head = f"plan for {prepared['model'] or 'the default model'}, vLLM {prepared['vllm']}, {where}: "
        for line in (head + prepared["expected"]["text"], *prepared["notes"]):
            announcer.say(line)
        if not args.dry_run:
            if not args.json:
                return Supervisor(options, prepared, announcer.say).run()
            supervisor = Supervisor(options, prepared, announcer.say, outputs=(2, 2))
            code = supervisor.run()
            last = {"command": shlex.split(supervisor.setup.line), "expected": dict(supervisor.setup.expected)}
            ended = {"history": supervisor.history, "verified": supervisor.verified, "exit_code": code}
            print_json(_first_command_json(prepared) | last | ended)
            return code
        if args.json:
            print_json(_first_command_json(prepared))
        else:
            print(prepared["line"])
        return ANSWER_IS_NO if prepared["expected"]["verdict"] == "does_not_fit" else OK


def _first_command_json(prepared: Mapping[str, Any]) -> dict[str, Any]:
    """For `run --json`: model, vllm, gpus, url, expected, notes of `prepared`; its `line` split into `command`."""
    names = ("model", "vllm", "gpus", "url", "expected", "notes")
    return {name: prepared[name] for name in names} | {"command": shlex.split(prepared["line"])}


def _run_options(args: argparse.Namespace) -> RunOptions:
    """The parsed options; LegroomError for a number out of range or a --save that cannot be written."""
    if args.save:
        check_writable(args.save)
    return RunOptions(
        tuple(args.command_words),
        tries=parse_whole(args.tries, "--tries", 0, 99_999),
        keep=tuple(args.keep),
        min_context=parse_length(args.min_context, "--min-context") if args.min_context else None,
        min_concurrency=_parse_number(args.min_concurrency, "--min-concurrency") if args.min_concurrency else None,
        on_crash=args.on_crash,
        restarts=parse_whole(args.restarts, "--restarts", 0, 99_999),
        restart_delay_s=_parse_number(args.restart_delay, "--restart-delay"),
        ready_timeout_s=_parse_number(args.ready_timeout, "--ready-timeout"),
        hang_timeout_s=_parse_number(args.hang_timeout, "--hang-timeout"),
        drain_s=_parse_number(args.drain, "--drain"),
        verify=not args.no_verify,
        save=args.save,
        vllm=args.vllm,
        gpu=args.gpu,
    )


def _parse_number(text: str, option: str) -> float:
    """A number from 0 to below ten million; raises, naming the option, otherwise."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e7:
        raise LegroomError(f"{option} {text!r} is not a number", f"write it like {option} 4")
    return value
