"""What this node gives a container: its GPUs and what is free of them, the driver, /dev/shm, the limit of memory."""

from __future__ import annotations

import os
import shutil
import subprocess

from legroom.live.gpu_memory import GpuMemory, devices
from legroom.live.host_memory import Cgroup
from legroom.records import dataclass
from legroom.units import MIB

_QUERY = "index,name,uuid,memory.total,memory.used,driver_version"
_ASK_S = 20
_SHM = "/dev/shm"


@dataclass(frozen=True, slots=True)
class NodeState:
    """As a process of the container sees it."""

    gpus: tuple[GpuMemory, ...]
    driver: str = ""
    shm_bytes: int | None = None
    memory_limit_bytes: int | None = None


def this_node() -> NodeState:
    gpus, driver = devices(), _driver()
    if not gpus:
        gpus, driver = _asked_of_nvidia_smi()
    limit = cgroup.limit if (cgroup := Cgroup.of()) is not None else None
    return NodeState(gpus, driver, _shm_bytes(), limit[0] if limit else None)


def _driver() -> str:
    try:
        import pynvml  # noqa: PLC0415 - loads the driver's library

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
    rows = [row for row in rows if len(row) == 6 and row[3].isdecimal() and row[4].isdecimal()]
    gpus = (GpuMemory(int(row[0]), row[1], row[2], int(row[3]) * MIB, int(row[4]) * MIB) for row in rows)
    return tuple(gpus), rows[0][5] if rows else ""


def _shm_bytes() -> int | None:
    try:
        stat = os.statvfs(_SHM)
    except OSError:
        return None
    return stat.f_blocks * stat.f_frsize
