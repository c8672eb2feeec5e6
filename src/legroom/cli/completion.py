"""`legroom completion SHELL`: a completion script, made by shtab from the commands' own parsers."""

import argparse
import importlib
import sys
from typing import Any

from legroom.cli.main import COMMANDS, Parser, parser_texts
from legroom.errors import OK
from legroom.facts.bundled import bundled_names
from legroom.facts.flags import flags_of
from legroom.facts.gpus import gpu_names
from legroom.facts.releases import latest

DESCRIPTION = "Print a script that completes legroom's commands and options in your shell."
EPILOG = """\
examples:
  legroom completion bash > ~/.local/share/bash-completion/completions/legroom
  legroom completion zsh > ~/.zfunc/_legroom        (with ~/.zfunc in fpath before compinit)
  legroom completion fish > ~/.config/fish/completions/legroom.fish

The script holds every command, option, GPU and bundled model of this version and starts nothing: print it again after
an upgrade.

exit codes: 0 printed, 2 the call is wrong, 3 the Python package shtab is missing
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that it is for")


def run(args: argparse.Namespace) -> int:
    """Prints the completion script of the named shell."""
    sys.stdout.write(completion_script(args.shell))
    return OK


def completion_script(shell: str) -> str:
    """The script that completes legroom's commands in bash, zsh or fish."""
    import shtab

    return str(shtab.complete(_parser_of_all_commands(shtab.FILE), shell))


def _parser_of_all_commands(complete_path: Any) -> argparse.ArgumentParser:
    """One parser of all commands and their options; `complete_path` is put on options to let shtab complete paths."""
    gpus = [min(names, key=len) for names in gpu_names().values() if names]
    values = {"--gpu": gpus, **{name: list(bundled_names()) for name in ("--model", "model")}}
    vllm_flags = sorted(name for name in flags_of(latest()) if name.startswith("--"))
    whole = Parser(prog="legroom", description="GPU memory in vLLM serving.")
    commands = whole.add_subparsers(prog="legroom")
    for command in COMMANDS:
        module = importlib.import_module(command.module)
        parser = commands.add_parser(command.name, help=command.help, **parser_texts(module))
        module.add_options(parser)
        if command.name in ("plan", "size", "run"):
            parser.add_argument("model", nargs="?", help="a model")
        if hasattr(module, "parse"):
            for flag in vllm_flags:
                if flag not in parser._option_string_actions:
                    parser.add_argument(flag, help="a flag of vLLM")
        for action in parser._actions:
            name = next((word for word in (*action.option_strings, action.dest) if word in values), None)
            if name:
                action.choices = values[name]
            elif action.nargs != 0 and not action.choices:
                action.complete = complete_path  # type: ignore[attr-defined]
    return whole
