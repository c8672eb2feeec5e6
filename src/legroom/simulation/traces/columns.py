"""Rows of a CSV file with a header, as numbers."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence

from legroom.errors import LegroomError


def names_columns(head: str, columns: Sequence[str]) -> bool:
    """Whether the first line is a header with these columns, whatever their case."""
    first = head.split("\n", 1)[0].lower()
    return all(name.lower() in first for name in columns)


def csv_rows(lines: Iterable[str], names: Sequence[str], file: str) -> Iterator[tuple[int, list[str]]]:
    """Line number and the named cells of every row."""
    reader = csv.reader(lines)
    header = [cell.strip().lower() for cell in next(reader, [])]
    missing = [name for name in names if name.lower() not in header]
    if missing:
        raise LegroomError(f"{file} has no column {missing[0]!r}", f"its columns are {', '.join(header)}")
    places = [header.index(name.lower()) for name in names]
    for row in reader:
        if not row:
            continue
        if len(row) <= max(places):
            raise LegroomError(f"{file}, line {reader.line_num}: {len(row)} cells, the header has {len(header)}")
        yield reader.line_num, [row[place].strip() for place in places]


def tokens(cell: str, what: str, file: str, line: int) -> int:
    try:
        return int(float(cell))
    except (ValueError, OverflowError):
        raise LegroomError(f"{file}, line {line}: {what} is {cell!r}, not a number") from None
