"""`legroom plan --diff`: two versions of a deployment file, server by server."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from legroom.cli.deployment import count_of
from legroom.cli.output import print_json
from legroom.errors import ANSWER_IS_NO, OK, LegroomError

if TYPE_CHECKING:
    from legroom.planning.file_plans import FileServer
    from legroom.planning.machine import Machine

_GIT_S = 30
_BOTH = "give a file, /dev/null for none, or REVISION:FILE inside a git repository"


def run_diff(args: argparse.Namespace) -> int:
    """Compare, print, and answer with 1 where a server of the new version does not start."""
    from legroom.planning.plan_diff import server_diffs
    from legroom.render.plan_diff_text import diff_markdown, diff_text

    if not args.diff:
        raise LegroomError("--markdown belongs to --diff", "legroom plan --diff OLD NEW --markdown")
    if args.vllm_words or args.command_words or args.line or args.file or args.python:
        raise LegroomError("--diff says what runs: two files", "leave the model and vLLM's flags out")
    old, new = args.diff
    diffs = server_diffs(_servers(old, args), _servers(new, args))
    if args.json:
        broken = any(diff.is_broken for diff in diffs)
        print_json({"old": old, "new": new, "ok": not broken, "servers": [diff.to_json() for diff in diffs]})
    elif args.markdown:
        sys.stdout.write(diff_markdown(_path(new), diffs))
    else:
        from legroom.drawing.terminal import style_of

        sys.stdout.write(diff_text(diffs, style_of(sys.stdout)))
    return ANSWER_IS_NO if any(diff.is_broken for diff in diffs) else OK


def _servers(named: str, args: argparse.Namespace) -> list[FileServer]:
    from legroom.facts.releases import release as known_release
    from legroom.planning.file_plans import planned_servers, started_servers

    text = _text(named)
    asked = known_release(args.vllm) if args.vllm else None
    servers, unread = started_servers(_path(named), text, asked) if text.strip() else ([], None)
    if unread is not None and not servers:
        raise LegroomError(f"{named} {unread.reason}", unread.hint)
    machine = _machine(args)
    return list(planned_servers(servers, machine, asked, advice=not args.no_advice, gpu_wins=machine is not None))


def _machine(args: argparse.Namespace) -> Machine | None:
    from legroom.planning.machine import Machine

    if args.gpu is None:
        return None
    return Machine(args.gpu, count_of(args.gpus, "--gpus"), args.gpu_memory, args.gpu_used, args.host_memory)


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
        raise LegroomError(f"{named} is no file", _BOTH)
    words = ["git", "show", "--end-of-options", named]
    try:
        done = subprocess.run(words, capture_output=True, timeout=_GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        raise LegroomError(f"{named} is no file, and git could not be asked for it", _BOTH) from None
    if done.returncode:
        reason = done.stderr.decode("utf-8", "replace").strip().partition("\n")[0]
        raise LegroomError(f"{named} is no file, and git says: {reason}", _BOTH)
    return done.stdout.decode("utf-8-sig", "replace")
