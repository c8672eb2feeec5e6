"""Filled curves over time, in a terminal and in an SVG."""

from __future__ import annotations

from collections.abc import Sequence

from legroom.drawing.svg import COLOURS, Svg
from legroom.drawing.terminal import Style

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_PLAIN = " ..::||##"
CURVE_LEFT = 110
"""Where the boxes of labelled curves begin."""


def squeeze(values: Sequence[float], width: int) -> list[float]:
    """`values` in `width` columns: the highest of each stretch, so that no peak is lost."""
    if not values or width <= 0:
        return []
    if len(values) <= width:
        return [values[i * len(values) // width] for i in range(width)]
    return [max(values[i * len(values) // width : max((i + 1) * len(values) // width, 1)]) for i in range(width)]


def area(values: Sequence[float], top: float, size: tuple[int, int], style: Style, colour: str) -> list[str]:
    """A filled curve, `size` columns wide and lines high; `top` is the value at the upper edge."""
    width, height = size
    columns = squeeze(values, width)
    levels = [min(height * 8, max(0, round(value / top * height * 8))) if top > 0 else 0 for value in columns]
    levels = [1 if value > 0 and level == 0 else level for value, level in zip(columns, levels, strict=True)]
    glyphs = _EIGHTHS if style.unicode else _PLAIN
    lines = []
    for row in range(height - 1, -1, -1):
        cells = "".join(glyphs[min(8, max(0, level - row * 8))] for level in levels)
        lines.append(style.paint(cells, colour))
    return lines


def svg_curve(
    svg: Svg,
    y: float,
    label: tuple[str, str],
    values: Sequence[float],
    top: float,
    size: tuple[float, float],
    colour: str,
) -> None:
    """A filled curve in a box of (width, height), its name on the left and the scale at its top on the right."""
    (name, scale), (width, height) = label, size
    svg.text(24, y + 12, name, "soft")
    svg.text(736, y + 12, scale, "soft", anchor="end")
    svg.box(CURVE_LEFT, y, width, height, css="box")
    svg_area(svg, (CURVE_LEFT, y, width, height), values, top, colour)


def svg_area(
    svg: Svg, box: tuple[float, float, float, float], values: Sequence[float], top: float, colour: str
) -> None:
    """A filled curve in a box of (x, y, width, height)."""
    x, y, width, height = box
    points = squeeze(values, min(len(values), int(width)))
    if not points or top <= 0:
        return
    step = width / len(points)
    path = [f"M{x:.1f} {y + height:.1f}"]
    for i, value in enumerate(points):
        level = y + height * (1 - min(1.0, value / top))
        path.append(f"L{x + i * step:.1f} {level:.1f}L{x + (i + 1) * step:.1f} {level:.1f}")
    path.append(f"L{x + width:.1f} {y + height:.1f}Z")
    svg.body.append(f'<path d="{"".join(path)}" fill="{COLOURS[colour]}" fill-opacity="0.75"/>')
