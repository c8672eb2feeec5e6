"""Draws the pictures of the pages from what legroom really prints and plans: python docs/img/make_pictures.py"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

import legroom as api
from legroom.drawing.svg import COLOURS, Svg
from legroom.drawing.terminal import Style
from legroom.render.plan_parts import layout_parts, scale_bytes
from legroom.units import GIB, gib

HERE = Path(__file__).parent
CODES = {
    "38;5;68": COLOURS["blue"], "38;5;214": COLOURS["orange"], "38;5;140": COLOURS["purple"],
    "38;5;138": COLOURS["brown"], "38;5;71": COLOURS["green"], "38;5;167": COLOURS["red"], "38;5;245": COLOURS["grey"],
}  # fmt: skip
CHAR, LINE, MARGIN = 8.4, 18.0, 20.0
BLOCKS = "█"
NO_BREAK = "\u00a0"
"""Runs of plain spaces collapse in some viewers."""
STYLE = Style(width=80, colour=True)
WIDTH, LEFT, BAR = 760.0, 28.0, 704.0
VERDICT_CSS = {"fits": "good", "tight": "fair", "does_not_fit": "bad"}


def terminal_svg(command: str, text: str) -> str:
    """The screen after a command, as SVG: blocks as boxes, letters as text."""
    lines = [f"$ {command}", "", *text.rstrip("\n").split("\n")]
    body: list[str] = []
    for row, line in enumerate(lines):
        column = 0
        for piece, style in pieces(line):
            body += draw(piece, style, MARGIN + column * CHAR, 46 + row * LINE)
            column += len(piece)
    columns = max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in lines)
    width, height = 2 * MARGIN + max(columns, 80) * CHAR, 58 + len(lines) * LINE
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
    (HERE / name).write_text(terminal_svg(command, report.text(STYLE)), encoding="utf-8")


def cards_svg(title: str, cards: Sequence[tuple[str, api.PlanReport]]) -> str:
    """One bar a setting, all to one scale, so that they can be compared: where each byte of the same card goes."""
    page = Svg(WIDTH, title)
    scale = max(scale_bytes(report.layout) for _, report in cards)
    page.text(LEFT, 34, title, "sans ink", size=17, bold=True)
    y = 58.0
    for label, report in cards:
        y = card(page, label, report, y, scale)
    x = LEFT
    for part in layout_parts(cards[0][1].layout):
        if part.figure:
            page.box(x, y + 4, 12, 12, fill=part.segment.colour, round_=2)
        else:
            page.box(x, y + 4, 12, 12, css="room", round_=2)
        page.text(x + 18, y + 14, part.name, "sans soft", size=12)
        x += 40 + 7.2 * len(part.name)
    return page.render(y + 34)


def card(page: Svg, label: str, report: api.PlanReport, y: float, scale: int) -> float:
    layout, height = report.layout, 34.0
    page.text(LEFT, y + 12, label, "ink")
    page.text(LEFT + BAR, y + 12, outcome(report), f"sans {VERDICT_CSS[report.verdict]}", anchor="end", bold=True)
    top, x = y + 22, LEFT
    page.box(LEFT, top, layout.total_bytes / scale * BAR, height, css="room", round_=3)
    for part in layout_parts(layout):
        width = part.segment.amount / scale * BAR
        if part.figure is not None and width > 0:
            page.box(
                x, top, max(width, 1.0), height, fill=part.segment.colour, tip=f"{part.name}: {gib(part.figure.bytes)}"
            )
            if width > 16 + 7.0 * len(words := f"{part.name} {part.figure.bytes / GIB:.1f}"):
                page.text(x + 8, top + 22, words, "sans", size=12, fill="#ffffff")
        x += width
    for at, words, dashed in (
        (layout.budget_bytes, f"budget {gib(layout.budget_bytes, 1)}", False),
        (layout.total_bytes, f"the card, {gib(layout.total_bytes, 1)}", True),
    ):
        edge = LEFT + at / scale * BAR
        page.line(edge, top - 4, edge, top + height + 6, dashed=dashed)
        left_of_it = not dashed or edge > LEFT + BAR - 60
        down = 16 if not dashed else 29 if left_of_it else 16
        anchor = "end" if left_of_it else "start"
        page.text(edge + (-4 if left_of_it else 4), top + height + down, words, "sans soft", anchor=anchor, size=11.5)
    return top + height + 44


def outcome(report: api.PlanReport) -> str:
    kv = report.plan.memory.kv
    if report.verdict == "does_not_fit":
        return "does not start"
    tight = "tight: " if report.verdict == "tight" else ""
    return f"{tight}{kv.tokens:,} tokens of KV cache, {report.layout.headroom_bytes / GIB:.1f} GiB free"


def diagnosis(name: str) -> None:
    log = "docs/samples/kv-too-small.log"
    with contextlib.chdir(HERE.parents[1]):
        report = api.diagnose(Path(log), gpu="rtx4090")
    (HERE / name).write_text(terminal_svg(f"legroom diagnose {log} --gpu rtx4090", report.text(STYLE)), "utf-8")


def main() -> int:
    fits = api.plan("llama-3.1-8b", gpu="h100", vllm="0.32.0")
    picture("plan.svg", "legroom plan llama-3.1-8b --gpu h100", fits)
    fails = api.plan("qwen3-32b", gpu="h100", vllm="0.32.0")
    picture("does-not-fit.svg", "legroom plan qwen3-32b --gpu h100", fails)
    (HERE / "bar.svg").write_text(fits.svg(), encoding="utf-8")
    diagnosis("diagnosis.svg")

    def plan(model: str, gpu: str, vllm: str = "0.32.0", **flags: object) -> api.PlanReport:
        return api.plan(model, gpu=gpu, vllm=vllm, advice=False, **flags)

    two = (
        ("vllm serve Qwen/Qwen3-8B", plan("qwen3-8b", "rtx4090")),
        ("vllm serve Qwen/Qwen3-8B-FP8 --kv-cache-dtype fp8", plan("qwen3-8b-fp8", "rtx4090", kv_cache_dtype="fp8")),
    )
    (HERE / "two-settings.svg").write_text(cards_svg("Qwen3-8B on one RTX 4090, two settings", two), "utf-8")
    split = {"tensor_parallel_size": 2, "max_model_len": 8192}
    three = tuple(
        (label, plan(model, "a100-40gb", **split))
        for label, model in (
            ("bfloat16", "llama-3.1-70b"),
            ("FP8 weights", "llama-3.1-70b-fp8"),
            ("4-bit weights (AWQ)", "llama-3.1-70b-awq"),
        )
    )
    title = "Llama 3.1 70B on two A100 40 GB: what is on each card"
    (HERE / "70b-two-a100.svg").write_text(cards_svg(title, three), "utf-8")
    releases = tuple(
        (f"vLLM {release}", plan("qwen3-8b", "rtx4090", release, max_model_len=32768))
        for release in ("0.11.0", "0.19.0", "0.20.0", "0.28.0", "0.32.0")
    )
    title = "Qwen3-8B on an RTX 4090: the same command in five releases"
    (HERE / "releases.svg").write_text(cards_svg(title, releases), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
