"""Ending the remains of a dead server: by PID and birth, politely first, written to the journal before it is done."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from legroom.live.journal.journal_records import JournalUnavailable
from legroom.process_table import started
from legroom.records import dataclass
from legroom.recover.holders import Holdings, ProcessFact, born, look
from legroom.recover.orphans import Holder, judge

if TYPE_CHECKING:
    from legroom.live.journal.journal import Journal

Ending = Literal["ended", "killed", "removed", "gone by itself", "not permitted", "changed", "still there"]
FREED: frozenset[Ending] = frozenset({"ended", "killed", "removed", "gone by itself"})

POLITE_S, KILLED_S = 10.0, 5.0
"""An engine core answers SIGTERM within a second (0.32); one that is killed takes a few to give its GPU memory back."""
_LOOK_S = 0.1


@dataclass(frozen=True)
class Freed:
    """What became of one holder."""

    holder: Holder
    ending: Ending
    detail: str = ""

    @property
    def is_free(self) -> bool:
        """Whether it holds nothing any more."""
        return self.ending in FREED


def free(
    dead: Sequence[Holder],
    journal: Journal | None = None,
    *,
    look_again: Callable[[], Holdings] = look,
    polite_s: float = POLITE_S,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[Freed, ...]:
    """End these processes and remove these segments, as long as they still are what they were judged to be.

    A journal that fails keeps nothing from being freed: that is told.
    """
    action: int | None = None
    try:
        action = journal.begin_action(None, "recover", "free", _record(dead)) if journal else None
    except JournalUnavailable as error:
        tell(f"{error.message}: what is freed is not written down")
    ended = _end_all([holder for holder in dead if holder.process], look_again, polite_s)
    outcome = [*ended, *_remove_all(dead, look_again)]
    if journal and action is not None:
        how = "done" if all(freed.is_free for freed in outcome) else "failed"
        try:
            journal.finish_action(action, how, {"outcome": [_line(freed) for freed in outcome]})
        except JournalUnavailable as error:
            tell(f"{error.message}: how it ended is not written down")
    return tuple(outcome)


def _end_all(holders: Sequence[Holder], look_again: Callable[[], Holdings], polite_s: float) -> list[Freed]:
    if not holders:
        return []
    # The engine core ends its workers itself: it is asked first, they are ended only if they stay.
    failed = _signal_all([holder for holder in holders if _is_top(holder)], signal.SIGTERM, look_again)
    asked = [holder for holder in holders if holder not in failed]
    _wait(asked, polite_s)
    stayed = [holder for holder in asked if _is_same(holder.process)]
    failed |= _signal_all(stayed, signal.SIGKILL, look_again) if stayed else {}
    killed = [holder for holder in stayed if holder not in failed]
    _wait(killed, KILLED_S)
    return [failed.get(holder) or _ending(holder, holder in killed) for holder in holders]


def _ending(holder: Holder, was_killed: bool) -> Freed:
    if _is_same(holder.process):
        return Freed(holder, "still there", "the kernel has not ended it: it may wait for the driver (state D)")
    return Freed(holder, "killed" if was_killed else "ended")


def _signal_all(
    holders: Sequence[Holder], number: signal.Signals, look_again: Callable[[], Holdings]
) -> dict[Holder, Freed]:
    """Send a signal to each that is still the process it was and still dead weight; those it did not reach."""
    dead = {holder.process.identity for holder in judge(look_again()) if holder.state == "dead" and holder.process}
    results = {holder: _signal(holder, number, dead) for holder in holders}
    return {holder: failed for holder, failed in results.items() if failed}


def _is_top(holder: Holder) -> bool:
    return holder.process is not None and holder.process.pid == holder.top


def _is_same(fact: ProcessFact | None) -> bool:
    """Whether the process still lives and is the one that was seen."""
    return fact is not None and born(fact.pid) == fact.created_s and started(fact.pid) is not None


def _signal(holder: Holder, number: signal.Signals, dead: Collection[tuple[int, float]]) -> Freed | None:
    """None where it was sent."""
    fact = holder.process
    assert fact is not None
    try:
        handle = os.pidfd_open(fact.pid)
    except ProcessLookupError:
        return Freed(holder, "gone by itself")
    except OSError as error:
        return Freed(holder, "still there", f"it cannot be held on to: {error.strerror}")
    try:
        # The handle pins the process: what is checked now is what the signal reaches, even if the PID is used again.
        if born(fact.pid) != fact.created_s:
            return Freed(holder, "gone by itself", "the PID belongs to another process now")
        if started(fact.pid) is None:  # it ended while the machine was looked at, and nobody has collected it
            return Freed(holder, "gone by itself")
        if fact.identity not in dead:
            return Freed(holder, "changed", "it is no longer provably dead weight: left alone")
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return Freed(holder, "gone by itself")
    except PermissionError:
        return Freed(holder, "not permitted", f"PID {fact.pid} belongs to {fact.user or 'another user'}")
    finally:
        os.close(handle)
    return None


def _wait(holders: Sequence[Holder], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(_is_same(holder.process) for holder in holders):
        time.sleep(_LOOK_S)


def _remove_all(dead: Sequence[Holder], look_again: Callable[[], Holdings]) -> list[Freed]:
    wanted = [holder for holder in dead if holder.segment]
    if not wanted:
        return []
    now = look_again()
    mapped = {path for fact in now.processes.values() for path in fact.shared}
    present = {segment.path: segment.inode for segment in now.segments}
    return [_remove(holder, present, mapped) for holder in wanted]


def _remove(holder: Holder, present: dict[str, int], mapped: set[str]) -> Freed:
    segment = holder.segment
    assert segment is not None
    if present.get(segment.path) != segment.inode:
        return Freed(holder, "gone by itself")
    if segment.path in mapped:
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


def _record(dead: Sequence[Holder]) -> dict[str, object]:
    return {
        "processes": [
            {"pid": fact.pid, "created_s": fact.created_s, "title": fact.title}
            for holder in dead
            if (fact := holder.process)
        ],
        "segments": [holder.segment.path for holder in dead if holder.segment],
    }


def _line(freed: Freed) -> str:
    fact = freed.holder.process
    named = f"PID {fact.pid} {fact.title}" if fact else freed.holder.what
    return f"{named}: {freed.ending}" + (f" ({freed.detail})" if freed.detail else "")
