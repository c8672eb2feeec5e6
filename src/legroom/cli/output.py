"""Output of a command: its answer on stdout as text or JSON, files, notes and a progress bar."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legroom.drawing.terminal import Style, style_of
from legroom.errors import LegroomError

if TYPE_CHECKING:
    from legroom.simulation.timeline import ScheduledStep

_REDRAW_INTERVAL_S, _DRAW_AFTER_S, _BAR_WIDTH = 0.2, 1.0, 30
_ROWS_PER_GROUP = 10_000


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[float], None]]:
    """Yields a function of the finished share (0 to 1) that, after 1 s, draws a bar behind `title` on a terminal."""
    began = drawn_at = time.monotonic()

    def draw(share: float) -> None:
        """Draws the bar at the finished share (0 to 1), if it is due and stderr is a terminal."""
        nonlocal drawn_at
        now = time.monotonic()
        if not sys.stderr.isatty() or now - began < _DRAW_AFTER_S or now - drawn_at < _REDRAW_INTERVAL_S:
            return
        drawn_at = now
        full = round(share * _BAR_WIDTH)
        left_s = (now - began) * (1 - share) / share if share > 0 else 0
        sys.stderr.write(f"\r{title} [{'#' * full}{'.' * (_BAR_WIDTH - full)}] {share:4.0%} {left_s:4.0f} s left ")
        sys.stderr.flush()

    try:
        yield draw
    finally:
        if drawn_at != began:
            sys.stderr.write("\r" + " " * 79 + "\r")
            sys.stderr.flush()


def print_answer(as_json: bool, document: Any, text: str | Callable[[Style], str]) -> None:
    """Prints the document as JSON, else the text; either may be a function that is called only if it is printed."""
    if as_json:
        print_json(document() if callable(document) else document)
    else:
        print_text(text)


def print_text(text: str | Callable[[Style], str]) -> None:
    """Prints a text; or what the function returns for stdout's style, which is its width and whether it has colours."""
    sys.stdout.write(text if isinstance(text, str) else text(style_of(sys.stdout)))


def print_json(document: Any) -> None:
    """Prints one indented JSON document."""
    sys.stdout.write(_json_text(document, 1) + "\n")


def print_json_line(document: Any) -> None:
    """Prints one JSON document of a stream as a line and flushes it."""
    sys.stdout.write(_json_text(document, None) + "\n")
    sys.stdout.flush()


def _json_text(document: Any, indent: int | None) -> str:
    """The document as JSON, escaped to ASCII where stdout cannot encode it."""
    text = json.dumps(document, indent=indent, ensure_ascii=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:  # a file name that is not UTF-8, or an ASCII terminal
        text = json.dumps(document, indent=indent)
    return text


def write_file(path: str, text: str, what: str) -> None:
    """Writes a file that the user named; `what` is the noun for it in the LegroomError where that fails."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise LegroomError(f"could not write the {what} to {path}: {error.strerror}") from error


def note(text: str) -> None:
    """Prints a remark on stderr."""
    print(text, file=sys.stderr)


@contextmanager
def step_writer(path: str | None) -> Iterator[Callable[[ScheduledStep], None] | None]:
    """Yields a function that writes a replay's steps to a .parquet or .jsonl file; None where there is no path."""
    if path is None:
        yield None
        return
    try:
        if path.endswith(".parquet"):
            with _parquet_writer(path) as write:
                yield write
            return
        with Path(path).open("w", encoding="utf-8") as out:
            encode = json.JSONEncoder(separators=(",", ":")).encode
            yield lambda step: print(encode(step.as_json()), file=out)
    except OSError as error:
        raise LegroomError(f"could not write the timeline to {path}: {error.strerror}") from error


@contextmanager
def _parquet_writer(path: str) -> Iterator[Callable[[ScheduledStep], None]]:
    """Yields the function that appends one scheduler step to a Parquet file; needs pyarrow."""
    try:
        import pyarrow as pa  # type: ignore[import-not-found,unused-ignore]
        from pyarrow import parquet  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise LegroomError("a Parquet timeline needs the package pyarrow", "write to a .jsonl file instead") from None
    ids = pa.list_(pa.string())
    types = {"scheduled": pa.map_(pa.string(), pa.int64()), "preempted": ids, "finished": ids}
    names = ("step", "scheduled", "preempted", "finished", "running", "waiting", "free_blocks")
    schema = pa.schema([(name, types.get(name, pa.int64())) for name in names])
    rows: list[dict[str, Any]] = []
    with parquet.ParquetWriter(path, schema) as out:

        def flush() -> None:
            """Writes the collected rows to the file as one row group."""
            if rows:
                out.write_table(pa.Table.from_pylist(rows, schema))
                rows.clear()

        def write(step: ScheduledStep) -> None:
            """Collects the step as a row; every _ROWS_PER_GROUP rows are written."""
            rows.append({**step.as_json(), "scheduled": list(step.scheduled.items())})
            if len(rows) >= _ROWS_PER_GROUP:
                flush()

        yield write
        flush()
