"""The board of files by which a server's processes tell each other of their memory, and are asked for a record."""

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
from legroom.worker.memory import WorkerMemory

PREFIX = "legroom-workers-"
_ASKED = "asked"


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

    def ask(self) -> None:
        """Ask every worker for a record. Called by a handler of signals, so it is one call and raises nothing."""
        with contextlib.suppress(OSError):
            (self.folder / _ASKED).touch()

    def asked_s(self) -> float:
        """When a record was last asked for; 0 if never."""
        try:
            return (self.folder / _ASKED).stat().st_mtime
        except OSError:
            return 0.0

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
