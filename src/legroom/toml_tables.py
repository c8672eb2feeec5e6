"""TOML settings files whose errors name the line and the key."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from legroom.errors import LegroomError
from legroom.files import expanded, read_text

_Value = TypeVar("_Value")
_Choice = TypeVar("_Choice", bound=str)
_HEADER = re.compile(r"^\s*(\[\[|\[)\s*([^\]]+?)\s*\]")
_KEY = re.compile(r"""^\s*((?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+)(?:\s*\.\s*(?:"[^"]*"|[A-Za-z0-9_-]+))*)\s*=""")
_HUGE_NUMBER = re.compile(r"[0-9_]{4000}")
_NAMES = {str: "text", bool: "true or false", int: "a whole number", float: "a number", list: "a list", dict: "a table"}

KeyPath = tuple[str | int, ...]


class ConfigError(LegroomError):
    """An invalid setting; the message names its line and its key."""


class KeyLines:
    """The line numbers of a TOML text's headers and keys."""

    def __init__(self, text: str) -> None:
        lines: dict[KeyPath, int] = {}
        counts: dict[KeyPath, int] = {}
        at: KeyPath = ()
        open_quote = ""
        for number, line in enumerate(text.splitlines(), start=1):
            if open_quote:
                open_quote = "" if open_quote in line else open_quote
                continue
            header, key = _HEADER.match(line), _KEY.match(line)
            if header:
                at = _path_with_indexes(_split_key(header[2]), counts)
                if header[1] == "[[":
                    counts[at] = counts.get(at, -1) + 1
                    at = (*at, counts[at])
                lines.setdefault(at, number)
            elif key:
                path = (*at, *_split_key(key[1]))
                lines.setdefault(path, number)
                lines.setdefault(path[: len(at) + 1], number)
                for quote in ('"""', "'''"):
                    open_quote = quote if line.count(quote) == 1 else open_quote
        self._lines = lines

    def line_of(self, path: KeyPath) -> int:
        """The line number of a key, else of the nearest enclosing table that has a line, else 1."""
        while path:
            if path in self._lines:
                return self._lines[path]
            path = path[:-1]
        return 1


def parse_toml(text: str, name: str, hint: str = "see https://toml.io for the format") -> dict[str, Any]:
    """The parsed text called `name`. A syntax error becomes a LegroomError with its line and, if known, key."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOML's own, or Python's for a number of thousands of digits
        lines = text.splitlines()
        place = re.search(r"\(at line (\d+), column \d+\)", str(error))
        huge = None if place else _HUGE_NUMBER.search(text)
        number = int(place[1]) if place else text.count("\n", 0, huge.start()) + 1 if huge else len(lines)
        key = _KEY.match(lines[number - 1]) if 0 < number <= len(lines) else None
        where = f"{name}, line {number}{f', key {key[1]!r}' if key else ''}"
        reason = re.sub(r" \(at .*\)$", "", str(error))
        raise LegroomError(f"{where}: {reason}", hint) from error


def read_toml(path: Path) -> TomlTable:
    """The top-level table of a TOML file; LegroomError where it cannot be read."""
    text = read_text(path)
    return TomlTable(parse_toml(text, path.name), (), path, KeyLines(text))


class TomlTable:
    """One table of a file. Values are type-checked when read; leaving its `with` block refuses keys never read."""

    def __init__(self, values: Mapping[str, Any], at: KeyPath, file: Path, lines: KeyLines) -> None:
        self._values, self._at, self._file, self._lines = values, at, file, lines
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __enter__(self) -> TomlTable:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        unread = (key for key in self._values if key not in self._read)
        if error is None and (key := next(unread, None)) is not None:
            raise self.error(key, "is not a setting here", _closest_key_hint(key, sorted(self._read)))

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of all keys of the table, read or not."""
        return tuple(self._values)

    def error(self, key: str, problem: str, hint: str = "") -> ConfigError:
        """The exception to raise for `problem` with a key (empty: with the table itself); it names the line."""
        path = (*self._at, key) if key else self._at
        name = ".".join(str(step + 1) if isinstance(step, int) else step for step in path)
        return ConfigError(f"{self._file.name}, line {self._lines.line_of(path)}: {name}: {problem}", hint)

    def get(self, key: str, kind: type[_Value], default: _Value) -> _Value:
        """The value at `key`, of type `kind`; the default without the key; ConfigError for another type."""
        value = self.find(key, kind)
        return default if value is None else value

    def find(self, key: str, kind: type[_Value]) -> _Value | None:
        """The value at `key`, of type `kind`; None without the key; ConfigError for another type."""
        self._read.add(key)
        if key not in self._values:
            return None
        value = self._values[key]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(key, f"must be {_NAMES[kind]}, not {_value_for_message(value)}")
        return value

    def number(self, key: str, default: float, least: float = 0.0, most: float = float("inf")) -> float:
        """A number from `least` to `most`, else ConfigError; without the key the default, checked as well."""
        value = self.get(key, float, default)
        if not least <= value <= most:  # false for NaN too
            bounds = f"from {least:g} on" if most == float("inf") else f"from {least:g} to {most:g}"
            raise self.error(key, f"must be {bounds}, not {value:g}")
        return value

    def integer(self, key: str, default: int, least: int = 0, most: int = 1_000_000) -> int:
        """A whole number from `least` to `most`, else ConfigError; without the key the default, checked as well."""
        value = self.get(key, int, default)
        if not least <= value <= most:
            raise self.error(key, f"must be from {least} to {most}, not {value}")
        return value

    def require(self, key: str, kind: type[_Value]) -> _Value:
        """The value at `key`, of type `kind`; ConfigError for another type or without the key."""
        value = self.find(key, kind)
        if value is None:
            raise self.error(key, "is missing")
        return value

    def choice(self, key: str, choices: Sequence[_Choice], default: _Choice) -> _Choice:
        """A string among the choices, else ConfigError; without the key the default, which must be valid too."""
        value = self.get(key, str, str(default))
        for choice in choices:
            if choice == value:
                return choice
        raise self.error(key, f"must be one of {', '.join(choices)}, not {value!r}", _closest_key_hint(value, choices))

    def choices(self, key: str, choices: Sequence[str], default: Sequence[str]) -> tuple[str, ...]:
        """A list whose items are all among the choices, else ConfigError; the default without the key."""
        values = self.get(key, list, list(default))
        for value in values:
            if value not in choices:
                hint = _closest_key_hint(str(value), choices)
                raise self.error(key, f"must be among {', '.join(choices)}, not {_value_for_message(value)}", hint)
        return tuple(values)

    def path(self, key: str) -> Path | None:
        """The path at `key`, relative ones below the TOML file's folder; None without the key."""
        text = self.find(key, str)
        return None if text is None else self._file.parent / expanded(text)

    def secret(self, key: str) -> str | None:
        """The text at `key`, in the environment variable that KEY_env names, or in the file KEY_file; None without."""
        given = [name for name in (key, f"{key}_env", f"{key}_file") if name in self._values]
        if len(given) > 1:
            raise self.error(given[1], f"is given beside {given[0]}: one of them is enough")
        for name in given:
            if not isinstance(self._values[name], str):  # a secret of digits is not to be shown
                raise self.error(name, f"must be text, not {_type_name(self._values[name])}", "put it in quotes")
        plain, variable, file = self.find(key, str), self.find(f"{key}_env", str), self.path(f"{key}_file")
        if variable is not None:
            plain = os.environ.get(variable, "")
            if not plain:
                raise self.error(f"{key}_env", f"the environment variable {variable} is not set")
        if file is not None:
            try:
                plain = file.read_text("utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise self.error(f"{key}_file", f"{file} cannot be read") from error
        if plain is not None and not plain.strip():
            raise self.error(given[0], "is empty")
        return plain

    def table(self, key: str) -> TomlTable | None:
        """The table at a key; None without the key, ConfigError for another value."""
        values = self.find(key, dict)
        return None if values is None else TomlTable(values, (*self._at, key), self._file, self._lines)

    def subtables(self) -> Iterator[tuple[str, TomlTable]]:
        """(Key, table) for every key; ConfigError for a value that is no table."""
        for key in self._values:
            yield key, TomlTable(self.require(key, dict), (*self._at, key), self._file, self._lines)

    def tables(self, key: str) -> tuple[TomlTable, ...]:
        """The tables of a TOML list of tables, `[[key]]`, else ConfigError; empty without the key."""
        tables = self.get(key, list, [])
        for number, values in enumerate(tables):
            if not isinstance(values, dict):
                raise self.error(key, f"number {number + 1} must be a table, written [[{key}]]")
        return tuple(
            TomlTable(values, (*self._at, key, number), self._file, self._lines) for number, values in enumerate(tables)
        )

    def raw(self, key: str) -> Any:
        """The value at `key` as TOML has it; None without the key."""
        self._read.add(key)
        return self._values.get(key)


def _path_with_indexes(path: KeyPath, counts: Mapping[KeyPath, int]) -> KeyPath:
    """A header's path with list indexes: `servers.limits` below the third `[[servers]]` -> servers, 2, limits."""
    at: KeyPath = ()
    for number, step in enumerate(path):
        at = (*at, step)
        if at in counts and number < len(path) - 1:
            at = (*at, counts[at])
    return at


def _split_key(dotted: str) -> KeyPath:
    """The parts of a dotted TOML key, without quotes."""
    return tuple(part.strip("\"'") for part in re.findall(r""""[^"]*"|'[^']*'|[A-Za-z0-9_-]+""", dotted))


def _closest_key_hint(word: str, known: Sequence[str]) -> str:
    """`did you mean ...?` with the known key or choice closest to the word; empty where none is close."""
    near = get_close_matches(word, known, 1)
    return f"did you mean {near[0]}?" if near else ""


def _value_for_message(value: Any) -> str:
    """The value as an error message names it; the type alone for text, which may be a secret."""
    if isinstance(value, str):
        return "text"  # it may be a secret in the wrong place
    return _type_name(value) if isinstance(value, (list, dict, bool)) else str(value)


def _type_name(value: Any) -> str:
    """What a value is, in words for the user: `a whole number`, `a table` ..."""
    return _NAMES.get(type(value), type(value).__name__)
