"""The keeper: a tiny process between legroom and the server, so that no orphan is left whoever dies.

It starts the server as its child and adopts every orphan below it, so descent alone tells what belongs to the server:
vLLM's engine core and workers are found even after the API server that made them is gone. It holds one end of a socket;
when the other end closes, legroom is dead, and everything below the keeper is killed. If the keeper itself dies, the
kernel kills the server, and legroom, which adopts orphans too, kills the rest.

What it reads: `signal N` (to the server alone), `kill` (everything). What it writes: `pid N`, `failed ERRNO`,
`exit STATUS` (a wait status), `gone` (nothing is left). It is run as a program of its own, and loads next to nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

from legroom.actions.descendants import (
    adopt_orphans,
    die_with_parent,
    is_resource_tracker,
    kill_all_below,
    kill_below,
    reap,
)
from legroom.process_table import descendants

TRACKER_GRACE_S = 1.0
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)


def keep(control: int, leftover_grace_s: float, words: list[str]) -> None:
    """Start the server, look after it, and leave nothing behind.

    What a server leaves behind may take `leftover_grace_s` to end by itself, unless it was to be killed.
    """
    adopt_orphans()
    ended, wakeup = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in _HANDLED:
        signal.signal(number, signal.SIG_IGN)
    server = _start(words, control)
    if server:
        _close_output()
        _report(control, f"pid {server}")
        _watch(control, server, ended, leftover_grace_s)
    _report(control, "gone")


def _start(words: list[str], control: int) -> int:
    """The server's pid, or 0 where it could not be executed."""
    failed, failing = os.pipe()  # closed by a successful exec
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(failed)
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for number in (*_HANDLED, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            die_with_parent()
            if os.getppid() != keeper:
                os._exit(127)  # it died before it could take this process along
            os.close(control)
            os.execvp(words[0], words)
        except OSError as error:
            os.write(failing, str(error.errno or 1).encode())
        finally:
            os._exit(127)
    os.close(failing)
    reason = os.read(failed, 16).decode()
    os.close(failed)
    if not reason:
        return pid
    os.waitpid(pid, 0)
    _report(control, f"failed {reason}")
    return 0


def _close_output() -> None:
    """Only the server and what it starts hold the output, so its end is seen when they are gone."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.close(nothing)


def _watch(control: int, server: int, ended: int, leftover_grace_s: float) -> None:
    pending = b""
    while True:
        readable, _, _ = select.select([control, ended], [], [])
        if control in readable:
            received = _read(control)
            if not received:
                break  # legroom is dead
            pending += received
            *lines, pending = pending.split(b"\n")
            for line in lines:
                if line == b"kill":
                    kill_below(os.getpid(), is_resource_tracker)
                    leftover_grace_s = 0.0  # what this look missed is not waited for either
                elif line.startswith(b"signal "):
                    os.kill(server, int(line[7:]))  # not collected yet, so the pid is still its own
        if ended in readable:
            os.read(ended, 4096)
            status = reap().get(server)
            if status is not None:
                _report(control, f"exit {status}")
                _wait_until_empty(leftover_grace_s, control)
                break
    _kill_remaining()


def _kill_remaining() -> None:
    """Kill what is left; what cleans up after the others goes last."""
    kill_all_below(os.getpid(), is_resource_tracker)
    _wait_until_empty(TRACKER_GRACE_S)
    kill_all_below(os.getpid())


def _wait_until_empty(patience_s: float, control: int | None = None) -> None:
    """Until nothing is left, the patience is over, or legroom dies or says anything."""
    until = time.monotonic() + patience_s
    while descendants(os.getpid()) and time.monotonic() < until:
        if control is not None and select.select([control], [], [], 0)[0]:
            return
        reap()
        time.sleep(0.02)


def _read(control: int) -> bytes:
    try:
        return os.read(control, 4096)
    except OSError:
        return b""


def _report(control: int, text: str) -> None:
    with contextlib.suppress(OSError):  # where nobody listens any more, the reading end tells
        os.write(control, text.encode() + b"\n")


def main() -> None:
    """`keeper CONTROL_FD LEFTOVER_GRACE_S COMMAND...`."""
    keep(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])


if __name__ == "__main__":
    main()
