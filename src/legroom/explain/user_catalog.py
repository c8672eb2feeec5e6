"""Records that this user imported: one file each under `catalog/` in legroom's home."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError
from legroom.explain.deadends import entry_of_record
from legroom.explain.entry import Entry
from legroom.explain.entry_files import record_schema
from legroom.explain.schema_check import problems
from legroom.explain.validate import pattern_problem
from legroom.home import home

_LARGEST_RECORD_BYTES = 1 << 20
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def user_folder() -> Path:
    return home() / "catalog"


def imported() -> tuple[Entry, ...]:
    """What was imported, by id; a file that is no record any more is left out (`catalog validate` names it)."""
    return tuple(entry_of_record(record) for _, record, wrong in stored_records() if record is not None and not wrong)


def stored_records() -> list[tuple[Path, Mapping[str, Any] | None, list[str]]]:
    """Every file of the user's catalog with its record and what is wrong with it."""
    records: list[tuple[Path, Mapping[str, Any] | None, list[str]]] = []
    try:
        paths = sorted(user_folder().glob("*.json"))
    except OSError:
        return []
    for path in paths:
        try:
            record = _read(path)
        except LegroomError as error:
            records.append((path, None, [error.message]))
            continue
        records.append((path, record, record_problems(record)))
    return records


def import_record(path: str) -> Path:
    """Check one record and keep it; where it now lies."""
    record = _read(Path(path))
    wrong = record_problems(record)
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise LegroomError(f"{path} is no record of the dead-ends shape: {wrong[0]}{more}",
                           "legroom catalog export --format deadends shows the shape")  # fmt: skip
    target = user_folder() / f"{_UNSAFE.sub('__', record['id']).strip('.')}.json"
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        temporary.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise LegroomError(
            f"could not write {target}: {error.strerror or error}", "set LEGROOM_HOME to a folder you can write to"
        ) from None
    return target


def record_problems(record: Any) -> list[str]:
    wrong = problems(record, record_schema())
    if not wrong:
        bad_pattern = pattern_problem(record["regex"])
        if bad_pattern:
            wrong.append(f"$.regex: not a pattern that matches in linear time (RE2): {bad_pattern}")
    return wrong


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size > _LARGEST_RECORD_BYTES:
            raise LegroomError(f"{path} is too large for one record", "give a file that holds a single record")
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LegroomError(f"there is no file {path}", "legroom catalog import FILE reads one JSON record") from None
    except OSError as error:
        raise LegroomError(f"cannot read {path}: {error.strerror or error}", "check its path and permissions") from None
    except (ValueError, RecursionError) as error:
        raise LegroomError(f"{path} is not JSON: {error}", "give one record as `catalog export` writes it") from None
