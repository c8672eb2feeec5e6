"""The final settings as a start script."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from legroom.errors import LegroomError
from legroom.masking import CREDENTIALS, SECRET_FLAGS, is_secret


def script(words: Sequence[str], env: Mapping[str, str]) -> str:
    """A shell script that starts the server as it was started."""
    kept, variables = _without_secrets(words)
    variables += [name for name, value in env.items() if is_secret(name, value)]
    lines = ["#!/usr/bin/env bash", "# Written by `legroom run` once the server was up with these settings.", "set -eu"]
    lines += [
        f': "${{{name}:?set it: it is not kept in this file}}"; export {name}' for name in dict.fromkeys(variables)
    ]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in env.items() if name not in variables]
    return "\n".join([*lines, f'exec {" ".join(kept)} "$@"', ""])


def save(path: str, words: Sequence[str], env: Mapping[str, str]) -> str:
    """Write it; a sentence on how that went."""
    where = Path(path)
    try:
        where.write_text(script(words, env), encoding="utf-8", errors="surrogateescape")  # a path need not be text
        where.chmod(0o755)
    except OSError as error:
        return f"the script {path} could not be written: {error.strerror}"
    return f"saved as {path}"


def check_writable(path: str) -> None:
    """Bad news first: a script that cannot be written is said before anything is started."""
    where = Path(path)
    if where.is_dir() or not where.resolve().parent.is_dir():
        raise LegroomError(f"--save {path}: not a file that can be written", "give a path in a folder that is there")


def _without_secrets(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words as the shell takes them, and the variables that stand for what is not written down."""
    from legroom.vllm.command_line import command_parts  # noqa: PLC0415 - a table of flags, for this alone

    kept: list[str] = []
    variables: list[str] = []
    for part in command_parts(words):
        if part.name and part.long_name in SECRET_FLAGS:
            variables.append(SECRET_FLAGS[part.long_name])
        elif part.name and CREDENTIALS.search(part.value):
            # vLLM reads such an address from nowhere else: the script has a variable of its own for it.
            variables.append(part.dest.upper())
            kept += [part.name, f'"${part.dest.upper()}"']
        else:
            kept += [shlex.quote(word) for word in part.words]
    return kept, variables
