"""A legroom command that stays, in a process of its own, as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from urllib.parse import urlsplit


class Spawned:
    """It has said where it listens (`--json`)."""

    def __init__(self, *words: str, **env: str) -> None:
        command = [sys.executable, "-m", "legroom", *words, "--json"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **env}
        )
        assert self.process.stdout is not None
        self.where = json.loads(self.process.stdout.readline())
        self.url: str = self.where["url"]
        port = urlsplit(self.url).port
        assert port is not None
        self.port = port

    def end(self) -> tuple[int, str]:
        """As Ctrl-C does it: the exit code, and what it said on standard error."""
        self.process.send_signal(signal.SIGINT)
        _, errors = self.process.communicate(timeout=120)
        return self.process.returncode, errors
