"""`legroom export env`: the environment of the planned server, for systemd's EnvironmentFile or docker's --env-file."""

from collections.abc import Iterator

from legroom.errors import LegroomError
from legroom.exports.deploy.exported_server import ExportedServer, add_server_options, requested_server
from legroom.exports.deploy.flag_comments import comment_lines, plan_headline
from legroom.exports.deploy.serve_command import API_KEY_NAME, WITHOUT_API_KEY
from legroom.exports.export_request import ExportedFile, ExportRequest

NAME = "env"
HELP = "the server's environment, secrets left to be filled in"
NEEDS_PLAN = True
add_options = add_server_options


def files(request: ExportRequest) -> tuple[ExportedFile, ...]:
    """One NAME.env file with the variables of the planned server."""
    server = requested_server(request)
    return (ExportedFile(f"{server.name}.env", "\n".join(_variable_lines(server)) + "\n"),)


def _variable_lines(server: ExportedServer) -> Iterator[str]:
    """`NAME=value` lines, unquoted as docker needs them, and comments; LegroomError for a value with a line end."""
    yield from comment_lines(*plan_headline(server.plan), *server.remarks)
    for line in server.env:
        if "\n" in line.value or "\r" in line.value:
            hint = "an environment file holds one line per variable"
            raise LegroomError(f"the value of {line.name} has several lines", hint)
        yield from comment_lines(f"{line.name}: {line.why}.")
        yield f"{line.name}={line.value}"
    for name in server.secrets:
        open_to_all = f" It is needed: {WITHOUT_API_KEY}." if name == API_KEY_NAME else ""
        text = f"{name} is a secret: fill it in only where nobody but the service can read the file.{open_to_all}"
        yield from comment_lines(text)
        yield f"#{name}="
