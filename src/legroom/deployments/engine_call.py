"""The arguments of `LLM(...)` and of engine arguments as a release reads them."""

from __future__ import annotations

from typing import Any

from legroom.deployments.subjects import EngineCall
from legroom.facts.flags import Flag, flag_name, flags_of
from legroom.facts.releases import Release
from legroom.vllm.args import Usage
from legroom.vllm.parse import ParsedArgs
from legroom.vllm.problems import explain_unknown
from legroom.vllm.reading import FIELDS, FlagReader

_USAGES: dict[str, Usage] = {"LLM": "llm", "EngineArgs": "llm", "AsyncEngineArgs": "serve"}
"""Whose defaults a call gets."""


def parse_call(call: EngineCall, release: Release) -> ParsedArgs:
    """The literal arguments of a call, read for one release."""
    reading = FlagReader(release, [])
    table = {flag.dest: flag for flag in flags_of(release).values()}
    for name, value in call.values.items():
        if value is None:
            continue
        flag = table.get(name)
        if flag is None:
            reading.problems.append(explain_unknown(flag_name(name), release))
        else:
            _store_literal(reading, flag, value)
    return ParsedArgs(reading.to_args(_USAGES[call.name], {}), tuple(reading.problems))


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
