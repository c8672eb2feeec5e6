"""SVG documents of boxes, lines, text and filled curves, and named curves over time, also in a terminal."""

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape, quoteattr

from legroom.drawing.chart import area, downsampled
from legroom.drawing.terminal import Colour, Style
from legroom.drawing.text import printable
from legroom.records import dataclass, field

COLOURS = {
    "blue": "#4c78a8",
    "orange": "#f2a33a",
    "purple": "#a584c9",
    "brown": "#a98b7b",
    "green": "#54a24b",
    "red": "#d1605e",
    "grey": "#8a8f98",
}

_THEME = """
  .page{fill:#ffffff} .ink{fill:#1f2328} .soft{fill:#59636e} .line{stroke:#59636e} .room{fill:#eaeef2}
  .good{fill:#1a7f37} .fair{fill:#9a6700} .bad{fill:#cf222e} .box{fill:#f6f8fa}
  @media (prefers-color-scheme: dark){
    .page{fill:#0d1117} .ink{fill:#e6edf3} .soft{fill:#9198a1} .line{stroke:#9198a1} .room{fill:#262c36}
    .good{fill:#3fb950} .fair{fill:#d29922} .bad{fill:#f85149} .box{fill:#151b23}
  }
  text{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
  text{font-size:13px;white-space:pre}
  .sans{font-family:system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif}
"""


def _escaped(text: str) -> str:
    """The text for an XML element, with control characters, which XML forbids, as backslash escapes."""
    return escape(printable(text))


@dataclass
class Svg:
    """An SVG document; coordinates in pixels."""

    width: float
    title: str
    body: list[str] = field(default_factory=list)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "",
        css: str = "",
        tip: str = "",
        round_: float = 0,
    ) -> None:
        """Draw a rectangle in the colour `fill` (a name of COLOURS) or theme class `css`; `tip` shows on hover."""
        paint = f' fill="{COLOURS[fill]}"' if fill else f' class="{css}"'
        corner = f' rx="{round_:g}"' if round_ else ""
        inner = f"<title>{_escaped(tip)}</title></rect>" if tip else "</rect>"
        self.body.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"{paint}{corner}>{inner}'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False) -> None:
        """Draw a line from (x1, y1) to (x2, y2)."""
        dash = ' stroke-dasharray="3 3"' if dashed else ""
        self.body.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="line"{dash}/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        css: str = "ink",
        *,
        anchor: str = "start",
        size: float = 0,
        bold: bool = False,
        fill: str = "",
    ) -> None:
        """Draw a line of text, its baseline at (x, y); `css`: theme classes, `fill`: SVG colour, `size`: px (0: 13)."""
        style = (f' font-size="{size:g}" style="font-size:{size:g}px"' if size else "") + (
            ' font-weight="600"' if bold else ""
        )
        paint = f' fill="{fill}"' if fill else ""
        where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class={quoteattr(css)}'
        self.body.append(f"<text {where}{style}{paint}>{_escaped(text)}</text>")

    def lines(self, x: float, y: float, texts: Iterable[str], step: float, css: str = "ink", size: float = 0) -> float:
        """Draw lines of text below each other, the first `step` pixels below y; returns the y of the last."""
        for text in texts:
            y += step
            self.text(x, y, text, css, size=size)
        return y

    def render(self, height: float) -> str:
        """The SVG document of this height in pixels, light and dark theme included."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {height:g}" width="{self.width:g}" '
            f'height="{height:g}" role="img" aria-label={quoteattr(self.title)}>'
        )
        page = f'<rect class="page" width="{self.width:g}" height="{height:g}" rx="8"/>'
        return "\n".join(
            [head, f"<title>{_escaped(self.title)}</title>", f"<style>{_THEME}</style>", page, *self.body, "</svg>", ""]
        )


def _fill_curve(svg: Svg, curve: "Curve", box: tuple[float, float, float, float]) -> None:
    """Draw a curve, filled to the lower edge, into a box of (x, y, width, height)."""
    x, y, width, height = box
    points = downsampled(curve.values, min(len(curve.values), int(width)))
    if not points or curve.top <= 0:
        return
    step = width / len(points)
    path = [f"M{x:.1f} {y + height:.1f}"]
    for i, value in enumerate(points):
        level = y + height * (1 - min(1.0, value / curve.top))
        path.append(f"L{x + i * step:.1f} {level:.1f}L{x + (i + 1) * step:.1f} {level:.1f}")
    path.append(f"L{x + width:.1f} {y + height:.1f}Z")
    svg.body.append(f'<path d="{"".join(path)}" fill="{COLOURS[curve.colour]}" fill-opacity="0.75"/>')


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
    """A curve whose upper edge is its largest value, at least 1; `height`: its lines in a terminal."""
    top = max(1.0, *values) if values else 1.0
    return Curve(name, colour, height, values, top, f"{top:,.0f}")


def curve_width(style: Style) -> int:
    """Columns of a curve in a terminal, between its name and its scale."""
    return max(_NARROWEST, style.width - _NAME_WIDTH - _SCALE_WIDTH)


def curve_lines(curve: Curve, style: Style, growing: bool = False) -> list[str]:
    """A curve's lines in a terminal; a `growing` one with fewer values than columns is drawn at the right edge."""
    width, values = curve_width(style), curve.values
    drawn = [*([0.0] * (width - len(values))), *values] if growing else values
    edges = {curve.height - 1: "0", 0: curve.scale}
    return [
        f"{'' if row else curve.name:<{_NAME_WIDTH}}{line} {edges.get(row, '')}".rstrip()
        for row, line in enumerate(area(drawn, curve.top, width, curve.height, style, curve.colour))
    ]


def axis_line(begin: str, end: str, style: Style) -> str:
    """The line below the curves in a terminal, with the labels `begin` at the left and `end` at the right edge."""
    return f"{'':<{_NAME_WIDTH}}{begin}{end:>{max(1, curve_width(style) - len(begin))}}"


def draw_curves(svg: Svg, y: float, curves: Iterable[Curve]) -> float:
    """Draws curves below each other into an SVG from `y` on; returns the y below them."""
    for curve in curves:
        box = (SVG_LEFT, y, 560, 26.0 * curve.height)
        svg.text(24, y + 12, curve.name, "soft")
        svg.text(736, y + 12, curve.scale, "soft", anchor="end")
        svg.box(*box, css="box")
        _fill_curve(svg, curve, box)
        y += box[3] + 12
    return y


def draw_rows(svg: Svg, y: float, rows: Iterable[tuple[str, str]]) -> float:
    """Draws (name, figure) rows into an SVG below `y`, a line each; returns the y of the last."""
    for name, value in rows:
        y += 20
        svg.text(24, y, name, "soft")
        svg.text(150, y, value, "ink")
    return y
