"""Draws the pictures of the README from what legroom really prints: python docs/img/make_pictures.py"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path

from legroom import api
from legroom.drawing.svg import COLOURS
from legroom.drawing.terminal import Style

HERE = Path(__file__).parent
CODES = {
    "38;5;68": COLOURS["blue"], "38;5;214": COLOURS["orange"], "38;5;140": COLOURS["purple"],
    "38;5;138": COLOURS["brown"], "38;5;71": COLOURS["green"], "38;5;167": COLOURS["red"], "38;5;245": COLOURS["grey"],
}  # fmt: skip
CHAR, LINE, MARGIN = 8.4, 18.0, 20.0
BLOCKS = "█"
NO_BREAK = "\u00a0"
"""Runs of plain spaces collapse in some viewers."""


def terminal_svg(command: str, text: str) -> str:
    """The screen after a command, as SVG: blocks as boxes, letters as text."""
    lines = [f"$ {command}", "", *text.rstrip("\n").split("\n")]
    body: list[str] = []
    for row, line in enumerate(lines):
        column = 0
        for piece, style in pieces(line):
            body += draw(piece, style, MARGIN + column * CHAR, 46 + row * LINE)
            column += len(piece)
    width, height = 2 * MARGIN + 80 * CHAR, 58 + len(lines) * LINE
    dots = "".join(
        f'<circle cx="{18 + 16 * i}" cy="16" r="5" fill="{c}"/>'
        for i, c in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" '
        f'role="img" aria-label={quoted(command)}><style>text{{font-size:14px;font-family:ui-monospace,Menlo,Consolas,'
        f'"DejaVu Sans Mono",monospace;fill:#e6edf3;white-space:pre}}</style>'
        f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#0d1117"/>{dots}\n' + "\n".join(body) + "\n</svg>\n"
    )


def pieces(line: str) -> list[tuple[str, str]]:
    """A line as runs of one style."""
    found, style = [], ""
    for part in re.split(r"(\x1b\[[0-9;]*m)", line):
        code = re.fullmatch(r"\x1b\[([0-9;]*)m", part)
        if code:
            style = "" if code[1] == "0" else code[1]
        elif part:
            found.append((part, style))
    return found


def draw(text: str, style: str, x: float, y: float) -> list[str]:
    colour = next((value for code, value in CODES.items() if code in style), "")
    if text.strip(BLOCKS) == "":
        where = f'x="{x:.1f}" y="{y - 12:.1f}" width="{len(text) * CHAR:.1f}" height="{LINE - 3:g}"'
        return [f'<rect {where} fill="{colour or "#e6edf3"}"/>']
    x += (len(text) - len(text.lstrip())) * CHAR
    text = text.strip()
    if not text:
        return []
    extra = ' font-weight="700"' if re.search(r"(^|;)1(;|$)", style) else ""
    extra += ' opacity="0.65"' if re.search(r"(^|;)2(;|$)", style) else ""
    paint = f' style="fill:{colour}"' if colour else ""
    length = f'textLength="{len(text) * CHAR:.1f}" lengthAdjust="spacingAndGlyphs"'
    return [f'<text x="{x:.1f}" y="{y:.1f}" {length}{extra}{paint}>{escape(text).replace(" ", NO_BREAK)}</text>']


def quoted(text: str) -> str:
    return '"' + escape(text, quote=True) + '"'


def picture(name: str, command: str, report: api.PlanReport) -> None:
    (HERE / name).write_text(terminal_svg(command, report.text(Style(width=80, colour=True))), encoding="utf-8")


def main() -> int:
    fits = api.plan("llama-3.1-8b", gpu="h100", vllm="0.32.0")
    picture("plan.svg", "legroom plan llama-3.1-8b --gpu h100", fits)
    fails = api.plan("qwen3-32b", gpu="h100", vllm="0.32.0")
    picture("mend.svg", "legroom plan qwen3-32b --gpu h100", fails)
    (HERE / "bar.svg").write_text(fits.svg(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
