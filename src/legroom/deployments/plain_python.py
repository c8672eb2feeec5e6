"""`LLM(...)` and engine arguments in Python source: read as literals, never run."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.flags import Flag, flags_of
from legroom.facts.releases import Release
from legroom.vllm.args import Usage
from legroom.vllm.parse import ParsedArgs
from legroom.vllm.problems import explain_unknown
from legroom.vllm.reading import FIELDS, FlagReader

_CALLS: dict[str, Usage] = {"LLM": "llm", "EngineArgs": "llm", "AsyncEngineArgs": "serve"}


def call_in_source(text: str) -> tuple[str, dict[str, Any], list[str]] | None:
    """The first `LLM(...)` (or engine arguments) call: its name, its literal arguments, and those it could not read."""
    try:
        tree = _parsed(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise LegroomError("the Python source could not be read", f"{type(error).__name__}: {error}") from None
    constants = _constants(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _called(node)) in _CALLS:
            return name, *_arguments(node, constants)
    return None


def _parsed(text: str) -> ast.Module:
    """The source; keyword arguments alone are read as those of `LLM(...)`."""
    try:
        return ast.parse(text)
    except SyntaxError:
        try:
            return ast.parse(f"LLM({text.strip().strip(',')})")
        except SyntaxError:
            pass
        raise


def usage_of(call: str) -> Usage:
    """Whose defaults a call gets."""
    return _CALLS[call]


def _called(node: ast.Call) -> str:
    target = node.func
    return target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else ""


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Names bound once to a literal at the top level."""
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                found.pop(node.targets[0].id, None)
    return found


def _arguments(node: ast.Call, constants: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    values: dict[str, Any] = {}
    unread: list[str] = []
    named = [("model", node.args[0])] if node.args else []
    named += [(keyword.arg or "**", keyword.value) for keyword in node.keywords]
    for name, value in named:
        if isinstance(value, ast.Name) and value.id in constants:
            held = constants[value.id]
            values |= held if name == "**" and isinstance(held, dict) else {name: held}
            continue
        try:
            read = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            unread.append(name)
            continue
        values |= read if name == "**" and isinstance(read, dict) else {name: read}
    return {str(name): value for name, value in values.items()}, unread


def parse_kwargs(kwargs: Mapping[str, Any], release: Release, *, usage: Usage = "llm") -> ParsedArgs:
    """Keyword arguments of `LLM(...)`, read for one release."""
    reading = FlagReader(release, [])
    table = {flag.dest: flag for flag in flags_of(release).values()}
    for name, value in kwargs.items():
        if value is None:
            continue
        flag = table.get(name)
        if flag is None:
            reading.problems.append(explain_unknown("--" + name.replace("_", "-"), release))
        else:
            _store_literal(reading, flag, value)
    return ParsedArgs(reading.to_args(usage, {}), tuple(reading.problems))


def _store_literal(reading: FlagReader, flag: Flag, value: Any) -> None:
    kind = FIELDS.get(flag.dest, "")
    if isinstance(value, str) and not kind.startswith("str") and flag.kind in ("int", "human", "float"):
        reading.convert_and_store(flag, flag.dest, value)
    elif kind.startswith("Mapping") and isinstance(value, int) and not isinstance(value, bool):
        reading.store(flag, {"level": value})
    elif _fits(kind, value):
        reading.store(flag, tuple(value) if isinstance(value, list) and kind.startswith("tuple") else value)
    else:
        reading.problem(flag.name, "bad_value", f"{flag.dest}={value!r} is not what {flag.name} takes")


def _fits(kind: str, value: Any) -> bool:
    """Whether a literal may sit in a field of this type."""
    if not kind:
        return isinstance(value, str | int | float | bool | list | tuple | dict)
    if kind.startswith("bool"):
        return isinstance(value, bool)
    if kind.startswith("int"):
        return isinstance(value, int) and not isinstance(value, bool)
    if kind.startswith("float"):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind.startswith("Mapping"):
        return isinstance(value, dict)
    if kind.startswith("tuple"):
        return isinstance(value, list | tuple) and all(isinstance(item, int) for item in value)
    return isinstance(value, str)
