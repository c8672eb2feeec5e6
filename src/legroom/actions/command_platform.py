"""A server that a shell command of the user restarts."""

import json
from pathlib import Path
from typing import ClassVar

from legroom.actions import platform
from legroom.actions.programs import process_identity, run_checked
from legroom.records import dataclass


@dataclass(frozen=True)
class CommandPlatform:
    """`restart_command` is run by `sh -c` with LEGROOM_SERVER and, where one is named, LEGROOM_FLAGS_FILE set.
    `pid_file` gives the identity of each start; without it, the server's own start time does."""

    name: ClassVar[str] = "the restart command"
    restart_command: str
    server: str = ""
    pid_file: Path | None = None
    flags_file: Path | None = None
    settle_s: float = 10.0

    async def state(self) -> platform.State:
        """Whether the process in `pid_file` runs; unknown without such a file."""
        if self.pid_file is None:
            return platform.State(None)
        text = platform.read_optional(self.pid_file)
        if text is None:
            return platform.State(None, False)
        try:
            identity = process_identity(int(text.split()[0]))
        except (ValueError, IndexError) as error:
            raise platform.ActionFailed(f"{self.pid_file} holds no process id") from error
        return platform.State(identity, identity is not None)

    async def restart(self, request: platform.RestartRequest) -> None:
        """Run the user's restart command and wait for its end; raises ActionFailed where it fails."""
        env = {"LEGROOM_SERVER": self.server, "LEGROOM_ACTION": request.token}
        if self.flags_file is not None:
            env["LEGROOM_FLAGS_FILE"] = str(self.flags_file)
        words = ["/bin/sh", "-c", self.restart_command]
        await run_checked(words, "the restart command", timeout_s=request.deadline_s, env=env, request=request)

    async def override_place(self) -> platform.Override:
        """The flags file and its present content, to restore; FlagsFixed where no flags file is configured."""
        if self.flags_file is None:
            raise platform.FlagsFixed("no `flags_file` is named for the restart command, so flags cannot be changed")
        return platform.Override(str(self.flags_file), platform.read_optional(self.flags_file))

    async def write_flags(self, change: platform.FlagChange) -> None:
        """Writes the change as JSON to the flags file, for the restart command."""
        place = Path((await self.override_place()).place)
        content = {"flags": dict(change.flags), "env": dict(change.env)}
        platform.write_atomically(place, json.dumps(content, indent=1) + "\n", 0o600)

    async def restore_flags(self, override: platform.Override) -> None:
        """Writes the flags file's earlier content back, or removes the file."""
        platform.restore_file(Path(override.place), override.before)
