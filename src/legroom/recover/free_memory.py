"""Ends the processes of a dead server, by SIGTERM and then SIGKILL, and removes its segments; journaled beforehand."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from legroom.live.journal.journal_records import JournalUnavailable
from legroom.process_table import process_start_ticks
from legroom.records import dataclass
from legroom.recover.machine_snapshot import MachineSnapshot, ProcessInfo, creation_time, read_machine
from legroom.recover.orphans import Holder, classify_holders

if TYPE_CHECKING:
    from legroom.live.journal.journal import Journal

Ending = Literal["ended", "killed", "removed", "gone by itself", "not permitted", "changed", "still there"]

_SIGTERM_GRACE_S, _SIGKILL_GRACE_S = 10.0, 5.0
"""vLLM 0.32's engine core ends within 1 s of SIGTERM; after SIGKILL the driver takes some seconds to free memory."""


@dataclass(frozen=True)
class Freed:
    """What happened to one memory holder that was to be freed."""

    holder: Holder
    ending: Ending
    detail: str = ""

    @property
    def is_free(self) -> bool:
        """Whether the holder's memory is free now: its process has ended, or its segment was removed."""
        return self.ending in ("ended", "killed", "removed", "gone by itself")


def free_dead_holders(
    dead: Sequence[Holder],
    journal: Journal | None = None,
    *,
    rescan: Callable[[], MachineSnapshot] = read_machine,
    sigterm_grace_s: float = _SIGTERM_GRACE_S,
    on_warning: Callable[[str], None] = lambda _: None,
) -> tuple[Freed, ...]:
    """Ends the processes and removes the segments of these holders that a new scan still finds dead; the outcome of
    each. A journal that cannot be written causes a warning only."""
    action: int | None = None
    try:
        action = journal.begin_action(None, "recover", "free", _journal_record(dead)) if journal else None
    except JournalUnavailable as error:
        on_warning(f"{error.message}: what is freed is not written down")
    ended = _terminate([holder for holder in dead if holder.process], rescan, sigterm_grace_s)
    outcome = [*ended, *_unlink_dead_segments(dead, rescan)]
    if journal and action is not None:
        how = "done" if all(freed.is_free for freed in outcome) else "failed"
        try:
            journal.finish_action(action, how, {"outcome": [_journal_line(freed) for freed in outcome]})
        except JournalUnavailable as error:
            on_warning(f"{error.message}: how it ended is not written down")
    return tuple(outcome)


def _terminate(holders: Sequence[Holder], rescan: Callable[[], MachineSnapshot], sigterm_grace_s: float) -> list[Freed]:
    """Sends SIGTERM to the engine cores and, after the grace time, SIGKILL to what remains; each holder's outcome."""
    if not holders:
        return []
    # The engine core ends its workers itself, so they are killed only if they remain.
    engine_cores = [each for each in holders if each.process and each.process.pid == each.top]
    failed = _signal_all(engine_cores, signal.SIGTERM, rescan)
    signalled = [holder for holder in holders if holder not in failed]
    _wait_for_exit(signalled, sigterm_grace_s)
    remaining = [holder for holder in signalled if _still_runs(holder.process)]
    failed |= _signal_all(remaining, signal.SIGKILL, rescan) if remaining else {}
    killed = [holder for holder in remaining if holder not in failed]
    _wait_for_exit(killed, _SIGKILL_GRACE_S)
    return [failed.get(holder) or _ended_outcome(holder, holder in killed) for holder in holders]


def _ended_outcome(holder: Holder, was_killed: bool) -> Freed:
    """The outcome of a signalled process: killed, ended, or still there."""
    if _still_runs(holder.process):
        return Freed(holder, "still there", "the kernel has not ended it: it may wait for the driver (state D)")
    return Freed(holder, "killed" if was_killed else "ended")


def _signal_all(
    holders: Sequence[Holder], number: signal.Signals, rescan: Callable[[], MachineSnapshot]
) -> dict[Holder, Freed]:
    """Sends a signal to each holder that a new scan still finds dead; returns the outcome of the others by holder."""
    found = classify_holders(rescan())
    dead_weight = {holder.process.identity for holder in found if holder.state == "dead" and holder.process}
    results = {holder: _signal_process(holder, number, dead_weight) for holder in holders}
    return {holder: failed for holder, failed in results.items() if failed}


def _still_runs(process: ProcessInfo | None) -> bool:
    """Whether the same process, and no later one with its PID, still runs and is no zombie."""
    if process is None or creation_time(process.pid) != process.created_s:
        return False
    return process_start_ticks(process.pid) is not None


def _signal_process(holder: Holder, number: signal.Signals, dead_ids: Collection[tuple[int, float]]) -> Freed | None:
    """Sends a signal to the process if its (PID, creation time) is in `dead_ids`; None if sent, else the outcome."""
    process = holder.process
    assert process is not None
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return Freed(holder, "gone by itself")
    except OSError as error:
        return Freed(holder, "still there", f"it cannot be held on to: {error.strerror}")
    try:
        # The pidfd refers to this process even if the PID is reused.
        if creation_time(process.pid) != process.created_s:
            return Freed(holder, "gone by itself", "the PID belongs to another process now")
        if process_start_ticks(process.pid) is None:  # a zombie
            return Freed(holder, "gone by itself")
        if process.identity not in dead_ids:
            return Freed(holder, "changed", "it is no longer provably dead weight: left alone")
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return Freed(holder, "gone by itself")
    except PermissionError:
        return Freed(holder, "not permitted", f"PID {process.pid} belongs to {process.user or 'another user'}")
    finally:
        os.close(handle)
    return None


def _wait_for_exit(holders: Sequence[Holder], timeout_s: float) -> None:
    """Waits until none of the processes runs, for `timeout_s` at most."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until and any(_still_runs(holder.process) for holder in holders):
        time.sleep(0.1)


def _unlink_dead_segments(dead: Sequence[Holder], rescan: Callable[[], MachineSnapshot]) -> list[Freed]:
    """Unlinks segments of dead holders that no process maps in a new scan; the outcome of each, also if kept."""
    wanted = [holder for holder in dead if holder.segment]
    if not wanted:
        return []
    now = rescan()
    mapped = {path for process in now.processes.values() for path in process.shared}
    inodes = {segment.path: segment.inode for segment in now.segments}
    return [_unlink_segment(holder, inodes, mapped) for holder in wanted]


def _unlink_segment(holder: Holder, inodes: dict[str, int], mapped_paths: set[str]) -> Freed:
    """Unlinks one /dev/shm file unless it was replaced (`inodes`: now, by path) or a process maps it."""
    segment = holder.segment
    assert segment is not None
    if inodes.get(segment.path) != segment.inode:
        return Freed(holder, "gone by itself")
    if segment.path in mapped_paths:
        return Freed(holder, "changed", "a process maps it now: left alone")
    try:
        Path(segment.path).unlink()
    except FileNotFoundError:
        return Freed(holder, "gone by itself")
    except PermissionError:
        return Freed(holder, "not permitted", "the file belongs to another user")
    except OSError as error:
        return Freed(holder, "still there", error.strerror or "it could not be removed")
    return Freed(holder, "removed")


def _journal_record(dead: Sequence[Holder]) -> dict[str, object]:
    """The processes and shared memory segments of dead holders, as JSON data for the journal."""
    names = ("pid", "created_s", "title")
    processes = [{name: getattr(holder.process, name) for name in names} for holder in dead if holder.process]
    return {"processes": processes, "segments": [holder.segment.path for holder in dead if holder.segment]}


def _journal_line(freed: Freed) -> str:
    """`PID 42 VLLM::Worker: killed`, or a segment's name with its outcome."""
    process = freed.holder.process
    named = f"PID {process.pid} {process.title}" if process else freed.holder.what
    return f"{named}: {freed.ending}" + (f" ({freed.detail})" if freed.detail else "")
