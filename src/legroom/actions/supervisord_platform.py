"""A server that supervisord runs as a program, through `supervisorctl`."""

import re
import shlex
from pathlib import Path

from legroom.actions import platform
from legroom.actions.programs import process_identity, run_checked, run_program
from legroom.records import dataclass
from legroom.vllm.command_line import with_flags

_STATUS = re.compile(r"^\S+\s+(?P<state>[A-Z]+)\s*(?:pid (?P<pid>\d+))?", re.MULTILINE)
_COMMENT = re.compile(r"\s[;#].*")
_MOVING = ("STARTING", "STOPPING", "BACKOFF")


@dataclass(frozen=True)
class SupervisordProgram:
    """One program of the supervisord whose configuration is `config`. `program_file` is the included file with the
    program's section, where there is one."""

    program: str
    config: Path | None = None
    program_file: Path | None = None
    settle_s: float = 30.0

    @property
    def name(self) -> str:
        """`supervisord program NAME`, for messages."""
        return f"supervisord program {self.program}"

    async def state(self) -> platform.State:
        """Whether `supervisorctl status` says RUNNING; ActionFailed where it does not know the program."""
        # The exit code is 3 where the program does not run.
        done = await run_program(self._supervisorctl_command("status", self.program))
        status = _STATUS.search(done.output)
        if status is None or "ERROR (no such" in done.output:
            raise platform.ActionFailed(f"supervisord does not answer about {self.program}: {done.last_output}")
        pid = status["pid"]
        identity = process_identity(int(pid)) or f"{pid}@unseen" if pid else None
        return platform.State(identity, status["state"] == "RUNNING", status["state"] in _MOVING)

    async def restart(self, request: platform.RestartRequest) -> None:
        """Reloads the configuration, then restarts the program."""
        words = self._supervisorctl_command("update", self.program.partition(":")[0])
        done = await run_program(words, timeout_s=request.deadline_s, request=request)
        if "updated process group" in done.output or "added process group" in done.output:
            return  # `update` has restarted a changed program
        words = self._supervisorctl_command("restart", self.program)
        output = await run_checked(words, f"restarting {self.name}", timeout_s=request.deadline_s, request=request)
        if "ERROR" in output:
            raise platform.ActionFailed(f"restarting {self.name} failed: {output.strip()}")

    async def override_place(self) -> platform.Override:
        """The file with the program's section and its content; supervisord has no override files."""
        path = self._config_path()
        text = platform.read_optional(path)
        if text is None:
            raise platform.ActionFailed(f"{path} is not there, so the flags of {self.program} cannot be changed")
        with_command(text, self.program.rpartition(":")[2], platform.FlagChange({}))
        return platform.Override(str(path), text)

    async def write_flags(self, change: platform.FlagChange) -> None:
        """Rewrites the `command` of the program's section."""
        path = self._config_path()
        text, program = platform.read_optional(path) or "", self.program.rpartition(":")[2]
        platform.write_atomically(path, with_command(text, program, change))

    async def restore_flags(self, override: platform.Override) -> None:
        """Writes the configuration file's earlier content back."""
        if override.before is not None:
            platform.write_atomically(Path(override.place), override.before)

    def _supervisorctl_command(self, *words: str) -> list[str]:
        """`supervisorctl`, with `-c CONFIG` where one is configured, and then `words`."""
        return ["supervisorctl", *(["-c", str(self.config)] if self.config else []), *words]

    def _config_path(self) -> Path:
        """The configuration file with the program's section: `program_file`, else `config`; FlagsFixed without both."""
        path = self.program_file or self.config
        if path is None:
            hint = "name `config` or `program_file` in watch.toml"
            raise platform.FlagsFixed(f"where {self.program} is configured is not known", hint)
        return path


def with_command(text: str, program: str, change: platform.FlagChange) -> str:
    """The configuration `text` with changed flags in the program's command; FlagsFixed if it does not start vLLM,
    ActionFailed for a change of variables."""
    lines = text.splitlines()
    start = next((at for at, line in enumerate(lines) if line.strip() == f"[program:{program}]"), None)
    if start is None:
        raise platform.FlagsFixed(f"there is no [program:{program}] section to change")
    end = next((at for at in range(start + 1, len(lines)) if lines[at].lstrip().startswith("[")), len(lines))
    at = next((at for at in range(start, end) if re.match(r"\s*command\s*[=:]", lines[at])), None)
    if at is None:
        raise platform.FlagsFixed(f"[program:{program}] has no command")
    if change.env:
        hint = "change it by hand"
        raise platform.ActionFailed("legroom does not change the environment of a supervisord program", hint)
    last = at + 1
    while last < end and lines[last][:1].isspace() and lines[last].strip():
        last += 1
    value = "\n".join([re.split(r"[=:]", lines[at], maxsplit=1)[1], *lines[at + 1 : last]])
    words = platform.shell_words(_COMMENT.sub("", value), f"the command of [program:{program}]")
    platform.require_server(words, f"[program:{program}]")
    changed = shlex.join(with_flags(words, platform.with_doubled_signs(change.flags, "%")))
    return "\n".join([*lines[:at], f"command={changed}", *lines[last:]]) + "\n"
