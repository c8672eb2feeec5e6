"""`legroom recover`: after a crash, what still holds memory, and freeing what is provably a dead server's."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from legroom.cli.output import note, print_answer, print_text
from legroom.cli.shared_options import gpu_count
from legroom.drawing.terminal import Style
from legroom.drawing.text import wrap
from legroom.errors import ANSWER_IS_NO, OK, LegroomError
from legroom.live.journal.journal import Journal
from legroom.live.journal.journal_records import JournalUnavailable
from legroom.planning.plan_json import layout_json
from legroom.recover import restart_command
from legroom.recover.free_memory import Freed, free_dead_holders
from legroom.recover.machine_snapshot import MachineSnapshot, read_machine
from legroom.recover.orphans import Holder, classify_holders
from legroom.recover.restart_command import NoRestartCommand, RestartCommand
from legroom.render.recover_text import freed_json, freed_text, hidden_text, holder_json, snapshot_text, total_text

USAGE = "legroom recover [--yes | --dry-run] [options]"
DESCRIPTION = """\
Show what holds GPU memory and shared memory on this machine, and which of it is provably the dead weight of a vLLM
server that is gone: engine cores and workers whose API server died, and segments of /dev/shm that nobody maps. Frees
just that, by PID, with SIGTERM and then SIGKILL, after showing it and asking. Then the command to start instead."""

EPILOG = """\
examples:
  legroom recover
  legroom recover --yes --log vllm.log
  legroom recover --dry-run --command 'vllm serve Qwen/Qwen3-8B --max-model-len 32768' --gpu rtx4090

exit codes: 0 no dead weight is left, 1 some is (a dry run, not permitted, would not end) or may be (of another user,
  who alone can look into it), 2 the call is wrong
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--yes", action="store_true", help="free it without asking")
    how.add_argument("--dry-run", action="store_true", help="only show it (the default when not on a terminal)")
    known = parser.add_argument_group("the server that died, for a command to start instead")
    known.add_argument("--command", metavar="LINE", dest="line", help="the vllm serve line that was run")
    known.add_argument("--log", metavar="FILE", help="its log: the fix is computed from it")
    known.add_argument("--gpu", metavar="NAME", help="a GPU or a size (default: what NVML shows)")
    known.add_argument("--gpus", metavar="N", help="how many GPUs the machine has")
    known.add_argument("--vllm", metavar="VERSION", help="the vLLM release")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Prints what holds GPU memory, frees that of dead servers once confirmed; exit status 1 where some of it stays."""
    restart, restart_note = _restart_command(args)  # first, so that a wrong option is reported before anything is freed
    snapshot = read_machine()
    holders = classify_holders(snapshot)
    dead = [holder for holder in holders if holder.state == "dead"]
    if not args.json:
        print_text(lambda style: snapshot_text(snapshot, holders, style))
        sys.stdout.flush()
    freed = _free_and_journal(dead) if dead and _is_confirmed(args, dead) else ()
    document = _report_json(snapshot, holders, freed, restart)
    print_answer(args.json, document, lambda style: _outcome_text(freed, restart, style))
    if restart_note:
        note(restart_note)
    left = len(dead) - sum(result.is_free for result in freed)
    hidden = hidden_text(snapshot, holders)
    if hidden and args.json:
        note(hidden)
    return ANSWER_IS_NO if left or hidden else OK


def _is_confirmed(args: argparse.Namespace, dead: Sequence[Holder]) -> bool:
    """Whether to free the memory: --yes, or the answer on a terminal; otherwise notes a dry run."""
    if args.yes:
        return True
    if args.dry_run or args.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        note(f"dry run: nothing was freed ({total_text(dead)}); --yes frees it")
        return False
    try:
        answer = input(f"\nFree {total_text(dead)}? [y/N] ")
    except EOFError:
        answer = ""
    return answer.strip().lower() in ("y", "yes")


def _free_and_journal(dead: Sequence[Holder]) -> tuple[Freed, ...]:
    """Frees what dead servers hold and records it in the journal; a journal that fails only leads to a note."""
    try:
        journal = Journal.open()
    except JournalUnavailable as error:
        note(f"{error.message}: what is freed is not written down")
        return free_dead_holders(dead)
    with journal:
        return free_dead_holders(dead, journal, on_warning=note)


def _restart_command(args: argparse.Namespace) -> tuple[RestartCommand | None, str]:
    """(the command to start instead, or None; a note on what it was computed from, or on why there is none)."""
    given = args.line is not None or args.log is not None
    known = None if given else restart_command.last_killed_run()
    line, log = (known.command, known.log) if known else (args.line or None, args.log or None)
    crashed = restart_command.CrashedServer(line, log, args.gpu, gpu_count(args.gpus, "--gpus"), args.vllm)
    if crashed.command is None and crashed.log is None:
        return None, ""
    try:
        return restart_command.restart_after(crashed), f"computed from {known.source}" if known else ""
    except NoRestartCommand as error:
        return None, f"no command to start instead: {error.message}; {error.hint}"
    except LegroomError as error:
        if given:
            raise
        return None, f"no command computed from {known.source if known else 'what is known'}: {error.message}"


def _outcome_text(freed: Sequence[Freed], restart: RestartCommand | None, style: Style) -> str:
    """What was freed and the command to start instead; empty where there is neither."""
    text = "\n" + freed_text(freed, style) if freed else ""
    if restart:
        why = "\n".join(wrap(restart.why, style.width, "  "))
        command = style.paint(shlex.join(restart.command), "bold")
        text += f"\n{style.paint('Start instead', 'bold')}\n{why}\n  {command}\n"
    return text


def _report_json(
    snapshot: MachineSnapshot, holders: Sequence[Holder], freed: Sequence[Freed], restart: RestartCommand | None
) -> dict[str, Any]:
    """The document of `legroom recover --json`."""
    instead: dict[str, Any] | None = None
    if restart:
        layout = layout_json(restart.plan.layout) if restart.plan else None
        instead = {"command": list(restart.command), "why": restart.why, "layout": layout}
    shown = ("index", "name", "total_bytes", "used_bytes")
    return {
        "gpus": [{name: getattr(card, name) for name in shown} for card in snapshot.gpus],
        "holders": [holder_json(holder) for holder in holders],
        "freed": [freed_json(result) for result in freed],
        "restart": instead,
        "notes": list(snapshot.notes),
    }
