"""Flags as a log prints them, taken apart: `{'model': ..., 'port': 8000}`, `Namespace(...)`, the engine's config line.

What is printed is Python: plain values are read, objects of vLLM only where their flag can be written again.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from legroom.facts.flags import Flag, default, defaults_ever, flags_ever, flags_of
from legroom.facts.releases import Release
from legroom.records import dataclass, field
from legroom.vllm.command_line import flag_words
from legroom.vllm.reading import FIELDS, SPECULATIVE_FIELDS

_NAME = re.compile(r"""[\s.]*(?:'(?P<quoted>\w+)'\s*:|"(?P<double>\w+)"\s*:|(?P<bare>[A-Za-z_]\w*)=)\s*""")
_ENUM = re.compile(r"<\w+\.\w+: (?P<value>'[^']*'|\d+)>")
_MODULE = re.compile(r"\w+\(name='(?P<name>[^']*)', (?:local_)?path='(?P<path>[^']*)'")
_OPEN, _CLOSE = "([{", ")]}"
_NEVER_TYPED = frozenset({"model_tag", "subparser", "command", "dispatch_function", "config", "usage_context"})
_FROM_LLM_CLASS = frozenset({"disable_log_stats"})
"""`LLM(...)` sets these by itself."""
_MOST_FLAGS = 400


@dataclass(frozen=True, slots=True)
class PrintedFlags:
    """What was given, by vLLM's Python names, and the names whose value cannot be told from what is printed."""

    values: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    is_whole: bool = True
    """Nothing is cut off or left out."""


def read_printed(text: str) -> PrintedFlags:
    """The outermost names and values of a dictionary or a call as Python prints it; a cut text as far as it goes."""
    values: dict[str, Any] = {}
    unread: list[str] = []
    inner, at = text.strip(), 0
    # What stood inside Namespace(...) comes without its bracket; a dictionary that lacks its own was cut.
    inner = inner[1:] if inner.startswith("{") else f"{inner})"
    while len(values) < _MOST_FLAGS and (pair := _pair(inner, at)):
        name, written, at = pair
        try:
            values.setdefault(name, _value(written))
        except ValueError:
            unread.append(name)
    return PrintedFlags(values, tuple(unread), not inner[at:].strip(" )}"))


def given_only(printed: PrintedFlags, release: Release | None) -> PrintedFlags:
    """Without what a release takes anyway; any release's default counts where none is known."""
    by_dest = _by_dest(release)
    values = {
        name: value
        for name, value in printed.values.items()
        if name not in by_dest or not _is_default(by_dest[name], value, release)
    }
    # An object that is printed whole is mostly the default's own.
    return PrintedFlags(values, (), printed.is_whole)


def other_words(printed: PrintedFlags, release: Release | None, from_llm: bool = False) -> tuple[str, ...]:
    """The flags that have no field in `ServeArgs`, as they are typed."""
    words: list[str] = []
    by_dest = _by_dest(release)
    for name, value in printed.values.items():
        flag = by_dest.get(name)
        if flag is None or name in FIELDS or name in _NEVER_TYPED or name in SPECULATIVE_FIELDS:
            continue
        if value is None or value in ([], {}, "") or (from_llm and name in _FROM_LLM_CLASS):
            continue
        words += _words(flag, value)
    return tuple(words)


def untyped_names(printed: PrintedFlags, release: Release | None) -> tuple[str, ...]:
    """Flags that were given with a value which the log does not show."""
    by_dest = _by_dest(release)
    return tuple(by_dest[name].name for name in printed.unread if name in by_dest and name not in _NEVER_TYPED)


def _words(flag: Flag, value: Any) -> list[str]:
    if isinstance(value, dict) or (isinstance(value, list) and not flag.kind.startswith("list:")):
        return [flag.name, json.dumps(value)]
    if isinstance(value, bool) and flag.kind not in ("switch", "bool", "optbool"):
        return [flag.name] if value else []
    return flag_words(flag, value)


def _by_dest(release: Release | None) -> dict[str, Flag]:
    table = {flag.dest: flag for flag in flags_ever().values()}
    return table if release is None else table | {flag.dest: flag for flag in flags_of(release).values()}


def _is_default(flag: Flag, value: Any, release: Release | None) -> bool:
    if value is None or value is False or value in ([], {}, ""):
        return True
    declared = defaults_ever(flag.name) if release is None else (default(flag.name, release),)
    return any(one == value or (isinstance(one, str) and _is_written(one, value)) for one in declared)


def _is_written(default_text: str, value: Any) -> bool:
    """A default that vLLM's source writes as an enum's member; an expression cannot be compared, and is hardly ever
    overridden."""
    return "(" in default_text or default_text.rpartition(".")[2].lower() == str(value).lower()


def _pair(text: str, at: int) -> tuple[str, str, int] | None:
    """The next name, its value as it is written, and where to go on; None where the text is over or cut."""
    name = _NAME.match(text, at)
    end = _end_of_value(text, name.end()) if name else None
    if name is None or end is None:
        return None
    return name["quoted"] or name["double"] or name["bare"], text[name.end() : end].strip(), end + 1


def _end_of_value(text: str, at: int) -> int | None:
    """Where the comma or the closing bracket after a value stands; None where the text ends before."""
    depth, quote = 0, ""
    while at < len(text):
        char = text[at]
        if quote:
            if char == "\\":
                at += 1
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            if depth == 0:
                return at
            depth -= 1
        elif char == "," and depth == 0:
            return at
        at += 1
    return None


def _value(written: str) -> Any:
    """A value as Python or JSON writes it; adapters as `name=path`, which is how their flag takes them."""
    enum = _ENUM.fullmatch(written)
    text = enum["value"] if enum else written
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    modules = [f"{module['name']}={module['path']}" for module in _MODULE.finditer(text)]
    if modules and text.startswith("["):
        return modules
    raise ValueError(text)
