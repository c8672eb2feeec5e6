"""`legroom export script`: a start script in which every flag says what it does, with its number from the plan."""

import shlex
from collections.abc import Iterator

from legroom.exports.deploy.exported_server import ExportedServer, add_server_options, requested_server
from legroom.exports.deploy.flag_comments import comment_lines, plan_headline
from legroom.exports.deploy.serve_command import API_KEY_NAME, WITHOUT_API_KEY
from legroom.exports.export_request import ExportedFile, ExportRequest

NAME = "script"
HELP = "a start script with every flag explained"
NEEDS_PLAN = True
add_options = add_server_options
_NEEDED = {"HF_TOKEN": " Only gated models need it.", "LEGROOM_GUARD_TOKEN": " Without it the guard cannot be drained."}


def files(request: ExportRequest) -> tuple[ExportedFile, ...]:
    """One executable bash script that starts the planned server."""
    server = requested_server(request)
    return (ExportedFile(f"{server.name}.sh", script_text(server), executable=True),)


def script_text(server: ExportedServer) -> str:
    """A bash script that sets the variables and replaces itself with `vllm serve`."""
    arguments = ["arguments=(", *(f"  {line}" for line in argument_lines(server)), ")"] if server.phrases else []
    words = shlex.join((*server.words.head, *server.words.model_words))
    given = ' "${arguments[@]}"' if server.phrases else ""
    parts = (_script_head(server), _export_lines(server), arguments, [f'exec {words}{given} "$@"'])
    return "\n\n".join(filter(None, map("\n".join, parts))) + "\n"


def _script_head(server: ExportedServer) -> Iterator[str]:
    """The script's first lines: shebang, the plan as comments, and `set -euo pipefail`."""
    yield "#!/usr/bin/env bash"
    yield from comment_lines(*plan_headline(server.plan))
    yield "# Arguments given to this script are added to the command and take precedence."
    if not server.drains_itself:
        yield from comment_lines(server.stop_sentence())
    yield "set -euo pipefail"


def _export_lines(server: ExportedServer) -> Iterator[str]:
    """`export NAME=value` lines with their reasons; secrets must be set by the caller."""
    yield from comment_lines(*server.remarks)
    for line in server.env:
        yield from comment_lines(f"{line.name}: {line.why}.")
        yield f"export {line.name}={shlex.quote(line.value)}"
    for name in server.secrets:
        needed = _NEEDED.get(name, "")
        yield from comment_lines(f"{name} is a secret: set it in the environment, never in this file.{needed}")
        yield from required_variable_line(name)


def required_variable_line(name: str) -> Iterator[str]:
    """For VLLM_API_KEY, a bash line that fails where the variable is not set; nothing for other names."""
    if name == API_KEY_NAME:
        yield f': "${{{name}:?{WITHOUT_API_KEY}}}"'


def argument_lines(server: ExportedServer) -> Iterator[str]:
    """The flags as lines of a bash array, each below its comment."""
    for phrase in server.phrases:
        yield from comment_lines(phrase.why)
        yield shlex.join(phrase.words)
