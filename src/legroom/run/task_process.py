"""Runs a task of `tasks.py` in a child process, so that the supervisor itself stays small."""

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


def start_task_process(task: str, stdin: IO[bytes], stdout: int, stderr: IO[bytes]) -> subprocess.Popen[bytes]:
    """Starts `python -m legroom.run.tasks TASK`; `stdin` and `stdout` carry its input and output JSON."""
    words = [sys.executable, "-m", "legroom.run.tasks", task]
    return subprocess.Popen(words, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True)


class TaskProcess:
    """One running task. Call `read` whenever `fileno()` is readable."""

    def __init__(self, task: str, task_input: Mapping[str, Any], start: StartTask = start_task_process) -> None:
        self._stderr = _memory_file()
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""
        self.done = False
        reading, writing = os.pipe()
        self._stdout = os.fdopen(reading, "rb", buffering=0)
        with _memory_file() as written:
            written.write(json.dumps(task_input).encode())
            written.seek(0)
            try:
                self._process = start(task, written, writing, self._stderr)
            except OSError as error:  # no more processes; the server keeps running
                self._stderr.write(str(error).encode())
            finally:
                os.close(writing)

    def fileno(self) -> int:
        return self._stdout.fileno()

    def read(self) -> None:
        """Reads what the task has written since the last call; sets `done` at the end of its output."""
        piece = self._stdout.read(1 << 16) or b""
        self._received += piece
        self.done = not piece

    def output(self) -> dict[str, Any]:
        """Waits for the task's end; its output, or LegroomError where it raised one or wrote no output."""
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
        output: dict[str, Any] = document["answer"]
        return output

    def stop(self) -> None:
        """Kills the task."""
        if self._process is not None:
            self._process.kill()
        self._close()

    def _close(self) -> None:
        """Closes the task's output and waits for its end."""
        self._stderr.close()
        self._stdout.close()
        if self._process is not None:
            self._process.wait()


def _memory_file() -> IO[bytes]:
    """A file in memory (memfd) for a task's input and output, so that fixes work on a full disk."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("legroom"), "w+b")
    return tempfile.TemporaryFile()  # not Linux


def run_task(task: str, task_input: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a task in a process of its own and returns its output."""
    return TaskProcess(task, task_input).output()
