"""Runs other programs by argument list, with a deadline. A program that changes something waits at a gate until the
journal has its process id. If legroom is killed before that, the program never runs; if after, the next legroom finds
the process or its end."""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from legroom.actions.platform import QUERY_TIMEOUT_S, ActionFailed, RestartRequest
from legroom.masking import masked
from legroom.process_table import process_start_ticks
from legroom.records import dataclass

# The words of the program are arguments of this script and are never parsed as shell.
_GATE = 'read -r word && [ "$word" = go ] || exit 125; exec "$@" </dev/null'


@dataclass(frozen=True)
class ProgramResult:
    """The exit code and the unmasked output of a program."""

    code: int
    output: str

    @property
    def last_output(self) -> str:
        """The last three lines of the output, with secrets masked; `nothing was said` if it is empty."""
        lines = self.output.strip()[-2000:].splitlines()
        return str(masked(" / ".join(line.strip() for line in lines[-3:]))) or "nothing was said"


async def run_program(
    words: Sequence[str],
    *,
    timeout_s: float = QUERY_TIMEOUT_S,
    env: Mapping[str, str] | None = None,
    request: RestartRequest | None = None,
) -> ProgramResult:
    """Runs a program to its end, for a `request` not before `request.launched` has recorded its pid. ActionFailed if it
    is not installed or takes longer than `timeout_s`."""
    if shutil.which(words[0]) is None:
        raise ActionFailed(f"{words[0]} is not installed here", "install it, or name another platform in the config")
    gated = request is not None and request.launched is not None
    line = ["/bin/sh", "-c", _GATE, "legroom", *words] if gated else list(words)
    # A file instead of a pipe, because the program may outlive legroom, and a server may keep its output open.
    with tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_exec(
            *line,
            stdin=asyncio.subprocess.PIPE if gated else asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        try:
            if request is not None and request.launched is not None:
                await request.launched(process.pid, process_identity(process.pid) or "")
                assert process.stdin is not None  # the shell waits for a line before it runs the program
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    process.stdin.write(b"go\n")
                    await process.stdin.drain()
                process.stdin.close()
            await asyncio.wait_for(process.wait(), timeout_s)
        except TimeoutError:
            await _stop_program(process)
            raise ActionFailed(f"{words[0]} did not end within {timeout_s:g} s") from None
        except BaseException:
            if process.stdin is not None and not process.stdin.is_closing():
                process.stdin.close()
            raise
        output.seek(0)
        return ProgramResult(process.returncode or 0, output.read().decode("utf-8", "replace"))


async def _stop_program(process: asyncio.subprocess.Process) -> None:
    """Ends the program (SIGTERM, SIGKILL after 5 s) and waits; not its children, which may include a server."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(sent)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 5.0)
            return


async def run_checked(
    words: Sequence[str],
    what: str,
    *,
    timeout_s: float = QUERY_TIMEOUT_S,
    env: Mapping[str, str] | None = None,
    request: RestartRequest | None = None,
) -> str:
    """The output of `run_program`; ActionFailed ("`what` failed: ...") for a non-zero exit code."""
    done = await run_program(words, timeout_s=timeout_s, env=env, request=request)
    if done.code:
        raise ActionFailed(f"{what} failed: {words[0]} ended with {done.code}: {done.last_output}")
    return done.output


def interpreter_of_script(script: Path) -> str | None:
    """The Python in a script's first line, or beside a script with pip's `#!/bin/sh`; None if it names none."""
    try:
        with script.open("rb") as file:
            first = file.readline(512).decode("utf-8", "replace").strip()
    except OSError:
        return None
    if first == "#!/bin/sh":  # pip's form for long paths: the next line executes the interpreter
        beside = script.with_name("python")
        return str(beside) if beside.exists() else None
    words = first[2:].split() if first.startswith("#!") else []
    if words and Path(words[0]).name == "env":
        words = [shutil.which(words[-1]) or ""]
    return words[0] or None if words else None


def process_identity(pid: int) -> str | None:
    """Pid, start ticks and boot id as a text that no later process has; None for a missing process or a zombie."""
    ticks = process_start_ticks(pid)
    if ticks is not None:
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()[:8]
        except OSError:
            boot = ""
        return f"{pid}@{ticks}@{boot}"
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{pid}@{process.create_time():.2f}"
    except (psutil.Error, ValueError, OverflowError):
        return None
