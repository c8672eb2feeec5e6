"""What the guard's benchmarks share: one real vLLM that serves each request with or without the guard, and a client.

    vllm serve ... --middleware guard_toggle.Toggle

A request with the header `x-guard: off` goes straight to vLLM, all others through `legroom.guard.Guard`: both sides are
measured on the same server, in the same run, interleaved.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench_harness import ROOT


class Toggle:
    """vLLM's middleware hook: the guard, or nothing."""

    def __init__(self, app: Any) -> None:
        from legroom.guard import Guard

        self.plain, self.guard = app, Guard(app)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        off = scope["type"] == "http" and (b"x-guard", b"off") in scope["headers"]
        await (self.plain if off else self.guard)(scope, receive, send)


class RealServer:
    """A real vLLM with a tiny model, as a context."""

    def __init__(self, python: Path, port: int, *flags: str, env: dict[str, str] | None = None) -> None:
        from tiny_models import SERVE_ENV, serve_words, write_model

        self.folder = tempfile.TemporaryDirectory()
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        model = write_model(Path(self.folder.name) / "tiny")
        # float32: bfloat16 takes AMX instructions, which some virtual machines announce and do not run.
        own = "--dtype float32 --served-model-name tiny --middleware guard_toggle.Toggle"
        words = serve_words(python, model, port, *own.split(), *flags)
        self.log = Path(self.folder.name) / "log"
        paths = os.pathsep.join((str(ROOT / "src"), str(ROOT / "bench")))
        self.words, self.env = words, os.environ | SERVE_ENV | {"PYTHONPATH": paths} | (env or {})

    def __enter__(self) -> RealServer:
        self.child = subprocess.Popen(
            self.words, env=self.env, stdout=self.log.open("w"), stderr=subprocess.STDOUT, start_new_session=True
        )
        until = time.monotonic() + 240
        while time.monotonic() < until:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2)
                return self
            except OSError:
                if self.child.poll() is not None:
                    break
                time.sleep(0.5)
        self.__exit__()
        sys.exit(f"vLLM did not start:\n{self.log.read_text()[-3000:]}")

    def __exit__(self, *_: object) -> None:
        if self.child.poll() is None:
            os.killpg(self.child.pid, signal.SIGINT)
            try:
                self.child.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.child.pid, signal.SIGKILL)
                self.child.wait()

    def metrics(self) -> dict[str, float]:
        return read_metrics(self.url)


def read_metrics(url: str) -> dict[str, float]:
    """Sums of the series on a server's page, labels dropped."""
    sums: dict[str, float] = {}
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as page:
        for line in page.read().decode().splitlines():
            if line and not line.startswith("#"):
                name, value = re.split(r"[{ ]", line, maxsplit=1)[0], float(line.rsplit(" ", 1)[1])
                sums[name] = sums.get(name, 0.0) + value
    return sums


class Connection:
    """A kept connection that does as little as can be done for a request."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def open(self) -> Connection:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def post(
        self, path: str, body: dict[str, Any], guard: bool, key: str = ""
    ) -> tuple[int, dict[str, str], bytes]:
        """`key`: the API key by which the guard tells clients apart; the server asks for none."""
        data = json.dumps(body).encode()
        switch = "" if guard else "x-guard: off\r\n"
        switch += f"authorization: Bearer {key}\r\n" if key else ""
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{switch}content-length: {len(data)}"
        )
        self.writer.write(head.encode() + b"\r\n\r\n" + data)
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        answer = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(lines[0].split()[1]), headers, answer

    def close(self) -> None:
        self.writer.close()
