"""`legroom completion SHELL`: a completion script, made by shtab from the commands' own parsers."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from legroom.errors import OK

_EPILOG = """\
examples:
  legroom completion bash > ~/.local/share/bash-completion/completions/legroom
  legroom completion zsh > ~/.zfunc/_legroom        (with ~/.zfunc in fpath before compinit)
  legroom completion fish > ~/.config/fish/completions/legroom.fish

The script holds every command, option, GPU and bundled model of this version and starts nothing: print it again after
an upgrade.

exit codes: 0 printed, 2 the call is wrong, 3 the Python package shtab is missing
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "completion",
        description="Print a script that completes legroom's commands and options in your shell.",
        epilog=_EPILOG,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that it is for")
    return parser


def run(args: argparse.Namespace) -> int:
    sys.stdout.write(completion_script(args.shell))
    return OK


def completion_script(shell: str) -> str:
    """The script of one shell for every command."""
    import shtab

    script: str = shtab.complete(_full_parser(shtab.FILE), shell)
    return script


def _full_parser(files: Any) -> argparse.ArgumentParser:
    """One parser of all commands, with the values that options can have; `files` is how shtab completes a path."""
    from legroom.cli.main import COMMANDS, Parser
    from legroom.facts.bundled import bundled_names
    from legroom.facts.flags import flags_of
    from legroom.facts.gpus import gpu_names
    from legroom.facts.releases import latest

    values = {
        "--gpu": [min(names, key=len) for names in gpu_names().values() if names],
        "--model": list(bundled_names()),
        "model": list(bundled_names()),
    }
    vllm_flags = sorted(name for name in flags_of(latest()) if name.startswith("--"))
    whole = Parser(prog="legroom", description="GPU memory in vLLM serving.")
    commands = whole.add_subparsers(prog="legroom")
    for command in COMMANDS:
        module = importlib.import_module(command.module)
        parser = module.add_parser(_Named(commands, command.help))
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
                action.complete = files
    return whole


class _Named:
    """Adds a command's parser with the help of the table of commands."""

    def __init__(self, commands: Any, help_text: str) -> None:
        self.commands, self.help_text = commands, help_text

    def add_parser(self, name: str, **options: Any) -> Any:
        return self.commands.add_parser(name, **{**options, "help": self.help_text})
