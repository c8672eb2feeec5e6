"""Named curves over time, in a terminal and in an SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from legroom.drawing.chart import area
from legroom.drawing.svg import svg_area
from legroom.records import dataclass

if TYPE_CHECKING:
    from legroom.drawing.svg import Svg
    from legroom.drawing.terminal import Colour, Style

_NAME_WIDTH, _SCALE_WIDTH, _NARROWEST = 12, 10, 8
SVG_LEFT = 110
"""Left edge of the curves in an SVG, in pixels."""


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    colour: Colour
    height: int
    """In lines of a terminal."""
    values: Sequence[float]
    top: float
    """The value at the upper edge."""
    scale: str
    """The label of `top`."""


def scaled_curve(name: str, colour: Colour, values: Sequence[float], height: int = 2) -> Curve:
    """A curve scaled to its maximum."""
    top = max(1.0, *values) if values else 1.0
    return Curve(name, colour, height, values, top, f"{top:,.0f}")


def curve_width(style: Style) -> int:
    """Columns of a curve in a terminal."""
    return max(_NARROWEST, style.width - _NAME_WIDTH - _SCALE_WIDTH)


def curve_lines(curve: Curve, style: Style, growing: bool = False) -> list[str]:
    """The lines of a curve in a terminal; a `growing` one is aligned to the right."""
    width, values = curve_width(style), curve.values
    drawn = [*([0.0] * (width - len(values))), *values] if growing else values
    edges = {curve.height - 1: "0", 0: curve.scale}
    return [
        f"{'' if row else curve.name:<{_NAME_WIDTH}}{line} {edges.get(row, '')}".rstrip()
        for row, line in enumerate(area(drawn, curve.top, (width, curve.height), style, curve.colour))
    ]


def axis_line(begin: str, end: str, style: Style) -> str:
    """The labels of the left and right edge, below the curves."""
    return f"{'':<{_NAME_WIDTH}}{begin}{end:>{max(1, curve_width(style) - len(begin))}}"


def draw_curve(svg: Svg, y: float, curve: Curve, size: tuple[float, float]) -> None:
    """Draws a curve into an SVG; `size` is (width, height) in pixels."""
    width, height = size
    svg.text(24, y + 12, curve.name, "soft")
    svg.text(736, y + 12, curve.scale, "soft", anchor="end")
    svg.box(SVG_LEFT, y, width, height, css="box")
    svg_area(svg, (SVG_LEFT, y, width, height), curve.values, curve.top, curve.colour)
