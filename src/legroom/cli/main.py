"""`legroom COMMAND`: the table of commands, and how every command ends."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn, Protocol

from legroom.errors import BAD_INPUT, OK, LegroomError
from legroom.version import __version__

_INTERRUPTED = 130
_BUG = 70


class Command(NamedTuple):
    """One row of the table: only the chosen command's module is imported."""

    name: str
    help: str
    module: str


COMMANDS: tuple[Command, ...] = (
    Command("plan", "will vLLM start, and where does every byte of the GPU go?", "legroom.cli.plan"),
    Command("size", "which GPUs, and how many, hold this model?", "legroom.cli.size"),
    Command("diagnose", "why did it fail? the proof, the cause, the command that will work", "legroom.cli.diagnose"),
    Command("run", "start vLLM, mend what fails, hold it: signals, crashes, nothing left behind", "legroom.cli.run"),
    Command("simulate", "does a setting hold a load? replay it through vLLM's scheduler", "legroom.cli.simulate"),
    Command("watch", "servers as they serve: a page, a look, a stream or a sidecar", "legroom.cli.watch"),
    Command("incidents", "what went wrong lately", "legroom.cli.incidents"),
    Command("incident", "one incident: seen, diagnosed, done, recommended", "legroom.cli.incident"),
    Command("verify", "does a server hold what was planned? proven under load", "legroom.cli.verify"),
    Command("recover", "after a crash: what still holds memory, and freeing what is dead", "legroom.cli.recover"),
    Command("guard", "admit only what the KV cache can hold: a proxy or a vLLM middleware", "legroom.cli.guard"),
    Command("explain", "the long story of one cause, or find one in the catalog", "legroom.cli.explain"),
    Command("catalog", "check, export or extend the error catalog", "legroom.cli.catalog"),
    Command("export", "alerts, dashboards, units, manifests and scripts from the plan", "legroom.cli.export"),
    Command("mcp", "serve legroom's tools to agents (Model Context Protocol)", "legroom.cli.mcp"),
    Command("lint", "what is wrong in your rules, dashboards, scripts, units and manifests", "legroom.cli.lint"),
    Command("calibrate", "learn from the start-up logs of your own machine", "legroom.cli.calibrate"),
    Command("score", "check predictions against a file of real start-ups", "legroom.cli.score"),
)

_EXAMPLES = """\
examples:
  legroom plan llama-3.1-8b --gpu h100
  legroom plan Qwen/Qwen3-32B --gpu l40s --gpus 2 --tensor-parallel-size 2 --max-model-len 32768
  legroom plan --gpu a100-80gb -- vllm serve mistralai/Mistral-7B-v0.1 --max-num-seqs 64
  legroom size llama-3.1-70b --context 8k --concurrency 16

exit codes: 0 it fits, 1 it does not, 2 the call or an input is wrong, 3 something needed was unreachable
"""


class CommandModule(Protocol):
    """What a command's file exposes."""

    def add_parser(self, subparsers: argparse._SubParsersAction[Parser]) -> argparse.ArgumentParser:
        """Describe the command's own options."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it; the exit code."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes end like every other bad input."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and leaving."""
        raise LegroomError(message, f"see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and answer with its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _write_anything()
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except LegroomError as error:
        _complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output left; leave too, and keep the interpreter from complaining on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except Exception:
        _report_bug(words)
        return _BUG


def _write_anything() -> None:
    """A model's name that the terminal has no letters for is written with their numbers, as on stderr."""
    if getattr(sys.stdout, "errors", None) == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        _overview().print_help()
        return OK if words else BAD_INPUT
    if words[0] in ("-V", "--version"):
        print(f"legroom {__version__}")
        return OK
    command = _find(words[0])
    module: CommandModule = importlib.import_module(command.module)
    parser = Parser(prog="legroom", add_help=False)
    # Saying `prog` keeps argparse from formatting a usage line just to find it.
    chosen = module.add_parser(parser.add_subparsers(dest="command", prog="legroom"))
    try:
        # A command that takes vLLM's flags too splits its own words off first.
        parse = getattr(module, "parse", None)
        args = parse(chosen, words[1:]) if parse else parser.parse_args(words)
    except SystemExit as leaving:  # --help prints and leaves
        return int(leaving.code or OK)
    return module.run(args)


def _find(name: str) -> Command:
    for command in COMMANDS:
        if command.name == name:
            return command
    import difflib

    names = [command.name for command in COMMANDS]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the commands are {', '.join(names)}"
    raise LegroomError(f"there is no command {name!r}", hint)


def _overview() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="legroom",
        description="GPU memory in vLLM serving as a thing you know, not a thing you guess.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action="store_true", help="print legroom's version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        commands.add_parser(command.name, help=command.help, add_help=False)
    return parser


def _complain(error: LegroomError) -> None:
    from legroom.drawing.terminal import style_of

    style = style_of(sys.stderr)
    print(f"{style.paint('error:', 'red', 'bold')} {error.message}", file=sys.stderr)
    if error.hint:
        print(f"{style.paint('hint:', 'blue', 'bold')} {error.hint}", file=sys.stderr)


def _report_bug(words: Sequence[str]) -> None:
    import shlex
    import traceback

    from legroom.live.journal.masking import masked
    from legroom.vllm.secret_words import without_secrets

    print(
        f"{masked(traceback.format_exc())}\n"
        f"This is a bug in legroom {__version__}, not in your input. Please report it with the lines above and the "
        f"command: legroom {masked(shlex.join(without_secrets(words)))}",
        file=sys.stderr,
    )
