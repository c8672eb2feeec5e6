"""Reading watch.toml so that a mistake in it is named with its line and its key."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from legroom.errors import LegroomError

_Value = TypeVar("_Value")
_HEADER = re.compile(r"^\s*(\[\[|\[)\s*([^\]]+?)\s*\]")
_KEY = re.compile(r"""^\s*((?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+)(?:\s*\.\s*(?:"[^"]*"|[A-Za-z0-9_-]+))*)\s*=""")
_NAMES = {str: "text", bool: "true or false", int: "a whole number", float: "a number", list: "a list", dict: "a table"}

Steps = tuple[str | int, ...]


class ConfigMistake(LegroomError):
    """A mistake in the file, with its line and its key in the message."""


def read_toml(path: Path) -> Table:
    """The whole file as a table that knows its lines."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise LegroomError(f"{path} cannot be read: {reason}") from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"line (\d+)", str(error))
        line = int(place[1]) if place else len(text.splitlines())
        raise LegroomError(f"{path.name}, line {line}: {error}", "see https://toml.io for the format") from error
    return Table(values, (), path.name, _lines(text), path.parent)


class Table:
    """One table of the file. Whatever is taken from it is checked, and what nobody took is a mistake."""

    def __init__(
        self, values: Mapping[str, Any], at: Steps, file: str, lines: Mapping[Steps, int], folder: Path
    ) -> None:
        self._held, self._at, self._file, self._lines = values, at, file, lines
        self.folder = folder
        self._taken: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._held

    @property
    def keys(self) -> tuple[str, ...]:
        """As written."""
        return tuple(self._held)

    def wrong(self, key: str, what: str, hint: str = "") -> ConfigMistake:
        """A mistake at a key, ready to be raised."""
        steps = (*self._at, key) if key else self._at
        name = ".".join(str(step + 1) if isinstance(step, int) else step for step in steps)
        return ConfigMistake(f"{self._file}, line {self._line(steps)}: {name}: {what}", hint)

    def _line(self, steps: Steps) -> int:
        """Of the key, else of the nearest thing around it that has a line of its own."""
        while steps:
            if steps in self._lines:
                return self._lines[steps]
            steps = steps[:-1]
        return 1

    def get(self, key: str, kind: type[_Value], default: _Value) -> _Value:
        """A value of this type, or the default where there is none."""
        value = self.find(key, kind)
        return default if value is None else value

    def find(self, key: str, kind: type[_Value]) -> _Value | None:
        """The same with None where there is none."""
        self._taken.add(key)
        if key not in self._held:
            return None
        value = self._held[key]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.wrong(key, f"must be {_NAMES[kind]}, not {_shown(value)}")
        return value

    def number(self, key: str, default: float, least: float = 0.0, most: float = float("inf")) -> float:
        value = self.get(key, float, default)
        if not least <= value <= most:  # false for NaN too
            bounds = f"from {least:g} on" if most == float("inf") else f"from {least:g} to {most:g}"
            raise self.wrong(key, f"must be {bounds}, not {value:g}")
        return value

    def whole(self, key: str, default: int, least: int = 0, most: int = 1_000_000) -> int:
        value = self.get(key, int, default)
        if not least <= value <= most:
            raise self.wrong(key, f"must be from {least} to {most}, not {value}")
        return value

    def need(self, key: str, kind: type[_Value]) -> _Value:
        value = self.find(key, kind)
        if value is None:
            raise self.wrong(key, "is missing")
        return value

    def choice(self, key: str, choices: Sequence[str], default: str) -> str:
        value = self.get(key, str, default)
        if value not in choices:
            raise self.wrong(key, f"must be one of {', '.join(choices)}, not {value!r}", _closest(value, choices))
        return value

    def words(self, key: str, choices: Sequence[str], default: Sequence[str]) -> tuple[str, ...]:
        values = self.get(key, list, list(default))
        for value in values:
            if value not in choices:
                hint = _closest(str(value), choices)
                raise self.wrong(key, f"must be among {', '.join(choices)}, not {_shown(value)}", hint)
        return tuple(values)

    def path(self, key: str) -> Path | None:
        """A path, taken from the folder of the file."""
        text = self.find(key, str)
        return None if text is None else self.folder / Path(text).expanduser()

    def secret(self, key: str) -> str | None:
        """`key` itself, or what `key_env` or `key_file` point to: a file under version control needs no secret."""
        given = [name for name in (key, f"{key}_env", f"{key}_file") if name in self._held]
        if len(given) > 1:
            raise self.wrong(given[1], f"is given beside {given[0]}: one of them is enough")
        for name in given:
            if not isinstance(self._held[name], str):  # a secret of digits is not to be shown
                raise self.wrong(name, f"must be text, not {_kind(self._held[name])}", "put it in quotes")
        plain, variable, file = self.find(key, str), self.find(f"{key}_env", str), self.path(f"{key}_file")
        if variable is not None:
            plain = os.environ.get(variable, "")
            if not plain:
                raise self.wrong(f"{key}_env", f"the environment variable {variable} is not set")
        if file is not None:
            try:
                plain = file.read_text("utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise self.wrong(f"{key}_file", f"{file} cannot be read") from error
        if plain is not None and not plain.strip():
            raise self.wrong(given[0], "is empty")
        return plain

    def table(self, key: str) -> Table | None:
        values = self.find(key, dict)
        return None if values is None else Table(values, (*self._at, key), self._file, self._lines, self.folder)

    def tables(self, key: str) -> tuple[Table, ...]:
        """A list of tables, `[[key]]`."""
        tables = self.get(key, list, [])
        for number, values in enumerate(tables):
            if not isinstance(values, dict):
                raise self.wrong(key, f"number {number + 1} must be a table, written [[{key}]]")
        return tuple(
            Table(values, (*self._at, key, number), self._file, self._lines, self.folder)
            for number, values in enumerate(tables)
        )

    def plain(self) -> dict[str, Any]:
        """Everything in it, for whoever checks it himself."""
        self._taken.update(self._held)
        return dict(self._held)

    def end(self) -> None:
        """Nothing may be left that nobody took."""
        for key in self._held:
            if key not in self._taken:
                raise self.wrong(key, "is not a setting here", _closest(key, sorted(self._taken)))


def _lines(text: str) -> dict[Steps, int]:
    """The line of every header and key. Good enough to point with: tomllib has read the file already."""
    lines: dict[Steps, int] = {}
    counts: dict[Steps, int] = {}
    at: Steps = ()
    in_text = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if in_text:
            in_text = "" if in_text in line else in_text
            continue
        header, key = _HEADER.match(line), _KEY.match(line)
        if header:
            at = _resolved(_split(header[2]), counts)
            if header[1] == "[[":
                counts[at] = counts.get(at, -1) + 1
                at = (*at, counts[at])
            lines.setdefault(at, number)
        elif key:
            lines.setdefault((*at, *_split(key[1])), number)
            for quote in ('"""', "'''"):
                in_text = quote if line.count(quote) == 1 else in_text
    return lines


def _resolved(steps: Steps, counts: Mapping[Steps, int]) -> Steps:
    """`servers.limits` below the third `[[servers]]` is servers, 2, limits."""
    at: Steps = ()
    for number, step in enumerate(steps):
        at = (*at, step)
        if at in counts and number < len(steps) - 1:
            at = (*at, counts[at])
    return at


def _split(dotted: str) -> Steps:
    return tuple(part.strip("\"'") for part in re.findall(r""""[^"]*"|'[^']*'|[A-Za-z0-9_-]+""", dotted))


def _closest(word: str, known: Sequence[str]) -> str:
    near = get_close_matches(word, known, 1)
    return f"did you mean {near[0]}?" if near else ""


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return "text"  # it may be a secret in the wrong place
    return _kind(value) if isinstance(value, (list, dict, bool)) else str(value)


def _kind(value: Any) -> str:
    return _NAMES.get(type(value), type(value).__name__)
