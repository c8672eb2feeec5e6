"""A real vLLM behind the guard, clients that count what becomes of every request, and ways to restart it meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
from free_ports import free_port
from tiny_models import SERVE_ENV, beside_vllm, serve_words, write_model

TOKEN = "a token of the tests"
PATIENCE_S = 600.0
OUTPUT_TOKENS = 96


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


class Load:
    """Clients that send one request after another, half of them streaming, and put every one into a class:

    completed: 200 and every token of it; refused: 503 with Retry-After, so the client knows to come again; nobody
    there: no connection, or none that anything came back on after the door was closed; lost: all else.
    """

    def __init__(self, url: str, model: str, clients: int = 12) -> None:
        self.url, self.model, self.clients = url, model, clients
        self.counts: Counter[str] = Counter()
        self.lost: list[str] = []
        self.closed_s = float("inf")
        """When new work was stopped, on the monotonic clock."""
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(self.clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def until(self, true: Callable[[], object], seconds: float = PATIENCE_S) -> None:
        """Waits while the load goes on. What never comes true is an error that tells what the clients saw."""
        end_s = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end_s, f"{dict(self.counts)}, lost: {self.lost[-3:]}"
            await asyncio.sleep(0.1)

    async def _client(self, number: int) -> None:
        # A connection each: what an idle connection meets when its server goes is no request's fate.
        connector = aiohttp.TCPConnector(force_close=True)
        timeout = aiohttp.ClientTimeout(total=90.0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            while not self._stop.is_set():
                kind = await self._request(session, streaming=number % 2 == 0)
                self.counts[kind] += 1
                if kind != "completed":
                    await asyncio.sleep(0.1)

    async def _request(self, session: aiohttp.ClientSession, streaming: bool) -> str:
        body = {
            "model": self.model,
            "prompt": [5] * 24,
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
            "stream": streaming,
        }
        began_s, status = time.monotonic(), 0
        try:
            async with session.post(f"{self.url}/v1/completions", json=body) as answer:
                status = answer.status
                text = await answer.text()
                if status == 200 and _is_whole(text, streaming):
                    return "completed"
                if status == 503 and "Retry-After" in answer.headers:
                    return "refused"
        except aiohttp.ClientConnectorError:
            return "nobody there"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if status == 0 and began_s >= self.closed_s:
                return "nobody there"
            text = type(error).__name__
        self.lost.append(f"{status or 'no answer'}: {text[:120]}")
        return "lost"


def _is_whole(text: str, streaming: bool) -> bool:
    if not streaming:
        return json.loads(text)["usage"]["completion_tokens"] == OUTPUT_TOKENS
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return lines[-1:] == ["[DONE]"] and len(lines) > 1 and '"error"' not in text


SERVE_FLAGS = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", "64M")
GUARD_FLAGS = ("--middleware", "legroom.guard.Guard")


class HeldServer:
    """vLLM below `legroom run`, with or without the guard inside. Nobody sets a token: the run makes its own."""

    def __init__(self, python: Path, folder: Path, guard: bool) -> None:
        port = free_port()
        self.url, self.model = f"http://127.0.0.1:{port}", str(write_model(folder / "tiny"))
        self._record, self._log = folder / "runs" / f"{port}.json", folder / "run.log"
        words = serve_words(python, Path(self.model), port, *SERVE_FLAGS, *(GUARD_FLAGS if guard else ()))
        env = os.environ | SERVE_ENV | {"PYTHONPATH": beside_vllm(folder), "LEGROOM_HOME": str(folder)}
        with self._log.open("wb") as log:
            self.run = subprocess.Popen(
                [sys.executable, "-m", "legroom", "run", "--", *words], env=env, stdout=log, stderr=log
            )

    def wait_until_up(self, instead_of: int | None = None) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not (self.child not in (None, instead_of) and answers(f"{self.url}/health")):
            assert self.run.poll() is None and time.monotonic() < end_s, self.said()[-3000:]
            time.sleep(0.25)

    @property
    def child(self) -> int | None:
        return json.loads(self._record.read_text())["child_pid"] if self._record.exists() else None

    def restart(self) -> None:
        before = self.child
        self.run.send_signal(signal.SIGHUP)
        self.wait_until_up(instead_of=before)

    def said(self) -> str:
        return self._log.read_text("utf-8", "replace")

    def stop(self) -> None:
        self.run.send_signal(signal.SIGINT)
        try:
            self.run.wait(60)
        except subprocess.TimeoutExpired:
            self.run.kill()


class GuardedServer:
    """vLLM with the guard inside, a script that restarts it, and a sidecar that may call the script."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.folder, self.port, self.own = folder, free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = str(write_model(folder / "tiny"))
        words = serve_words(python, Path(self.model), self.port, *SERVE_FLAGS, *GUARD_FLAGS)
        own = {"PYTHONPATH": beside_vllm(folder), "LEGROOM_GUARD_TOKEN": TOKEN, "LEGROOM_HOME": str(folder)}
        env = SERVE_ENV | own
        start = folder / "start.py"
        start.write_text(
            "import os, subprocess\n"
            f"words, env, folder = {[str(word) for word in words]!r}, {env!r}, {str(folder)!r}\n"
            "log = open(folder + '/log', 'ab')\n"
            "child = subprocess.Popen(words, env=os.environ | env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, "
            "start_new_session=True)\n"
            "open(folder + '/pid', 'w').write(str(child.pid))\n"
        )
        restart = folder / "restart.sh"
        restart.write_text(
            f"#!/bin/sh\nold=$(cat {folder}/pid)\nkill -TERM $old\n"
            f"for n in $(seq 300); do grep -qs '^State:.[^Z]' /proc/$old/status || break; sleep 0.1; done\n"
            f"kill -KILL -$old 2>/dev/null\n{sys.executable} {start}\n"
        )
        restart.chmod(0o755)
        self.start_words, self.restart_words = [sys.executable, str(start)], [str(restart)]
        self._sidecar: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        subprocess.run(self.start_words, check=True)
        self.wait_until_up()

    def wait_until_up(self) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not answers(f"{self.url}/health"):
            assert time.monotonic() < end_s, (self.folder / "log").read_text("utf-8", "replace")[-3000:]
            time.sleep(0.25)

    def start_sidecar(self) -> None:
        config = self.folder / "watch.toml"
        config.write_text(f"""
interval_s = 1
port = {self.own}
journal = "journal.db"
token = "act-token"
[limits]
first_pause_s = 0
drain_deadline_s = 60
restart_deadline_s = {PATIENCE_S:g}
[[servers]]
url = "{self.url}"
platform = "command"
restart_command = "{self.restart_words[0]}"
pid_file = "pid"
drain = {{ by = "guard", token = "{TOKEN}" }}
""")
        code = (
            "import sys; from pathlib import Path; from legroom.sidecar.sidecar import run_sidecar; "
            "from legroom.sidecar.watch_config import read_config; "
            "sys.exit(run_sidecar(read_config(Path(sys.argv[1]))))"
        )
        with (self.folder / "said").open("ab") as said:
            self._sidecar = subprocess.Popen([sys.executable, "-c", code, str(config)], stdout=said, stderr=said)
        end_s = time.monotonic() + 60.0
        while not answers(f"http://127.0.0.1:{self.own}/healthz"):
            assert time.monotonic() < end_s, (self.folder / "said").read_text()
            time.sleep(0.1)

    def ask_for_restart(self) -> dict[str, Any]:
        body = json.dumps({"action": "restart", "server": self.url}).encode()
        asked = urllib.request.Request(f"http://127.0.0.1:{self.own}/act", body, {"Authorization": "Bearer act-token"})
        end_s = time.monotonic() + 60.0
        while True:
            try:
                with urllib.request.urlopen(asked, timeout=10) as answer:
                    held: dict[str, Any] = json.load(answer)
                    return held
            except urllib.error.HTTPError as error:
                # 503: the journal cannot be read yet, which a busy disk delays.
                assert error.code == 503 and time.monotonic() < end_s, (
                    error.read(),
                    (self.folder / "said").read_text(),
                )
                time.sleep(0.2)

    def stop(self) -> None:
        if self._sidecar is not None:
            self._sidecar.terminate()
            self._sidecar.wait(30)
        with contextlib.suppress(OSError, ValueError):
            os.killpg(int((self.folder / "pid").read_text()), signal.SIGKILL)
