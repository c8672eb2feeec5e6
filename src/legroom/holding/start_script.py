"""The final settings as a start script."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from legroom.errors import LegroomError

_SECRET = {"--api-key": "VLLM_API_KEY", "--hf-token": "HF_TOKEN"}
"""Flags whose value never goes into a file, and the variable that vLLM reads instead."""


def script(words: Sequence[str], env: Mapping[str, str]) -> str:
    """A shell script that starts the server as it was started."""
    kept, variables = _without_secrets(words)
    lines = ["#!/usr/bin/env bash", "# Written by `legroom run` once the server was up with these settings.", "set -eu"]
    lines += [f': "${{{name}:?set it: it is not kept in this file}}"; export {name}' for name in variables]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    return "\n".join([*lines, f'exec {" ".join(shlex.quote(word) for word in kept)} "$@"', ""])


def save(path: str, words: Sequence[str], env: Mapping[str, str]) -> str:
    """Write it; a sentence on how that went."""
    where = Path(path)
    try:
        where.write_text(script(words, env), encoding="utf-8")
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
    kept: list[str] = []
    variables: list[str] = []
    secret = False
    for word in words:
        name, joined, _ = word.partition("=")
        if name in _SECRET:
            variables.append(_SECRET[name])
            secret = not joined
        elif secret and not word.startswith("--"):
            continue
        else:
            secret = False
            kept.append(word)
    return kept, list(dict.fromkeys(variables))
