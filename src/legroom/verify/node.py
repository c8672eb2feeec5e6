"""What this node gives a container: its GPUs and what is free of them, the driver, /dev/shm, the limit of memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from legroom.errors import LegroomError
from legroom.facts.gpus import gpu
from legroom.live.gpu_memory import GpuMemory, devices, visible
from legroom.live.kernel_memory import Cgroup
from legroom.records import dataclass
from legroom.units import GIB, MIB

_QUERY = "index,name,uuid,memory.total,memory.used,driver_version"
_ASK_S = 20
_SHM = "/dev/shm"
_LISTED_CARD = re.compile(r"GPU \d+: .*\(UUID: (?P<uuid>[^)]+)\)")
_LISTED_SLICE = re.compile(r"\s+MIG (?P<profile>\d+g\.\d+gb\S*)\s+Device\s+\d+: \(UUID: (?P<uuid>[^)]+)\)")


@dataclass(frozen=True, slots=True)
class NodeState:
    """As a process of the container sees it."""

    gpus: tuple[GpuMemory, ...]
    driver: str = ""
    shm_bytes: int | None = None
    memory_limit_bytes: int | None = None
    hidden_gpus: int = 0
    """That CUDA_VISIBLE_DEVICES keeps from the server."""


def this_node(visible_devices: str | None = None) -> NodeState:
    """`visible_devices` is the server's CUDA_VISIBLE_DEVICES, where it has any."""
    gpus, driver = devices(), _driver()
    if not gpus:
        gpus, driver = _asked_of_nvidia_smi()
    seen = visible(gpus, visible_devices)
    limit = cgroup.limit if (cgroup := Cgroup.of()) is not None else None
    return NodeState(seen, driver, _shm_bytes(), limit[0] if limit else None, len(gpus) - len(seen))


def _driver() -> str:
    try:
        import pynvml  # loads the driver's library

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except Exception:
        return ""  # no package, or any of NVML's own errors
    return version.decode() if isinstance(version, bytes) else str(version)


def _asked_of_nvidia_smi() -> tuple[tuple[GpuMemory, ...], str]:
    """The same where Python's package for NVML is not installed; nothing where there is no driver either."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return (), ""
    words = [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return (), ""
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines()]
    rows = [row for row in rows if len(row) == 6 and row[0].isdecimal()]
    slices = _slices_listed(program)
    gpus: list[GpuMemory] = []
    for index, name, uuid, total, used, _ in rows:
        if own := slices.get(uuid):
            gpus += (_slice(int(index), name, profile, slice_uuid) for profile, slice_uuid in own)
        elif total.isdecimal() and used.isdecimal():
            gpus.append(GpuMemory(int(index), name, uuid, int(total) * MIB, int(used) * MIB))
    return tuple(gpus), rows[0][5] if rows else ""


def _slices_listed(program: str) -> dict[str, list[tuple[str, str]]]:
    """UUID of a card -> profile and UUID of each of its MIG slices, as `nvidia-smi -L` lists them."""
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_ASK_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    slices: dict[str, list[tuple[str, str]]] = {}
    card = ""
    for line in listed.splitlines():
        if whole := _LISTED_CARD.match(line):
            card = whole["uuid"]
        elif part := _LISTED_SLICE.match(line):
            slices.setdefault(card, []).append((part["profile"], part["uuid"]))
    return slices


def _slice(index: int, card: str, profile: str, uuid: str) -> GpuMemory:
    """What is used of a slice is not listed; its total is known by the profile, or by the gigabytes of its name."""
    name = f"{card} MIG {profile}"
    try:
        total = gpu(name).total_bytes
    except LegroomError:
        total = int(profile.partition(".")[2].partition("gb")[0] or 0) * GIB
    return GpuMemory(index, name, uuid, total, 0)


def _shm_bytes() -> int | None:
    try:
        stat = os.statvfs(_SHM)
    except OSError:
        return None
    return stat.f_blocks * stat.f_frsize
