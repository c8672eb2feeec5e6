"""The Azure LLM inference traces: TIMESTAMP, ContextTokens, GeneratedTokens."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from legroom.errors import LegroomError
from legroom.simulation.trace import Trace
from legroom.simulation.traces.columns import csv_rows, names_columns, tokens

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def looks_like(head: str) -> bool:
    """Whether the header names the columns."""
    return names_columns(head, _COLUMNS)


def read(lines: Iterable[str], name: str) -> Trace:
    """Arrivals count from the first request. Requests that generated nothing are counted as one token."""
    trace = Trace(name, in_seconds=True)
    start: float | None = None
    for line, (stamp, prompt, output) in csv_rows(lines, _COLUMNS, name):
        at = _seconds(stamp, name, line)
        start = at if start is None else start
        trace.add(
            tokens(prompt, "ContextTokens", name, line),
            max(1, tokens(output, "GeneratedTokens", name, line)),
            max(0.0, at - start),
        )
    return trace


def _seconds(stamp: str, name: str, line: int) -> float:
    # The traces write seven digits of a second; Python reads six.
    whole, _, fraction = stamp.partition(".")
    digits = "".join(c for c in fraction.split("+")[0] if c.isdigit())
    try:
        moment = datetime.fromisoformat(whole.split("+")[0])
    except ValueError:
        raise LegroomError(f"{name}, line {line}: {stamp!r} is not a date and time") from None
    return moment.replace(tzinfo=UTC).timestamp() + (float(f"0.{digits}") if digits else 0.0)
