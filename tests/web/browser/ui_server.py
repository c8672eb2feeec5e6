"""`legroom ui` as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class UiServer:
    """A running page and the way to end it."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url

    def stop(self) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


@contextmanager
def serving_ui(*options: str, port: int = 0) -> Iterator[UiServer]:
    command = [sys.executable, "-m", "legroom", "ui", "--port", str(port), "--json", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    server = UiServer(process, json.loads(process.stdout.readline())["url"])
    try:
        yield server
    finally:
        server.stop()
        process.stdout.close()
