"""The keeper: a small process between legroom and the server, so that no orphan is left when either of them dies.

It starts the server as its child and adopts orphaned descendants, so that vLLM's engine cores and workers are found
after their API server has ended. It kills all descendants when legroom's end of the control socket closes. If the
keeper dies, the kernel kills the server, and legroom, which adopts orphans too, kills the rest.

It reads `signal N` (to the server alone) and `kill` (all descendants). It writes `pid N`, `failed ERRNO`,
`exit STATUS` (a wait status) and `gone` (no process is left). It imports little, because it runs as long as the server.
"""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable

from legroom.process_table import descendants, process_start_ticks, process_title

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)


def run_until_all_ended(control_fd: int, leftover_grace_s: float, words: list[str]) -> None:
    """Runs the server until all its descendants have ended; those left are killed `leftover_grace_s` after its end, or
    at once when legroom sends `kill` or dies."""
    adopt_orphans()
    ended, wakeup = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in _HANDLED:
        signal.signal(number, signal.SIG_IGN)
    server = _execute_server(words, control_fd)
    if server:
        # With the keeper's output at /dev/null, the pipes close when the server's processes have ended.
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        os.close(nothing)
        _write_control(control_fd, f"pid {server}")
        _relay_until_exit(control_fd, server, ended, leftover_grace_s)
    _write_control(control_fd, "gone")


def _execute_server(words: list[str], control_fd: int) -> int:
    """Starts the server in its own process group; its pid, or 0 after sending `failed ERRNO` to legroom."""
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
                os._exit(127)  # the keeper died before PR_SET_PDEATHSIG took effect
            os.close(control_fd)
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
    _write_control(control_fd, f"failed {reason}")
    return 0


def _relay_until_exit(control_fd: int, server: int, ended_fd: int, leftover_grace_s: float) -> None:
    """Forwards legroom's signals to `server` until it ends (`ended_fd` readable) or legroom dies; kills the rest."""
    pending = b""
    while True:
        readable, _, _ = select.select([control_fd, ended_fd], [], [])
        if control_fd in readable:
            received = b""
            with contextlib.suppress(OSError):
                received = os.read(control_fd, 4096)
            if not received:
                break  # legroom is dead
            pending += received
            *lines, pending = pending.split(b"\n")
            for line in lines:
                if line == b"kill":
                    kill_below(os.getpid(), is_resource_tracker)
                    leftover_grace_s = 0.0  # processes that this scan missed get no grace either
                elif line.startswith(b"signal "):
                    os.kill(server, int(line[7:]))  # not reaped yet, so the pid is still its own
        if ended_fd in readable:
            os.read(ended_fd, 4096)
            status = reap().get(server)
            if status is not None:
                _write_control(control_fd, f"exit {status}")
                _wait_until_empty(leftover_grace_s, control_fd)
                break
    # Resource trackers end last, because they clean up after the others.
    kill_all_below(os.getpid(), is_resource_tracker)
    _wait_until_empty(1.0)
    kill_all_below(os.getpid())


def _wait_until_empty(timeout_s: float, control_fd: int | None = None) -> None:
    """Waits until no descendant is left, `timeout_s` passed, or legroom died or sent a message (if `control_fd`)."""
    until = time.monotonic() + timeout_s
    while descendants(os.getpid()) and time.monotonic() < until:
        if control_fd is not None and select.select([control_fd], [], [], 0)[0]:
            return
        reap()
        time.sleep(0.02)


def _write_control(control_fd: int, text: str) -> None:
    """Sends one line to legroom over the socket `control_fd`; ignored where legroom has died."""
    with contextlib.suppress(OSError):  # legroom has died; the next read shows it
        os.write(control_fd, text.encode() + b"\n")


def send_signal(pid: int, start_ticks: int, signum: int) -> bool:
    """Sends a signal to the process with this pid and start time; False where it has ended or may not be signalled."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if process_start_ticks(pid) != start_ticks:  # another process has the pid now
            return False
        signal.pidfd_send_signal(handle, signum)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def kill_below(ancestor: int, is_spared: Callable[[int], bool] | None = None) -> int:
    """Kills all descendants of a process except those for which `is_spared(pid)` is true; returns their number."""
    below = {pid: start for pid, start in descendants(ancestor).items() if is_spared is None or not is_spared(pid)}
    for pid, start in below.items():
        send_signal(pid, start, signal.SIGKILL)
    return len(below)


def kill_all_below(ancestor: int, is_spared: Callable[[int], bool] | None = None) -> None:
    """Repeats `kill_below` until three scans in a row find none, because one scan may miss a new process."""
    empty = 0
    while empty < 3:
        empty = 0 if kill_below(ancestor, is_spared) else empty + 1
        reap()
        time.sleep(0.01)


def is_resource_tracker(pid: int) -> bool:
    """Whether `pid` is Python's resource tracker, which removes shared memory that ended processes left."""
    return b"multiprocessing.resource_tracker" in process_title(pid)


def adopt_orphans() -> None:
    """Makes this process the parent of orphaned descendants (Linux only)."""
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent dies (Linux only)."""
    _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def reap() -> dict[int, int]:
    """Collects all children that have ended: pid -> wait status."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended


def _prctl(option: int, value: int) -> None:
    """Calls Linux's prctl(2); an error, or a libc without that function, is ignored."""
    import ctypes  # a megabyte of memory

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def main() -> None:
    """Entry point of the keeper process: `keeper CONTROL_FD LEFTOVER_GRACE_S COMMAND...`."""
    run_until_all_ended(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])


if __name__ == "__main__":
    main()
