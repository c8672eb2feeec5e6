"""Traces in CSV files: the Azure LLM inference traces and BurstGPT."""

import csv
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime

from legroom.errors import LegroomError
from legroom.records import dataclass
from legroom.simulation.trace import Trace


@dataclass(frozen=True)
class CsvFormat:
    """A CSV file with a column each for the time, the prompt tokens and the output tokens of a request."""

    columns: tuple[str, str, str]
    seconds: Callable[[str], float]
    """Reads the time; raises ValueError."""
    time_error: str
    """The message about a time that cannot be read."""
    skips_empty_outputs: bool
    """Whether rows without output tokens are failed requests; otherwise they count as one token."""

    def looks_like(self, head: str) -> bool:
        """Whether the first line of `head`, a file's beginning, is a header with this format's columns, in any case."""
        first = head.split("\n", 1)[0].lower()
        return all(name.lower() in first for name in self.columns)

    def read(self, lines: Iterable[str], name: str) -> Trace:
        """The trace of CSV lines, named `name`; arrivals are seconds after the first; LegroomError for a bad cell."""
        trace = Trace(name, in_seconds=True)
        start: float | None = None
        for line, (time, prompt, output) in self._numbered_rows(lines, name):
            output_len = _token_count(output, self.columns[2], name, line)
            if output_len == 0 and self.skips_empty_outputs:
                continue
            try:
                at = self.seconds(time)
            except ValueError:
                raise LegroomError(f"{name}, line {line}: {self.time_error.format(time)}") from None
            start = at if start is None else start
            trace.add(_token_count(prompt, self.columns[1], name, line), max(1, output_len), max(0.0, at - start))
        return trace

    def _numbered_rows(self, lines: Iterable[str], file: str) -> Iterator[tuple[int, list[str]]]:
        """(line number, cells of this format's columns) of each row. LegroomError: `file` lacks a column or a cell."""
        reader = csv.reader(lines)
        header = [cell.strip().lower() for cell in next(reader, [])]
        missing = [name for name in self.columns if name.lower() not in header]
        if missing:
            raise LegroomError(f"{file} has no column {missing[0]!r}", f"its columns are {', '.join(header)}")
        indices = [header.index(name.lower()) for name in self.columns]
        for row in filter(None, reader):
            if len(row) <= max(indices):
                raise LegroomError(f"{file}, line {reader.line_num}: {len(row)} cells, the header has {len(header)}")
            yield reader.line_num, [row[index].strip() for index in indices]


def _token_count(cell: str, column: str, file: str, line: int) -> int:
    """The cell as an integer, fractions cut off; LegroomError with file, line and column where it is no number."""
    try:
        return int(float(cell))
    except (ValueError, OverflowError):
        raise LegroomError(f"{file}, line {line}: {column} is {cell!r}, not a number") from None


def _timestamp_s(text: str) -> float:
    """Unix seconds of an ISO date and time without a zone, taken as UTC."""
    # Azure writes seven digits of a second; Python reads six.
    whole, _, fraction = text.partition(".")
    digits = "".join(c for c in fraction.split("+")[0] if c.isdigit())
    moment = datetime.fromisoformat(whole.split("+")[0])
    return moment.replace(tzinfo=UTC).timestamp() + (float(f"0.{digits}") if digits else 0.0)


AZURE = CsvFormat(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _timestamp_s, "{!r} is not a date and time", False)
BURSTGPT = CsvFormat(("Timestamp", "Request tokens", "Response tokens"), float, "Timestamp is {!r}, not seconds", True)
