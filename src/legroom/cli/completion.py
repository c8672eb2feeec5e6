"""`legroom completion SHELL`: a completion script, made from the commands' own parsers."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping
from typing import Any

from legroom.errors import OK
from legroom.records import dataclass

_EPILOG = """\
examples:
  legroom completion bash > ~/.local/share/bash-completion/completions/legroom
  legroom completion zsh > ~/.zfunc/_legroom        (with ~/.zfunc in fpath before compinit)
  legroom completion fish > ~/.config/fish/completions/legroom.fish

The script holds every command, option, GPU and bundled model of this version and starts nothing: print it again after
an upgrade.

exit codes: 0 printed, 2 the call is wrong
"""


@dataclass(frozen=True)
class CompletedOption:
    """An option of a command: how it is written, what it means, and the values that it can have."""

    words: tuple[str, ...]
    help: str
    values: tuple[str, ...] | None
    """None: it takes no value; empty: a value that cannot be listed, which is completed as a file."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "completion",
        description="Print a script that completes legroom's commands and options in your shell.",
        epilog=_EPILOG,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that it is for")
    return parser


def run(args: argparse.Namespace) -> int:
    script = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}[args.shell]
    sys.stdout.write(script(every_option()))
    return OK


def every_option() -> dict[str, tuple[CompletedOption, ...]]:
    """The options of every command; those that take vLLM's flags complete these too."""
    from legroom.cli.main import COMMANDS, Parser

    gpus = _gpu_values()
    options = {}
    for command in COMMANDS:
        module = importlib.import_module(command.module)
        parser = module.add_parser(Parser(prog="legroom", add_help=False).add_subparsers(prog="legroom"))
        own = [_completed(action, gpus) for action in parser._actions if action.option_strings]
        taken = {word for option in own for word in option.words}
        theirs = _vllm_options() if hasattr(module, "parse") else ()
        options[command.name] = (*own, *(option for option in theirs if not taken.intersection(option.words)))
    return options


def _completed(action: argparse.Action, gpus: tuple[str, ...]) -> CompletedOption:
    values = None if action.nargs == 0 else tuple(map(str, action.choices or ()))
    if "--gpu" in action.option_strings:
        values = gpus
    elif "--model" in action.option_strings:
        values = _model_values()
    shown = "" if action.help in (None, argparse.SUPPRESS) else str(action.help).replace("%%", "%")
    return CompletedOption(tuple(action.option_strings), shown, values)


def _gpu_values() -> tuple[str, ...]:
    from legroom.facts.gpus import gpu_names

    return tuple(min(names, key=len) for names in gpu_names().values() if names)


def _model_values() -> tuple[str, ...]:
    from legroom.facts.bundled import bundled_names

    return bundled_names()


def _vllm_options() -> tuple[CompletedOption, ...]:
    from legroom.facts.flags import flags_of
    from legroom.facts.releases import latest

    names = sorted(name for name in flags_of(latest()) if name.startswith("--"))
    return tuple(CompletedOption((name,), "a flag of vLLM", ()) for name in names)


Options = Mapping[str, tuple[CompletedOption, ...]]


def bash_script(options: Options) -> str:
    cases: list[str] = []
    values: dict[str, tuple[str, ...]] = {}
    for command, listed in options.items():
        words = " ".join(word for option in listed for word in option.words)
        cases.append(f'        {command}) words="{words}" ;;')
        values |= {word: option.values for option in listed if option.values for word in option.words}
    chosen = "\n".join(f'        {word}) words="{" ".join(known)}" ;;' for word, known in values.items())
    return f"""# bash completion of legroom; made by `legroom completion bash`
_legroom() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{" ".join(options)} --help --version" -- "$current"))
        return
    fi
    case "$previous" in
{chosen}
    esac
    if [ -n "$words" ]; then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{chr(10).join(cases)}
    esac
    if [[ "$current" == -* ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
    elif [[ "${{COMP_WORDS[1]}}" =~ ^(plan|size|run)$ && "$COMP_CWORD" -eq 2 ]]; then
        COMPREPLY=($(compgen -W "{" ".join(_model_values())}" -- "$current") $(compgen -f -- "$current"))
    fi
}}
complete -o default -F _legroom legroom
"""


def zsh_script(options: Options) -> str:
    from legroom.cli.main import COMMANDS

    commands = "\n".join(f"        {_quoted(f'{entry.name}:{_zsh_text(entry.help)}')}" for entry in COMMANDS)
    cases = []
    for command, listed in options.items():
        rows = "".join(f" \\\n                {_zsh_option(option)}" for option in listed)
        first = (
            f" \\\n                {_quoted('1:model:_legroom_models')}" if command in ("plan", "size", "run") else ""
        )
        cases.append(
            f"            {command}) _arguments{first}{rows} \\\n                {_quoted('*:file:_files')} ;;"
        )
    return f"""#compdef legroom
# zsh completion of legroom; made by `legroom completion zsh`
_legroom_models() {{
    compadd -- {" ".join(_model_values())}
    _files
}}
_legroom() {{
    local -a commands
    commands=(
{commands}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    local chosen="$words[2]"
    shift words
    (( CURRENT-- ))
    case "$chosen" in
{chr(10).join(cases)}
    esac
}}
if [ "$funcstack[1]" = "_legroom" ]; then _legroom "$@"; else compdef _legroom legroom; fi
"""


def _zsh_option(option: CompletedOption) -> str:
    word = max(option.words, key=len)
    text = f"{word}[{_zsh_text(option.help)}]"
    if option.values is not None:
        text += f":value:({' '.join(option.values)})" if option.values else ":value:_files"
    return _quoted(text)


def _zsh_text(text: str) -> str:
    return text.replace("[", "(").replace("]", ")").replace(":", " -")


def fish_script(options: Options) -> str:
    from legroom.cli.main import COMMANDS

    lines = ["# fish completion of legroom; made by `legroom completion fish`"]
    lines += [
        f"complete -c legroom -n __fish_use_subcommand -f -a {entry.name} -d {_quoted(entry.help)}"
        for entry in COMMANDS
    ]
    for command, listed in options.items():
        seen = f"complete -c legroom -n '__fish_seen_subcommand_from {command}'"
        for option in listed:
            names = " ".join(f"-l {word[2:]}" if word.startswith("--") else f"-s {word[1:]}" for word in option.words)
            value = (
                ""
                if option.values is None
                else f" -x -a {_quoted(' '.join(option.values))}"
                if option.values
                else " -r"
            )
            lines.append(f"{seen} {names}{value} -d {_quoted(option.help)}")
        if command in ("plan", "size", "run"):
            lines.append(f"{seen} -a {_quoted(' '.join(_model_values()))}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "'\\''") + "'"
