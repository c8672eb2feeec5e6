"""Which GPUs hold a model at a context and a concurrency, and how many: the sizing guide, computed."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.gpus import Gpu, GpuPrice, all_gpus, list_prices
from legroom.facts.gpus import gpu as known_gpu
from legroom.facts.model import Model
from legroom.facts.releases import Release
from legroom.planning.capacity_search import gpus_for_weights, is_sure, search_flags
from legroom.planning.checkpoints import lost_bits, quantized_checkpoints
from legroom.planning.plan import Plan, Target, cold_start, ready_command
from legroom.planning.plan_json import layout_json
from legroom.planning.search_space import NODE_GPUS, CapacityGoal
from legroom.records import dataclass
from legroom.sweeps import ProcessExecutor, SweepExecutor, sweep
from legroom.toml_tables import read_toml
from legroom.vllm.args import ServeArgs
from legroom.vllm.resolve import served_model


@dataclass(frozen=True, slots=True)
class Fit:
    """The fewest GPUs of one kind that hold a model with the wanted capacity."""

    model: str
    gpu: Gpu
    plan: Plan | None
    """None: not even the largest number of GPUs holds it."""
    losses: tuple[str, ...]
    limiting: str
    """The largest part of the card's memory, or what was missing."""
    tried: tuple[int, ...] = ()
    """The numbers of GPUs that were tried."""
    short_bytes: int = 0
    """What each card lacks with the most GPUs and the checkpoint nearest to fitting; 0 where it fits or is refused."""
    limiting_bytes: int = 0
    """What the largest part takes of one card."""
    wanted: float = 1.0
    """Requests of the full length at once that it has to hold."""
    is_sure: bool = False
    """It fits, and no setting that was searched for fills the card."""

    @property
    def count(self) -> int:
        """GPUs of the fit; 0 where the model does not fit on this kind."""
        return self.plan.args.gpus_needed if self.plan else 0

    @property
    def holds(self) -> float:
        """How many full-length requests all data-parallel engines hold at once; 0 where the model does not fit."""
        return self.plan.holds if self.plan else 0.0


SEVERAL_NODES = f"more than {NODE_GPUS} GPUs are several nodes"
_DATA_CENTRE_GPUS = ("b200", "h200", "mi300x", "h100", "a100-80gb", "a100-40gb", "l40s", "rtx-a6000")
USUAL_GPUS = (*_DATA_CENTRE_GPUS, "rtx5090", "rtx4090", "a10", "l4", "t4")
"""The GPUs that are tried by default: common cards in clouds and workstations."""


def named_gpus(names: Sequence[str] | str | None) -> list[Gpu]:
    """The GPUs of `h100,l4`, `all`, or a list of names; None: USUAL_GPUS; LegroomError for an unknown one or none."""
    if names == "all":
        return list(all_gpus())
    chosen = names.split(",") if isinstance(names, str) else list(USUAL_GPUS if names is None else names)
    chosen = [name.strip() for name in chosen if name.strip()]
    if not chosen:
        raise LegroomError("no GPU was named", "write it like --gpu h100,l4")
    return [known_gpu(name) for name in chosen]


@dataclass(frozen=True)
class SizingTask:
    """The models, arguments and goal of a sizing table."""

    models: tuple[Model, ...]
    release: Release
    args: tuple[ServeArgs, ...]
    """Those of each model."""
    goal: CapacityGoal


def size_models(
    models: Sequence[str],
    release: Release,
    args: ServeArgs,
    goal: CapacityGoal,
    gpus: Sequence[Gpu],
    executor: SweepExecutor | None = None,
    progress: Callable[[float], None] | None = None,
) -> list[Fit]:
    """The smallest fit of every model on every GPU, in that order; two where a quantized checkpoint needs fewer."""
    each_args = tuple(replace(args, model=name) for name in models)
    # Read here, not where a cell is worked out: files and the Hub's cache are this machine's.
    task = SizingTask(tuple(map(served_model, each_args)), release, each_args, goal)
    cells = [(number, gpu) for number in range(len(models)) for gpu in gpus]
    found = sweep(fit_cell, task, cells, executor or ProcessExecutor(1), progress)
    return [fit for fits in found for fit in fits]


def fit_cell(task: SizingTask, cell: tuple[int, Gpu]) -> tuple[Fit, ...]:
    """The fewest GPUs of one kind for a model, given by its index, then for its checkpoints in 8 and in 4 bits where
    these need fewer, or as many without a "but"; where the fewest are not sure to fit, also the fewest that are."""
    number, gpu = cell
    target, args = Target(task.models[number], gpu, 1, task.release), task.args[number]
    rows, counts = _fits_up_to_sure(target, args, task.goal)
    for _, same_width in groupby(quantized_checkpoints(target, args) if counts else [], lost_bits):
        goal = replace(task.goal, gpus=counts, quantized_only=True)
        more, counts = _fits_up_to_sure(target, args, goal, list(same_width))
        rows += more
        if not counts:
            break
    holding = [row for row in rows if row.plan]
    nearest = min(rows, key=lambda row: row.short_bytes or math.inf)  # the checkpoint that lacks the least
    return tuple([row for row in rows if row is rows[0] or row.plan] if holding else [nearest])


def _fits_up_to_sure(
    target: Target, args: ServeArgs, goal: CapacityGoal, others: Sequence[Model] = ()
) -> tuple[list[Fit], tuple[int, ...]]:
    """The fewest GPUs for the target's model or `others` and, where that is not sure to fit, the fewest that are; and
    the numbers of GPUs that could do with less."""
    rows = [fewest_gpus(target, args, goal, others)]
    while rows[-1].plan and not rows[-1].is_sure:
        more = tuple(count for count in goal.gpus if count > rows[-1].count)
        following = fewest_gpus(target, args, replace(goal, gpus=more), others) if more else rows[0]
        if following.plan is None or not more:
            break
        rows.append(following)
    rows = [row for row in rows if row is rows[0] or row.is_sure]
    last = rows[-1]
    has_but = not last.is_sure or bool(last.plan and last.plan.args.enforce_eager and not args.enforce_eager)
    return rows, tuple(count for count in goal.gpus if not last.plan or count < last.count + has_but)


def row_json(fit: Fit, prices: Mapping[str, GpuPrice]) -> dict[str, Any]:
    """A row of `legroom size --json`: a model or its quantized checkpoint on one kind of GPU."""
    plan, usd = fit.plan, hourly_usd(fit, prices)
    split = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel")
    return {
        "model": plan.target.model.name if plan else fit.model,
        "gpu": fit.gpu.name,
        "total_bytes": fit.gpu.total_bytes,
        "count": fit.count,
        "verdict": plan.verdict if plan else "does_not_fit",
        "reason": plan.reason if plan and plan.verdict == "tight" else "",
        "notes": [SEVERAL_NODES] if fit.count > NODE_GPUS else [],
        "usd_per_hour": usd,
        "limiting": fit.limiting,
        "limiting_bytes": fit.limiting_bytes or None,
        "gives_up": list(fit.losses),
        **{name: getattr(plan.settings, name) if plan else None for name in split},
        "tried": list(fit.tried),
        "short_bytes": fit.short_bytes,
        "max_concurrency": fit.holds if plan else None,
        "held_per_usd": round(fit.holds / usd, 2) if plan and usd else None,
        "first_start_concurrency": cold_start(plan).holds if plan else None,
        "layout": layout_json(plan.layout) if plan else None,
        "command": ready_command(plan) if plan else None,
    }


def fewest_gpus(target: Target, args: ServeArgs, goal: CapacityGoal, others: Sequence[Model] = ()) -> Fit:
    """The fewest of the GPU counts in `goal` that hold it, with the model or one of `others`; else what is lacking."""
    short, lacking_bytes = "", 0
    counts = tuple(sorted(goal.gpus))
    targets = [target, *(replace(target, model=other) for other in others)]
    least = min(gpus_for_weights(each, args, counts[-1]) for each in targets)
    for number, count in enumerate(counts, 1):
        if count < least:
            continue
        on_count = [replace(each, gpus=count) for each in targets]
        result = search_flags(on_count, args, replace(goal, gpus=(count,)), max_answers=1)
        if (plan := result.best) is not None:
            # The part of one card that needs the most for the wanted requests.
            layout, requests = plan.layout, goal.concurrency / plan.settings.data_parallel_size
            parts = {
                "weights": layout.weights.bytes,
                "KV cache": round(plan.memory.kv.needed_bytes * requests),
                "activations": layout.activation.bytes,
                "outside the budget": layout.outside.bytes,
            }
            limiting, limiting_bytes = max(parts.items(), key=lambda part: part[1])
            fitting, tried = (target.model.name, target.gpu, plan, result.losses), counts[:number]
            return Fit(*fitting, limiting, tried, 0, limiting_bytes, goal.concurrency, is_sure(plan, args))
        short, lacking_bytes = result.short_by, result.short_bytes
    return Fit(target.model.name, target.gpu, None, (), short, counts, lacking_bytes)


def cheapest_first(rows: Sequence[Fit], prices: Mapping[str, GpuPrice]) -> list[Fit]:
    """Rows of each model by price per hour, then by the memory bought; cards without a price and misfits last."""
    models = list(dict.fromkeys(fit.model for fit in rows))

    def cost(fit: Fit) -> tuple[int, bool, float, int]:
        """A row's sort key: the model's place, then fits before misfits, price, and memory bought."""
        usd = hourly_usd(fit, prices)
        price = math.inf if usd is None else usd
        return models.index(fit.model), fit.plan is None, price, fit.count * fit.gpu.total_bytes

    return sorted(rows, key=cost)


def hourly_usd(fit: Fit, prices: Mapping[str, GpuPrice]) -> float | None:
    """Dollars per hour for all GPUs of a row; None where the card has no price or the model does not fit."""
    price = prices.get(fit.gpu.name)
    return price.usd_per_hour * fit.count if price and fit.count else None


_EXAMPLE = "write it like: [h100] and, in the next line, usd_per_hour = 2.49"


def prices_with_file(path: str | None) -> dict[str, GpuPrice]:
    """List prices by the card's full name, those of a user's file in place of them."""
    return list_prices() | (read_price_file(path) if path else {})


def read_price_file(path: str) -> dict[str, GpuPrice]:
    """Hourly prices of a TOML file by the card's full name; LegroomError for a wrong entry."""
    tables, prices = read_toml(Path(path)), dict[str, GpuPrice]()
    for name, table in tables.subtables():
        try:
            card = known_gpu(name)
        except LegroomError as error:
            raise tables.error(name, "legroom knows no such GPU", error.hint) from error
        if card.name in prices:
            raise tables.error(name, f"a second price of the {card.name}", "leave one of them out")
        with table:
            usd = table.number("usd_per_hour", table.require("usd_per_hour", float), most=1e9)
            date, source = str(table.raw("date") or ""), table.get("source", str, path)
        prices[card.name] = GpuPrice(card.name, usd, date, source)
    if not prices:
        raise LegroomError(f"{path} gives no price", _EXAMPLE)
    return prices
