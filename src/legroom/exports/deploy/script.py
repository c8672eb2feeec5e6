"""`legroom export script`: a start script in which every flag says what it does, with its number from the plan."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from legroom.exports.deploy.exported_server import ExportedServer, add_server_options, server_of
from legroom.exports.deploy.flag_comments import comment_lines, headline
from legroom.exports.deploy.serve_command import API_KEY_NAME, WITHOUT_API_KEY
from legroom.exports.export_request import ExportedFile

if TYPE_CHECKING:
    from legroom.exports.export_request import ExportRequest

NAME = "script"
HELP = "a start script with every flag explained"
NEEDS_PLAN = True


def add_options(group: argparse._ArgumentGroup) -> None:
    add_server_options(group)


def files(request: ExportRequest) -> tuple[ExportedFile, ...]:
    server = server_of(request)
    return (ExportedFile(f"{server.name}.sh", script_text(server), executable=True),)


def script_text(server: ExportedServer) -> str:
    parts = ["\n".join(_head(server)), "\n".join(_environment(server)), "\n".join(_flags(server)), _start(server)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(server: ExportedServer) -> Iterator[str]:
    yield "#!/usr/bin/env bash"
    for line in headline(server.plan):
        yield from comment_lines(line)
    yield "# Arguments given to this script are added to the command and take precedence."
    if not server.drains_itself:
        yield from comment_lines(server.stop_sentence())
    yield "set -euo pipefail"


def _environment(server: ExportedServer) -> Iterator[str]:
    for remark in server.remarks:
        yield from comment_lines(remark)
    for line in server.env:
        yield from comment_lines(f"{line.name}: {line.why}.")
        yield f"export {line.name}={shlex.quote(line.value)}"
    for name in server.secrets:
        yield from comment_lines(f"{name} is a secret: set it in the environment, never in this file.{_needed(name)}")
        yield from required(name)


def required(name: str) -> Iterator[str]:
    """A line that ends a script whose API key is not there: the server would start, and start open."""
    if name == API_KEY_NAME:
        yield f': "${{{name}:?{WITHOUT_API_KEY}}}"'


def _needed(name: str) -> str:
    return {
        "HF_TOKEN": " Only gated models need it.",
        "LEGROOM_GUARD_TOKEN": " Without it the guard cannot be drained.",
    }.get(name, "")


def _flags(server: ExportedServer) -> Iterator[str]:
    if not server.lines:
        return
    yield "arguments=("
    for line in server.lines:
        for text in comment_lines(line.why):
            yield f"  {text}"
        yield "  " + " ".join(shlex.quote(word) for word in line.phrase.words)
    yield ")"


def _start(server: ExportedServer) -> str:
    words = " ".join(shlex.quote(word) for word in (*server.words.head, *server.words.model_words))
    arguments = ' "${arguments[@]}"' if server.lines else ""
    return f'exec {words}{arguments} "$@"'
