"""Freeing dead weight: real processes that look like vLLM's, orphaned on purpose."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from legroom.live.journal.journal import Journal
from legroom.live.journal.journal_records import JournalUnavailable
from legroom.recover.free_memory import free_dead_holders
from legroom.recover.machine_snapshot import SharedMemorySegment, read_machine
from legroom.recover.orphans import Holder, classify_holders

ORPHAN = """
import os, signal, sys
if os.fork():
    os._exit(0)
if "stubborn" in sys.argv[1]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
os.close(1)
signal.pause()
while "stubborn" in sys.argv[1]:
    signal.pause()
"""


@pytest.fixture
def orphan():
    """Starts a Python process titled like an engine core whose parent ends at once."""
    made: list[int] = []

    def start(kind: str = "mild") -> int:
        started = subprocess.run(
            ["bash", "-c", f"exec -a VLLM::EngineCore {sys.executable} - {kind}"],
            input=ORPHAN,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
            timeout=120,
        )
        made.append(int(started.stdout))
        return made[-1]

    yield start
    for pid in made:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def dead_holder(pid: int) -> Holder:
    """The holder of a PID; its title is what vLLM's own would be, which a script cannot give itself."""
    fact = read_machine().processes[pid]
    return Holder("dead", "VLLM::EngineCore", "an orphan", replace(fact, title="VLLM::EngineCore"), top=pid)


def looking():
    """A look in which the orphans have the title that setproctitle would give them, and nobody for a parent.

    A test that ran before may have made this process one that adopts orphans, and a container's first process may be a
    Python, which `judge` takes for the server that made them.
    """
    seen = read_machine()
    titled = {
        pid: replace(fact, title="VLLM::EngineCore", parent=0) if fact.title.startswith("VLLM::EngineCore -") else fact
        for pid, fact in seen.processes.items()
    }
    return replace(seen, processes=titled)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_orphan_is_judged_dead_and_ends_when_asked(orphan):
    pid = orphan()
    dead = [holder for holder in classify_holders(looking()) if holder.process and holder.process.pid == pid]
    assert [holder.state for holder in dead] == ["dead"]
    assert [one.ending for one in free_dead_holders(dead, rescan=looking)] == ["ended"]
    assert not lives(pid)


def test_one_that_ignores_the_question_is_killed(orphan):
    pid = orphan("stubborn")
    time.sleep(0.2)
    assert [one.ending for one in free_dead_holders([dead_holder(pid)], rescan=looking, sigterm_grace_s=0.3)] == [
        "killed"
    ]
    assert not lives(pid)


def test_a_pid_that_was_used_again_is_not_touched(orphan):
    pid = orphan()
    older = dead_holder(pid)
    assert older.process
    stale = replace(older, process=replace(older.process, created_s=older.process.created_s - 5))
    (outcome,) = free_dead_holders([stale], rescan=looking, sigterm_grace_s=0.2)
    assert (outcome.ending, lives(pid)) == ("gone by itself", True)


def test_one_that_ends_while_the_machine_is_looked_at_is_gone():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        holder = dead_holder(process.pid)

        def look_on():
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
            return looking()

        (outcome,) = free_dead_holders([holder], rescan=look_on, sigterm_grace_s=0.2)
    assert outcome.ending == "gone by itself"


def test_what_is_no_longer_dead_weight_is_left_alone(orphan):
    pid = orphan()
    (outcome,) = free_dead_holders(
        [dead_holder(pid)], rescan=lambda: replace(looking(), knows_peers=False), sigterm_grace_s=0.2
    )
    assert (outcome.ending, outcome.is_free, lives(pid)) == ("changed", False, True)


def test_without_permission_it_says_so_and_goes_on(orphan, monkeypatch):
    first, second = orphan(), orphan()
    send = signal.pidfd_send_signal

    def refuse(handle, number, *rest):
        pid = int(Path(f"/proc/self/fdinfo/{handle}").read_text().rpartition("Pid:")[2].split()[0])
        if pid == first:
            raise PermissionError
        send(handle, number, *rest)

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    outcome = free_dead_holders([dead_holder(first), dead_holder(second)], rescan=looking, sigterm_grace_s=2)
    assert [one.ending for one in outcome] == ["not permitted", "ended"]
    assert "belongs to" in outcome[0].detail


def segment_holder(path: Path) -> Holder:
    seen = path.stat()
    return Holder(
        "dead", path.name, "a leftover", segment=SharedMemorySegment(str(path), seen.st_size, 0, seen.st_ino, 0.0)
    )


def in_folder(folder: Path):
    return lambda: read_machine(folder)


def test_a_leftover_segment_is_removed(tmp_path):
    path = tmp_path / "psm_x"
    path.write_bytes(b"x")
    (outcome,) = free_dead_holders([segment_holder(path)], rescan=in_folder(tmp_path))
    assert (outcome.ending, path.exists()) == ("removed", False)


def test_a_segment_made_anew_under_the_same_name_stays(tmp_path):
    path = tmp_path / "psm_x"
    path.write_bytes(b"x")
    holder = segment_holder(path)
    assert holder.segment
    stale = replace(holder, segment=replace(holder.segment, inode=holder.segment.inode + 1))
    (outcome,) = free_dead_holders([stale], rescan=in_folder(tmp_path))
    assert (outcome.ending, path.exists()) == ("gone by itself", True)


@pytest.mark.parametrize("failing", ["begin_action", "finish_action"])
def test_a_journal_that_fails_keeps_nothing_from_being_freed(tmp_path, monkeypatch, failing):
    def locked(*_: object) -> int:
        raise JournalUnavailable("the journal is locked")

    path = tmp_path / "psm_x"
    path.write_bytes(b"x")
    monkeypatch.setattr(Journal, failing, locked)
    told: list[str] = []
    with Journal.open(tmp_path / "journal.db") as journal:
        (outcome,) = free_dead_holders(
            [segment_holder(path)], journal, rescan=in_folder(tmp_path), on_warning=told.append
        )
    assert (outcome.ending, path.exists()) == ("removed", False)
    assert len(told) == 1 and "locked" in told[0] and "not written down" in told[0]


def test_what_is_freed_is_in_the_journal_before_and_after(tmp_path):
    path = tmp_path / "psm_x"
    path.write_bytes(b"x")
    with Journal.open(tmp_path / "journal.db") as journal:
        seen_before: list[int] = []

        def watching():
            seen_before.append(len(journal.unfinished_actions()))
            return read_machine(tmp_path)

        free_dead_holders([segment_holder(path)], journal, rescan=watching)
        assert seen_before == [1]
        assert journal.unfinished_actions() == ()
