#!/usr/bin/env python3
"""Hostile memory snapshots and black boxes, for as long as is asked: nothing may be run, fill the memory or crash.

    fuzz_records.py [--seconds 60] [--seed N] [SNAPSHOT.pickle ...]

Starts from snapshots that the tests write, the snapshots given and the black boxes recorded on an H200. Pickles are
changed byte by byte, in their opcodes, by calls put into them, and as data before they are written; black boxes as text
and as data. Each is read, reported and drawn as `legroom fragments` does, and a black box diagnosed. The process may
take 1 GiB more than it has at the start, and a read 20 seconds. Says what failed, with the input's path; exit code 1.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pickle
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "fragments"))

from snapshot_writer import SnapshotWriter, block, pinned_segments

from legroom import DiagnosisReport
from legroom.diagnosis.diagnose import read_log
from legroom.diagnosis.starting_plan import Hints
from legroom.drawing.terminal import Style
from legroom.errors import LegroomError
from legroom.fragments.fragment_report import fragment_report
from legroom.fragments.fragment_sources import read_content
from legroom.render.fragments_svg import fragments_svg
from legroom.render.fragments_text import fragments_text

WITNESS = Path(tempfile.gettempdir()) / f"legroom-fuzz-ran-{os.getpid()}"
CALL = b"cos\nsystem\n(X" + len(f"touch {WITNESS}").to_bytes(4, "little") + f"touch {WITNESS}".encode() + b"tR"
OPCODES = bytes(range(0x80, 0x98)) + b"(.012FGIJKLMNPQRSTUVX]abcdeghijlopqrstu})"
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63 - 1,
    2**63,
    2**80,
    -(2**70),
    1e308,
    -1.0,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\x1b[2J\n\r\u202e<script>",
    "A" * 5000,
    [],
    {},
    [[]],
    [1, [2]],
    {"a": {"b": []}},
    (),
    (0, 0, 0),
]


def laughs() -> Any:
    """A list that is in itself twice, forty times over: 160 lists, and no room for its text."""
    value: Any = ["ha"]
    for _ in range(40):
        value = [value, value]
    return value


def changed_data(value: Any, chance: random.Random, share: float) -> Any:
    if chance.random() < share:
        return laughs() if chance.random() < 0.1 else chance.choice(VALUES)
    if isinstance(value, dict):
        items = [(name, changed_data(inner, chance, share)) for name, inner in value.items()]
        return dict(item for item in items if chance.random() > share / 2)
    if isinstance(value, list | tuple):
        inner = [changed_data(item, chance, share) for item in value]
        if inner and chance.random() < share:
            inner = inner * chance.choice([2, 50])
        return type(value)(inner)
    return value


def changed_bytes(content: bytes, chance: random.Random, letters: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 5, 20])):
        place = chance.randrange(len(changed) + 1)
        kind = chance.randrange(6)
        if kind == 0:
            changed[place : place + 1] = bytes([chance.randrange(256)])
        elif kind == 1:
            changed[place:place] = bytes([chance.choice(letters)])
        elif kind == 2:
            del changed[place : place + chance.choice([1, 4, 100])]
        elif kind == 3:
            changed[place:place] = changed[: chance.choice([8, 200])]
        elif kind == 4:
            del changed[place:]
        else:
            changed[place:place] = CALL
    return bytes(changed)


def snapshot(chance: random.Random, seeds: list[bytes]) -> bytes:
    if chance.random() < 0.5:
        return changed_bytes(chance.choice(seeds), chance, OPCODES)
    document = pickle.loads(chance.choice(seeds))  # our own, or given by who runs this
    return pickle.dumps(changed_data(document, chance, chance.choice([0.0005, 0.005, 0.05])), chance.randint(2, 5))


def black_box(chance: random.Random, seeds: list[Any]) -> bytes:
    record = chance.choice(seeds)
    if chance.random() < 0.3:
        return changed_bytes(json.dumps(record).encode(), chance, b'{}[]",:0123456789-eEn\\u')
    while True:
        changed = changed_data(record, chance, chance.choice([0.0001, 0.0005, 0.005]))
        if isinstance(changed, dict):
            head = {"legroom": "black box", "version": 1}
            with_laughs = any(value is not None and _is_deep(value) for value in changed.values())
            if not with_laughs:  # JSON has no references: its text would be endless here already
                return json.dumps(head | {k: v for k, v in changed.items() if k not in head}).encode()


def _is_deep(value: Any, depth: int = 0) -> bool:
    if depth > 30:
        return True
    if isinstance(value, dict):
        return any(_is_deep(inner, depth + 1) for inner in value.values())
    return isinstance(value, list | tuple) and any(_is_deep(inner, depth + 1) for inner in value)


def tried(content: bytes, is_black_box: bool) -> str:
    try:
        for reading in read_content(content, "the file", 256 << 20):
            report = fragment_report(reading)
            json.dumps(report.to_json(), allow_nan=False)
            fragments_text(report, Style(width=80))
            fragments_svg(report)
        outcome = "read"
    except LegroomError:
        outcome = "refused"
    if is_black_box:
        try:
            diagnosis = DiagnosisReport(read_log([content], "the file", Hints()))
            json.dumps(diagnosis.json(), allow_nan=False)
            diagnosis.text()
        except LegroomError:
            outcome += ", not diagnosed"
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("snapshots", nargs="*", type=Path)
    args = parser.parse_args()
    writer = SnapshotWriter()
    writer.segment(block(1 << 20), block(1 << 19, "inactive"), pool=(0, 3), expandable=True)
    seeds = [pinned_segments(3).content(), writer.content(2), *(path.read_bytes() for path in args.snapshots)]
    recorded = ROOT / "tests/fixtures/h200_black_boxes.jsonl"
    boxes = [row["record"] for row in map(json.loads, recorded.read_text().splitlines()) if "record" in row]
    limit = psutil.Process().memory_info().vms + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("20 seconds")))
    outcomes: collections.Counter[str] = collections.Counter()
    failures: dict[str, Path] = {}
    end_s = time.monotonic() + args.seconds
    number = args.seed
    while time.monotonic() < end_s:
        number += 1
        chance = random.Random(number)
        is_black_box = number % 2 == 0
        content = black_box(chance, boxes) if is_black_box else snapshot(chance, seeds)
        kind = "black box" if is_black_box else "snapshot"
        signal.alarm(20)
        try:
            outcomes[f"{kind} {tried(content, is_black_box)}"] += 1
        except BaseException as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{kind}: {type(error).__name__}: {str(error)[:90]} ({Path(last.filename).name}:{last.lineno})"
            outcomes["FAILED"] += 1
            if where not in failures:
                failures[where] = Path(tempfile.gettempdir()) / f"legroom-fuzz-{number}"
                failures[where].write_bytes(content)
        finally:
            signal.alarm(0)
        if WITNESS.exists():
            WITNESS.unlink()
            sys.exit(f"number {number} ran code")
    print(json.dumps(dict(outcomes) | {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000}))
    for where, path in failures.items():
        print(where, path)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
