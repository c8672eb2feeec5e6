"""The segments of an allocator as rows of runs: what the pictures of `legroom fragments` are drawn from."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from legroom.records import dataclass
from legroom.units import human_bytes

if TYPE_CHECKING:
    from legroom.black_box import AllocatorSegment
    from legroom.drawing.terminal import Colour
    from legroom.fragments.fragment_report import FragmentReport

KINDS: dict[str, tuple[str, Colour, str, str]] = {
    "allocated": ("in use", "blue", "█", "#"),
    "pending": ("given back, still used by a stream", "purple", "▓", "+"),
    "private": ("in use by graphs", "purple", "▒", "g"),
    "free": ("free", "grey", "·", "."),
}
"""Name, colour, glyph without colour, letter without Unicode."""


@dataclass(frozen=True, slots=True)
class SegmentRow:
    label: str
    size_bytes: int
    runs: tuple[tuple[str, int], ...]
    """(kind, bytes) in the order of addresses."""
    count: int = 1
    """How many segments look just like this one."""


def segment_rows(report: FragmentReport, most: int) -> tuple[tuple[SegmentRow, ...], int]:
    """The largest segments, those that look alike as one row; and how many are not shown."""
    segments = sorted(report.reading.state.segments, key=lambda segment: -segment.size_bytes)
    rows: list[SegmentRow] = []
    for (size, runs, label), alike in groupby(segments, key=lambda s: (s.size_bytes, _runs(s), _label(s))):
        rows.append(SegmentRow(label, size, runs, len(list(alike))))
    return tuple(rows[:most]), sum(row.count for row in rows[most:])


def _label(segment: AllocatorSegment) -> str:
    kind = "graphs" if segment.pool else "small" if segment.is_small else ""
    grows = "grows" if segment.is_expandable else ""
    return " ".join(filter(None, (human_bytes(segment.size_bytes), kind, grows)))


def _runs(segment: AllocatorSegment) -> tuple[tuple[str, int], ...]:
    if not segment.blocks:
        used = segment.allocated_bytes
        return (("private" if segment.pool else "allocated", used), ("free", segment.size_bytes - used))
    kinds = [
        ("private" if segment.pool and block.state == "allocated" else block.state, block.size_bytes)
        for block in segment.blocks
    ]
    merged = groupby(kinds, key=lambda run: run[0])
    return tuple((kind, sum(size for _, size in group)) for kind, group in merged)
