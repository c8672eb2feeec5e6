"""legroom's own lines: nobody waits for who reads them."""

from __future__ import annotations

import contextlib
import os
import sys
import time

from legroom.run.supervisor import Announcer


def test_lines_come_in_order_with_legrooms_name(capsys):
    with Announcer() as announcer:
        for number in range(100):
            announcer.say(f"line {number}")
    assert capsys.readouterr().err.splitlines() == [f"legroom: line {number}" for number in range(100)]


def test_a_reader_who_stalls_keeps_nobody_waiting(monkeypatch):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    with os.fdopen(writing, "w") as stalled, os.fdopen(reading, "rb"):
        monkeypatch.setattr(sys, "stderr", stalled)
        took_s = []
        with Announcer() as announcer:
            for _ in range(5):  # a busy machine may stop this process in one or two of them
                began_s = time.monotonic()
                announcer.say("SIGINT: ending at once")
                took_s.append(time.monotonic() - began_s)
            assert min(took_s) < 0.4
