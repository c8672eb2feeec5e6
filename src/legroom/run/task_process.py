"""Runs a task of `tasks.py` in a child process, so that the supervisor itself stays small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import IO, Any

from legroom.errors import LegroomError

StartTask = Callable[[str, IO[bytes], int, IO[bytes]], "subprocess.Popen[bytes]"]
"""Starts a task by name, with its stdin, the file descriptor of its stdout, and its stderr."""


def start_task_process(task: str, question: IO[bytes], answer: int, stderr: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start `python -m legroom.run.tasks TASK` with JSON `question` on stdin and `answer` (fd) as stdout."""
    return subprocess.Popen(
        [sys.executable, "-m", "legroom.run.tasks", task],
        stdin=question,
        stdout=answer,
        stderr=stderr,
        start_new_session=True,
    )


class TaskProcess:
    """One running task. Call `read` whenever `fileno()` is readable."""

    def __init__(self, task: str, question: Mapping[str, Any], start: StartTask = start_task_process) -> None:
        self._stderr = _memory_file()
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""
        self.done = False
        reading, writing = os.pipe()
        self._answer = os.fdopen(reading, "rb", buffering=0)
        with _memory_file() as written:
            written.write(json.dumps(question).encode())
            written.seek(0)
            try:
                self._process = start(task, written, writing, self._stderr)
            except OSError as error:  # no more processes; the server keeps running
                self._stderr.write(str(error).encode())
            finally:
                os.close(writing)

    def fileno(self) -> int:
        return self._answer.fileno()

    def read(self) -> None:
        """Read what the task has written so far, without blocking."""
        piece = self._answer.read(1 << 16) or b""
        self._received += piece
        self.done = not piece

    def answer(self) -> dict[str, Any]:
        """Waits for the task and returns its answer. Raises the task's LegroomError."""
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
        if self._process is not None:
            self._process.kill()
        self._close()

    def _close(self) -> None:
        self._stderr.close()
        self._answer.close()
        if self._process is not None:
            self._process.wait()


def _memory_file() -> IO[bytes]:
    """A file in memory (memfd) for a task's input and output, so that fixes work on a full disk."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("legroom"), "w+b")
    return tempfile.TemporaryFile()  # not Linux


def run_task(task: str, question: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of a task run in a process of its own, waited for."""
    return TaskProcess(task, question).answer()
