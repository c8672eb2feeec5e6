"""The sizing table: a GPU a row, or models by GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from legroom.drawing.terminal import PLAIN, Style
from legroom.drawing.text import columns, wrap
from legroom.render.plan_parts import short_name
from legroom.units import gib

if TYPE_CHECKING:
    from legroom.planning.sizing import Fit

Rows = Sequence[tuple[str, "Fit"]]


def size_text(rows: Rows, title: str, style: Style = PLAIN) -> str:
    """One table a model."""
    blocks = []
    for model in dict.fromkeys(name for name, _ in rows):
        fits = [fit for name, fit in rows if name == model]
        head = style.paint(f"{short_name(model)}: {title}", "bold")
        blocks.append("\n".join([head, "", *_table(fits, style)]))
    return "\n\n".join(blocks) + "\n"


def _table(fits: Sequence[Fit], style: Style) -> list[str]:
    header = ("GPU", "total", "count", "split", "holds", "free", "most of it")
    rows = [tuple(style.paint(word, "dim") for word in header)]
    rows += [_row(fit, style) for fit in fits if fit.plan is not None]
    lines = [f"  {line}" for line in columns(rows, "<>><>><")] if len(rows) > 1 else []
    if any(fit.losses for fit in fits):
        lines += ["", style.paint("  * gives up something: see --json, or legroom plan --want-context ...", "dim")]
    without = [fit for fit in fits if fit.plan is None]
    if without:
        names = ", ".join(f"{fit.gpu.name} ({fit.limiting})" if fit.limiting else fit.gpu.name for fit in without)
        lines += ["", *wrap(f"too small: {names}", style.width, "  ", "    ")]
    return lines


def _row(fit: Fit, style: Style) -> tuple[str, ...]:
    plan = fit.plan
    assert plan is not None
    settings = plan.settings
    split = [f"TP {settings.tensor_parallel_size}"] if settings.tensor_parallel_size > 1 else []
    split += [f"PP {settings.pipeline_parallel_size}"] if settings.pipeline_parallel_size > 1 else []
    mark = style.paint("*", "orange") if fit.losses else ""
    return (
        fit.gpu.name + mark,
        gib(fit.gpu.total_bytes, 1),
        str(fit.count),
        " ".join(split) or style.pick("·", "-"),
        style.pick("·", "-") if plan.memory.kv.shape.is_empty else f"{plan.memory.kv.max_concurrency:.1f}",
        gib(plan.layout.headroom_bytes, 1),
        fit.limiting,
    )


def matrix_text(rows: Rows, title: str, style: Style = PLAIN) -> str:
    """Models down, GPUs across, the number of GPUs in each cell."""
    models = list(dict.fromkeys(name for name, _ in rows))
    gpus = list(dict.fromkeys(fit.gpu.name for _, fit in rows))
    counts = {(name, fit.gpu.name): fit for name, fit in rows}
    nothing = style.pick("·", "-")
    table = [("GPU", *(short_name(model) for model in models))]
    for gpu in gpus:
        cells = (counts[model, gpu] for model in models)
        table.append((gpu, *(f"{fit.count}{'*' if fit.losses else ''}" if fit.plan else nothing for fit in cells)))
    lines = columns([tuple(row) for row in table], "<" + ">" * len(models))
    head = style.paint(f"GPUs needed for {title}", "bold")
    legend = style.paint(f"  {nothing} not with that many   * gives something up", "dim")
    return "\n".join([head, "", *(f"  {line}" for line in lines), "", legend, ""])
