"""Text of a file with the place of each character."""

import re
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

from legroom.errors import LegroomError
from legroom.isolation import given_models
from legroom.records import dataclass

MAX_FILE_BYTES = 10 * 2**20
"""Deployment files are a thousand times smaller; logs are not read here."""

OPEN_WORD = "$_template_"
"""Stands for a word that a template fills in with what is not known."""


def read_text(path: Path) -> str:
    """The text of a file; LegroomError if unreadable, not text, above MAX_FILE_BYTES, or where no file may be read."""
    if given_models() is not None:
        raise LegroomError(f"{path} is a file beside this text, and is not read", "put what it says into the text")
    try:
        if path.is_dir():
            raise LegroomError(f"{path} is a folder", "pass one file")
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise LegroomError(
                f"{path} is {size / 2**20:,.0f} MiB, too large for a deployment file",
                f"legroom reads files up to {MAX_FILE_BYTES >> 20} MiB",
            )
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LegroomError(f"{path} cannot be read: {reason}", "check the path") from None
    if len(content) > MAX_FILE_BYTES:
        raise LegroomError(f"{path} is too large", f"legroom reads files up to {MAX_FILE_BYTES >> 20} MiB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise LegroomError(f"{path} is not a text file", "pass a YAML, unit, Python or shell file") from None


@dataclass(frozen=True, slots=True)
class Place:
    """A line and column of a file, counted from 1."""

    path: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Unread:
    """A file, or a part of one, that could not be read."""

    place: Place
    reason: str
    hint: str = ""


class Text:
    """A whole file, a code block in a document, or a value in a manifest, with its place in the file."""

    def __init__(
        self, path: str, text: str, line: int = 1, columns: tuple[int, ...] | None = None, within: "Text | None" = None
    ) -> None:
        """`line` is its first line in the file, or in the text around it; `columns[i]` is the indentation of line i."""
        self.path, self._within = path, within
        self.text = text
        self._line = line
        self._columns = columns or ()
        self._starts = [0, *(newline.end() for newline in re.finditer("\n", text))]

    def place(self, offset: int) -> Place:
        """Path, line and column of an offset in this text, as they are in the whole file."""
        row = bisect_right(self._starts, max(0, min(offset, len(self.text)))) - 1
        column = offset - self._starts[row] + (self._columns[row] if row < len(self._columns) else 0)
        if self._within is not None:
            return self._within.place(self._within.start_of(self._line + row - 1) + column)
        return Place(self.path, self._line + row, column + 1)

    def with_text(self, text: str) -> "Text":
        """Another text with the same rows and columns of the file, such as this text with parts blanked."""
        return Text(self.path, text, self._line, self._columns, self._within)

    def start_of(self, row: int) -> int:
        """The offset in this text at which a row (counted from 0) begins."""
        return self._starts[min(row, len(self._starts) - 1)]

    def row_of(self, offset: int) -> int:
        """The row of an offset, counted from 0."""
        return bisect_right(self._starts, offset) - 1

    def lines(self) -> Iterator[tuple[int, str]]:
        """(offset of its beginning, line) of each line of the text."""
        for i, start in enumerate(self._starts):
            end = self._starts[i + 1] - 1 if i + 1 < len(self._starts) else len(self.text)
            yield start, self.text[start:end].rstrip("\r")

    def dedented_rows(self, first: int, last: int) -> "Text":
        """The rows from `first` up to, without, `last` as a text without their common indentation."""
        if first >= len(self._starts):
            return Text(self.path, "", self._line + first, None, self._within)
        end = self._starts[last] - 1 if last < len(self._starts) else len(self.text)
        lines = [line.rstrip("\r") for line in self.text[self._starts[first] : end].split("\n")][: last - first]
        filled = [line for line in lines if line.strip()]
        indent = min((len(line) - len(line.lstrip(" ")) for line in filled), default=0)
        columns = tuple(
            indent + (self._columns[first + i] if first + i < len(self._columns) else 0) for i in range(len(lines))
        )
        return Text(self.path, "\n".join(line[indent:] for line in lines), self._line + first, columns, self._within)


def without_comment_lines(text: str, marks: str) -> str:
    """The text of a continued line with comment lines inside it blanked; `marks`: characters that begin a comment."""
    return re.sub(rf"(?<=\n)[ \t]*[{marks}][^\n]*(\n|$)", lambda comment: " " * len(comment[0]), text)


class ShiftedLocator:
    """Converts offsets in a part of a text to places in its file."""

    def __init__(self, source: Text, start: int) -> None:
        self._source, self._start = source, start

    def __call__(self, offset: int) -> Place:
        return self._source.place(self._start + offset)
