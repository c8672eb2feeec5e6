"""`legroom export systemd`: the planned server as a unit that waits for the load, drains and leaves no orphan."""

import argparse
import re
from collections.abc import Iterator

from legroom.errors import LegroomError
from legroom.exports.deploy.containers import OPEN_FILES
from legroom.exports.deploy.exported_server import ExportedServer, add_server_options, guard_drain, requested_server
from legroom.exports.deploy.flag_comments import WRITTEN, comment_lines, plan_headline
from legroom.exports.deploy.named_paths import check_paths
from legroom.exports.deploy.serve_command import API_KEY_NAME, WITHOUT_API_KEY, check_health_is_reachable
from legroom.exports.export_request import ExportedFile, ExportRequest
from legroom.facts.flags import env_default
from legroom.records import dataclass

NAME = "systemd"
HELP = "a systemd unit"
NEEDS_PLAN = True
_RESTART_S = 15
_BURST = 3
_TARGET = "multi-user.target"


def add_options(group: argparse._ArgumentGroup) -> None:
    add_server_options(group)
    group.add_argument("--user", metavar="NAME", default="vllm", help="the user it runs as (default: vllm)")
    group.add_argument("--bin", metavar="FOLDER", default="/opt/vllm/bin", help="where vllm is installed")


def files(request: ExportRequest) -> tuple[ExportedFile, ...]:
    """The .service unit of the server and, where asked for, that of `legroom watch`."""
    server = requested_server(request)
    check_health_is_reachable(server.words)
    check_paths(server, mounted=False)
    user, folder = request.options.get("user", "vllm"), request.options.get("bin", "/opt/vllm/bin").rstrip("/")
    if not folder.startswith("/"):
        raise LegroomError(f"--bin {folder} is not an absolute path", "systemd starts programs by their absolute path")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,30}", user):
        raise LegroomError(f"--user {user!r} is not a user name", "write it like --user vllm")
    made = [ExportedFile(f"{server.name}.service", unit_text(server, user, folder))]
    if server.options.sidecar:
        made.append(ExportedFile(f"{server.name}-watch.service", watch_unit_text(server, user, folder)))
    return tuple(made)


@dataclass(frozen=True, slots=True)
class UnitPlace:
    target: str = _TARGET
    """The target that starts and stops it."""
    after: tuple[str, ...] = ()
    """Units that start before it."""
    starts_with_target: bool = True


def unit_text(server: ExportedServer, user: str, program_folder: str, place: UnitPlace | None = None) -> str:
    """The .service file; `user` runs it, `program_folder` holds `vllm`, `place`: its target and order of start."""
    place = place or UnitPlace()
    sections = [_unit_section(server, place), _service_section(server, user, program_folder)]
    if place.starts_with_target:
        sections.append(iter(("[Install]", f"WantedBy={place.target}")))
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def _unit_section(server: ExportedServer, place: UnitPlace) -> Iterator[str]:
    """The lines of the unit's [Unit] section, below the plan as comments."""
    yield from comment_lines(*plan_headline(server.plan))
    yield "[Unit]"
    yield f"Description=vLLM {server.release.version}: {_escaped_description(server.model)}"
    yield "Wants=network-online.target"
    yield " ".join(("After=network-online.target nvidia-persistenced.service", *place.after))
    if place.target != _TARGET:
        yield f"PartOf={place.target}"
    yield from comment_lines(
        f"It gives up after {_BURST} failed starts in a row; the window is long enough for {_BURST} of the longest."
    )
    yield f"StartLimitIntervalSec={_BURST * (server.times.limit_s + _RESTART_S) + 60}"
    yield f"StartLimitBurst={_BURST}"


def _service_section(server: ExportedServer, user: str, program_folder: str) -> Iterator[str]:
    """The lines of the unit's [Service] section: user, variables, start, stop and restart."""
    yield from ("[Service]", "Type=exec", f"User={user}", f"StateDirectory={server.name}")
    cache = f" VLLM_CACHE_ROOT=%S/{server.name}/cache" if env_default("VLLM_CACHE_ROOT", server.release) else ""
    yield f"Environment=HF_HOME=%S/{server.name}/huggingface{cache}"
    yield from comment_lines(*server.remarks)
    for line in server.env:
        yield from comment_lines(f"{line.name}: {line.why}.")
        yield f"Environment={quoted(f'{line.name}={line.value}', expanded=False)}"
    if server.secrets:
        yield from comment_lines(f"{', '.join(server.secrets)}: in this file, which only root may read.")
        needed = API_KEY_NAME in server.secrets
        yield f"EnvironmentFile={'' if needed else '-'}/etc/{server.name}/secrets.env"
        if needed:
            yield from comment_lines(f"{API_KEY_NAME} must be there: {WITHOUT_API_KEY}.")
            there = f'test -n "${API_KEY_NAME}"'
            yield f"ExecStartPre=/bin/sh -c {quoted(there)}"
    yield f"ExecStart={_exec_start(server, program_folder)}"
    yield from comment_lines("`systemctl start` returns when it serves: " + server.times.sentence() + ".")
    alive = server.address.curl("/health", "-o", "/dev/null")
    yield f"ExecStartPost=/bin/sh -c {quoted(f'while kill -0 $MAINPID; do {alive} && exit 0; sleep 5; done; exit 1')}"
    yield f"TimeoutStartSec={server.times.limit_s}"
    if server.options.guard:
        yield from comment_lines("The guard refuses new requests; the running ones have the drain time to finish.")
        yield f"ExecStop=/bin/sh -c {quoted(guard_drain(server))}"
    elif not server.drains_itself:
        yield from comment_lines(server.stop_sentence())
    yield from comment_lines("SIGTERM goes to the server alone; workers that outlive it are killed: no orphans.")
    yield from ("KillMode=mixed", "KillSignal=SIGTERM")
    stop_s = server.times.stop_s + (server.times.drain_s if server.options.guard else 0)
    yield f"TimeoutStopSec={stop_s}"
    yield from comment_lines("Always, because some releases exit with code 0 when their engine dies.")
    yield from ("Restart=always", f"RestartSec={_RESTART_S}", f"LimitNOFILE={OPEN_FILES}")
    yield from comment_lines("Pinned host memory counts as locked.")
    yield from ("LimitMEMLOCK=infinity", "NoNewPrivileges=yes", "ProtectSystem=full")


def _exec_start(server: ExportedServer, program_folder: str) -> str:
    """The value of ExecStart: the program by absolute path, then one continued line per flag."""
    named = server.words.head[0]
    program = [named if named.startswith("/") else f"{program_folder}/{named}", *server.words.head[1:]]
    phrases = [" ".join(quoted(word) for word in phrase.words) for phrase in server.phrases]
    first = " ".join(quoted(word, expanded=i > 0) for i, word in enumerate([*program, *server.words.model_words]))
    return " \\\n  ".join([first, *phrases])


def watch_unit_text(server: ExportedServer, user: str, program_folder: str) -> str:
    """A unit for `legroom watch`, in `program_folder`, run by `user` and bound to the server's own unit."""
    unit = f"{server.name}.service"
    program = quoted(f"{program_folder}/legroom", expanded=False)
    command = " ".join([program, *(quoted(word) for word in server.address.watch_words())])
    lines = [
        f"# {WRITTEN}",
        "[Unit]",
        f"Description=legroom watch: {_escaped_description(server.model)}",
        f"BindsTo={unit}",
        f"After={unit}",
        "",
        "[Service]",
        "Type=exec",
        f"User={user}",
        f"StateDirectory={server.name}",
        f"Environment=LEGROOM_HOME=%S/{server.name}/legroom",
        f"ExecStart={command}",
        "Restart=always",
        f"RestartSec={_RESTART_S}",
        "NoNewPrivileges=yes",
        "ProtectSystem=full",
        "",
        "[Install]",
        f"WantedBy={unit}",
    ]
    return "\n".join(lines) + "\n"


def quoted(word: str, *, expanded: bool = True) -> str:
    """A word quoted for a unit file; `expanded`: with `$` doubled, as ExecStart needs. LegroomError for a line end."""
    if "\n" in word or "\r" in word:
        raise LegroomError(f"{word.splitlines()[0]!r} goes on in another line", "a unit file cannot hold it")
    text = word.replace("%", "%%")
    if expanded:
        text = text.replace("$", "$$")
    if text and not set(text) & set(" \t'\"\\;"):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _escaped_description(text: str) -> str:
    """The text for `Description=`: one line, with `%` doubled."""
    return text.replace("%", "%%").replace("\n", " ")
