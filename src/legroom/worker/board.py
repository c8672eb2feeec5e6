"""Files through which the workers of one server tell its API server what they hold: one a process, in a private folder.

Processes of vLLM have no channel of their own for this, and come and go in ways that differ by release and executor.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import psutil

from legroom.records import dataclass
from legroom.worker.reading import WorkerMemory

PREFIX = "legroom-workers-"


@dataclass(frozen=True)
class Board:
    """A folder that lasts as long as the server."""

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
