"""A log on a disk that is full, or that cannot be rotated: nothing freezes, and the newest lines can still be read."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from legroom.actions.child import Child
from legroom.actions.server_log import UNWRITTEN_BYTES, OutputRelay, ServerLog, last_lines

DISK_BYTES = 256 << 10


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", place], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("no file system can be mounted here: it takes root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def lines(count: int, first: int = 0) -> bytes:
    return b"".join(b"line %06d\n" % number for number in range(first, first + count))


def test_what_a_full_disk_does_not_take_is_kept_in_memory(small_disk):
    log = ServerLog(small_disk / "log")
    log.write(lines(50_000))
    log.close()
    assert (small_disk / "log").stat().st_size <= DISK_BYTES
    assert log.readable().read_bytes() == lines(50_000)


def test_another_process_can_read_it_while_this_one_lives(small_disk):
    log = ServerLog(small_disk / "log")
    log.write(lines(50_000))
    read = subprocess.run(["tail", "-n", "1", log.readable()], capture_output=True, check=True)
    assert read.stdout == b"line 049999\n"


def test_of_more_than_memory_is_for_the_newest_lines_stay(small_disk):
    log = ServerLog(small_disk / "log")
    for first in range(0, 300_000, 1000):
        log.write(lines(1000, first))
    text = log.readable().read_bytes()
    assert text.startswith(b"line 000000\n") and text.endswith(b"line 299999\n")
    assert b"[legroom left out" in text
    assert len(text) < DISK_BYTES + UNWRITTEN_BYTES + 100


def test_once_there_is_room_again_it_is_written(small_disk):
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * (DISK_BYTES - 8192))
    log = ServerLog(small_disk / "log")
    log.write(lines(5000))
    assert log.problem
    ballast.unlink()
    log.write(b"the end\n")
    assert not log.problem
    assert (small_disk / "log").read_bytes() == lines(5000) + b"the end\n"


def test_without_room_for_a_second_file_a_log_is_shortened_in_place(small_disk, monkeypatch):
    monkeypatch.setattr("legroom.actions.server_log.TAIL_BYTES", 100_000)
    monkeypatch.setattr("legroom.actions.server_log.UNWRITTEN_BYTES", 20_000)
    log = ServerLog(small_disk / "log")
    log.write(b"the start\n")
    log.started()
    for first in range(0, 40_000, 100):
        log.write(lines(100, first))
    kept = log.readable().read_bytes().splitlines()
    assert kept[0] == b"the start" and kept[-1] == b"line 039999"
    assert not (small_disk / "log.new").exists()


def test_a_log_that_cannot_be_shortened_at_all_is_not_copied_with_every_line(tmp_path, monkeypatch):
    monkeypatch.setattr("legroom.actions.server_log.TAIL_BYTES", 1000)
    attempts = []

    def refused(*_: object) -> None:
        attempts.append(1)
        raise OSError(errno.EPERM, "append only")

    monkeypatch.setattr(os, "ftruncate", refused)
    monkeypatch.setattr(Path, "replace", refused)
    log = ServerLog(tmp_path / "log")
    log.started()
    for number in range(1000):
        log.write(b"line %06d\n" % number)
    assert len(attempts) < 40
    assert last_lines(log.readable(), 1) == ["line 000999"]


def test_an_output_on_a_full_disk_is_written_again_when_there_is_room(small_disk):
    out = os.open(small_disk / "out", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    code = (
        "import sys, time; print('x' * 400000, flush=True); time.sleep(0.5)\n"
        f"import os; os.truncate({str(small_disk / 'out')!r}, 0); print('room', flush=True)"
    )
    child = Child([sys.executable, "-c", code], os.environ, outputs=(out, out))
    try:
        assert child.wait_gone(30)
    finally:
        child.close()
    assert (small_disk / "out").read_bytes().endswith(b"room\n")


def test_a_folder_that_is_not_there_loses_no_line(tmp_path):
    (tmp_path / "file").write_text("")
    log = ServerLog(tmp_path / "file/log")
    log.write(lines(10))
    assert log.readable().read_bytes() == lines(10)


def test_a_server_that_prints_much_at_once_is_not_kept_waiting(monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr("legroom.actions.server_log.time.sleep", pauses.append)
    source, writing = os.pipe()
    with Path(os.devnull).open("wb") as nowhere:
        relay = OutputRelay(source, nowhere.fileno(), None, None)
        relay.is_batching = True
        relay.start()
        for line in (b"x" * 500_000, b"the last\n"):
            os.write(writing, line)
        os.close(writing)
        relay.join(30)
    assert len(pauses) <= 4  # a pipe holds 64 KiB: eight would be a pause after each


def test_a_line_that_is_being_written_is_no_problem_of_the_disk(tmp_path, monkeypatch):
    log, seen, write = ServerLog(tmp_path / "log"), [], os.write

    def looked_at(file: int, lines: bytes) -> int:
        seen.append(log.problem)
        return write(file, lines)

    monkeypatch.setattr(os, "write", looked_at)
    log.write(b"a line\n")
    assert seen == [False] and not log.problem
