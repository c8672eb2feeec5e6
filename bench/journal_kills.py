"""The sidecar and a writer of its journal, killed at random moments, mid-restart included: a table and JSON.

    python bench/journal_kills.py [--kills 200] [--seed 1] [--seconds S]

What is restarted is a stand-in (tests/sidecar/stand_in_server.py), by a command: a process with /metrics that hangs
when told to and writes down which action started it, so restarts can be counted from outside. After every kill the
journal must be whole and hold every entry that was acknowledged; no action may have started the server twice; and in
the end every action must be done with exactly one start, undone with none, or failed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

from bench_harness import arguments
from stand_in import free_port, start_server, start_sidecar, starts, stop_server, wait_for, write_config

from legroom.live.journal.journal import Journal
from legroom.live.journal.journal_records import DONE, UNDONE

WRITER = """
import sys, time
from pathlib import Path
from legroom.live.journal.journal import Journal
journal = Journal.open(Path(sys.argv[1]), busy_s=30)
number = 0
while True:
    number += 1
    incident = journal.open_incident("writer", "test", f"number {number}", {})
    journal.note(incident, "a note")
    print(incident, flush=True)
    time.sleep(0.01)
"""


def action_of(token: str) -> int | None:
    return int(token.partition("-")[0]) if token != "first" else None


STAGES = "stages"
UNFINISHED = "actions WHERE state IN ('planned', 'started')"


def count(path: Path, rows: str) -> int:
    """Looked at from outside, without a lock."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)) as db:
            return int(db.execute(f"SELECT count(*) FROM {rows}").fetchone()[0])
    except sqlite3.Error:
        return 0


class JournalUnderKills:
    """One server, one journal, and the kills of its sidecars."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng = folder, rng
        self.port = free_port()
        start_server(folder, self.port)
        self.config = write_config(folder, self.port, free_port())
        self.journal = folder / "journal.db"
        Journal.open(self.journal).close()
        self.acknowledged: set[int] = set()
        self.mid_action = 0
        self.problems: list[str] = []

    def kill_once(self) -> None:
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(self.journal)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        sidecar = start_sidecar(self.config, self.folder / "sidecar.log")
        if self.rng.random() < 0.9:
            (self.folder / "stuck").touch()
        if self.rng.random() < 0.6:  # so many steps into an action, if one comes
            reached, end_s = count(self.journal, STAGES) + self.rng.randint(1, 5), time.monotonic() + 4.0
            while count(self.journal, STAGES) < reached and time.monotonic() < end_s and sidecar.poll() is None:
                time.sleep(0.005)
            time.sleep(self.rng.uniform(0.0, 0.2))
        else:
            time.sleep(self.rng.uniform(0.0, 3.0))
        for process in self.rng.sample([writer, sidecar], 2):
            os.kill(process.pid, signal.SIGKILL)
        sidecar.wait()
        self.acknowledged |= {int(line) for line in writer.communicate()[0].splitlines() if line}
        self.check()

    def check(self) -> None:
        with Journal.open(self.journal) as journal:
            self.problems += [f"damaged: {problem}" for problem in journal.integrity_problems()]
            held = {incident.id for incident in journal.incidents(server="writer")}
            known = {action.id: action for action in journal.actions()}
            self.mid_action += any(action.unfinished for action in known.values())
        self.problems += [f"acknowledged incident {number} is gone" for number in sorted(self.acknowledged - held)]
        for number, count in Counter(map(action_of, starts(self.folder)[1:])).items():
            if number not in known or known[number].stage("launched") is None:
                self.problems.append(f"action {number} acted without being recorded")
            if count > 1:
                self.problems.append(f"action {number} restarted the server {count} times")

    def finish(self) -> Counter[str]:
        """A sidecar that is left alone ends whatever is open."""
        sidecar = start_sidecar(self.config, self.folder / "sidecar.log")
        wait_for(lambda: not count(self.journal, UNFINISHED) or sidecar.poll() is not None, 60)
        time.sleep(1.0)
        wait_for(lambda: not count(self.journal, UNFINISHED) or sidecar.poll() is not None, 60)
        sidecar.terminate()
        if sidecar.wait(30) != 0:
            self.problems.append("the last sidecar did not end well")
        started = Counter(map(action_of, starts(self.folder)[1:]))
        with Journal.open(self.journal) as journal:
            actions = journal.actions()
        for action in actions:
            wanted = {DONE: 1, UNDONE: 0}.get(action.state)
            if action.unfinished or (wanted is not None and started[action.id] != wanted):
                self.problems.append(f"action {action.id} is {action.state} with {started[action.id]} starts")
        return Counter(action.state for action in actions)


def main() -> int:
    options = arguments(__doc__, kills=200, seed=1, seconds=float("inf"))
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="legroom-kills-") as folder:
        held = JournalUnderKills(Path(folder), random.Random(options.seed))
        try:
            killed = 0
            for number in range(options.kills):
                if time.monotonic() - began_s > options.seconds:
                    break
                held.kill_once()
                killed += 1
                if (number + 1) % 20 == 0:
                    print(f"{number + 1} kills, {held.mid_action} of them mid-action", file=sys.stderr, flush=True)
            states = held.finish()
        finally:
            stop_server(held.folder)
        restarts = len(starts(held.folder)) - 1
    rows = [
        ("kills (sidecar and writer, SIGKILL)", killed),
        ("of them in the middle of an action", held.mid_action),
        ("acknowledged journal entries", len(held.acknowledged)),
        ("actions begun", states.total()),
        ("done, one start each", states[DONE]),
        ("undone, no start", states[UNDONE]),
        ("failed", states["failed"]),
        ("restarts of the server in all", restarts),
        ("problems", len(held.problems)),
    ]
    for name, value in rows:
        print(f"{name:40} {value:>8,}")
    for problem in held.problems[:20]:
        print(f"  {problem}")
    print(
        json.dumps({**dict(rows), "stand_in": True, "wall_s": round(time.monotonic() - began_s), "seed": options.seed})
    )
    return 1 if held.problems else 0


if __name__ == "__main__":
    sys.exit(main())
