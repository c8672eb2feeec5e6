"""The file that `legroom simulate --timeline` writes: one line or row a step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError
from legroom.simulation.timeline import ScheduledStep

_ROWS_A_GROUP = 10_000


@contextmanager
def step_writer(path: str) -> Iterator[Callable[[ScheduledStep], None]]:
    """Write steps to `path`, by its ending."""
    try:
        if path.endswith(".parquet"):
            with _parquet(path) as write:
                yield write
            return
        with Path(path).open("w", encoding="utf-8") as out:
            dumps = json.JSONEncoder(separators=(",", ":")).encode

            def write_line(step: ScheduledStep) -> None:
                out.write(dumps(step.as_json()) + "\n")

            yield write_line
    except OSError as error:
        raise LegroomError(f"could not write the timeline to {path}: {error.strerror}") from error


@contextmanager
def _parquet(path: str) -> Iterator[Callable[[ScheduledStep], None]]:
    try:
        import pyarrow as pa  # type: ignore[import-not-found,unused-ignore]
        from pyarrow import parquet  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise LegroomError("a Parquet timeline needs the package pyarrow", "write to a .jsonl file instead") from None
    names = pa.list_(pa.string())
    schema = pa.schema(
        [
            ("step", pa.int64()),
            ("scheduled", pa.map_(pa.string(), pa.int64())),
            ("preempted", names),
            ("finished", names),
            ("running", pa.int64()),
            ("waiting", pa.int64()),
            ("free_blocks", pa.int64()),
        ]
    )
    rows: list[dict[str, Any]] = []
    with parquet.ParquetWriter(path, schema) as out:

        def flush() -> None:
            if rows:
                out.write_table(pa.Table.from_pylist(rows, schema))
                rows.clear()

        def write(step: ScheduledStep) -> None:
            rows.append({**step.as_json(), "scheduled": list(step.scheduled.items())})
            if len(rows) >= _ROWS_A_GROUP:
                flush()

        yield write
        flush()
