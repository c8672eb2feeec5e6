"""The memory of the worker that this process is, and the board of files that tells the API server of it.

Only what the process already knows is read: PyTorch's own counts and NVML, never a call into CUDA. One from another
thread would break a graph capture that is under way.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from legroom.records import dataclass


@dataclass(frozen=True)
class WorkerMemory:
    """One device of one worker."""

    rank: int
    """Among the workers of its engine, or of all engines where they compute together."""
    gpu: str
    """NVML's index; `cpu` for a worker without a GPU."""
    used_bytes: int | None = None
    """On the whole card, whoever holds it; without a GPU what the process holds of the host's memory."""
    reserved_bytes: int | None = None
    """Taken from the card by PyTorch's allocator."""
    allocated_bytes: int | None = None
    """Of those, handed out."""


def read() -> tuple[WorkerMemory, ...]:
    """Nothing in a process that is no worker, or not yet: its place among the others is not settled."""
    rank = _rank()
    if rank is None:
        return ()
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return (_host(rank),)
    return tuple(memory for device in range(cuda.device_count()) if (memory := _device(cuda, device, rank)))


def _rank() -> int | None:
    groups = sys.modules.get("vllm.distributed.parallel_state")
    world = getattr(groups, "_WORLD", None)
    return None if world is None else int(world.rank)


def _host(rank: int) -> WorkerMemory:
    return WorkerMemory(rank, "cpu", used_bytes=psutil.Process(os.getpid()).memory_info().rss)


def _device(cuda: Any, device: int, rank: int) -> WorkerMemory | None:
    """None where the worker holds nothing: it sees the other workers' GPUs too."""
    counts = cuda.memory_stats(device)
    reserved = counts.get("reserved_bytes.all.current", 0)
    if not reserved:
        return None
    index, used = _card(str(cuda.get_device_properties(device).uuid))
    gpu = str(device) if index is None else str(index)
    return WorkerMemory(rank, gpu, used, int(reserved), int(counts.get("allocated_bytes.all.current", 0)))


def _card(uuid: str) -> tuple[int | None, int | None]:
    """(NVML's index, bytes in use); PyTorch writes a UUID without NVML's prefix."""
    from legroom.live.gpu_memory import devices  # noqa: PLC0415

    for gpu in devices():
        if gpu.uuid.removeprefix("GPU-") == uuid.removeprefix("GPU-"):
            return gpu.index, gpu.used_bytes
    return None, None


PREFIX = "legroom-workers-"


@dataclass(frozen=True)
class Board:
    """A folder that lasts as long as the server, with a file for each process.

    Processes of vLLM have no channel of their own for this, and come and go in ways that differ by release and
    executor.
    """

    folder: Path

    @classmethod
    def create(cls) -> Board:
        """A new one for this server; those of servers that were killed are taken away."""
        for old in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            owner = old.name.removeprefix(PREFIX).partition("-")[0]
            if owner.isdigit() and not psutil.pid_exists(int(owner)):
                shutil.rmtree(old, ignore_errors=True)  # another user's stays
        return cls(Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")))

    def write(self, memory: tuple[WorkerMemory, ...]) -> bool:
        """This process's figures in place of its last; False where the server took the board away."""
        path = self.folder / f"{os.getpid()}.json"
        new = path.with_suffix(".new")
        try:
            new.write_text(json.dumps([asdict(device) for device in memory]), "utf-8")
            new.replace(path)
        except FileNotFoundError:
            return False
        except OSError:
            new.unlink(missing_ok=True)  # a full disk: the last figures grow old by themselves
        return True

    def read(self, fresh_s: float) -> tuple[WorkerMemory, ...]:
        """What the living processes wrote within that time."""
        memory: list[WorkerMemory] = []
        for path in sorted(self.folder.glob("*.json")):
            with contextlib.suppress(OSError, ValueError, TypeError):
                if time.time() - path.stat().st_mtime <= fresh_s and psutil.pid_exists(int(path.stem)):
                    memory += [WorkerMemory(**fields) for fields in json.loads(path.read_text("utf-8"))]
        return tuple(memory)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
