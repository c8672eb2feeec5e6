"""What became of fixes: an anonymous local record, so that rates are counted and not believed.

One line a fix in `outcomes.jsonl` of legroom's own folder: the cause, the catalog's entry, the kind of fix, the vLLM
release and whether it worked. No text of a log, no command, no name of a model, a machine or a person, no time. It
never leaves the machine.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from legroom.errors import LegroomError
from legroom.home import home
from legroom.records import dataclass

Reporter = Literal["user", "run"]
_FILE = "outcomes.jsonl"
_MOST_LINES = 100_000
_PLAIN = re.compile(r"[A-Za-z0-9_.+-]{0,60}")
"""Labels, ids and versions look like this; anything else could say more than it should, and is not written."""
CATALOG_KINDS = {
    "eager_or_fewer_graphs": "fewer_graphs",
    "more_or_fewer_gpus_tp_pp": "gpus_or_split",
    "free_gpu_or_kill_orphans": "free_the_gpu",
    "sequence_starts_or_wait": "start_in_turn",
    "engine_version_or_V0": "other_version",
    "disable_custom_allreduce_or_nccl_env": "communication_setting",
    "other_engine_feature_off": "feature_off",
    "more_host_ram_or_shm": "more_host_memory",
    "flag": "drop_flag",
    "driver": "driver_update",
}
"""Kinds of fixes that the catalog's threads are counted by under another name; the rest have the same."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One fix that somebody tried."""

    cause: str
    entry: str
    fix: str
    """The kind of the fix, not its value."""
    release: str
    """The vLLM release; empty where it was not known."""
    worked: bool
    reporter: Reporter = "user"
    """Whether the user said so, or `legroom run` saw it."""


@dataclass(frozen=True, slots=True)
class OutcomeCount:
    worked: int = 0
    tried: int = 0

    @property
    def rate(self) -> float | None:
        return round(self.worked / self.tried, 3) if self.tried else None


def outcomes_path() -> Path:
    """In legroom's folder."""
    return home() / _FILE


def record_outcome(outcome: Outcome) -> Path:
    """Append one line; a reader sees all of it or nothing."""
    values = asdict(outcome)
    odd = [name for name, value in values.items() if isinstance(value, str) and not _PLAIN.fullmatch(value)]
    if odd:
        raise LegroomError(f"this outcome is not recorded: its {odd[0]} is not a plain label")
    path = outcomes_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, (json.dumps(values) + "\n").encode())
        finally:
            os.close(file)
    except OSError as error:
        raise LegroomError(
            f"{path} cannot be written: {error.strerror or error}", "set LEGROOM_HOME to a folder you can write to"
        ) from None
    return path


def read_outcomes(path: Path | None = None) -> tuple[Outcome, ...]:
    """What was recorded here; lines that do not read are passed over."""
    try:
        lines = (path or outcomes_path()).read_text("utf-8", "replace").splitlines()
    except OSError:
        return ()
    return tuple(outcome for line in lines[-_MOST_LINES:] if (outcome := _outcome(line)))


def counted_by(outcomes: Iterable[Outcome], part: str) -> dict[str, OutcomeCount]:
    """How often fixes worked, by one part of the record, the most tried first."""
    groups: dict[str, list[bool]] = {}
    for outcome in outcomes:
        groups.setdefault(str(getattr(outcome, part)) or "not known", []).append(outcome.worked)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return {name: OutcomeCount(sum(worked), len(worked)) for name, worked in ordered}


def total(outcomes: Sequence[Outcome]) -> OutcomeCount:
    return OutcomeCount(sum(outcome.worked for outcome in outcomes), len(outcomes))


def outcomes_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The counts, overall and by cause, kind of fix and release."""

    def document(count: OutcomeCount) -> dict[str, Any]:
        return {"tried": count.tried, "worked": count.worked, "rate": count.rate}

    parts = {
        part: {name: document(count) for name, count in counted_by(outcomes, part).items()}
        for part in ("cause", "fix", "release", "reporter")
    }
    return {"first_fixes": document(total(outcomes)), "by": parts}


def _outcome(line: str) -> Outcome | None:
    try:
        values = json.loads(line)
        outcome = Outcome(**values)
    except (ValueError, TypeError, RecursionError):
        return None
    words = (outcome.cause, outcome.entry, outcome.fix, outcome.release, outcome.reporter)
    return outcome if isinstance(outcome.worked, bool) and all(isinstance(word, str) for word in words) else None
