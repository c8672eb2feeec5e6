"""The supervisor's side of a task: a question to a process of its own, whose answer can be waited on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import IO, Any, Protocol

from legroom.errors import LegroomError


class TaskProgram(Protocol):
    """A started process that works on a task."""

    def kill(self) -> None:
        """End it."""

    def wait(self) -> int:
        """Collect it."""
        ...


StartTask = Callable[[str, IO[bytes], int, IO[bytes]], TaskProgram]
"""A task's name, what it reads, where it writes its answer, and where it complains."""


def start_python(task: str, question: IO[bytes], answer: int, stderr: IO[bytes]) -> TaskProgram:
    """`python -m legroom.run.tasks TASK`."""
    return subprocess.Popen(
        [sys.executable, "-m", "legroom.run.tasks", task],
        stdin=question,
        stdout=answer,
        stderr=stderr,
        start_new_session=True,
    )


class TaskProcess:
    """One task under way. `fileno()` is readable when there is something to `read`."""

    def __init__(self, task: str, question: Mapping[str, Any], start: StartTask = start_python) -> None:
        self._stderr = _memory_file()
        self._process: TaskProgram | None = None
        self._received = b""
        self.done = False
        reading, writing = os.pipe()
        self._answer = os.fdopen(reading, "rb", buffering=0)
        with _memory_file() as written:
            written.write(json.dumps(question).encode())
            written.seek(0)
            try:
                self._process = start(task, written, writing, self._stderr)
            except OSError as error:  # no process more is to be had; a server that runs goes on
                self._stderr.write(str(error).encode())
            finally:
                os.close(writing)

    def fileno(self) -> int:
        return self._answer.fileno()

    def read(self) -> None:
        """Take in what has been answered so far."""
        piece = self._answer.read(1 << 16) or b""
        self._received += piece
        self.done = not piece

    def answer(self) -> dict[str, Any]:
        """The whole answer; raises what it raised. Waits where it is not done yet."""
        while not self.done:
            self.read()
        self._stderr.seek(0)
        stderr = self._stderr.read().decode("utf-8", "replace").strip()
        self._close()
        try:
            document = json.loads(self._received)
        except ValueError:
            last = stderr.splitlines()[-1] if stderr else "it said nothing"
            raise LegroomError(f"legroom could not work it out: {last}") from None
        if "error" in document:
            error = document["error"]
            raise LegroomError(error["message"], error["hint"], error["exit_code"])
        answer: dict[str, Any] = document["answer"]
        return answer

    def stop(self) -> None:
        """Nobody wants the answer any more."""
        if self._process is not None:
            self._process.kill()
        self._close()

    def _close(self) -> None:
        self._stderr.close()
        self._answer.close()
        if self._process is not None:
            self._process.wait()


def _memory_file() -> IO[bytes]:
    """In memory: a disk that is full or cannot be written to must not keep a server from being fixed."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("legroom"), "w+b")
    return tempfile.TemporaryFile()  # not Linux


def run_task(task: str, question: Mapping[str, Any]) -> dict[str, Any]:
    return TaskProcess(task, question).answer()
