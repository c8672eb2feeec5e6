"""watch.toml: servers, groups, limits, webhooks, platforms and allowed actions."""

import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from legroom.actions.command_platform import CommandPlatform
from legroom.actions.docker_platform import ComposeService, DockerContainer
from legroom.actions.kubernetes_platform import WORKLOAD_KINDS, Workload
from legroom.actions.platform import FlagChange, Platform
from legroom.actions.run_platform import RunChild
from legroom.actions.server_drain import CommandDrain, DrainMethod, GuardDrain, PlatformDrain, ReadinessFileDrain
from legroom.actions.supervisord_platform import SupervisordProgram
from legroom.actions.systemd_platform import SystemdUnit
from legroom.errors import LegroomError
from legroom.guard import TOKEN_NAME as GUARD_TOKEN
from legroom.live.detectors import DETECTORS
from legroom.live.metrics.endpoint import Endpoint, endpoint
from legroom.live.metrics.prometheus_source import PrometheusSource
from legroom.live.thresholds import DEFAULT, LONGEST_INTERVAL_S, Hold, Thresholds
from legroom.planning.plan_document import PlanDocument, read_plan
from legroom.records import dataclass, field
from legroom.sidecar import WATCH_PORT
from legroom.sidecar.action_policy import ACTION_NAMES, ActionLimits
from legroom.sidecar.notifier import FORMATS, Webhook
from legroom.toml_tables import ConfigError, TomlTable, read_toml

_SHORTEST_INTERVAL_S = 0.1


@dataclass(frozen=True)
class ServerConfig:
    """A watched server. Without a platform it is never restarted."""

    endpoint: Endpoint
    group: str
    platform: Platform | None = None
    drain_method: DrainMethod | None = None
    plan: PlanDocument | None = None
    answers: Mapping[str, FlagChange] = field(default_factory=dict)
    """Kind of finding -> flags to restart with."""

    @property
    def name(self) -> str:
        """The address of the server, by which its metrics and incidents are labelled."""
        return self.endpoint.server


@dataclass(frozen=True)
class GroupConfig:
    name: str
    act: frozenset[str] = frozenset({"notify"})
    limits: ActionLimits = ActionLimits()


@dataclass(frozen=True)
class PrometheusConfig:
    """A Prometheus that already scrapes the servers."""

    url: str = field(repr=False)
    token: str | None = field(default=None, repr=False)
    matchers: str = ""
    """Such as `job="vllm"`; empty for all."""
    verify_tls: bool = True
    ca_file: str | None = None


@dataclass(frozen=True)
class KubernetesConfig:
    """Pods to watch, found by their labels."""

    selector: str
    namespace: str | None = None
    context: str | None = None


@dataclass(frozen=True)
class SidecarConfig:
    """The whole configuration. Its repr shows no secret."""

    servers: tuple[ServerConfig, ...]
    groups: Mapping[str, GroupConfig] = field(default_factory=dict)
    act: frozenset[str] = frozenset({"notify"})
    interval_s: float = 5.0
    thresholds: Thresholds = DEFAULT
    journal: Path | None = None
    host: str = "127.0.0.1"
    port: int = WATCH_PORT
    token: str | None = field(default=None, repr=False)
    webhooks: tuple[Webhook, ...] = field(default=(), repr=False)
    prometheus: PrometheusConfig | None = None
    kubernetes: KubernetesConfig | None = None
    lease: str = "journal"
    lease_namespace: str = "default"
    poll_s: float = 0.5
    """Poll interval during a drain or restart."""

    def group(self, name: str) -> GroupConfig:
        """The settings of the group with this name, else the default ones."""
        return self.groups.get(name) or GroupConfig(name, self.act)


def read_config(path: Path) -> SidecarConfig:
    """Reads and validates watch.toml. Errors name the line and the key."""
    table = read_toml(path)
    act = frozenset(table.choices("act", ACTION_NAMES, ("notify",)))
    servers = tuple(_server_config(server_table) for server_table in table.tables("servers"))
    prometheus = _prometheus_config(table.table("prometheus"))
    kubernetes = _kubernetes_config(table.table("kubernetes"))
    if not servers and prometheus is None and kubernetes is None:
        raise table.error("servers", "there is no server to watch", 'write [[servers]] with url = "http://host:8000"')
    named = [server.name for server in servers]
    for number, server_table in enumerate(table.tables("servers")):
        if named[number] in named[:number]:
            raise server_table.error("url", f"{named[number]} is there twice")
    limits = _action_limits(table.table("limits"), ActionLimits())
    with table:
        return SidecarConfig(
            servers=servers,
            groups=_group_configs(table.table("groups"), act, limits, servers),
            act=act,
            interval_s=table.number("interval_s", 5.0, least=0.05, most=LONGEST_INTERVAL_S),
            thresholds=thresholds_of(table.table("thresholds")),
            journal=table.path("journal"),
            host=table.get("host", str, "127.0.0.1"),
            port=table.integer("port", WATCH_PORT, most=65535),
            token=table.secret("token"),
            webhooks=tuple(_webhook(server_table) for server_table in table.tables("notify")),
            prometheus=prometheus,
            kubernetes=kubernetes,
            lease=table.choice("lease", ("journal", "kubernetes"), "journal"),
            lease_namespace=table.get("lease_namespace", str, "default"),
        )


def simple_config(addresses: Sequence[str], act: Sequence[str] = (), **fields: Any) -> SidecarConfig:
    """A configuration without a file: one group that may `notify` and do what `act` names; `fields`: further ones."""
    servers = {place.server: ServerConfig(place, "default") for place in map(endpoint, addresses)}
    return with_more_actions(SidecarConfig(tuple(servers.values()), **fields), act)


def with_more_actions(config: SidecarConfig, act: Sequence[str]) -> SidecarConfig:
    """The configuration with these actions allowed too, in every group; LegroomError for an unknown one."""
    more = frozenset(act)
    if unknown := sorted(more - set(ACTION_NAMES)):
        raise LegroomError(f"there is no action {unknown[0]}", f"one of: {', '.join(ACTION_NAMES)}")
    groups = {name: replace(group, act=group.act | more) for name, group in config.groups.items()}
    return replace(config, act=config.act | more, groups=groups)


def with_interval(config: SidecarConfig, interval_s: float) -> SidecarConfig:
    """The configuration with this scrape interval; LegroomError outside 0.1 to 300 s."""
    if not _SHORTEST_INTERVAL_S <= interval_s <= LONGEST_INTERVAL_S:
        bounds = f"{_SHORTEST_INTERVAL_S:g} and {LONGEST_INTERVAL_S:g} s"
        hint = "scrapes further apart show nothing in time"
        raise LegroomError(f"an interval of {interval_s:g} s is not between {bounds}", hint)
    return replace(config, interval_s=interval_s)


def _server_config(table: TomlTable) -> ServerConfig:
    """The server of a `[[servers]]` table; ConfigError for wrong or unknown keys."""
    try:
        url, token, verify_tls = table.require("url", str), table.secret("token"), table.get("verify_tls", bool, True)
        place = endpoint(url, token, verify_tls=verify_tls, ca_file=_ca_file(table))
    except ConfigError:
        raise
    except LegroomError as error:
        raise table.error("url", error.message, error.hint) from error
    platform = platform_of(table, place.server) if "platform" in table else None
    drain_method = drain_method_of(table.table("drain"), place, platform)
    group = table.get("group", str, "default")
    with table:
        return ServerConfig(place, group, platform, drain_method, _server_plan(table), _flag_answers(table))


def _server_plan(table: TomlTable) -> PlanDocument | None:
    """The plan in the file named by the table's key `plan`; None without it, ConfigError if it is no plan."""
    path = table.path("plan")
    if path is None:
        return None
    try:
        return read_plan(str(path), needs=("layout",))
    except LegroomError as error:
        hint = "write it with: legroom plan ... --json"
        raise table.error("plan", f"{path} is not the JSON of a plan", hint) from error


def _flag_answers(table: TomlTable) -> dict[str, FlagChange]:
    """Detector kind -> flags, of `answers.preemption_thrash = { "--max-num-seqs" = "32" }`; or ConfigError."""
    kinds, known = table.table("answers"), [kind.kind for kind in DETECTORS]
    made: dict[str, FlagChange] = {}
    if kinds is None:
        return made
    for kind, flags_table in kinds.subtables():
        if kind not in known:
            raise kinds.error(kind, "is not something legroom finds", f"one of: {', '.join(known)}")
        for name in flags_table.keys:
            if not name.startswith("--"):
                raise flags_table.error(name, "must be a flag of vLLM, such as --max-num-seqs")
        made[kind] = FlagChange({name: flags_table.require(name, str) for name in flags_table.keys})
    return made


def _group_configs(
    table: TomlTable | None, act: frozenset[str], limits: ActionLimits, servers: Sequence[ServerConfig]
) -> dict[str, GroupConfig]:
    """Group name -> settings, by default `act` and `limits`; ConfigError for a group without a server."""
    groups = {server.group: GroupConfig(server.group, act, limits) for server in servers}
    if table is None:
        return groups
    for name, group_table in table.subtables():
        if name not in groups and servers:
            raise table.error(name, "no server is in this group", f"groups of servers: {', '.join(sorted(groups))}")
        with group_table:
            own = frozenset(group_table.choices("act", ACTION_NAMES, tuple(act)))
            groups[name] = GroupConfig(name, own, _action_limits(group_table.table("limits"), limits))
    return groups


def _action_limits(table: TomlTable | None, defaults: ActionLimits) -> ActionLimits:
    """The limits in the table; keys that it leaves out are those of `defaults`."""
    if table is None:
        return defaults
    with table:
        return ActionLimits(
            per_hour=table.integer("per_hour", defaults.per_hour, most=3600),
            per_day=table.integer("per_day", defaults.per_day, most=86400),
            first_pause_s=table.number("first_pause_s", defaults.first_pause_s),
            longest_pause_s=table.number("longest_pause_s", defaults.longest_pause_s),
            drain_deadline_s=table.number("drain_deadline_s", defaults.drain_deadline_s),
            restart_deadline_s=table.number("restart_deadline_s", defaults.restart_deadline_s, least=1.0),
            most_replicas=table.integer("most_replicas", defaults.most_replicas, least=1),
        )


def thresholds_of(table: TomlTable | None) -> Thresholds:
    """The default thresholds, changed by the table's; ConfigError for an unknown name or a wrong value."""
    if table is None:
        return DEFAULT
    levels: dict[str, Any] = {}
    with table:
        for name, default in ((each.name, getattr(DEFAULT, each.name)) for each in fields(DEFAULT)):
            if isinstance(default, Hold):
                if (hold := table.table(name)) is not None:
                    with hold:
                        samples = hold.integer("samples", default.samples, least=1)
                        levels[name] = Hold(samples, hold.number("seconds", default.seconds, most=1e9))
            elif isinstance(default, int):
                levels[name] = table.integer(name, default, least=1, most=1 << 50)
            else:  # a share is at most 1; as many may wait as run, and more
                is_share = name.endswith("_ratio") and name != "queue_per_running_ratio"
                levels[name] = table.number(name, default, most=1.0 if is_share else 1e15)
    return replace(DEFAULT, **levels)


def _webhook(table: TomlTable) -> Webhook:
    """A webhook with its format and, where a token is given, an Authorization header; ConfigError for a wrong URL."""
    url = table.secret("url")
    if url is None:
        raise table.error("url", "is missing, as url, url_env or url_file")
    try:
        parts = urlsplit(url)
        is_web = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an open bracket, a port that is no number
        is_web = False
    if not is_web:
        raise table.error("url", "must begin with http:// or https://, then a host and a port that exist")
    with table:
        token, style = table.secret("token"), table.choice("format", FORMATS, "json")
        return Webhook(url, style, {"Authorization": f"Bearer {token}"} if token else {})


def _prometheus_config(table: TomlTable | None) -> PrometheusConfig | None:
    """The Prometheus to poll; None without a table, ConfigError for a wrong URL or matcher."""
    if table is None:
        return None
    url, token, matchers = table.require("url", str), table.secret("token"), table.get("matchers", str, "")
    verify_tls, ca_file = table.get("verify_tls", bool, True), _ca_file(table)
    for key, checked in (("url", ""), ("matchers", matchers)):
        try:
            PrometheusSource(url, checked)
        except LegroomError as error:
            raise table.error(key, error.message, error.hint) from error
    with table:
        return PrometheusConfig(url, token, matchers, verify_tls, ca_file)


def _ca_file(table: TomlTable) -> str | None:
    """The path of a PEM file; None where none is given, ConfigError where it holds no certificate."""
    path = table.path("ca_file")
    if path is None:
        return None
    try:
        ssl.create_default_context(cafile=path)
    except OSError as error:  # that of ssl is one too
        raise table.error("ca_file", f"{path} holds no certificates that could be read", "give a PEM file") from error
    return str(path)


def _kubernetes_config(table: TomlTable | None) -> KubernetesConfig | None:
    """The pods to watch; None without a table, ConfigError without a selector."""
    if table is None:
        return None
    with table:
        selector, namespace = table.require("selector", str), table.find("namespace", str)
        return KubernetesConfig(selector, namespace, table.find("context", str))


_DRAINS_BY_ITSELF = (Workload, RunChild)
_PLATFORMS = ("systemd", "docker", "compose", "kubernetes", "supervisord", "run", "command")


def platform_of(table: TomlTable, server: str) -> Platform:
    """The platform that `platform = "systemd"` and its keys name; ConfigError for missing keys."""
    kind = table.choice("platform", _PLATFORMS, "command")
    if kind == "systemd":
        return SystemdUnit(table.require("unit", str), table.get("user", bool, False))
    if kind == "docker":
        return DockerContainer(table.require("container", str), table.integer("stop_s", 60, most=3600))
    if kind == "compose":
        path = table.path("file")
        if path is None:
            raise table.error("file", "is missing: the Compose file")
        return ComposeService(path, table.require("service", str), table.integer("stop_s", 60, most=3600))
    if kind == "kubernetes":
        workload_kind = table.choice("kind", WORKLOAD_KINDS, "deployment")
        name, namespace = table.require("workload", str), table.get("namespace", str, "default")
        return Workload(name, namespace, workload_kind, table.find("container", str), table.find("context", str))
    if kind == "supervisord":
        return SupervisordProgram(table.require("program", str), table.path("config"), table.path("program_file"))
    if kind == "run":
        return RunChild(table.integer("port", urlsplit(server).port or 8000, least=1, most=65535))
    command, settle_s = table.require("restart_command", str), table.number("settle_s", 10.0, most=3600.0)
    return CommandPlatform(command, server, table.path("pid_file"), table.path("flags_file"), settle_s)


def drain_method_of(table: TomlTable | None, place: Endpoint, platform: Platform | None) -> DrainMethod | None:
    """The drain of `drain = { by = "guard" }`; by default the platform's own, else the guard's; None without token."""
    if table is None:
        if isinstance(platform, _DRAINS_BY_ITSELF):
            return PlatformDrain(platform.name)
        token = os.environ.get(GUARD_TOKEN)
        return GuardDrain(place.server, token, place.verify_tls, place.ca_file) if token else None
    with table:
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
