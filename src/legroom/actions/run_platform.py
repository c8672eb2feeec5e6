"""A server that `legroom run` supervises: SIGHUP restarts it, and a file beside its run file changes its flags."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from legroom.actions import platform
from legroom.actions.programs import process_identity
from legroom.files import runs_folder
from legroom.masking import SECRET_FLAGS
from legroom.records import dataclass
from legroom.vllm.command_line import changes_back


@dataclass(frozen=True)
class RunChild:
    """The `legroom run` of a port of this machine."""

    port: int
    home: Path | None = None
    settle_s: float = 120.0  # it drains before it stops

    @property
    def name(self) -> str:
        """`legroom run` and its port, for messages."""
        return f"`legroom run` on port {self.port}"

    async def state(self) -> platform.State:
        """Whether the vLLM process of the `legroom run` lives; ActionFailed where the `legroom run` does not."""
        record = self._run_record()
        if process_identity(int(record["pid"])) is None:
            raise platform.ActionFailed(f"the {self.name} is gone (process {record['pid']})")
        child = int(record.get("child_pid") or 0)
        identity = process_identity(child) if child else None
        return platform.State(identity, identity is not None, record.get("state") in ("starting", "restarting"))

    async def restart(self, request: platform.RestartRequest) -> None:
        """Sends SIGHUP and waits for a new vLLM process; ActionFailed without one by the deadline."""
        before = await self.state()
        pid = int(self._run_record()["pid"])
        if self._run_record().get("state") == "starting" and not self._flags_file().exists():
            # `legroom run` does not restart a server that is starting without changes.
            raise platform.ActionFailed(f"the {self.name} is starting its server already")
        identity = process_identity(pid)
        if request.launched is not None and identity is not None:
            # The run itself restarts the server, so there is no restart program to record.
            await request.launched(0, "")
        try:
            os.kill(pid, signal.SIGHUP)
        except OSError as error:
            raise platform.ActionFailed(f"the {self.name} cannot be signalled: {error.strerror}") from error
        deadline_s = time.monotonic() + request.deadline_s
        while time.monotonic() < deadline_s:
            now = await self.state()
            if now.identity is not None and now.identity != before.identity:
                return
            await asyncio.sleep(0.2)
        raise platform.ActionFailed(f"the {self.name} did not start another vLLM within {request.deadline_s:g} s")

    async def override_place(self) -> platform.Override:
        """The file of changes that `legroom run` reads at its next restart; `before` is the running command."""
        words = self._run_record().get("command")
        if not isinstance(words, list) or not words:
            raise platform.ActionFailed(f"the {self.name} does not say which command it runs")
        return platform.Override(str(self._flags_file()), json.dumps([str(word) for word in words]))

    async def write_flags(self, change: platform.FlagChange) -> None:
        """Writes the file of flags that `legroom run` adds to its command at the next restart."""
        content = {"flags": dict(change.flags), "env": dict(change.env)}
        platform.write_atomically(self._flags_file(), json.dumps(content, indent=1) + "\n", 0o600)

    async def restore_flags(self, override: platform.Override) -> None:
        """Writes, to the run's flags file, the changes that turn its command back into the one in `override`."""
        words = [str(word) for word in self._run_record().get("command") or []]
        changes = changes_back(words, json.loads(override.before or "[]"))
        back = {name: value for name, value in changes.items() if name not in SECRET_FLAGS}  # the file has no values
        if back:
            await self.write_flags(platform.FlagChange(back))
        else:
            self._flags_file().unlink(missing_ok=True)

    def _flags_file(self) -> Path:
        """The path of the file with changed flags for the `legroom run` on this port."""
        return runs_folder(self.home) / f"{self.port}.flags.json"

    def _run_record(self) -> dict[str, Any]:
        """The JSON of the run file of the `legroom run` on this port; ActionFailed if there is none."""
        path = runs_folder(self.home) / f"{self.port}.json"
        text = platform.read_optional(path)
        if text is None:
            raise platform.ActionFailed(f"no `legroom run` is recorded on port {self.port} ({path} is not there)")
        try:
            record: dict[str, Any] = json.loads(text)
            int(record["pid"])
        except (ValueError, KeyError, TypeError) as error:
            raise platform.ActionFailed(f"{path} cannot be read: {error}") from error
        return record
