"""Checks whether a server's command can run on this node: its GPUs, driver, /dev/shm and memory limit."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Literal

from legroom.errors import UNREACHABLE, LegroomError
from legroom.facts.gpus import gpu
from legroom.facts.release_support import build_of, driver_is_older
from legroom.facts.releases import Release
from legroom.live.gpu_memory import GpuMemory, nvml_devices, visible
from legroom.live.kernel_memory import Cgroup
from legroom.planning.machine import Machine, make_plan
from legroom.planning.plan import Plan
from legroom.planning.plan_json import plan_json
from legroom.records import dataclass
from legroom.units import GIB, MIB, gib, human_bytes
from legroom.vllm.args import ServeArgs
from legroom.vllm.command_line import any_release_words

CheckFinding = Literal["ok", "warning", "failure"]
_DOCKER_SHM_BYTES = 64 * MIB  # Docker's default /dev/shm, with which NCCL fails at once.
_QUERY = "index,name,uuid,memory.total,memory.used,driver_version"
_APPS_QUERY = "gpu_uuid,pid,used_memory"
_CSV = ("--format=csv,noheader,nounits",)
_LISTED_CARD = re.compile(r"GPU \d+: .*\(UUID: (?P<uuid>[^)]+)\)")
_LISTED_SLICE = re.compile(r"\s+MIG (?P<profile>\d+g\.\d+gb\S*)\s+Device\s+\d+: \(UUID: (?P<uuid>[^)]+)\)")
_HIDDEN_HINT = "inside a container the GPUs are numbered from 0, whichever of the node's they are: leave it out there"
_NO_GPU = "this container sees no NVIDIA GPU"
_NO_GPU_HINT = "give it nvidia.com/gpu in its limits, as the server's own container has it, and check the node's driver"


@dataclass(frozen=True, slots=True)
class NodeState:
    """What a process of this container can use."""

    gpus: tuple[GpuMemory, ...]
    driver: str = ""
    shm_bytes: int | None = None
    memory_limit_bytes: int | None = None
    hidden_gpus: int = 0
    """GPUs excluded by CUDA_VISIBLE_DEVICES."""

    def to_json(self) -> dict[str, Any]:
        names = ("name", "total_bytes", "used_bytes")
        gpus = [{name: getattr(card, name) for name in names} for card in self.gpus]
        limits = {"shm_bytes": self.shm_bytes, "memory_limit_bytes": self.memory_limit_bytes}
        return {"gpus": gpus, "driver": self.driver, **limits}


@dataclass(frozen=True, slots=True)
class NodeCheck:
    name: Literal["gpus", "memory", "driver", "shm"]
    finding: CheckFinding
    message: str


@dataclass(frozen=True)
class Preflight:
    """The checks, and the plan they are based on."""

    node: NodeState
    checks: tuple[NodeCheck, ...]
    plan: Plan | None = None

    @property
    def ok(self) -> bool:
        """Whether no check failed; warnings pass."""
        return all(check.finding != "failure" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "node": self.node.to_json(),
            "checks": [asdict(check) for check in self.checks],
            "plan": plan_json(self.plan) if self.plan is not None else None,
        }


def preflight(args: ServeArgs, release: Release, node: NodeState, host_memory: str | None = None) -> Preflight:
    """Checks whether a server with these flags can run on the node; `host_memory` overrides the node's memory limit.
    LegroomError where the node has no GPU."""
    if not node.gpus and node.hidden_gpus:
        hidden = f"CUDA_VISIBLE_DEVICES hides all {node.hidden_gpus} GPUs of this container"
        raise LegroomError(hidden, _HIDDEN_HINT, UNREACHABLE)
    if not node.gpus:
        raise LegroomError(_NO_GPU, _NO_GPU_HINT, UNREACHABLE)
    needed = max(args.gpus_needed, 1)
    there = len(node.gpus)
    if needed > there:
        hidden = f" ({node.hidden_gpus} more are hidden by CUDA_VISIBLE_DEVICES)" if node.hidden_gpus else ""
        message = f"the flags ask for {needed} GPUs, and this container sees {there}{hidden}"
        return Preflight(node, (NodeCheck("gpus", "failure", message), *_driver_checks(node, release)))
    limit = host_memory or (str(node.memory_limit_bytes) if node.memory_limit_bytes else None)
    fullest = max(node.gpus[:needed], key=lambda card: card.used_bytes)
    plan = make_plan(args, release, _machine_of_card(fullest, there, limit))
    checks = (_gpu_check(node, needed), _memory_check(plan, fullest))
    return Preflight(node, (*checks, *_driver_checks(node, release), *_shm_checks(plan, node, needed)), plan)


def _machine_of_card(card: GpuMemory, count: int, host_memory: str | None) -> Machine:
    """A machine with `count` GPUs like this card, as much used as it is now, without the driver's reserve, which NVML
    counts as used and CUDA does not count at all."""
    name, reserved = card.name, 0
    try:
        reserved = max(card.total_bytes - gpu(name).total_bytes, 0)
    except LegroomError:  # not in the facts
        name = f"{card.total_bytes / MIB:.0f}MiB"
    return Machine(name, count, used=str(max(card.used_bytes - reserved, 0)), host_memory=host_memory)


def _gpu_check(node: NodeState, gpus_needed: int) -> NodeCheck:
    """Whether the node has enough GPUs; a warning where several are needed and their names differ."""
    names = sorted({card.name for card in node.gpus})
    if len(names) > 1 and gpus_needed > 1:
        return NodeCheck("gpus", "warning", f"the GPUs differ ({', '.join(names)}): the smallest decides")
    return NodeCheck("gpus", "ok", f"{gpus_needed} of {len(node.gpus)} x {names[0]}")


def _memory_check(plan: Plan, card: GpuMemory) -> NodeCheck:
    """Whether the plan fits the card's free memory, else with the error with which vLLM would stop."""
    free = f"{human_bytes(card.total_bytes - card.used_bytes)} of GPU {card.index} are free"
    if plan.verdict == "fits":
        return NodeCheck("memory", "ok", f"the server fits; {free}")
    fix = f"; {' '.join(any_release_words(plan.advice[0].flags))} would start" if plan.advice else ""
    if plan.verdict == "tight":
        return NodeCheck("memory", "warning", f"tight: {plan.reason}; {free}{fix}")
    failure = plan.memory.failure
    words = failure.message.partition(". ")[0].rstrip(".") if failure is not None else plan.reason
    return NodeCheck("memory", "failure", f"vLLM would stop with: {words}; {free}{fix}")


def _driver_checks(node: NodeState, release: Release) -> Iterator[NodeCheck]:
    """A warning where the driver is older than the release's CUDA needs; nothing where either is unknown."""
    build = build_of(release)
    oldest = build.oldest_driver
    if not node.driver or oldest is None:
        return
    if driver_is_older(node.driver, oldest):
        made_for = f"which CUDA {build.cuda} of vLLM {release} was made for"
        yield NodeCheck("driver", "warning", f"driver {node.driver} is older than {oldest}, {made_for}")
    else:
        yield NodeCheck("driver", "ok", f"driver {node.driver} serves CUDA {build.cuda}")


def _shm_checks(plan: Plan, node: NodeState, ranks: int) -> Iterator[NodeCheck]:
    """Whether /dev/shm is large enough for the ranks; no check for one rank or where its size is unknown."""
    there, wanted = node.shm_bytes, plan.host.shm_bytes
    if there is None or ranks < 2:
        return
    text = f"/dev/shm has {human_bytes(there)}"
    if there <= _DOCKER_SHM_BYTES:
        fix = f"mount an emptyDir with medium Memory of {gib(wanted, 0)}"
        yield NodeCheck("shm", "failure", f"{text}, and {ranks} ranks talk through it: {fix}")
    elif there < wanted:
        yield NodeCheck("shm", "warning", f"{text}, and {gib(wanted, 0)} may be used")
    else:
        yield NodeCheck("shm", "ok", text)


def read_node_state(visible_devices: str | None = None) -> NodeState:
    """The state of this node, with the GPUs that the server's CUDA_VISIBLE_DEVICES selects (None: all)."""
    gpus, driver = nvml_devices(), _driver_version()
    if not gpus:
        gpus, driver = gpus_from_nvidia_smi()
    seen = visible(gpus, visible_devices)
    limit = cgroup.limit if (cgroup := Cgroup.of()) is not None else None
    return NodeState(seen, driver, shm_bytes(), limit[0] if limit else None, len(gpus) - len(seen))


def _driver_version() -> str:
    """The NVIDIA driver's version; empty where NVML does not tell."""
    try:
        import pynvml  # loads the driver's library

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except Exception:
        return ""  # no package, or any of NVML's own errors
    return version.decode() if isinstance(version, bytes) else str(version)


def gpus_from_nvidia_smi() -> tuple[tuple[GpuMemory, ...], str]:
    """(GPUs, driver version) by nvidia-smi, for where nvidia-ml-py is missing; both empty without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return (), ""
    listed = _command_output([program, f"--query-gpu={_QUERY}", *_CSV])
    rows = [[field.strip() for field in line.split(",")] for line in listed.splitlines()]
    rows = [row for row in rows if len(row) == 6 and row[0].isdecimal()]
    slices = _mig_slices(program)
    holders: dict[str, list[tuple[int, int]]] = {}
    for line in _command_output([program, f"--query-compute-apps={_APPS_QUERY}", *_CSV]).splitlines():
        uuid, pid, size = (*(field.strip() for field in line.split(",")), "", "")[:3]
        if pid.isdecimal():
            holders.setdefault(uuid, []).append((int(pid), int(size) * MIB if size.isdecimal() else 0))
    gpus: list[GpuMemory] = []
    for index, name, uuid, total, used, _ in rows:
        if card_slices := slices.get(uuid):
            gpus += (_mig_slice(int(index), name, profile, slice_uuid) for profile, slice_uuid in card_slices)
        elif total.isdecimal() and used.isdecimal():
            processes = tuple(holders.get(uuid, ()))
            gpus.append(GpuMemory(int(index), name, uuid, int(total) * MIB, int(used) * MIB, processes))
    return tuple(gpus), rows[0][5] if rows else ""


def _mig_slices(program: str) -> dict[str, list[tuple[str, str]]]:
    """Card UUID -> (profile, UUID) of each of its MIG slices, by `nvidia-smi -L`; `program`: nvidia-smi's path."""
    slices: dict[str, list[tuple[str, str]]] = {}
    card = ""
    for line in _command_output([program, "-L"]).splitlines():
        if whole := _LISTED_CARD.match(line):
            card = whole["uuid"]
        elif part := _LISTED_SLICE.match(line):
            slices.setdefault(card, []).append((part["profile"], part["uuid"]))
    return slices


def _mig_slice(index: int, card_name: str, profile: str, uuid: str) -> GpuMemory:
    """A MIG slice, its total from the profile; its used memory, which nvidia-smi does not list, counts as 0."""
    name = f"{card_name} MIG {profile}"
    try:
        total = gpu(name).total_bytes
    except LegroomError:
        total = int(profile.partition(".")[2].partition("gb")[0] or 0) * GIB
    return GpuMemory(index, name, uuid, total, 0)


def _command_output(command: list[str]) -> str:
    """The command's stdout, whatever its exit code; empty if it cannot be run or takes over 20 s."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def shm_bytes(folder: str = "/dev/shm") -> int | None:
    """The size of a shared-memory folder, used or not; None where there is none."""
    try:
        stat = os.statvfs(folder)
    except OSError:
        return None
    return stat.f_blocks * stat.f_frsize
