"""Terminal charts: stacked bars, rulers and filled curves."""

from collections.abc import Sequence

from legroom.drawing.terminal import Colour, Style
from legroom.records import dataclass

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_PLAIN = " ..::||##"


@dataclass(frozen=True, slots=True)
class Segment:
    label: str
    amount: int
    colour: Colour
    glyph: str = "█"
    """Fills the cells on a terminal without colour."""
    letter: str = "#"
    """Fills the cells on a terminal without Unicode."""


def cell_counts(amounts: Sequence[int], width: int) -> list[int]:
    """`width` cells divided in proportion to the amounts; a positive amount gets at least one, even beyond `width`."""
    whole = sum(amounts)
    if whole <= 0 or width <= 0:
        return [0] * len(amounts)
    shown = [max(1, int(amount * width / whole)) if amount > 0 else 0 for amount in amounts]
    while sum(shown) > width:
        # Shrinks the segment that is drawn most too wide; none shrinks to zero.
        shrinkable = [i for i, count in enumerate(shown) if count > 1]
        if not shrinkable:
            break
        widest = max(shrinkable, key=lambda i: shown[i] - amounts[i] * width / whole)
        shown[widest] -= 1
    while sum(shown) < width:
        shortest = max(
            (i for i, amount in enumerate(amounts) if amount > 0), key=lambda i: amounts[i] * width / whole - shown[i]
        )
        shown[shortest] += 1
    return shown


def swatch(segment: Segment, style: Style, count: int = 1) -> str:
    """`count` cells of a bar or legend: coloured blocks; its glyph without colour, its letter without Unicode."""
    if not style.unicode:
        return segment.letter * count
    return style.paint(("█" if style.colour and segment.glyph != "·" else segment.glyph) * count, segment.colour)


def bar(segments: Sequence[Segment], width: int, style: Style) -> str:
    """A stacked bar of `width` cells, divided among the segments in proportion to their amounts."""
    counts = cell_counts([segment.amount for segment in segments], width)
    return "".join(swatch(segment, style, count) for segment, count in zip(segments, counts, strict=True))


def dominant_kinds(runs: Sequence[tuple[str, int]], width: int) -> list[str]:
    """Per cell of `width` the kind with most of it; `runs`: (kind, amount) in order; [] if they sum to 0."""
    whole = sum(amount for _, amount in runs)
    if whole <= 0 or width <= 0:
        return []
    shares: list[dict[str, float]] = [{} for _ in range(width)]
    position = 0.0
    for kind, amount in runs:
        end = position + amount * width / whole
        for cell in range(int(position), min(width, int(end) + 1)):
            overlap = min(end, cell + 1) - max(position, cell)
            if overlap > 0:
                shares[cell][kind] = shares[cell].get(kind, 0.0) + overlap
        position = end
    return [max(share, key=lambda kind: share[kind]) if share else runs[-1][0] for share in shares]


def labels(segments: Sequence[Segment], width: int) -> str:
    """A line with each segment's name above its cells in a bar of `width`; a name that is too wide is left out."""
    line, counts = "", cell_counts([segment.amount for segment in segments], width)
    for segment, count in zip(segments, counts, strict=True):
        name = segment.label if len(segment.label) + 1 <= count else ""
        line += name.ljust(count)
    return line.rstrip()


def ruler(position: int, width: int, text: str, style: Style) -> str:
    """A bracket under the first `position` of `width` cells, with the text inside, or after it if it is too wide."""
    left, line, right = (style.pick(fancy, plain) for fancy, plain in (("└", "`"), ("─", "-"), ("┘", "'")))
    position = max(2, min(position, width))
    inner = position - 2
    if len(text) + 4 <= inner:
        before = (inner - len(text) - 2) // 2
        return left + line * before + f" {text} " + line * (inner - len(text) - 2 - before) + right
    return left + line * inner + right + " " + text


def downsampled(values: Sequence[float], width: int) -> list[float]:
    """The values in `width` columns, each the maximum of the values it covers; fewer values are repeated."""
    if not values or width <= 0:
        return []
    if len(values) <= width:
        return [values[i * len(values) // width] for i in range(width)]
    return [max(values[i * len(values) // width : max((i + 1) * len(values) // width, 1)]) for i in range(width)]


def area(values: Sequence[float], top: float, width: int, height: int, style: Style, colour: Colour) -> list[str]:
    """The `height` lines of a filled curve of `width` columns; `top`: the value that reaches the upper edge."""
    columns = downsampled(values, width)
    levels = [min(height * 8, max(0, round(value / top * height * 8))) if top > 0 else 0 for value in columns]
    levels = [1 if value > 0 and level == 0 else level for value, level in zip(columns, levels, strict=True)]
    glyphs = _EIGHTHS if style.unicode else _PLAIN
    lines = []
    for row in range(height - 1, -1, -1):
        cells = "".join(glyphs[min(8, max(0, level - row * 8))] for level in levels)
        lines.append(style.paint(cells, colour))
    return lines
