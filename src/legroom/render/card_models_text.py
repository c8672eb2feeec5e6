"""Text of `legroom models --gpu`: what the card serves, and what lacks little memory."""

from __future__ import annotations

from collections.abc import Iterator

from legroom.drawing.terminal import Style
from legroom.drawing.text import columns, wrap
from legroom.simulation.card_models import CardModel, CardModels
from legroom.units import gib, human_bytes

_MOST_ROWS = 20
"""A screen of models; a word, or --json, shows the others."""
_NEAREST = 5


def card_models_text(answer: CardModels, style: Style) -> str:
    """The models that fit, the largest first, one checkpoint each; then those that lack the least."""
    asked = answer.question
    users = f"{asked.goal.concurrency:g} user{'' if asked.goal.concurrency == 1 else 's'}"
    title = (
        f"{asked.gpus} x {asked.gpu.name} ({gib(asked.gpu.total_bytes, 1)}) with vLLM {asked.release.version}: "
        f"{users} of {asked.goal.context:,} tokens"
    )
    lines = [style.paint(line, "bold") for line in wrap(title, style.width)]
    best = answer.best_of_each
    lines += ["", *_fitting_table(best[:_MOST_ROWS], style)] if best else ["", "No bundled model fits."]
    lines += _footer_lines(answer, len(best) - _MOST_ROWS, style)
    if missing := answer.nearest_missing[:_NEAREST]:
        rows = [(each.bundled.name, f"lacks {human_bytes(each.fit.short_bytes)} a card") for each in missing]
        lines += ["", style.paint("Too large, by the least", "bold"), *(f"  {line}" for line in columns(rows, "<<"))]
    return "\n".join(lines) + "\n"


def _fitting_table(models: list[CardModel], style: Style) -> Iterator[str]:
    head = ("model", "weights", "users", "longest", "tokens/s", "gives up")
    rows = [tuple(style.paint(word, "dim") for word in head)]
    for each in models:
        plan, rate, nothing = each.fit.plan, each.rate, style.pick("·", "-")
        if plan is None:
            continue
        has_cache = not plan.memory.kv.shape.is_empty
        rows.append(
            (
                style.paint(each.bundled.name, "bold" if plan.verdict == "fits" else "orange"),
                gib(plan.layout.weights.bytes, 1),
                f"{each.fit.holds:.1f}" if has_cache else nothing,
                f"{each.longest_len:,}" if has_cache else nothing,
                f"{rate.low:.0f} to {rate.high:.0f}" if rate else nothing,
                ", ".join(loss.partition(":")[0] for loss in each.fit.losses),
            )
        )
    yield from (f"  {line}" for line in columns(rows, "<>>>><"))


def _footer_lines(answer: CardModels, more: int, style: Style) -> Iterator[str]:
    if more > 0:
        yield style.paint(f"  and {more} smaller ones: add a word like `qwen3`, or --json", "dim")
    if answer.fitting:
        yield ""
        yield from wrap(
            "users: requests of that length at once; longest: of one request; tokens/s: of one user alone, with its "
            "range.",
            style.width,
            "  ",
        )
