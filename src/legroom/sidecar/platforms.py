"""The platform and the way to drain that a table of watch.toml names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from legroom.actions.command_platform import CommandPlatform
from legroom.actions.docker_platform import ComposeService, DockerContainer
from legroom.actions.kubernetes_platform import Workload
from legroom.actions.platform import Platform
from legroom.actions.run_platform import RunChild
from legroom.actions.server_drain import CommandDrain, DrainMethod, GuardDrain, PlatformDrain, ReadinessFileDrain
from legroom.actions.supervisord_platform import SupervisordProgram
from legroom.actions.systemd_platform import SystemdUnit
from legroom.guard import TOKEN_NAME as GUARD_TOKEN
from legroom.live.metrics.endpoint import Endpoint
from legroom.toml_tables import TomlTable

DRAINS_BY_ITSELF = (Workload, RunChild)


def platform_of(table: TomlTable, server: str) -> Platform:
    """`platform = "systemd"` and what that needs."""
    kind = table.choice("platform", tuple(_PLATFORMS), "command")
    return _PLATFORMS[kind](table, server)


def _systemd(table: TomlTable, server: str) -> Platform:
    return SystemdUnit(table.require("unit", str), table.get("user", bool, False))


def _docker(table: TomlTable, server: str) -> Platform:
    return DockerContainer(table.require("container", str), table.integer("stop_s", 60, most=3600))


def _compose(table: TomlTable, server: str) -> Platform:
    path = table.path("file")
    if path is None:
        raise table.error("file", "is missing: the Compose file")
    return ComposeService(path, table.require("service", str), table.integer("stop_s", 60, most=3600))


def _kubernetes(table: TomlTable, server: str) -> Platform:
    kind = table.choice("kind", ("deployment", "stateful_set"), "deployment")
    return Workload(
        table.require("workload", str),
        table.get("namespace", str, "default"),
        "stateful_set" if kind == "stateful_set" else "deployment",
        table.find("container", str),
        table.find("context", str),
    )


def _supervisord(table: TomlTable, server: str) -> Platform:
    return SupervisordProgram(table.require("program", str), table.path("config"), table.path("program_file"))


def _run(table: TomlTable, server: str) -> Platform:
    port = table.integer("port", urlsplit(server).port or 8000, least=1, most=65535)
    return RunChild(port)


def _command(table: TomlTable, server: str) -> Platform:
    return CommandPlatform(
        table.require("restart_command", str),
        server,
        table.path("pid_file"),
        table.path("flags_file"),
        table.number("settle_s", 10.0, most=3600.0),
    )


_PLATFORMS: Mapping[str, Callable[[TomlTable, str], Platform]] = {
    "systemd": _systemd,
    "docker": _docker,
    "compose": _compose,
    "kubernetes": _kubernetes,
    "supervisord": _supervisord,
    "run": _run,
    "command": _command,
}


def drain_method_of(table: TomlTable | None, place: Endpoint, platform: Platform | None) -> DrainMethod | None:
    """`drain = { by = "guard" }`. Without one: the platform where it drains by itself, the guard where there is a
    token for it, else none."""
    if table is None:
        if isinstance(platform, DRAINS_BY_ITSELF):
            return PlatformDrain(platform.name)
        token = os.environ.get(GUARD_TOKEN)
        return GuardDrain(place.server, token, place.verify_tls, place.ca_file) if token else None
    drain_method = _named_drain_method(table, place, platform)
    table.end()
    return drain_method


def _named_drain_method(table: TomlTable, place: Endpoint, platform: Platform | None) -> DrainMethod:
    by = table.choice("by", ("guard", "file", "command", "platform"), "guard")
    if by == "guard":
        token = table.secret("token") or os.environ.get(GUARD_TOKEN)
        if not token:
            raise table.error("token", f"is missing: the guard's, as token_env, token_file or {GUARD_TOKEN}")
        return GuardDrain(table.get("url", str, place.server), token, place.verify_tls, place.ca_file)
    if by == "file":
        path = table.path("path")
        if path is None:
            raise table.error("path", "is missing: the file that makes readiness fail")
        return ReadinessFileDrain(path, table.number("seen_after_s", 15.0, most=3600.0))
    if by == "command":
        return CommandDrain(table.require("close_command", str), table.require("open_command", str))
    return PlatformDrain(platform.name if platform is not None else "the platform")
