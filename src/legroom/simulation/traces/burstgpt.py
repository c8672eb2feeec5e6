"""BurstGPT: Timestamp (seconds), Model, Request tokens, Response tokens, ..."""

from __future__ import annotations

from collections.abc import Iterable

from legroom.errors import LegroomError
from legroom.simulation.trace import Trace
from legroom.simulation.traces.columns import csv_rows, names_columns, tokens

_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def looks_like(head: str) -> bool:
    """Whether the header names the columns."""
    return names_columns(head, _COLUMNS)


def read(lines: Iterable[str], name: str) -> Trace:
    """Rows with no response tokens are failures of the service that was traced; they are left out."""
    trace = Trace(name, in_seconds=True)
    start: float | None = None
    for line, (stamp, prompt, output) in csv_rows(lines, _COLUMNS, name):
        generated = tokens(output, "Response tokens", name, line)
        if generated == 0:
            continue
        try:
            at = float(stamp)
        except ValueError:
            raise LegroomError(f"{name}, line {line}: Timestamp is {stamp!r}, not seconds") from None
        start = at if start is None else start
        trace.add(tokens(prompt, "Request tokens", name, line), generated, max(0.0, at - start))
    return trace
