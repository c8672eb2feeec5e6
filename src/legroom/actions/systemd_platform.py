"""A server that systemd runs as a unit. Flags are changed by a drop-in file."""

import os
from pathlib import Path

from legroom.actions import platform
from legroom.actions.programs import run_checked, run_program
from legroom.records import dataclass
from legroom.vllm.command_line import with_flags

_PREFIXES = "@-:+!"  # of the program in ExecStart


@dataclass(frozen=True)
class SystemdUnit:
    """One unit of the system's or the user's systemd."""

    unit: str
    user: bool = False
    folder: Path | None = None
    settle_s: float = 95.0  # systemd's own default gives a service 90 s to stop

    @property
    def name(self) -> str:
        """`systemd unit UNIT` or `systemd user unit UNIT`, for messages."""
        return f"systemd {'user ' if self.user else ''}unit {self.unit}"

    async def state(self) -> platform.State:
        """Whether the unit runs; its identity is systemd's invocation id."""
        names = ("LoadState", "ActiveState", "InvocationID", "MainPID", "Job")
        words = self._systemctl_command("show", self.unit, *(f"--property={name}" for name in names))
        done = await run_program(words)
        if done.code:
            raise platform.ActionFailed(f"systemd does not answer about {self.unit}: {done.last_output}")
        shown = dict(line.partition("=")[::2] for line in done.output.splitlines())
        if shown.get("LoadState") in ("not-found", "bad-setting", "error", "masked"):
            raise platform.ActionFailed(f"there is no usable {self.name} (systemd says {shown['LoadState']})")
        active = shown.get("ActiveState", "")
        identity = shown.get("InvocationID") or shown.get("MainPID", "0")
        moving = active in ("activating", "deactivating", "reloading") or shown.get("Job", "0") not in ("", "0")
        known = identity if identity not in ("", "0") else None
        return platform.State(known, active in ("active", "reloading"), moving)

    async def restart(self, request: platform.RestartRequest) -> None:
        """Runs `systemctl restart`, which ends when the unit has started."""
        words = self._systemctl_command("restart", self.unit)
        await run_checked(words, f"restarting {self.name}", timeout_s=request.deadline_s, request=request)

    async def override_place(self) -> platform.Override:
        """legroom's drop-in file and its present content, to restore; FlagsFixed if ExecStart does not start vLLM."""
        await self._exec_start_words()
        return platform.Override(str(self._drop_in_file()), platform.read_optional(self._drop_in_file()))

    async def write_flags(self, change: platform.FlagChange) -> None:
        """Writes a drop-in with the whole new ExecStart."""
        words = with_flags(await self._exec_start_words(), platform.with_doubled_signs(change.flags, "%$"))
        lines = ["# Written by legroom; `legroom` undoes it by removing this file.", "[Service]", "ExecStart="]
        lines.append(f"ExecStart={' '.join(map(unit_quoted, words))}")
        env = platform.with_doubled_signs(change.env, "%")
        lines += [f"UnsetEnvironment={name}" for name, value in env.items() if value is None]
        lines += [f"Environment={unit_quoted(f'{n}={v}')}" for n, v in env.items() if v is not None]
        platform.write_atomically(self._drop_in_file(), "\n".join(lines) + "\n")
        await self._daemon_reload()

    async def restore_flags(self, override: platform.Override) -> None:
        """Writes the drop-in's earlier content back, or removes it, and reloads systemd."""
        platform.restore_file(Path(override.place), override.before)
        await self._daemon_reload()

    async def _exec_start_words(self) -> list[str]:
        """The words of ExecStart; FlagsFixed where they do not start vLLM."""
        text = await run_checked(self._systemctl_command("cat", self.unit), f"reading {self.name}")
        words = effective_exec_start(text)
        platform.require_server([words[0].lstrip(_PREFIXES), *words[1:]], f"ExecStart of {self.unit}")
        return words

    async def _daemon_reload(self) -> None:
        await run_checked(self._systemctl_command("daemon-reload"), "reading systemd's units again")

    def _systemctl_command(self, *words: str) -> list[str]:
        """`systemctl`, with `--user` for a user unit, and then `words`."""
        return ["systemctl", *(["--user"] if self.user else []), "--no-pager", *words]

    def _drop_in_file(self) -> Path:
        """The path of legroom's drop-in for the unit, in the system's or the user's systemd folder."""
        if self.folder is not None:
            folder = self.folder
        elif self.user:
            config = os.environ.get("XDG_CONFIG_HOME")
            folder = (Path(config) if config else Path.home() / ".config") / "systemd" / "user"
        else:
            folder = Path("/etc/systemd/system")
        unit = self.unit if "." in self.unit else f"{self.unit}.service"
        return folder / f"{unit}.d" / "90-legroom.conf"


def effective_exec_start(text: str) -> list[str]:
    """The words of ExecStart in `systemctl cat` text, where an empty one resets; FlagsFixed unless one is left."""
    lines = text.replace("\\\n", " ").splitlines()
    values: list[str] = []
    for line in lines:
        key, equals, value = line.strip().partition("=")
        if equals and key.strip() == "ExecStart":
            values = [*values, value.strip()] if value.strip() else []
    if len(values) != 1:
        why = f"the unit has {len(values)} ExecStart lines; legroom changes flags where there is one"
        raise platform.FlagsFixed(why)
    return platform.shell_words(values[0], "ExecStart")


def unit_quoted(word: str) -> str:
    """A word as written in a unit file: quoted where systemd needs it."""
    if word and not any(char in " \t\n\"'\\;#" for char in word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
