"""The supervisor's side of counsel: a question to a process of its own, whose answer can be waited on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import IO, Any

from legroom.errors import LegroomError


class Asking:
    """One question under way. `fileno()` is readable when there is something to `read`."""

    def __init__(self, task: str, question: Mapping[str, Any]) -> None:
        self._complaint = _passing_file()
        self._process: subprocess.Popen[bytes] | None = None
        with _passing_file() as asked:
            asked.write(json.dumps(question).encode())
            asked.seek(0)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "legroom.run.tasks", task], stdin=asked, stdout=subprocess.PIPE,
                    stderr=self._complaint, start_new_session=True,
                )  # fmt: skip
            except OSError as error:  # no process more is to be had; a server that runs goes on
                self._complaint.write(str(error).encode())
        self._answer: IO[bytes] = (self._process.stdout if self._process else None) or _passing_file()
        self._said = b""
        self.done = False

    def fileno(self) -> int:
        """What to wait on."""
        return self._answer.fileno()

    def read(self) -> None:
        """Take in what has been said so far."""
        piece = os.read(self.fileno(), 1 << 16)
        self._said += piece
        self.done = not piece

    def answer(self) -> dict[str, Any]:
        """The whole answer; raises what it raised. Waits where it is not done yet."""
        while not self.done:
            self.read()
        self._complaint.seek(0)
        complaint = self._complaint.read().decode("utf-8", "replace").strip()
        self._close()
        try:
            document = json.loads(self._said)
        except ValueError:
            last = complaint.splitlines()[-1] if complaint else "it said nothing"
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
        self._complaint.close()
        self._answer.close()
        if self._process is not None:
            self._process.wait()


def _passing_file() -> IO[bytes]:
    """In memory: a disk that is full or cannot be written to must not keep a server from being mended."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("legroom"), "w+b")
    return tempfile.TemporaryFile()  # not Linux


def ask(task: str, question: Mapping[str, Any]) -> dict[str, Any]:
    """Ask and wait."""
    return Asking(task, question).answer()
