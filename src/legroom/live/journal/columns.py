"""Samples as columns of numbers: what is kept of one, how an hour of them is packed, and how it is thinned.

An hour of one server is 720 samples of 17 numbers. Whole numbers are kept as differences, others with their bytes
sorted by significance, and the whole is compressed: a few bytes a number's change, nothing for what stands still.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import isnan

from legroom.records import dataclass

# Changing these takes a step in journal_schema.py that rewrites what is held.
GAUGES = ("kv_use", "running", "waiting", "memory_used_bytes", "num_blocks", "process_start_s")
COUNTERS = (
    "preemptions", "prefix_queries", "prefix_hits", "prompt_tokens", "generation_tokens", "recomputed_tokens",
    "finished", "e2e_latency_sum_s", "e2e_latency_count", "ttft_sum_s", "ttft_count",
)  # fmt: skip
FIELDS = GAUGES + COUNTERS
HOUR_S = 3600
RAW_STEP_S, MINUTE_STEP_S, TEN_MINUTES_STEP_S = 0, 60, 600

NAN = math.nan
Column = Sequence[float]
_CONSTANT, _INTEGERS, _DOUBLES = 0, 1, 2
_LARGEST_EXACT = 2.0**53
_MOST_ROWS = HOUR_S * 1000  # a sample has its millisecond


class DamagedColumns(ValueError):
    """Bytes that `pack_columns` did not write, or that were changed since."""


@dataclass(frozen=True, slots=True)
class JournalPoint:
    """A sample, or several made one: from `time_s` on for `span_s` seconds (0: one sample), `count` of them.

    Gauges have a least, a mean and a greatest value. Counters have their last total, and by how much they grew
    since the point before (restarts of the server taken out). What was not known is NaN.
    """

    time_s: float
    span_s: int
    count: int
    low: tuple[float, ...]
    mean: tuple[float, ...]
    high: tuple[float, ...]
    last: tuple[float, ...]
    growth: tuple[float, ...]

    def gauge(self, name: str) -> float | None:
        """The mean of a gauge."""
        return _known(self.mean[GAUGES.index(name)])

    def gauge_range(self, name: str) -> tuple[float, float] | None:
        at = GAUGES.index(name)
        return None if isnan(self.low[at]) else (self.low[at], self.high[at])

    def total(self, name: str) -> float | None:
        return _known(self.last[COUNTERS.index(name)])

    def growth_of(self, name: str) -> float | None:
        """By how much a counter grew since the point before."""
        return _known(self.growth[COUNTERS.index(name)])


def _known(value: float) -> float | None:
    return None if isnan(value) else value


@lru_cache(maxsize=8)
def _compressor() -> tuple[Callable[[bytes], bytes], Callable[[bytes], bytes], type[Exception]]:
    import zstandard  # noqa: PLC0415  one command in many touches samples

    return zstandard.ZstdCompressor(level=6).compress, zstandard.ZstdDecompressor().decompress, zstandard.ZstdError


def pack_row(values: Sequence[float]) -> bytes:
    """One sample as it waits to be packed with its hour."""
    return struct.pack(f"<{len(values)}d", *values)


def unpack_row(packed: bytes) -> tuple[float, ...]:
    """One waiting sample."""
    return struct.unpack(f"<{len(packed) // 8}d", packed)


def pack_columns(columns: Sequence[Column]) -> bytes:
    """Columns of equal length, compressed."""
    parts = [struct.pack("<HI", len(columns), len(columns[0]) if columns else 0)]
    for column in columns:
        parts.extend(_packed(column))
    return _compressor()[0](b"".join(parts))


def unpack_columns(packed: bytes) -> list[Column]:
    """What `pack_columns` was given. Raises `DamagedColumns`."""
    _, decompress, error_type = _compressor()
    try:
        plain = decompress(packed)
        count, length = struct.unpack_from("<HI", plain)
        if length > _MOST_ROWS:
            raise DamagedColumns(f"{length} rows in one hour")
        at, columns = 6, []
        for _ in range(count):
            column, at = _unpacked(plain, at, length)
            columns.append(column)
    except (error_type, struct.error, IndexError, ValueError, MemoryError) as error:  # a length may be damaged too
        raise DamagedColumns(str(error)) from error
    if at != len(plain):
        raise DamagedColumns(f"{len(plain)} bytes where {at} are expected")
    return columns


def _packed(column: Column) -> Iterable[bytes]:
    first = column[0]
    if all(value == first for value in column) or all(map(isnan, column)):
        return (struct.pack("<Bd", _CONSTANT, first),)
    if all(abs(value) < _LARGEST_EXACT and value == int(value) for value in column):  # false for NaN
        whole = [int(value) for value in column]
        steps = array("q", [whole[0], *(after - before for before, after in pairwise(whole))])
        return (bytes([_INTEGERS]), _by_significance(steps.tobytes()))
    return (bytes([_DOUBLES]), _by_significance(array("d", column).tobytes()))


def _unpacked(plain: bytes, at: int, length: int) -> tuple[Column, int]:
    kind = plain[at]
    at += 1
    if kind == _CONSTANT:
        return [struct.unpack_from("<d", plain, at)[0]] * length, at + 8
    values = _from_significance(plain[at : at + 8 * length])
    if kind == _DOUBLES:
        return array("d", values), at + 8 * length
    return list(accumulate(array("q", values))), at + 8 * length


def _by_significance(plain: bytes) -> bytes:
    return b"".join(plain[at::8] for at in range(8))


def _from_significance(sorted_bytes: bytes) -> bytes:
    plain, length = bytearray(len(sorted_bytes)), len(sorted_bytes) // 8
    for at in range(8):
        plain[at::8] = sorted_bytes[at * length : (at + 1) * length]
    return bytes(plain)
