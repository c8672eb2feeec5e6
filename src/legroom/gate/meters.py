"""The gate's own figures, in memory that all of its processes share: any of them can answer for all."""

from __future__ import annotations

import mmap
import struct
from bisect import bisect_left
from collections.abc import Iterator
from typing import Literal, get_args

Ending = Literal[
    "allowed", "warned", "refused", "would_refuse", "not_understood", "no_server", "skipped", "unchanged", "failed_open"
]
Reason = Literal["timeout", "error", "overload"]
ENDINGS: tuple[str, ...] = get_args(Ending)
REASONS: tuple[str, ...] = get_args(Reason)
EDGES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_CACHE = ("hit", "miss")
_NAMES = (
    *(f"ending:{ending}" for ending in ENDINGS),
    *(f"reason:{reason}" for reason in REASONS),
    *(f"cache:{result}" for result in _CACHE),
    "bad_request",
    *(f"edge:{edge}" for edge in (*EDGES_S, "+Inf")),
    "sum",
    "answered_before_search",
    "searches_dropped",
    "certificate_reloads",
    "certificate_reload_failures",
    "expiry",
)
_AT = {name: number for number, name in enumerate(_NAMES)}
_ROW = struct.Struct(f"{len(_NAMES)}d")
_EDGE_NAMES = tuple(f"edge:{edge}" for edge in (*EDGES_S, "+Inf"))


class GateMeters:
    """Made before the processes part; each then counts in a row of its own."""

    def __init__(self, processes: int) -> None:
        self._memory = mmap.mmap(-1, _ROW.size * processes)
        self._values = memoryview(self._memory).cast("d")
        self._processes = processes
        self._row = 0

    def choose_row(self, number: int) -> None:
        """Which process this is. Its counts go on from those of the one it replaces."""
        self._row = number * len(_NAMES)

    def count(self, name: str, amount: float = 1.0) -> None:
        self._values[self._row + _AT[name]] += amount

    def put(self, name: str, value: float) -> None:
        self._values[self._row + _AT[name]] = value

    def took(self, seconds: float) -> None:
        """How long one answer took."""
        self.count(_EDGE_NAMES[bisect_left(EDGES_S, seconds)])
        self.count("sum", seconds)

    def page(self) -> str:
        """Every series, summed over the processes."""
        return "\n".join(self._lines()) + "\n"

    def total(self, name: str) -> float:
        return sum(self._values[row * len(_NAMES) + _AT[name]] for row in range(self._processes))

    def _lines(self) -> Iterator[str]:
        yield from self._counter("reviews", "Objects looked at, by how it ended.", "ending", ENDINGS, "outcome")
        about = "Objects let through because no judgement was there in time."
        yield from self._counter("failed_open", about, "reason", REASONS, "reason")
        yield from self._counter("cache", "Judgements, by whether they were remembered.", "cache", _CACHE, "result")
        for name, about in (
            ("bad_request", "Bodies that were no AdmissionReview, or too large."),
            ("answered_before_search", "Answers given while flags that fix the object were still searched for."),
            ("searches_dropped", "Searches that were given up because too many waited; the next try begins them anew."),
            ("certificate_reloads", "Certificates loaded anew."),
            ("certificate_reload_failures", "Certificates that could not be loaded; the old one stays in use."),
        ):
            family = f"legroom_gate_{name}_total"
            yield from (f"# HELP {family} {about}", f"# TYPE {family} counter", f"{family} {_number(self.total(name))}")
        yield from self._histogram()
        expiries = [
            value for row in range(self._processes) if (value := self._values[row * len(_NAMES) + _AT["expiry"]])
        ]
        family = "legroom_gate_certificate_expiry_timestamp_seconds"
        yield from (f"# HELP {family} When the certificate in use ends.", f"# TYPE {family} gauge")
        yield f"{family} {_number(min(expiries, default=0.0))}"

    def _counter(self, name: str, about: str, kind: str, values: tuple[str, ...], label: str) -> Iterator[str]:
        family = f"legroom_gate_{name}_total"
        yield from (f"# HELP {family} {about}", f"# TYPE {family} counter")
        for value in values:
            yield f'{family}{{{label}="{value}"}} {_number(self.total(f"{kind}:{value}"))}'

    def _histogram(self) -> Iterator[str]:
        family = "legroom_gate_decision_seconds"
        yield from (f"# HELP {family} From a body's last byte to its answer.", f"# TYPE {family} histogram")
        reached = 0.0
        for name in _EDGE_NAMES:
            reached += self.total(name)
            yield f'{family}_bucket{{le="{name.partition(":")[2]}"}} {_number(reached)}'
        yield from (f"{family}_sum {_number(self.total('sum'))}", f"{family}_count {_number(reached)}")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
