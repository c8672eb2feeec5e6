"""`legroom doctor`: this machine and every vLLM server on it, read once; nothing is changed."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path, PurePath
from typing import Any, Literal

from legroom.deployments.deployment import KEPT_ENV, Deployment, deployment_from_command
from legroom.diagnosis.log_diagnosis import read_log
from legroom.drawing.terminal import Style
from legroom.errors import ANSWER_IS_NO, OK, UNREACHABLE, LegroomError
from legroom.facts.releases import release
from legroom.live.gpu_memory import GpuMemory, bytes_held_by, visible
from legroom.live.kernel_memory import Cgroup, machine_kills
from legroom.live.server_view import ServerView
from legroom.records import dataclass
from legroom.recover.machine_snapshot import MachineSnapshot, link_target_or_empty, read_machine
from legroom.recover.orphans import classify_holders
from legroom.units import human_bytes
from legroom.verify.node_preflight import NodeState, preflight, read_node_state, shm_bytes
from legroom.vllm.args import served_port
from legroom.vllm_logs.log_sources import pieces_of_file

Rank = Literal["wrong", "watch", "not read"]
_RANKS: tuple[Rank, ...] = ("wrong", "watch", "not read")
_SERVER = re.compile(r"(\S*/)?(python[\d.]*( -[^m]\S*)* (-m vllm\.entrypoints\.|(\S*/)?vllm serve )|vllm serve )")
"""The command line of a server: vLLM's program, or an interpreter with it or with its API server's module."""
_MOST_LINES = 10
_SCRAPE_GAP_S = 0.2  # Three scrapes of a server take less than half a second.


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One thing that is wrong, may become wrong, or could not be read."""

    rank: Rank
    about: str
    message: str


@dataclass(frozen=True, slots=True)
class ServerCheckup:
    """One running server: its state, what it holds, and what its plan says."""

    pid: int
    model: str
    vllm: str
    address: str
    state: str
    log: str | None
    held_bytes: int | None = None
    """GPU memory of all its processes; None where the driver does not tell."""
    planned_bytes: int | None = None
    """The planned peak of all its GPUs."""
    verdict: str | None = None

    @property
    def line(self) -> str:
        """The server in one line: PID, model, release, address, state, GPU memory held and planned."""
        held = f"holds {human_bytes(self.held_bytes)}" if self.held_bytes else "GPU memory not known"
        planned = f" (planned {human_bytes(self.planned_bytes)})" if self.planned_bytes else ""
        return f"PID {self.pid}, {self.model}, vLLM {self.vllm} at {self.address}: {self.state}, {held}{planned}"


@dataclass(frozen=True)
class DoctorReport:
    """The machine, its servers, and all findings, the gravest first."""

    node: NodeState
    servers: tuple[ServerCheckup, ...]
    findings: tuple[DoctorFinding, ...]

    @property
    def exit_code(self) -> int:
        """1 if something is wrong; 3 if nothing is, but there is no GPU; else 0."""
        if any(each.rank == "wrong" for each in self.findings):
            return ANSWER_IS_NO
        return OK if self.node.gpus else UNREACHABLE

    def text(self, style: Style) -> str:
        """At most ten lines: the number of findings by rank, the machine, the servers, then the findings."""
        counts = ", ".join(f"{sum(each.rank == rank for each in self.findings)} {rank}" for rank in _RANKS)
        rows = [("machine", _machine_line(self.node)), *(("server", server.line) for server in self.servers)]
        rows += [(each.rank, f"{each.about}: {each.message}") for each in self.findings]
        if len(rows) >= _MOST_LINES:
            shown = _MOST_LINES - 2
            rows = [*rows[:shown], ("more", f"{len(rows) - shown} more lines in --json")]
        lines = (f"  {name:10}{' '.join(text.split())}" for name, text in rows)
        return "\n".join([style.paint(f"legroom doctor: {counts}", "bold"), *lines]) + "\n"

    def to_json(self) -> dict[str, Any]:
        parts = {"servers": list(map(asdict, self.servers)), "findings": list(map(asdict, self.findings))}
        return {"ok": self.exit_code == OK, "machine": self.node.to_json(), **parts}


def doctor() -> DoctorReport:
    """Checks GPUs, processes, /dev/shm, and each running server's plan, metrics and log; the worst findings first."""
    node = read_node_state()
    snapshot = replace(read_machine(), gpus=node.gpus)
    found = list(_machine_findings(snapshot, node))
    lines = {pid: _proc_strings(pid, "cmdline") for pid in snapshot.processes}
    started = {pid: words for pid, words in lines.items() if _SERVER.match(" ".join(words))}
    # Processes that a server forked have its command line too.
    top = {pid: words for pid, words in started.items() if snapshot.processes[pid].parent not in started}
    servers = tuple(_checkup_of_server(snapshot, node, pid, words, found) for pid, words in top.items())
    if not servers:
        found.append(DoctorFinding("not read", "servers", "no running vLLM server was seen on this machine"))
    return DoctorReport(node, servers, tuple(sorted(found, key=lambda each: _RANKS.index(each.rank))))


def _machine_line(node: NodeState) -> str:
    """The machine in one line: its GPUs, the driver, the sizes of /dev/shm and of the memory limit."""
    names = [card.name for card in node.gpus]
    cards = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "no NVIDIA GPU"
    sizes = {"/dev/shm": node.shm_bytes, "memory limit": node.memory_limit_bytes}
    parts = (f"{name} {human_bytes(size)}" if size else f"no {name}" for name, size in sizes.items())
    return "; ".join([cards, f"driver {node.driver or 'not known'}", *parts])


def _machine_findings(snapshot: MachineSnapshot, node: NodeState) -> Iterator[DoctorFinding]:
    """What is wrong with the machine itself: leftovers of dead servers, OOM kills, and what could not be read."""
    if not node.gpus:
        message = "neither NVML nor nvidia-smi answers: no memory, no processes, no driver of a card"
        yield DoctorFinding("not read", "GPU", message)
    if snapshot.hides_others or any(not each.is_readable for each in snapshot.processes.values() if each.is_python):
        yield DoctorFinding("not read", "processes", "some belong to other users; root sees them")
    for holder in classify_holders(snapshot):
        if holder.state in ("dead", "suspect") and holder.process is not None and holder.process.pid == holder.top:
            held = human_bytes(sum(snapshot.gpu_bytes(each.pid) for each in snapshot.tree(holder.top)))
            message = f"{holder.what} holds {held} of GPU memory: {holder.reason}; `legroom recover` frees it"
            yield DoctorFinding("wrong" if holder.state == "dead" else "watch", f"PID {holder.top}", message)
    if kills := machine_kills():
        yield DoctorFinding("watch", "host memory", f"the kernel has ended {kills} processes since boot for memory")


def _proc_strings(pid: int, file_name: str) -> list[str]:
    """The NUL-separated strings of /proc/PID/`file_name`, such as `environ`; empty where not permitted."""
    try:
        return Path(f"/proc/{pid}/{file_name}").read_bytes().decode("utf-8", "replace").rstrip("\0").split("\0")
    except OSError:
        return []


def _checkup_of_server(
    snapshot: MachineSnapshot, node: NodeState, pid: int, command_words: list[str], findings: list[DoctorFinding]
) -> ServerCheckup:
    """The checkup of the server with this PID and command line; what is wrong is appended to `findings`."""
    # Its log is the file that it prints to, unless that is a terminal, a pipe or a journal.
    targets = (link_target_or_empty(f"/proc/{pid}/fd/{number}") for number in (1, 2))
    log = next((path for path in targets if not path.startswith("/dev/") and Path(path).is_file()), None)
    about = f"PID {pid}"
    env = dict(word.split("=", 1) for word in _proc_strings(pid, "environ") if "=" in word)
    line = shlex.join(["env", *(f"{name}={env[name]}" for name in env if KEPT_ENV.fullmatch(name)), *command_words])
    try:
        deployment = deployment_from_command(line)
    except LegroomError as error:
        findings.append(DoctorFinding("not read", about, f"its command line: {error.message}"))
        return ServerCheckup(pid, "a model", "(not known)", "(not known)", "not read", log)
    address = f"127.0.0.1:{served_port(deployment.args)}"
    view, version = _view_and_version(address, pid)
    if version := version or _installed_release(pid, command_words[0]):
        deployment = deployment_from_command(line, release(version))
    own = frozenset(each.pid for each in snapshot.tree(pid))
    shown = str(deployment.release) if version else f"{deployment.release} (assumed)"
    state, model = view.state if view is not None else "not reachable from here", deployment.args.model or "a model"
    checkup = ServerCheckup(pid, model, shown, address, state, log, bytes_held_by(own, node.gpus))
    cards = tuple(_without_processes(card, own) for card in visible(node.gpus, env.get("CUDA_VISIBLE_DEVICES")))
    if cards:
        checkup = _with_plan(checkup, deployment, replace(node, gpus=cards), findings)
    findings += (DoctorFinding(rank, about, message) for rank, message in _server_findings(view, address, log, pid))
    return checkup


def _with_plan(
    checkup: ServerCheckup, deployment: Deployment, node: NodeState, findings: list[DoctorFinding]
) -> ServerCheckup:
    """The checkup with the plan's peak and verdict, if it can be planned; preflight's are added to `findings`."""
    pid, about = checkup.pid, f"PID {checkup.pid}"
    limit = cgroup.limit if (cgroup := Cgroup.of(pid)) is not None else None
    shared = shm_bytes(f"/proc/{pid}/root/dev/shm")
    place = replace(node, shm_bytes=shared, memory_limit_bytes=limit[0] if limit else None)
    try:
        answer = preflight(deployment.args, deployment.release, place)
    except LegroomError as error:
        findings.append(DoctorFinding("not read", about, f"cannot be planned: {error.message}"))
        return checkup
    ranks: dict[str, Rank] = {"failure": "wrong", "warning": "watch"}
    for check in answer.checks:
        if rank := ranks.get(check.finding):
            when = "the next start: " if check.name == "memory" else ""
            findings.append(DoctorFinding(rank, about, f"{check.name}: {when}{check.message}"))
    if answer.plan is None:
        return checkup
    layout, gpus = answer.plan.layout, max(deployment.args.gpus_needed, 1)
    own_bytes = layout.peak_used_bytes - layout.held_by_others_bytes
    return replace(checkup, planned_bytes=own_bytes * gpus, verdict=answer.plan.verdict)


def _without_processes(card: GpuMemory, pids: frozenset[int]) -> GpuMemory:
    """The card as if these processes held nothing; as if empty where the driver lists no processes."""
    others = card.used_bytes - sum(size for pid, size in card.processes if pid in pids) if card.processes else 0
    return replace(card, used_bytes=max(others, 0))


def _installed_release(pid: int, interpreter: str) -> str | None:
    """The vLLM release installed beside a process's Python `interpreter`, as that process sees files; or None."""
    prefix = Path(f"/proc/{pid}/root{PurePath(interpreter).parent.parent}")
    name = next((path.name for path in prefix.glob("lib/python3*/*-packages/vllm-*.dist-info")), "")
    return name.removeprefix("vllm-").removesuffix(".dist-info").partition("+")[0] or None


def _view_and_version(address: str, pid: int) -> tuple[ServerView | None, str | None]:
    """(State by its metrics, vLLM release); each None if unknown, both in another network namespace."""
    from legroom.live.running_server import running_server
    from legroom.sidecar.watch_config import simple_config
    from legroom.sidecar.watch_session import WatchSession, check_once

    if link_target_or_empty(f"/proc/{pid}/ns/net") != link_target_or_empty("/proc/self/ns/net"):
        return None, None
    session = WatchSession()
    check_once(simple_config([address]), session, _SCRAPE_GAP_S)
    view = next(iter(session.views.values()), None)
    try:
        return view, running_server(address).version
    except LegroomError:  # it starts, is stuck, or asks for a key
        return view, None


def _server_findings(view: ServerView | None, address: str, log: str | None, pid: int) -> Iterator[tuple[Rank, str]]:
    """(Rank, sentence) of each problem in metrics, log and the kernel's counters; "not read" where one is None."""
    if view is None:
        yield "not read", "metrics: it has a network of its own; run doctor inside its container"
    elif view.state == "unreachable":
        yield "watch", f"no answer at {address}: it starts, is stuck, or listens elsewhere"
    elif view.has_incident:
        yield "wrong" if view.state == "critical" else "watch", view.sentence
    try:
        runs = read_log(pieces_of_file(log), log).runs if log else ()
    except LegroomError as error:
        runs = ()
        yield "not read", f"log: {error.message}"
    if runs and runs[0].verdict == "cause found":
        yield "wrong", f"its log shows {runs[0].findings[0].cause}: see `legroom diagnose {log}`"
    elif log is None:
        yield "not read", "log: its output goes to no file here; pipe it into `legroom diagnose -`"
    if (cgroup := Cgroup.of(pid)) is not None and (kills := cgroup.kills):
        yield "watch", f"the kernel has ended {kills} processes of its cgroup for memory"
