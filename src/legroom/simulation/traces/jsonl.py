"""legroom's own trace: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from legroom.errors import LegroomError
from legroom.simulation.trace import Trace

_HINT = 'a line looks like {"arrival": 0.5, "prompt_len": 800, "output_len": 120}'


def looks_like(head: str) -> bool:
    """Whether the first line is an object with `prompt_len`."""
    return head.lstrip().startswith("{") and '"prompt_len"' in head.split("\n", 1)[0]


def read(lines: Iterable[str], name: str) -> Trace:
    """`arrival` (seconds) or `arrival_step`, `prompt_len`, `output_len`, and what is optional."""
    trace = Trace(name)
    clocks: set[str] = set()
    loads = json.loads
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = loads(line)
            _add(trace, row, clocks)
        except LegroomError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise LegroomError(f"{name}, line {number}: {_problem(error)}", _HINT) from None
    if len(clocks) > 1:
        raise LegroomError(f"{name} mixes `arrival` (seconds) and `arrival_step`", "use one of them for all requests")
    trace.in_seconds = clocks == {"arrival"}
    return trace


def _add(trace: Trace, row: dict[str, Any], clocks: set[str]) -> None:
    get = row.get
    arrival: float = 0
    if (at := get("arrival_step")) is not None:
        clocks.add("arrival_step")
        arrival = int(at)
    elif (at := get("arrival")) is not None:
        clocks.add("arrival")
        arrival = float(at)
    prefix_len = get("prefix_len")
    prefix_id = get("prefix_id")
    request_id = get("id")
    trace.add(
        _whole(row["prompt_len"]),
        _whole(row["output_len"]),
        arrival,
        None if request_id is None else str(request_id),
        None if prefix_id is None else str(prefix_id),
        _whole(prefix_len) if prefix_len is not None else 0,
        _whole(get("priority") or 0),
    )


def _whole(value: Any) -> int:
    if type(value) is int:
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise ValueError(f"{value!r} is not a whole number")


def _problem(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"no {error.args[0]}"
    if isinstance(error, json.JSONDecodeError):
        return "not a JSON object"
    return str(error)
