"""legroom in a process of its own without starting Python anew: a fork of this one, in which everything is imported.

It is a process as real as any other: it has its own pid, takes signals, can be killed, and has the files it is given.
Only what takes seconds elsewhere is quicker: looks are close together, and tasks are forks too.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from legroom.actions.keeper import die_with_parent
from legroom.cli import run as run_command
from legroom.cli.main import main
from legroom.run import supervisor, task_process, tasks
from legroom.run.supervisor import Timing

QUICK = Timing(poll_interval_s=0.02, port_timeout_s=1.0, leftover_grace_s=0.05)


class Forked:
    """As much of `subprocess.Popen` as the tests use."""

    def __init__(self, work: Callable[[], int]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                code = work()
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(OSError, ValueError, AttributeError):
                        stream.flush()
                os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # collected by somebody else: as subprocess.Popen sees it
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout_s: float = 120.0) -> int:
        end_s = time.monotonic() + timeout_s
        while self.poll() is None:
            assert time.monotonic() < end_s, "it did not end"
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def legroom(
    words: Sequence[str],
    out: Path,
    err: Path,
    env: Mapping[str, str],
    timing: Timing = QUICK,
    closed: Sequence[int] = (),
) -> Forked:
    """`python -m legroom WORDS`, with what it prints in these files, or with some of its streams closed."""

    def work() -> int:
        take_streams(out, err)
        for number in closed:
            os.close(number)
            setattr(sys, ("stdin", "stdout", "stderr")[number], None)  # as Python itself does when it starts
        os.environ.update(env)
        # Where the command looks them up: a test before this one may have imported it, with the slow ones.
        run_command.run_task = lambda task, task_input: task_process.TaskProcess(task, task_input, fork_task).output()
        run_command.Supervisor = functools.partial(  # type: ignore[assignment, misc]
            supervisor.Supervisor, timing=timing, start_task=fork_task
        )
        return main(list(words))

    return Forked(work)


def take_streams(out: Path, err: Path) -> None:
    """Standard output and error into files, under Python's objects for them too."""
    for number, path, flags in (
        (0, Path(os.devnull), os.O_RDONLY),
        (1, out, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, err, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, closefd=False) for number, mode in ((0, "r"), (1, "w"), (2, "w"))
    )


def fork_task(task: str, stdin: IO[bytes], stdout: int, stderr: IO[bytes]) -> Forked:
    """What `python -m legroom.run.tasks TASK` does."""

    def work() -> int:
        signal.set_wakeup_fd(-1)
        die_with_parent()
        os.dup2(stderr.fileno(), 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        with os.fdopen(stdout, "w") as file:
            json.dump(tasks.output_or_error(task, json.load(stdin)), file)
        return 0

    return Forked(work)
