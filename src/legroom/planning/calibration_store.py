"""Where calibration is kept: one small JSON file a user, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from legroom.errors import BAD_INPUT, LegroomError
from legroom.home import store_path
from legroom.planning.calibration import Observation, from_json, to_json
from legroom.records import dataclass

__all__ = ["StoredCalibration", "locked", "open_for_change", "read_store", "store_path", "write_store"]

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class StoredCalibration:
    """What the store holds, and what the reader should be told about it."""

    observations: tuple[Observation, ...] = ()
    problem: str = ""
    """Why the file could not be read, if it could not."""


def read_store(path: Path | None = None) -> StoredCalibration:
    """What is stored. Never changes anything: a file that cannot be read is told as a problem."""
    path = path or store_path()
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return StoredCalibration()
    except (OSError, UnicodeDecodeError) as error:
        return StoredCalibration(problem=f"the calibration store {path} cannot be read: {error}")
    try:
        content = json.loads(text)
        schema = content["schema"]
        if isinstance(schema, int) and schema > SCHEMA:
            return StoredCalibration(
                problem=f"the calibration store {path} was written by a newer legroom (schema {schema})"
            )
        return StoredCalibration(tuple(from_json(entry) for entry in content["observations"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return StoredCalibration(problem=f"the calibration store {path} is damaged: {error}")


def write_store(observations: tuple[Observation, ...], path: Path | None = None) -> None:
    """Replace the store in one step; a reader sees the old file or the new one, never half of one."""
    path = path or store_path()
    content = {"schema": SCHEMA, "observations": [to_json(observation) for observation in observations]}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise LegroomError(
            f"the calibration store {path} cannot be written: {error}", "set LEGROOM_HOME to a folder you can write to"
        ) from error


def open_for_change(path: Path) -> tuple[tuple[Observation, ...], str]:
    """What is stored, ready to be replaced. A damaged file is first moved aside, and the note says where to."""
    stored = read_store(path)
    if not stored.problem:
        return stored.observations, ""
    if "newer legroom" in stored.problem:
        raise LegroomError(stored.problem, "update legroom, or set LEGROOM_HOME to another folder", BAD_INPUT)
    aside = _free_name(path)
    try:
        path.rename(aside)
    except OSError as error:
        raise LegroomError(stored.problem, f"it cannot be moved aside either: {error}") from error
    return (), f"{stored.problem}; it was moved to {aside}, and a new store begins"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the store for one change, so that two calibrations at once lose nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f"{path.name}.lock").open("w")
    except OSError as error:
        raise LegroomError(
            f"the calibration store {path} cannot be written: {error}", "set LEGROOM_HOME to a folder you can write to"
        ) from error
    with lock:
        try:
            import fcntl  # noqa: PLC0415 (absent on Windows, where a second writer is simply not held off)
        except ImportError:
            yield
            return
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    return aside
