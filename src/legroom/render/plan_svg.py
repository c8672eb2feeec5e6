"""SVG of a plan, with the figures of its text."""

import shlex

from legroom.drawing.svg import Svg
from legroom.drawing.text import count, wrap
from legroom.memory.layout import Layout
from legroom.planning.plan import Plan, ready_command
from legroom.render.plan_parts import (
    LayoutPart,
    certainty_text,
    holds_text,
    layout_parts,
    plan_headline,
    pool_text,
    scale_bytes,
)
from legroom.units import gib, human_bytes
from legroom.vllm.command_line import change_words

_WIDTH, _LEFT, _BAR = 760.0, 28.0, 704.0
_CHARS = 88  # Characters of the 13 px font that fit between the margins.
_VERDICT_CSS = {"fits": "good", "tight": "fair", "does_not_fit": "bad"}


def plan_svg(plan: Plan) -> str:
    """The plan as one SVG picture: verdict, memory bar, legend, KV cache, advice and command."""
    page = Svg(_WIDTH, plan_headline(plan))
    page.text(_LEFT, 40, plan.verdict.replace("_", " "), f"sans {_VERDICT_CSS[plan.verdict]}", size=20, bold=True)
    y = _draw_failure(page, plan, page.lines(_LEFT, 40, wrap(plan_headline(plan), 100), 22, "sans ink", size=14))
    y = _draw_card_bar(page, plan, y + 16)
    for number, part in enumerate(parts := layout_parts(plan.layout)):
        _draw_legend_row(page, plan.layout, part, y + 14 + 21 * number)
    y = _draw_kv_cache_lines(page, plan, y + 26 + 21 * len(parts))
    y = _draw_all_advice(page, plan, y + 8)
    y = _draw_command(page, plan, y + 8)
    return page.render(y + 18)


def _draw_failure(page: Svg, plan: Plan, y: float) -> float:
    """Draws the error that vLLM stops with; returns the y below it, or `y` itself where the plan starts."""
    failure = plan.memory.failure
    if failure is None:
        return y
    lines = wrap(failure.message, _CHARS - 4)
    page.box(_LEFT, y + 14, 3, 18 * len(lines) + 8, fill="red")
    page.box(_LEFT + 3, y + 14, _BAR - 3, 18 * len(lines) + 8, css="box")
    return page.lines(_LEFT + 14, y + 14, lines, 18) + 10


def _draw_card_bar(page: Svg, plan: Plan, y: float) -> float:
    """Draws the card's memory as a stacked bar with the budget line; returns the y below it."""
    layout = plan.layout
    page.text(_LEFT, y + 12, f"{plan.target.gpu.name}, {gib(layout.total_bytes)}", "sans soft")
    top, height = y + 22, 46.0
    page.box(_LEFT, top, _BAR, height, css="room", round_=4)
    scale, x = scale_bytes(layout), _LEFT
    for part in layout_parts(layout):
        width = part.segment.amount / scale * _BAR
        if part.figure is not None and width > 0:
            tip = f"{part.name}: {gib(part.figure.bytes)} ({part.meaning.rstrip('.')})"
            page.box(x, top, max(width, 1.0), height, fill=part.segment.colour, tip=tip)
        if width > 12 + 7.0 * len(part.name):
            ink = "#ffffff" if part.figure is not None else ""
            page.text(x + 8, top + 19, part.name, "sans" if ink else "sans soft", fill=ink)
            page.text(x + 8, top + 36, gib(part.segment.amount, 1), "sans" if ink else "sans soft", size=11.5, fill=ink)
        x += width
    # The --gpu-memory-utilization budget, and the card's end where it is exceeded.
    x = _LEFT + layout.budget_bytes / scale * _BAR
    page.line(x, top - 6, x, top + height + 8)
    words = f"budget {gib(layout.budget_bytes)} = {plan.settings.gpu_memory_utilization:g} x total"
    page.text(x - 4, top + height + 20, words, "sans soft", anchor="end", size=12)
    if scale > layout.total_bytes:
        edge = _LEFT + layout.total_bytes / scale * _BAR
        page.line(edge, top - 6, edge, top + height + 8, dashed=True)
        page.text(edge, top - 10, "end of the card", "sans soft", anchor="middle", size=12)
    return top + height + 26


def _draw_legend_row(page: Svg, layout: Layout, part: LayoutPart, y: float) -> None:
    """Draws one part's colour, name, size, share of the card and certainty, or how much is missing."""
    bytes_ = part.figure.bytes if part.figure else layout.headroom_bytes
    look: dict[str, str] = {"fill": part.segment.colour} if part.figure else {"css": "room"}
    page.box(_LEFT, y, 12, 12, **look, round_=2)
    page.text(_LEFT + 22, y + 11, part.name)
    if bytes_ < 0 and part.name != "outside":
        short = f"{gib(-bytes_)} missing" if part.figure else f"{gib(-bytes_)} over the card"
        page.text(_LEFT + 220, y + 11, "none", anchor="end")
        page.text(_LEFT + 312, y + 11, short, "bad")
        return
    page.text(_LEFT + 220, y + 11, gib(bytes_), anchor="end")
    page.text(_LEFT + 290, y + 11, f"{bytes_ / layout.total_bytes:.1%}", "soft", anchor="end")
    page.text(_LEFT + 312, y + 11, certainty_text(part.figure) if part.figure else "free at the peak", "soft")


def _draw_kv_cache_lines(page: Svg, plan: Plan, y: float) -> float:
    """Draws the KV cache's blocks, concurrency and longest request; returns the y below them."""
    kv = plan.memory.kv
    if not plan.reaches_pool:
        return y
    page.text(_LEFT, y + 12, pool_text(kv, "KV block"))
    page.text(_LEFT, y + 31, f"{holds_text(plan)}; the longest that fits is {count(kv.longest_len)}")
    return y + 38


def _draw_all_advice(page: Svg, plan: Plan, y: float) -> float:
    """Draws each advice with the memory bar it leads to, cheapest first; returns the y below them."""
    if not plan.advice:
        return y
    verb = "hold" if plan.starts else "start"
    y += 22
    page.text(_LEFT, y, f"What would make it {verb}, the cheapest first", "sans ink", size=14, bold=True)
    for advice in plan.advice:
        after, y = advice.plan, y + 14
        caveat = "" if after.verdict == "fits" else "  (tight)"
        page.text(_LEFT, y + 12, " ".join(change_words(advice.flags)) + caveat, bold=True)
        x, scale, width = _LEFT, scale_bytes(after.layout), 300.0
        page.box(x, y + 20, width, 14, css="room", round_=2)
        for part in layout_parts(after.layout):
            size = part.segment.amount / scale * width
            if part.figure is not None and size > 0:
                page.box(x, y + 20, size, 14, fill=part.segment.colour)
            x += size
        facts = f"KV {gib(after.layout.kv_cache.bytes)}, {after.holds:.2f} requests, "
        page.text(_LEFT + width + 16, y + 31, facts + f"headroom {human_bytes(after.layout.headroom_bytes)}", "soft")
        y += 40
    return y


def _draw_command(page: Svg, plan: Plan, y: float) -> float:
    """Draws the plan's command, or that of the first advice where the plan does not start; returns the y below."""
    if not plan.starts and not plan.advice:
        return y
    shown = plan if plan.starts else plan.advice[0].plan
    lines = wrap(shlex.join(ready_command(shown)), _CHARS - 4)
    page.box(_LEFT, y + 8, _BAR, 19 * len(lines) + 12, css="box", round_=4)
    shown_lines = [("    " if number else "$ ") + line for number, line in enumerate(lines)]
    return page.lines(_LEFT + 12, y + 10, shown_lines, 19) + 10
