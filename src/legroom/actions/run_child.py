"""A server that a `legroom run` holds: SIGHUP drains and restarts it, a file beside its record changes its flags."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from legroom.actions.platform import (
    ActionFailed,
    FlagChange,
    Override,
    RestartRequest,
    State,
    read_if_there,
    write_whole,
)
from legroom.actions.programs import process_identity
from legroom.home import runs_folder
from legroom.records import dataclass
from legroom.vllm.command_line import changes_back

_POLL_S = 0.2


@dataclass(frozen=True)
class RunChild:
    """The `legroom run` that serves on a port of this machine."""

    port: int
    home: Path | None = None
    settle_s: float = 120.0  # it drains before it stops

    @property
    def name(self) -> str:
        return f"`legroom run` on port {self.port}"

    async def state(self) -> State:
        record = self._record()
        if process_identity(int(record["pid"])) is None:
            raise ActionFailed(f"the {self.name} is gone (process {record['pid']})")
        child = int(record.get("child_pid") or 0)
        identity = process_identity(child) if child else None
        return State(identity, identity is not None)

    async def restart(self, asked: RestartRequest) -> None:
        """SIGHUP, and waits until another vLLM runs in the place of the old one."""
        before = await self.state()
        pid = int(self._record()["pid"])
        if self._record().get("state") == "starting" and not self._flags_file().exists():
            # It would not restart what is only starting; whoever asks wants a fresh server, and gets one.
            raise ActionFailed(f"the {self.name} is starting its server already")
        identity = process_identity(pid)
        if asked.launched is not None and identity is not None:
            # The process that does it is the `run` itself, and one signal is one restart: recorded, then sent.
            await asked.launched(0, "")
        try:
            os.kill(pid, signal.SIGHUP)
        except OSError as error:
            raise ActionFailed(f"the {self.name} cannot be signalled: {error.strerror}") from error
        deadline_s = time.monotonic() + asked.deadline_s
        while time.monotonic() < deadline_s:
            now = await self.state()
            if now.identity is not None and now.identity != before.identity:
                return
            await asyncio.sleep(_POLL_S)
        raise ActionFailed(f"the {self.name} did not start another vLLM within {asked.deadline_s:g} s")

    async def override_place(self) -> Override:
        """The file that `run` reads, once, when it restarts. What stands now is the command it runs."""
        words = self._record().get("command")
        if not isinstance(words, list) or not words:
            raise ActionFailed(f"the {self.name} does not say which command it runs")
        return Override(str(self._flags_file()), json.dumps([str(word) for word in words]))

    async def write_flags(self, change: FlagChange) -> None:
        """Flags on top of those it runs with."""
        content = {"flags": dict(change.flags), "env": dict(change.env)}
        write_whole(self._flags_file(), json.dumps(content, indent=1) + "\n", 0o600)

    async def restore_flags(self, override: Override) -> None:
        """The way back from the command that runs to the one that ran: what `run` was told, it keeps."""
        back = changes_back(
            [str(word) for word in self._record().get("command") or []], json.loads(override.before or "[]")
        )
        if back:
            await self.write_flags(FlagChange(back))
        else:
            self._flags_file().unlink(missing_ok=True)

    def _flags_file(self) -> Path:
        return runs_folder(self.home) / f"{self.port}.flags.json"

    def _record(self) -> dict[str, Any]:
        path = runs_folder(self.home) / f"{self.port}.json"
        text = read_if_there(path)
        if text is None:
            raise ActionFailed(f"no `legroom run` is recorded on port {self.port} ({path} is not there)")
        try:
            record: dict[str, Any] = json.loads(text)
            int(record["pid"])
        except (ValueError, KeyError, TypeError) as error:
            raise ActionFailed(f"{path} cannot be read: {error}") from error
        return record
