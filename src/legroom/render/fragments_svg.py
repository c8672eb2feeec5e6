"""The segments of PyTorch's allocator as an SVG picture: every block where it lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.drawing.svg import Svg
from legroom.drawing.text import plural, wrap
from legroom.render.fragments_text import KINDS, headline, segment_rows
from legroom.units import human_bytes

if TYPE_CHECKING:
    from legroom.fragments.fragment_report import FragmentReport

_WIDTH, _LEFT, _BAR_LEFT, _RIGHT = 760.0, 28.0, 190.0, 732.0
_ROW_HEIGHT, _GAP = 18.0, 6.0
_MOST_ROWS = 24
_HEADLINE_CHARS = 76
"""As wide a bold line as the picture has room for, in any usual font."""
_NARROWEST_PX = 0.4
"""Blocks below this are left to the ground of the row: a hundred thousand of them would make a file of megabytes."""


def fragments_svg(report: FragmentReport) -> str:
    state = report.reading.state
    svg = Svg(_WIDTH, headline(report))
    y = 34.0
    for line in wrap(headline(report), _HEADLINE_CHARS):
        svg.text(_LEFT, y, line, "sans ink", size=15, bold=True)
        y += 20
    reserved = "" if report.reading.is_host else f"{human_bytes(state.reserved_bytes)} reserved, "
    summary = f"{reserved}{human_bytes(state.allocated_bytes)} in use"
    svg.text(_LEFT, y + 2, summary, "sans soft")
    y += 20
    rows, left_out = segment_rows(report, _MOST_ROWS)
    for row in rows:
        label = f"{row.label} x {row.count}" if row.count > 1 else row.label
        svg.text(_BAR_LEFT - 10, y + 13, label, "soft", anchor="end")
        svg.box(_BAR_LEFT, y, _RIGHT - _BAR_LEFT, _ROW_HEIGHT, css="room")
        x = _BAR_LEFT
        for kind, size in row.runs:
            width = size / max(row.size_bytes, 1) * (_RIGHT - _BAR_LEFT)
            if kind != "free" and width >= _NARROWEST_PX:
                name, colour, _, _ = KINDS[kind]
                svg.box(x, y, width, _ROW_HEIGHT, fill=colour, tip=f"{human_bytes(size)} {name}")
            x += width
        y += _ROW_HEIGHT + _GAP
    if left_out:
        svg.text(_BAR_LEFT, y + 12, f"and {plural(left_out, 'smaller segment')}", "soft")
        y += 20
    _legend(svg, {kind for row in rows for kind, _ in row.runs}, y)
    return svg.render(_parts(svg, report, y + (28 if rows else 10)))


def _legend(svg: Svg, shown: set[str], y: float) -> None:
    x = _BAR_LEFT
    for kind, (name, colour, _, _) in KINDS.items():
        if kind in shown:
            if kind == "free":
                svg.box(x, y + 3, 12, 12, css="room")
            else:
                svg.box(x, y + 3, 12, 12, fill=colour)
            svg.text(x + 18, y + 13, name, "soft")
            x += 36 + 8 * len(name)


def _parts(svg: Svg, report: FragmentReport, y: float) -> float:
    for part in report.parts:
        size = human_bytes(part.bytes) if part.bytes is not None else ""
        svg.text(_BAR_LEFT - 10, y + 12, size, "ink", anchor="end")
        for line in wrap(part.text, 72):
            svg.text(_BAR_LEFT, y + 12, line, "soft")
            y += 18
    return y + 14
