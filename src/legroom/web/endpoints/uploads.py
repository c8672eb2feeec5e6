"""Endpoints for text and files of the user: manifests, logs and memory snapshots."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from legroom.errors import LegroomError
from legroom.facts.releases import latest
from legroom.facts.releases import release as known_release
from legroom.masking import is_secret
from legroom.units import human_bytes
from legroom.web.endpoints import in_requested_language

if TYPE_CHECKING:
    from legroom.deployments.deployment import Deployment
    from legroom.fragments.fragment_report import AllocatorReading

_MAX_SNAPSHOT_BYTES = 512 << 20
"""Decoded size of a memory snapshot: a quarter of the command line's limit, because several workers run at once."""


def read(request: dict[str, Any]) -> dict[str, Any]:
    """Every server that the request's `text` (command, script or manifest) starts; LegroomError where there is none."""
    from legroom.deployments.deployment import deployment_from_command, deployment_of
    from legroom.deployments.file_reader import read_file

    text, asked = request["text"], known_release(request["vllm"]) if request.get("vllm") else None
    if not text.strip():
        raise LegroomError("the text is empty", "paste a command, a script or a manifest")
    parts = list(read_file("the text", text, asked or latest()))
    servers = [server for part in parts for server in part.servers if server.words or server.call is not None]
    if not servers:
        unread = next((part.unread for part in parts if part.is_whole and part.unread), None)
        if unread is not None:
            raise LegroomError(f"the text {unread.reason}", unread.hint)
        return {"servers": [_server_document(deployment_from_command(text, asked))]}
    return {"servers": [_server_document(deployment_of(s, None if s.named_release else asked)) for s in servers]}


def lint(request: dict[str, Any]) -> dict[str, Any]:
    """The document of `legroom lint --json` for the request's `files` (`path`, `text`), rules in `ignore` left out."""
    from legroom.lint.lint_report import report_json
    from legroom.lint.linter import LintOptions, lint_texts

    vllm = request.get("vllm")
    release = known_release(vllm) if vllm and vllm != "any" else None
    options = LintOptions(release, None, frozenset(request.get("ignore", ())), any_release=vllm == "any")
    return report_json(lint_texts([(file["path"], file["text"]) for file in request["files"]], options))


def _server_document(deployment: Deployment) -> dict[str, Any]:
    """A server of an uploaded file: model, release, GPUs, flags, command without secrets, problems."""
    from legroom.deployments.described import refuse_bad_flags
    from legroom.vllm.command_line import command, without_secrets

    place, refused = deployment.place, None
    try:
        refuse_bad_flags(deployment.problems, deployment.release)
    except LegroomError as error:
        refused = {"why": error.message, "action": error.hint}
    return {
        "model": deployment.args.model,
        "vllm": deployment.release.version,
        "vllm_named": deployment.release_hint is not None,
        "gpu": deployment.gpu_names[0] if len(deployment.gpu_names) == 1 else None,
        "gpus": deployment.gpu_count,
        "host_memory": human_bytes(limit) if (limit := deployment.memory_limit_bytes) else None,
        "flags": _given_flags(deployment),
        "env": dict(deployment.args.env),
        "command": list(without_secrets(command(deployment.args, deployment.release))),
        "place": f"line {place.line}" if place else "",
        "line": place.line if place else None,
        "notes": list(deployment.notes),
        "problems": [problem.message for problem in deployment.problems],
        "refused": refused,
    }


def _given_flags(deployment: Deployment) -> dict[str, Any]:
    """The flags of the server's command by vLLM's Python names, without secrets."""
    from legroom.vllm.command_line import command_parts

    args = deployment.args
    read_by_plan = (field.name for field in fields(args) if field.name not in ("model", "usage", "env", "others"))
    given = {name: value for name in read_by_plan if (value := getattr(args, name)) is not None}
    flags: dict[str, Any] = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
    for part in command_parts(args.others, deployment.release):
        if part.flag is not None and not is_secret(part.dest):
            flags[part.dest] = not part.name.startswith("--no-") if part.value == "" else part.value
    return flags


def diagnose(request: dict[str, Any]) -> dict[str, Any]:
    """The document of `legroom diagnose --json` for the request's `log`; LegroomError for an empty one."""
    log = request["log"]
    if not log.strip():
        raise LegroomError("the log is empty", "give the server's output, stderr included")
    return diagnose_pieces([log.encode("utf-8", "replace")], request)


def diagnose_pieces(pieces: Iterable[bytes], request: dict[str, Any]) -> dict[str, Any]:
    """The document of `diagnose --json` for a log in pieces; the request has a `language` and hints (`gpu` ...)."""
    from legroom.deployments.described import refuse_two_models
    from legroom.diagnosis.diagnosis_json import readings_json
    from legroom.diagnosis.fixes.failed_run import Hints
    from legroom.diagnosis.log_diagnosis import read_log
    from legroom.render.diagnosis_text import deployment_text, finding_title, has_story, verdict_headline, verify_text

    command, model, gpu, vllm = (request.get(name) or None for name in ("command", "model", "gpu", "vllm"))
    refuse_two_models(command, model)
    hints = Hints(command, model, gpu, request.get("gpus"), vllm, local_models=False)
    reading = read_log(pieces, "the log", hints)
    document = in_requested_language(readings_json([reading]), request)
    if "language" in request:
        run, language = reading.runs[0] if reading.runs else None, request["language"]
        for row, finding in zip(document["findings"], run.findings if run else (), strict=False):
            title = finding_title(finding, language, run.other_engine if run else "")
            how = verify_text(run, finding, language) if run else ""
            row |= {"title": title, "has_story": has_story(finding), "verify": how}
        document["about"] = deployment_text(run, language) if run else ""
        is_known = run is not None and run.proven_findings
        document["headline"] = document["findings"][0]["title"] if is_known else verdict_headline(run, language)
    return document


def fragments(request: dict[str, Any]) -> dict[str, Any]:
    """The document of `legroom fragments --json` for the snapshot `file` (base64), with sentences and picture."""
    from legroom.fragments.fragment_report import fragment_report
    from legroom.render.fragments_text import advice_of, fragments_headline, fragments_svg
    from legroom.render.translation import in_language

    file, before = request["file"], request.get("earlier")
    earlier = _decode_snapshot(before, "the earlier file") if before else None
    report = fragment_report(_decode_snapshot(file, "the file"), earlier=earlier)
    words = {"headline": fragments_headline(report), "advice": advice_of(report), "parts": report.to_json()["parts"]}
    language = request.get("language", "en")
    return {**report.to_json(), **in_language(words, language), "svg": fragments_svg(report, language)}


def _decode_snapshot(encoded: str, name: str) -> AllocatorReading:
    """The fullest GPU in a PyTorch memory snapshot in base64; LegroomError, calling it `name`, for other text."""
    from legroom.fragments.fragment_sources import readings_of_content

    try:
        content = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise LegroomError(f"{name} is not in base64") from error
    return readings_of_content(content, name, _MAX_SNAPSHOT_BYTES)[0]
