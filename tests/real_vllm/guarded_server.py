"""A real vLLM with the guard inside, and the guard's proxy in front of it, for tests and benches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from free_ports import free_port
from metrics_page import metric
from tiny_models import SERVE_ENV, serve_words

from legroom.guard.serving.proxy import Proxy, ProxyOptions
from legroom.guard.serving.upstream import upstream_of

ROOT = Path(__file__).parents[2]
TOKEN = "a token of the tests"
PATIENCE_S = 600.0


class Endpoint:
    """Somewhere that requests are sent to: the server, or the proxy in front of it."""

    def __init__(self, port: int) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"

    def post(self, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[int, dict[str, str], Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, dict(answer.headers), json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, {name.lower(): value for name, value in error.headers.items()}, json.loads(error.read())

    def page(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        return metric(self.url, name)


class GuardedServer(Endpoint):
    """A vLLM that serves with the guard; its policy is a file that is read again when it changes."""

    def __init__(self, python: Path, folder: Path, model: Path, *flags: str, **env: str) -> None:
        super().__init__(free_port())
        self.policy, self.log = folder / "policy.toml", folder / "log"
        self.policy.write_text("[requests]\nmax_output_tokens = 0\n")
        words = serve_words(
            python, model, self.port, "--served-model-name", "tiny", "--middleware", "legroom.guard.Guard", *flags
        )
        paths = os.pathsep.join(path for path in (str(ROOT / "src"), env.pop("PYTHONPATH", "")) if path)
        own = {"LEGROOM_GUARD_POLICY": str(self.policy), "LEGROOM_GUARD_TOKEN": TOKEN, "PYTHONPATH": paths}
        with self.log.open("wb") as log:
            self._child = subprocess.Popen(
                words, env=os.environ | SERVE_ENV | own | env, stdout=log, stderr=log, start_new_session=True
            )

    def wait_until_healthy(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
                return
            except OSError:
                text = self.log.read_text("utf-8", "replace")[-3000:]
                assert self._child.poll() is None and time.monotonic() < until, text
                time.sleep(0.2)

    def set_policy(self, text: str) -> None:
        self.policy.write_text(text)
        time.sleep(1.1)  # the file is looked at once a second

    def close(self) -> None:
        os.killpg(self._child.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()


@contextlib.contextmanager
def guarded_server(python: Path, folder: Path, model: Path, *flags: str, **env: str) -> Iterator[GuardedServer]:
    server = GuardedServer(python, folder, model, *flags, **env)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def proxy_before(server: Endpoint) -> Iterator[tuple[Endpoint, Proxy]]:
    """The proxy in front of a server, once it knows the size of the pool."""
    proxy = Proxy(ProxyOptions(upstream_of(server.url), port=0))
    loop, stop, listening = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
    ports: list[int] = []

    def on_ready(port: int) -> None:
        ports.append(port)
        listening.set()

    thread = threading.Thread(target=lambda: loop.run_until_complete(proxy.run(stop, on_ready)))
    thread.start()
    try:
        assert listening.wait(30)
        until = time.monotonic() + 30
        while not proxy.admission.limits.known and time.monotonic() < until:
            time.sleep(0.05)
        yield Endpoint(ports[0]), proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
