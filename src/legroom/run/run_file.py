"""The files of a run: `<home>/runs/<port>.json`, and the start script with its final settings. Other processes find a
`legroom run` by its run file, and leave changes for the next restart beside it."""

import contextlib
import json
import os
import shlex
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from legroom.actions.server_log import ServerLog, last_lines
from legroom.errors import LegroomError
from legroom.files import replace_file, runs_folder, single_process
from legroom.live.kernel_memory import Cgroup, KernelAccount
from legroom.masking import CREDENTIALS, SECRET_FLAGS, is_secret


class ProcessRecord:
    """The log and the memory account of one server process."""

    def __init__(self, path: Path) -> None:
        self.log = ServerLog(path)
        self._account = KernelAccount.of()
        self._is_problem_reported = False

    def track_cgroup(self, pid: int | None) -> None:
        """Notes the cgroup of the server `pid`, into which a wrapper may have moved it before vLLM started."""
        if pid is None:
            return
        cgroup, current = Cgroup.of(pid), self._account.cgroup
        if cgroup is None or cgroup == current:
            return
        # A zombie process is shown in the root cgroup, but has not moved there.
        if current is None or not Path(current.folder).is_relative_to(cgroup.folder):
            self._account = KernelAccount.of(pid)

    def report_write_error(self, say: Callable[[str], None]) -> None:
        """Reports, once, that the log cannot be written."""
        if self.log.problem and not self._is_problem_reported:
            self._is_problem_reported = True
            say("the log cannot be written (is the disk full?): its newest lines are kept in memory")

    def last_lines(self, count: int) -> list[str]:
        """The last `count` lines of the log, including those that could not be written to it."""
        return last_lines(self.log.readable(), count)

    def task_input(self) -> dict[str, Any]:
        """The log's path and the OOM counters of the kernel, as JSON input of a task that reads the log."""
        return {"log": str(self.log.readable()), "account": asdict(self._account)}


def kernel_account_from(document: dict[str, Any]) -> KernelAccount:
    """The kernel OOM counters under the key `account` of a task's input."""
    cgroup = document["cgroup"]
    return KernelAccount(**{**document, "cgroup": Cgroup(**cgroup) if cgroup else None})


_ADDRESS_FLAGS = frozenset({"host", "port", "uds", "headless", "ssl_certfile", "ssl_keyfile"})
"""Flags that would move the server to an address that its run does not watch."""


def _claim_port(port: int, make_refusal: Callable[[str], LegroomError]) -> socket.socket:
    """An abstract Unix socket that claims the port for this run, across LEGROOM_HOMEs (unlike the lock file); raises
    `make_refusal(pid)` where another run holds it."""
    name = f"\0legroom run on port {port}"
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(name)
        claim.listen(1)
    except OSError:
        claim.close()
        with socket.socket(socket.AF_UNIX) as holder:
            holder.settimeout(1.0)
            pid = "unknown"
            with contextlib.suppress(OSError):
                holder.connect(name)
                pid = str(struct.unpack("3i", holder.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
        raise make_refusal(pid) from None
    return claim


class RunFile:
    """The file of one run, which exists while it runs. The server runs even where it cannot be written."""

    def __init__(self, port: int) -> None:
        self.path = runs_folder() / f"{port}.json"
        self._temporary_folder: tempfile.TemporaryDirectory[str] | None = None
        self.log = self._log_folder() / f"{port}.log"
        self._lock = self.path.with_name(f"{port}.lock")
        self._port = port
        self._pending_record: Mapping[str, Any] = {}
        """The newest content, where it could not be written."""
        self._flags = self.path.with_name(f"{port}.flags.json")

    def _log_folder(self) -> Path:
        """The folder for the log: the run file's, or a temporary one where that is read-only."""
        folder = self.path.parent
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
        with contextlib.suppress(OSError):
            self._temporary_folder = tempfile.TemporaryDirectory(prefix="legroom-")
            return Path(self._temporary_folder.name)
        return folder

    def lock(self, say: Callable[[str], None]) -> contextlib.ExitStack:
        """Locks the port until the result is closed (a starting vLLM does not listen yet); LegroomError if taken."""

        def refusal(pid: str) -> LegroomError:
            """The error for a port that the run with this pid holds."""
            hint = "stop that one, or give vLLM another --port; machines that share a home need a LEGROOM_HOME each"
            return LegroomError(f"port {self._port} is in use by another legroom run (pid {pid})", hint)

        with contextlib.ExitStack() as locks:
            locks.enter_context(_claim_port(self._port, refusal))
            locks.enter_context(single_process(self._lock, say, "a second run away from the port", refusal))
            return locks.pop_all()

    def record(self, content: Mapping[str, Any], say: Callable[[str], None]) -> None:
        """Writes `content` with log path and time; a failure is reported once, and `retry_write` tries again."""
        content = {**content, "log": str(self.log), "started_s": time.time()}
        problem = self.write(content)
        if problem and not self._pending_record:
            say(problem)
        self._pending_record = content if problem else {}

    def retry_write(self) -> None:
        """Writes again the content that could not be written before, if any."""
        if self._pending_record and not self.write(self._pending_record):
            self._pending_record = {}

    def write(self, content: Mapping[str, Any]) -> str:
        """Replaces the file atomically; returns the problem, or "". On failure it retries without the old file."""
        problem = ""
        for _ in range(2):
            try:
                replace_file(self.path, json.dumps(content), 0o600)  # a chat template or a path may be private
                return ""
            except OSError as error:
                problem = f"{self.path} cannot be written: {error.strerror}"
            with contextlib.suppress(OSError):
                self.path.unlink()
        return problem

    def remove(self) -> None:
        """Removes the file, unless another run of the port has replaced it."""
        if self._temporary_folder is not None:
            self._temporary_folder.cleanup()
        with contextlib.suppress(OSError, ValueError):
            if json.loads(self.path.read_text("utf-8")).get("pid") == os.getpid():
                self.path.unlink()

    def keep_previous_log(self) -> None:
        """Renames the previous run's log to `<port>.previous.log`."""
        with contextlib.suppress(OSError):
            self.log.replace(self.log.with_name(f"{self.log.stem}.previous.log"))

    def has_changes(self) -> bool:
        """Whether another process has left changes of flags or variables for the next restart."""
        return self._flags.exists()

    def pop_changes(self) -> tuple[Mapping[str, Any] | None, str]:
        """(Changes left for this restart, or None; problem, or ""). Removes their file."""
        if problem := self.reject_address_flags():
            return None, f"{problem}, so nothing is changed"
        try:
            text = self._flags.read_text("utf-8")
            self._flags.unlink()
        except FileNotFoundError:
            return None, ""
        except OSError as error:
            return None, f"{self._flags} cannot be read: {error.strerror}"
        try:
            changes = json.loads(text)
        except ValueError:
            changes = None
        if isinstance(changes, dict) and all(isinstance(changes.get(part, {}), dict) for part in ("flags", "env")):
            return changes, ""
        return None, f'{self._flags} is not {{"flags": {{...}}, "env": {{...}}}}, so nothing is changed'

    def reject_address_flags(self) -> str:
        """Removes changes that would move the server to another address; returns the refusal, or ""."""
        from legroom.facts.flags import dest_name  # a table of all flags

        with contextlib.suppress(OSError, ValueError, AttributeError):
            flags = json.loads(self._flags.read_text("utf-8")).get("flags") or {}
            moving = [name for name in flags if dest_name(name) in _ADDRESS_FLAGS]
            if moving:
                self._flags.unlink()
                return f"{', '.join(moving)} cannot be changed while it runs"
        return ""


def script(words: Sequence[str], env: Mapping[str, str]) -> str:
    """A bash script that starts the server with its final settings; it requires secrets as variables."""
    kept, variables = _without_secrets(words)
    variables += [name for name, value in env.items() if is_secret(name, value)]
    lines = ["#!/usr/bin/env bash", "# Written by `legroom run` once the server was up with these settings.", "set -eu"]
    required = ': "${{{0}:?set it: it is not kept in this file}}"; export {0}'
    lines += [required.format(name) for name in dict.fromkeys(variables)]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in env.items() if name not in variables]
    return "\n".join([*lines, f'exec {" ".join(kept)} "$@"', ""])


def save_script(path: str, words: Sequence[str], env: Mapping[str, str]) -> str:
    """Writes the start script to `path`; returns a sentence that says so or why it failed."""
    where = Path(path)
    try:
        where.write_text(script(words, env), encoding="utf-8", errors="surrogateescape")  # paths may contain any bytes
        where.chmod(0o755)
    except OSError as error:
        return f"the script {path} could not be written: {error.strerror}"
    return f"saved as {path}"


def check_writable(path: str) -> None:
    """Raises LegroomError where the path is a folder or its folder is missing; permissions are not checked."""
    where = Path(path)
    if where.is_dir() or not where.resolve().parent.is_dir():
        raise LegroomError(f"--save {path}: not a file that can be written", "give a path in a folder that is there")


def _without_secrets(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(Quoted words, with secrets dropped or replaced by `$VARIABLE`; names of these variables)."""
    from legroom.vllm.command_line import command_parts  # a table of all flags

    kept: list[str] = []
    variables: list[str] = []
    for part in command_parts(words):
        if part.name and part.long_name in SECRET_FLAGS:
            variables.append(SECRET_FLAGS[part.long_name])
        elif part.name and CREDENTIALS.search(part.value):
            # vLLM has no variable for such an address, so the script has one.
            variables.append(part.dest.upper())
            kept += [part.name, f'"${part.dest.upper()}"']
        else:
            kept += [shlex.quote(word) for word in part.words]
    return kept, variables
