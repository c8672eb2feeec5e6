"""`legroom COMMAND`: the table of commands, and the exit code of each."""

import argparse
import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

from legroom.errors import BAD_INPUT, INTERRUPTED, OK, UNREACHABLE, LegroomError
from legroom.masking import masked
from legroom.version import __version__

_BUG = 70
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
_EXTRA_OF_COMMAND = {
    **{name: name for name in ("completion", "gate", "guard", "mcp", "ui")},
    **dict.fromkeys(("doctor", "recover", "run", "verify"), "run"),
    **dict.fromkeys(("fragments", "incident", "incidents", "watch"), "watch"),
    "diagnose": "scan",
}
"""The extra with a command's dependencies."""
_PACKAGES = {
    "aiohttp": ("aiohttp", "watch"),
    "cryptography": ("cryptography", "gate"),
    "httptools": ("httptools", "guard"),
    "huggingface_hub": ("huggingface_hub", ""),
    "mcp": ("mcp", "mcp"),
    "prometheus_client": ("prometheus_client", "watch"),
    "psutil": ("psutil", "run"),
    "pynvml": ("nvidia-ml-py", "watch"),
    "re2": ("google-re2", ""),
    "shtab": ("shtab", "completion"),
    "starlette": ("starlette", "ui"),
    "uvicorn": ("uvicorn", "ui"),
    "yaml": ("PyYAML", ""),
    "zstandard": ("zstandard", "scan"),
}
"""Import name -> its package, and the extra of legroom that installs it; empty: every install has it."""


class CommandEntry(NamedTuple):
    """A command and its line of help; its module is imported when it is run."""

    name: str
    help: str

    @property
    def module(self) -> str:
        """The import path of the command's module."""
        return f"legroom.cli.{self.name.replace('-', '_')}"


SECTIONS: Mapping[str, tuple[CommandEntry, ...]] = {
    "before vLLM starts": (
        CommandEntry("plan", "will vLLM start, and where does every byte of the GPU go?"),
        CommandEntry("size", "which GPUs, and how many, hold this model?"),
        CommandEntry("pack", "several servers on one GPU: flags under which all start in any order"),
        CommandEntry("simulate", "does a setting hold a load? replays it through vLLM's scheduler"),
        CommandEntry("upgrade", "what does the same command do on another vLLM release?"),
        CommandEntry("calibrate", "learn from the start-up logs of your own machine"),
        CommandEntry("probe", "measure this machine's own GPU once; later plans use what was measured"),
        CommandEntry("models", "which models a GPU serves, and those known without a network"),
        CommandEntry("gpus", "the GPUs that are known, searchable"),
    ),
    "when it fails": (
        CommandEntry("diagnose", "why did it fail? the proof, the cause, the command that will work"),
        CommandEntry("doctor", "this machine and its running servers: what is wrong or will be, in ten lines"),
        CommandEntry("fragments", "memory that is reserved and not used: which, why, and what would have helped"),
        CommandEntry("explain", "the long story of one cause, or find one in the catalog"),
        CommandEntry("catalog", "check, export or extend the error catalog"),
    ),
    "while it serves": (
        CommandEntry("run", "start vLLM, fix what fails, supervise it, leave nothing behind"),
        CommandEntry("guard", "admit only what the KV cache can hold: a proxy or a vLLM middleware"),
        CommandEntry("watch", "servers as they serve: a page, a single check, a stream or a sidecar"),
        CommandEntry("incidents", "what went wrong lately"),
        CommandEntry("incident", "one incident: seen, diagnosed, done, recommended"),
        CommandEntry("verify", "does a server hold what was planned? proven under load"),
        CommandEntry("recover", "after a crash: what still holds memory, and freeing what is dead"),
    ),
    "in a cluster": (
        CommandEntry("gate", "refuse a manifest whose vLLM cannot start: an admission webhook"),
        CommandEntry("preflight", "does the server fit on this node? the check of an init container"),
    ),
    "on a page": (
        CommandEntry("ui", "all of it in a browser or over HTTP: served from here, or as files that need no server"),
    ),
    "files for other tools": (
        CommandEntry("export", "alerts, dashboards, units, manifests and scripts from the plan"),
        CommandEntry("lint", "what is wrong in your rules, dashboards, scripts, units and manifests"),
        CommandEntry("mcp", "serve legroom's tools to agents (Model Context Protocol)"),
        CommandEntry("completion", "completion of commands and options for bash, zsh or fish"),
    ),
}
COMMANDS = tuple(entry for entries in SECTIONS.values() for entry in entries)

_OVERVIEW = """\
usage: legroom COMMAND [options]

GPU memory in vLLM serving as a thing you know, not a thing you guess.
{sections}
options:
    -h, --help     show this; legroom COMMAND --help shows a command's options and examples
    -V, --version  print legroom's version

examples:
    legroom plan llama-3.1-8b --gpu h100
    legroom plan Qwen/Qwen3-32B --gpu l40s --gpus 2 --tensor-parallel-size 2 --max-model-len 32768
    legroom plan --gpu a100-80gb -- vllm serve mistralai/Mistral-7B-v0.1 --max-num-seqs 64
    legroom size llama-3.1-70b --context 8k --concurrency 16
    legroom diagnose vllm.log

exit codes: 0 it fits or is tight, 1 it does not, 2 the call or an input is wrong, 3 something needed was unreachable
"""


class CommandModule(Protocol):
    """A command's file. It may also define `USAGE`, and `parse(parser, words)` where it takes vLLM's flags."""

    DESCRIPTION: str
    EPILOG: str

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Declares the command's own options."""

    def run(self, args: argparse.Namespace) -> int:
        """Executes the command and returns its exit code."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises LegroomError and prints descriptions and epilogs unwrapped."""

    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        """Raises instead of printing the usage and exiting."""
        raise LegroomError(message, f"see {self.prog} --help")


def parser_texts(module: CommandModule) -> dict[str, Any]:
    """Keyword arguments (description, epilog, usage) for a command's parser, from its module."""
    texts = {"usage": getattr(module, "USAGE", None), "description": module.DESCRIPTION, "epilog": module.EPILOG}
    return {**texts, "allow_abbrev": False}


def command_parser(name: str, module: CommandModule) -> Parser:
    """The parser of a command's own options, called `legroom NAME`, which parsed arguments hold as `prog` too."""
    parser = Parser(prog=f"legroom {name}", **parser_texts(module))
    parser.set_defaults(prog=parser.prog)
    module.add_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _prepare_streams()
    try:
        code = _run_command(words)
        sys.stdout.flush()
        return code
    except LegroomError as error:
        _print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has exited
        _discard_output()
        return OK
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and _print_missing_package(error, words):
            return UNREACHABLE
        if isinstance(error, OSError) and error.errno in _UNWRITABLE and error.filename is None:
            _discard_output()
            _print_error(LegroomError(f"the output could not be written: {error.strerror}"))
            return UNREACHABLE
        import shlex
        import traceback

        from legroom.vllm.command_line import without_secrets

        print(
            f"{masked(traceback.format_exc())}\n"
            f"This is a bug in legroom {__version__}, not in your input. Please report it with the lines above and the "
            f"command: legroom {masked(shlex.join(without_secrets(words)))}",
            file=sys.stderr,
        )
        return _BUG


def _prepare_streams() -> None:
    """Opens closed streams (`>&-`) on /dev/null and escapes characters that stdout cannot encode."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - open until exit
    if getattr(sys.stdout, "errors", None) == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def _discard_output() -> None:
    """Redirects stdout to /dev/null, so that the interpreter does not report an error when it flushes at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_missing_package(error: ModuleNotFoundError, words: Sequence[str]) -> bool:
    """Prints how to install a missing dependency of the command `words[0]`; False if it is none of legroom's."""
    package, extra = _PACKAGES.get((error.name or "").partition(".")[0], ("", ""))
    if not package:
        return False
    name = words[0] if words else ""
    extra = _EXTRA_OF_COMMAND.get(name, extra) if extra else ""
    install = f"pip install 'legroom[{extra}]'" if extra else "pip install legroom"
    _print_error(LegroomError(f"legroom {name} needs the Python package {package}", install))
    return True


def _run_command(words: list[str]) -> int:
    """Run the subcommand that the words name and return its exit code; prints help or version."""
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(overview())
        return OK if words else BAD_INPUT
    if words[0] in ("-V", "--version"):
        print(f"legroom {__version__}")
        return OK
    command = _command_named(words[0])
    module: CommandModule = importlib.import_module(command.module)
    parser = command_parser(command.name, module)
    try:
        # A command that takes vLLM's flags separates its own options first.
        parse = getattr(module, "parse", None)
        args = parse(parser, words[1:]) if parse else parser.parse_args(words[1:])
    except SystemExit as leaving:  # --help prints and leaves
        return int(leaving.code or OK)
    return module.run(args)


def _command_named(name: str) -> CommandEntry:
    """The command with this name; raises with the nearest name if there is none."""
    for command in COMMANDS:
        if command.name == name:
            return command
    import difflib

    names = [command.name for command in COMMANDS]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the commands are {', '.join(names)}"
    raise LegroomError(f"there is no command {name!r}", hint)


def overview() -> str:
    """The text of `legroom --help`; imports no command."""
    width = max(len(entry.name) for entry in COMMANDS)
    blocks = (
        f"\n{title}:\n" + "".join(f"    {entry.name:{width}}  {entry.help}\n" for entry in entries)
        for title, entries in SECTIONS.items()
    )
    return _OVERVIEW.format(sections="".join(blocks))


def _print_error(error: LegroomError) -> None:
    """Prints the error's message and hint to stderr, with control characters escaped."""
    from legroom.drawing.terminal import style_of
    from legroom.drawing.text import printable

    style = style_of(sys.stderr)
    message, hint = ("\n".join(map(printable, text.split("\n"))) for text in (error.message, error.hint))
    print(f"{style.paint('error:', 'red', 'bold')} {message}", file=sys.stderr)
    if hint:
        print(f"{style.paint('hint:', 'blue', 'bold')} {hint}", file=sys.stderr)
