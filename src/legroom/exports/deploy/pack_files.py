"""`legroom pack --format`: the packed servers as one compose file, as units of one target, or for llama-swap."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from legroom.exports.deploy import compose, systemd
from legroom.exports.deploy.exported_server import ExportedServer, ServerOptions, planned_server
from legroom.exports.deploy.flag_comments import WRITTEN, comment_lines
from legroom.exports.deploy.named_paths import check_paths
from legroom.exports.deploy.serve_command import check_health_is_reachable, check_reachable
from legroom.exports.deploy.yaml_text import Commented, yaml_text
from legroom.exports.export_request import ExportedFile
from legroom.facts.release_support import SLEEP_FLAG
from legroom.planning.packing.gpu_packing import PackResult
from legroom.planning.packing.placement import Shift
from legroom.planning.plan_json import plan_document
from legroom.units import gib

TARGET = "vllm-pack"
_PREFIX = "vllm-"
_USER, _BIN = "vllm", "/opt/vllm/bin"


def pack_files(result: PackResult, format_name: str) -> tuple[ExportedFile, ...]:
    """The files that start a pack in this format (compose, systemd, llama-swap); with shifts, one script per shift."""
    named = ((packed.plan, ServerOptions(name=_PREFIX + packed.name)) for packed in result.packed)
    servers = tuple(planned_server(plan_document(plan), options) for plan, options in named)
    return _FORMATS[format_name](result, servers)


def _head_comments(result: PackResult) -> Iterator[str]:
    """Head comments: the servers, how shifts work, and each GPU's memory by server with what stays free."""
    names = ", ".join(packed.name for packed in result.packed)
    cards = len(result.cards)
    where = result.cards[0].card.gpu.name if cards == 1 else f"{cards} GPUs"
    yield f"{names} on {where}, packed so that they start in any order."
    if result.request.shifts:
        yield "Who is awake together is one shift; when it changes, the others make room first."
    for use in result.cards:
        each = ", ".join(f"{name} {gib(bytes_)}" for name, bytes_ in (*use.awake, *use.asleep))
        yield f"GPU {use.card.number}, {gib(use.card.gpu.total_bytes)}: {each}; {gib(use.headroom_bytes)} free."
    yield WRITTEN


def _first_shift_servers(result: PackResult, servers: Sequence[ExportedServer]) -> list[ExportedServer]:
    """The servers awake in the first shift; all of them where the pack has no shifts."""
    shifts = result.request.shifts
    return [server for server in servers if not shifts or _pack_name(server) in shifts[0].awake]


def _pack_name(server: ExportedServer) -> str:
    """The name that the user gave the server in the pack; exported names have a prefix before it."""
    return server.name.removeprefix(_PREFIX)


def _compose_files(result: PackResult, servers: Sequence[ExportedServer]) -> tuple[ExportedFile, ...]:
    """compose.yaml, which starts the first shift's servers one after another, and a start script for each shift."""
    services: dict[str, Any] = {}
    volumes: dict[str, Any] = {}
    before: ExportedServer | None = None
    first = _first_shift_servers(result, servers)
    for server in servers:
        check_reachable(server.words)
        check_paths(server)
        document = compose.compose_document(server)
        service = document["services"][server.name]
        if server not in first:
            service["profiles"] = Commented("Started by the script of its shift.", ["later"])
        elif before is not None:
            why = f"One at a time: {before.name} serves before this one looks at the card."
            service["depends_on"] = Commented(why, {before.name: {"condition": "service_healthy"}})
        services[server.name] = service
        volumes |= document["volumes"]
        before = server if server in first else before
    remarks = [remark for server in servers for remark in server.remarks]
    head = (*_head_comments(result), *dict.fromkeys(remarks))
    text = yaml_text({"services": services, "volumes": volumes}, head=head)
    scripts = _shift_scripts(result, servers, lambda name: f"docker compose up -d --wait {name}")
    return (ExportedFile("compose.yaml", text), *scripts)


def _systemd_files(result: PackResult, servers: Sequence[ExportedServer]) -> tuple[ExportedFile, ...]:
    """A unit for each server, in order, all part of one target."""
    files = []
    before: tuple[str, ...] = ()
    first = _first_shift_servers(result, servers)
    for server in servers:
        check_health_is_reachable(server.words)
        check_paths(server, mounted=False)
        text = systemd.unit_text(server, _USER, _BIN, systemd.UnitPlace(f"{TARGET}.target", before, server in first))
        files.append(ExportedFile(f"{server.name}.service", text))
        before = (f"{server.name}.service",) if server in first else before
    scripts = _shift_scripts(result, servers, lambda name: f"systemctl start {name}.service")
    wanted = " ".join(f"{server.name}.service" for server in first)
    unit = ("[Unit]", "Description=vLLM servers that share a machine", f"Wants={wanted}", "")
    target = [*comment_lines(*_head_comments(result)), *unit, "[Install]", "WantedBy=multi-user.target", ""]
    return (*files, ExportedFile(f"{TARGET}.target", "\n".join(target)), *scripts)


def _llama_swap_files(result: PackResult, servers: Sequence[ExportedServer]) -> tuple[ExportedFile, ...]:
    """A llama-swap configuration: servers start at their first request, and a group's members stay loaded together."""
    models = {_pack_name(server): _llama_swap_model(server) for server in servers}
    longest = max(server.times.limit_s for server in servers)
    document: dict[str, Any] = {
        "healthCheckTimeout": Commented("The longest that one of them may take to start, in seconds.", longest),
        "models": models,
        "groups": dict(_llama_swap_groups(result)),
    }
    return (ExportedFile("llama-swap.yaml", yaml_text(document, head=tuple(_head_comments(result)))),)


def _llama_swap_model(server: ExportedServer) -> dict[str, Any]:
    """The llama-swap entry of one server: its command, address and health check."""
    words = [*server.words.head, *server.words.model_words]
    words += [word for phrase in server.phrases if phrase.flag != "--port" for word in phrase.words]
    model: dict[str, Any] = {"cmd": f"{shlex.join(words)} --port ${{PORT}}", "proxy": "http://127.0.0.1:${PORT}"}
    model["checkEndpoint"] = "/health"
    if server.env:
        model["env"] = [f"{line.name}={line.value}" for line in server.env]
    return model


def _llama_swap_groups(result: PackResult) -> Iterator[tuple[str, dict[str, Any]]]:
    """(Name, llama-swap group): servers awake in all shifts, then each shift's others; without shifts, one of all."""
    shifts = result.request.shifts
    names = [packed.name for packed in result.packed]
    if not shifts:
        yield "pack", {"swap": False, "exclusive": False, "members": names}
        return
    always = [name for name in names if all(name in shift.awake for shift in shifts)]
    if always:
        yield "always", {"swap": False, "exclusive": False, "persistent": True, "members": always}
    placed = set(always)
    for shift in shifts:
        members = [name for name in names if name in shift.awake and name not in placed]
        placed |= set(members)
        if members:
            yield shift.name, {"swap": False, "exclusive": True, "members": members}


def _shift_scripts(
    result: PackResult, servers: Sequence[ExportedServer], start: Callable[[str], str]
) -> tuple[ExportedFile, ...]:
    """A script for each shift; `start(name)` is the shell line that starts the server of that name."""
    level = result.request.servers[0].sleep_level
    return tuple(
        ExportedFile(f"shift-{shift.name}.sh", _shift_script(shift, servers, level, start), executable=True)
        for shift in result.request.shifts
    )


def _shift_script(shift: Shift, servers: Sequence[ExportedServer], level: int, start: Callable[[str], str]) -> str:
    """A shift's shell script: puts other servers to sleep at vLLM's `level`, then starts or wakes its own."""
    awake = [server for server in servers if _pack_name(server) in shift.awake]
    names = ", ".join(map(_pack_name, awake))
    lines = ["#!/bin/sh", f"# The shift {shift.name}: awake {names}.", f"# {WRITTEN}", "set -eu"]
    for server in servers:
        if server not in awake:
            lines.append(f"if {_curl(server, '/health')}; then {_curl(server, f'/sleep?level={level}', 'POST')}; fi")
    for server in awake:
        lines.append(start(server.name))
        if server.words.get(SLEEP_FLAG) is not None:
            lines.append(_curl(server, "/wake_up", "POST"))
    return "\n".join(lines) + "\n"


def _curl(server: ExportedServer, path: str, method: str = "GET") -> str:
    """A shell line that requests a path of the server with curl."""
    # Weights are copied while it answers: no limit as short as a probe's.
    return f"curl -fsS -m 600 -o /dev/null -X {method} {shlex.quote(server.address.url + path)}"


_Writer = Callable[["PackResult", Sequence[ExportedServer]], tuple[ExportedFile, ...]]
_FORMATS: dict[str, _Writer] = {"compose": _compose_files, "systemd": _systemd_files, "llama-swap": _llama_swap_files}
