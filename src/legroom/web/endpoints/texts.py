"""Foreign text: what starts servers, and what servers printed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypedDict

from legroom.errors import LegroomError

if TYPE_CHECKING:
    from legroom.deployments.deployment import Deployment

_NAME = "the text"


class ReadServer(TypedDict):
    """One server that a text starts, as a plan request takes it."""

    model: str
    vllm: str
    vllm_named: bool
    gpus: int | None
    flags: dict[str, Any]
    env: dict[str, str]
    command: list[str]
    place: str
    line: int | None
    notes: list[str]
    problems: list[str]


class ReadDocument(TypedDict):
    servers: list[ReadServer]


def read(request: dict[str, Any]) -> ReadDocument:
    """Every server that a text of any kind starts; none is an error that says what is looked for."""
    from legroom.deployments.deployment import deployment_from_command, deployment_of
    from legroom.deployments.read import read_file
    from legroom.facts.releases import latest

    text = request["text"]
    if not text.strip():
        raise LegroomError("the text is empty", "paste a command, a script or a manifest")
    parts = list(read_file(_NAME, text, latest()))
    servers = [server for part in parts for server in part.servers if server.words or server.call is not None]
    if not servers:
        unread = next((part.unread for part in parts if part.is_whole and part.unread), None)
        if unread is not None:
            raise LegroomError(f"the text {unread.reason}", unread.hint)
        return {"servers": [_server(deployment_from_command(text))]}
    return {"servers": [_server(deployment_of(server)) for server in servers]}


def lint(request: dict[str, Any]) -> dict[str, Any]:
    """The document of `legroom lint --json`."""
    from legroom.facts.releases import release as known_release
    from legroom.lint.lint_report import report_json
    from legroom.lint.linter import LintOptions, lint_texts

    vllm = request.get("vllm")
    any_release = vllm == "any"
    asked = known_release(vllm) if vllm and not any_release else None
    options = LintOptions(asked, None, frozenset(request.get("ignore", ())), any_release=any_release)
    return report_json(lint_texts([(file["path"], file["text"]) for file in request["files"]], options))


def _server(what: Deployment) -> ReadServer:
    from legroom.vllm.command_line import command, without_secrets

    place = what.place
    return {
        "model": what.args.model,
        "vllm": what.release.version,
        "vllm_named": what.release_hint is not None,
        "gpus": what.gpu_count,
        "flags": _flags(what),
        "env": dict(what.args.env),
        "command": list(without_secrets(command(what.args, what.release))),
        "place": f"line {place.line}" if place else "",
        "line": place.line if place else None,
        "notes": list(what.notes),
        "problems": [problem.message for problem in what.problems],
    }


def _flags(what: Deployment) -> dict[str, Any]:
    """What was given, by vLLM's Python names; keys and tokens are left out."""
    from dataclasses import fields

    from legroom.masking import is_secret
    from legroom.vllm.command_line import command_parts

    args = what.args
    read_by_plan = (field.name for field in fields(args) if field.name not in ("model", "usage", "env", "others"))
    given = {name: value for name in read_by_plan if (value := getattr(args, name)) is not None}
    flags: dict[str, Any] = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
    for part in command_parts(args.others, what.release):
        if part.flag is not None and not is_secret(part.dest):
            flags[part.dest] = not part.name.startswith("--no-") if part.value == "" else part.value
    return flags


def diagnose(request: dict[str, Any]) -> dict[str, Any]:
    """The document of `legroom diagnose --json`."""
    log = request["log"]
    if not log.strip():
        raise LegroomError("the log is empty", "give the server's output, stderr included")
    return diagnose_pieces([log.encode("utf-8", "replace")], request)


def diagnose_pieces(pieces: Iterable[bytes], request: dict[str, Any]) -> dict[str, Any]:
    """The same for a log that comes in pieces, which is never held as a whole."""
    from legroom.diagnosis.diagnose import read_log
    from legroom.diagnosis.diagnosis_json import readings_json
    from legroom.diagnosis.starting_plan import Hints

    hints = Hints(
        request.get("command") or None,
        request.get("model") or None,
        request.get("gpu") or None,
        request.get("gpus"),
        request.get("vllm") or None,
        local_models=False,
    )
    return readings_json([read_log(pieces, "the log", hints)])
