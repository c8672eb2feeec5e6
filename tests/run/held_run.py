"""A `legroom run` of the stand-in, as the tests start it and look at it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from forked import QUICK, Forked, legroom
from free_ports import free_port

from legroom.live.journal.journal import Journal
from legroom.process_table import descendants
from legroom.run.supervisor import Timing

STAND_IN = Path(__file__).with_name("stand_in_vllm.py")


def until(true: Callable[[], Any], patience_s: float = 90.0) -> Any:
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        if value := true():
            return value
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def watched_by(pid: int) -> set[int]:
    """The processes that this one holds a pidfd of; its files come and go while they are read."""
    held = set()
    for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            held |= {int(line[4:]) for line in entry.read_text().splitlines() if line.startswith("Pid:")}
    return held


class Run:
    """One `legroom run` of the stand-in. With words `before` it is a Python of its own, as a user would start it."""

    def __init__(
        self,
        folder: Path,
        port: int,
        own: list[str],
        flags: list[str],
        env: dict[str, str],
        before: Sequence[str] = (),
        timing: Timing = QUICK,
    ) -> None:
        vllm = folder / "vllm"
        vllm.write_text(
            f"#!{sys.executable} -IS\nimport runpy\nrunpy.run_path({str(STAND_IN)!r}, run_name='__main__')\n"
        )
        vllm.chmod(vllm.stat().st_mode | stat.S_IXUSR)
        self.folder, self.port, self.home = folder, port, folder / "home"
        words = ["run", "--vllm", "0.32.0", "--restart-delay", "0", *own, "--"]
        words += [str(vllm), "serve", "tiny", "--port", str(port), *flags]
        env = {"LEGROOM_HOME": str(self.home), **env}
        self.out, self.err = folder / "out", folder / "err"
        self.process: Forked | subprocess.Popen[bytes]
        if not before:
            self.process = legroom(words, self.out, self.err, env, timing)
            return
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [*before, sys.executable, "-m", "legroom", *words], stdout=out, stderr=err, env={**os.environ, **env}
            )

    def said(self, text: str) -> str:
        """The first of legroom's lines that holds this text, once it is there."""

        def find() -> str | None:
            lines = self.err.read_text().splitlines() if self.err.exists() else []
            return next((line for line in lines if line.startswith("legroom: ") and text in line), None)

        return str(until(find))

    def serving(self, times: int = 1) -> None:
        try:
            until(lambda: self.err.exists() and self.err.read_text().count("legroom: serving at") >= times)
        except AssertionError as error:
            raise AssertionError(f"it does not serve: {self.err.read_text() if self.err.exists() else ''}") from error

    def file(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.home / f"runs/{self.port}.json").read_text())
        return record

    def engine(self) -> int:
        below = descendants(self.file()["child_pid"])
        return min(below)

    def everything(self) -> list[int]:
        file = self.file()
        return [file["keeper_pid"], *descendants(file["keeper_pid"])]

    def request(self, max_tokens: int, prompt: str = "x") -> Any:
        body = json.dumps({"prompt": prompt, "max_tokens": max_tokens}).encode()
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as answer:
            return json.load(answer)

    def received(self) -> None:
        """Waits until a request is inside."""
        until(lambda: "Received request" in self.out.read_text())

    def attempt(self, max_tokens: int, prompt: str = "x") -> None:
        """A request that may well be cut off."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            self.request(max_tokens, prompt)

    def incidents(self) -> list[Any]:
        with Journal.open(self.home / "journal.db") as journal:
            return [journal.incident(listed.id) for listed in journal.incidents()]

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(120)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def run(tmp_path: Path, port: int) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(
        *own: str, flags: tuple[str, ...] = (), before: Sequence[str] = (), timing: Timing = QUICK, **env: str
    ) -> Run:
        runs.append(Run(tmp_path, port, list(own), list(flags), env, before, timing))
        return runs[-1]

    yield start
    for started in runs:
        started.process.kill()
        started.process.wait()


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
