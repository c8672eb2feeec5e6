"""The sizing table: a GPU a row, or models by GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from legroom.drawing.terminal import PLAIN, Style
from legroom.drawing.text import columns, wrap
from legroom.planning.search_space import NODE_GPUS
from legroom.render.plan_parts import short_name
from legroom.units import gib, human_bytes

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
    rows += [_row(fit, style) for fit in fits if fit.plan is not None or fit.short_bytes]
    lines = [f"  {line}" for line in columns(rows, "<>><>><")] if len(rows) > 1 else []
    footers = list(_footers(fits, style))
    return [*lines, *([""] if lines and footers else []), *footers]


def _footers(fits: Sequence[Fit], style: Style) -> Iterator[str]:
    if any(fit.losses for fit in fits):
        yield style.paint("  * gives up something: see --json, or legroom plan --want-context ...", "dim")
    if any(fit.count > NODE_GPUS for fit in fits):
        yield style.paint(f"  more than {NODE_GPUS} GPUs are several nodes", "dim")
    without = [fit for fit in fits if fit.plan is None]
    small = [fit for fit in without if fit.short_bytes]
    if small:
        tried = max((fit.tried for fit in small), key=len)
        numbers = f"{', '.join(map(str, tried[:-1]))} and {tried[-1]}" if len(tried) > 1 else str(tried[-1])
        yield from wrap(
            f"{style.pick('–', '-')} too small: {numbers} of each GPU {'were' if tried[-1] > 1 else 'was'} tried, and "
            "`free` is what each card lacks with the most; --max-gpus tries more",
            style.width,
            "  ",
            "    ",
        )
    for reason in dict.fromkeys(fit.limiting for fit in without if not fit.short_bytes):
        names = ", ".join(fit.gpu.name for fit in without if fit.limiting == reason)
        yield from wrap(f"{names}: {reason}", style.width, "  ", "    ")


def _row(fit: Fit, style: Style) -> tuple[str, ...]:
    plan, nothing = fit.plan, style.pick("·", "-")
    if plan is None:
        missing = style.paint(f"-{human_bytes(fit.short_bytes)}", "red")
        return (fit.gpu.name, gib(fit.gpu.total_bytes, 1), style.pick("–", "-"), nothing, nothing, missing, "")
    settings = plan.settings
    sizes = {
        "TP": settings.tensor_parallel_size,
        "PP": settings.pipeline_parallel_size,
        "DP": settings.data_parallel_size,
    }
    split = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    split += ["EP"] if settings.enable_expert_parallel else []
    mark = style.paint("*", "orange") if fit.losses else ""
    return (
        fit.gpu.name + mark,
        gib(fit.gpu.total_bytes, 1),
        str(fit.count),
        " ".join(split) or nothing,
        nothing if plan.memory.kv.shape.is_empty else f"{fit.holds:.1f}",
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
