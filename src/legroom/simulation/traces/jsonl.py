"""legroom's own trace format: one JSON object per line."""

import json
from collections.abc import Iterable
from typing import Any

from legroom.errors import LegroomError
from legroom.simulation.trace import Trace

_HINT = 'a line looks like {"arrival": 0.5, "prompt_len": 800, "output_len": 120}'


def looks_like(head: str) -> bool:
    """Whether the first line of `head`, a file's beginning, is a JSON object with a field of this trace format."""
    first = head.lstrip().split("\n", 1)[0]
    return first.startswith("{") and any(f'"{name}"' in first for name in ("prompt_len", "output_len", "arrival_step"))


def read(lines: Iterable[str], name: str) -> Trace:
    """The trace of JSON lines with `arrival` (s) or `arrival_step`, `prompt_len`, `output_len`; else LegroomError."""
    trace = Trace(name)
    clocks: set[str] = set()
    decode = json.JSONDecoder().decode
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            _add_row(trace, decode(line), clocks)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise LegroomError(f"{name}, line {number}: {_error_text(error)}", _HINT) from None
    if len(clocks) > 1:
        raise LegroomError(f"{name} mixes `arrival` (seconds) and `arrival_step`", "use one of them for all requests")
    trace.in_seconds = clocks == {"arrival"}
    return trace


def _add_row(trace: Trace, row: dict[str, Any], clocks: set[str]) -> None:
    """Appends the row's request; adds the key of its arrival, `arrival` or `arrival_step`, to the set `clocks`."""
    get = row.get
    arrival: float = 0
    if (at := get("arrival_step")) is not None:
        clocks.add("arrival_step")
        arrival = _whole_number(at)
    elif (at := get("arrival")) is not None:
        clocks.add("arrival")
        arrival = float(at)
    prompt_len, output_len = row["prompt_len"], row["output_len"]
    if type(prompt_len) is not int or type(output_len) is not int:
        prompt_len, output_len = _whole_number(prompt_len), _whole_number(output_len)
    request_id, prefix_len, priority = get("id"), get("prefix_len"), get("priority")
    prefix_id = get("prefix_id") if prefix_len else None
    own, prefix = (None if name is None else str(name) for name in (request_id, prefix_id))
    shared, rank = (_whole_number(number) if number else 0 for number in (prefix_len, priority))
    trace.add(prompt_len, output_len, arrival, request_id=own, prefix_id=prefix, prefix_len=shared, priority=rank)


def _whole_number(value: Any) -> int:
    """The value as an integer, if it is one or a float without fraction; else ValueError."""
    if type(value) is int:
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise ValueError(f"{value!r} is not a whole number")


def _error_text(error: Exception) -> str:
    """What is wrong with a line, in words for the user, by the exception it raised."""
    if isinstance(error, KeyError):
        return f"no {error.args[0]}"
    if isinstance(error, json.JSONDecodeError):
        return "not a JSON object"
    return "a number is too large" if isinstance(error, OverflowError) else str(error)
