"""The answer to a wish: what holds it, what that gives up, and the other ways to pay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from legroom.drawing.terminal import PLAIN, Style
from legroom.drawing.text import count, wrap
from legroom.planning.plan import ready_command
from legroom.render.plan_parts import short_name
from legroom.render.plan_text import body_text, command_lines, mini_layout

if TYPE_CHECKING:
    from legroom.planning.plan import Plan
    from legroom.planning.search import WishResult


def wish_text(result: WishResult, style: Style = PLAIN) -> str:
    requests = "request" if result.wish.concurrency == 1 else "requests"
    wished = f"{result.wish.concurrency:g} {requests} of {count(result.wish.context)} tokens"
    if result.best is None:
        mark = style.paint(style.pick("✗", "x"), "red", "bold")
        lines = wrap(f"No setting holds {wished}: {result.short_by}", style.width - 2)
        tried = f"  {count(result.considered)} settings were weighed."
        return (
            "\n".join([f"{mark} {style.paint(lines[0], 'bold')}", *(f"  {line}" for line in lines[1:]), tried]) + "\n"
        )
    blocks = [
        list(_answer(result, result.best, wished, style)),
        list(command_lines(ready_command(result.best), style)),
        [body_text(result.best, style)],
        list(_alternatives(result, style)),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _answer(result: WishResult, best: Plan, wished: str, style: Style) -> Iterator[str]:
    mark = style.paint(style.pick("✓", "ok"), "green", "bold")
    head = f"{short_name(best.target.model.name)} on {best.target.gpus} x {best.target.gpu.name} holds {wished}."
    lines = wrap(head, style.width - 2)
    yield f"{mark} {style.paint(lines[0], 'bold')}"
    yield from (f"  {style.paint(line, 'bold')}" for line in lines[1:])
    paid = "; ".join(result.losses) if result.losses else "nothing beyond the defaults"
    yield from wrap(f"It gives up: {paid}.", style.width, "  ")
    yield from wrap(
        f"{count(result.considered)} settings were weighed; policy {result.wish.policy}.", style.width, "  "
    )


def _alternatives(result: WishResult, style: Style) -> Iterator[str]:
    if not result.alternatives:
        return
    yield style.paint("Other ways to pay", "bold")
    for plan, losses in result.alternatives:
        yield ""
        yield from command_lines(ready_command(plan), style)
        yield from mini_layout(plan, style)
        paid = "; ".join(losses) if losses else "nothing beyond the defaults"
        yield from (style.paint(line, "dim") for line in wrap(f"gives up: {paid}", style.width, "    "))
