"""Which GPUs hold a model at a context and a concurrency, and how many: the sizing guide, computed."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.gpus import Gpu, GpuPrice, all_gpus
from legroom.facts.gpus import gpu as known_gpu
from legroom.facts.model import Model
from legroom.facts.releases import Release
from legroom.memory.weights.loaded import weights
from legroom.planning.capacity_search import search_flags
from legroom.planning.plan import Plan, Target, ready_command
from legroom.planning.plan_document import layout_json
from legroom.planning.search_space import CapacityGoal
from legroom.records import dataclass
from legroom.sweeps.executors import ProcessExecutor, SweepExecutor
from legroom.vllm.args import ServeArgs
from legroom.vllm.resolve import resolve, served_model


@dataclass(frozen=True, slots=True)
class Fit:
    """The smallest number of one GPU that holds the wish."""

    gpu: Gpu
    plan: Plan | None
    """None: not even the largest count holds it."""
    losses: tuple[str, ...]
    limiting: str
    """The part that takes most of the card, or what was missing."""
    tried: tuple[int, ...] = ()
    """The numbers of GPUs that were tried, this one included."""
    short_bytes: int = 0
    """What each card lacks with the largest number tried; 0 where it fits, or where no setting is possible."""

    @property
    def count(self) -> int:
        """How many GPUs; 0 where it does not fit."""
        return self.plan.args.gpus_needed if self.plan else 0

    @property
    def holds(self) -> float:
        """Requests of the full length at once, over all data-parallel engines."""
        if self.plan is None:
            return 0.0
        return self.plan.memory.kv.max_concurrency * self.plan.settings.data_parallel_size


@dataclass(frozen=True)
class ModelFit:
    """One model on one GPU."""

    model: str
    fit: Fit


MOST_GPUS = 32
"""Four nodes of eight: as many of one GPU as are tried unless told otherwise."""
USUAL_GPUS = (
    "b200",
    "h200",
    "mi300x",
    "h100",
    "a100-80gb",
    "a100-40gb",
    "l40s",
    "rtx-a6000",
    "rtx5090",
    "rtx4090",
    "a10",
    "l4",
    "t4",
)
"""What is tried unless told otherwise: cards that people rent or have."""


def named_gpus(names: Sequence[str] | str | None) -> list[Gpu]:
    """The GPUs that `h100,l4`, `all`, a list or nothing (the usual ones) mean."""
    if names == "all":
        return list(all_gpus())
    chosen = names.split(",") if isinstance(names, str) else list(USUAL_GPUS if names is None else names)
    chosen = [name.strip() for name in chosen if name.strip()]
    if not chosen:
        raise LegroomError("no GPU was named", "write it like --gpu h100,l4")
    return [known_gpu(name) for name in chosen]


@dataclass(frozen=True)
class SizingTask:
    """What every cell of a sizing table is worked out from."""

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
) -> list[ModelFit]:
    """Every model on every GPU: model after model, in the order of the GPUs."""
    each_args = tuple(replace(args, model=name) for name in models)
    # Read here, not where a cell is worked out: files and the Hub's cache are this machine's.
    task = SizingTask(tuple(map(served_model, each_args)), release, each_args, goal)
    cells = [(number, gpu) for number in range(len(models)) for gpu in gpus]
    rows: dict[int, ModelFit] = {}
    with closing((executor or ProcessExecutor(1)).run(fit_cell, task, cells)) as results:
        for number, row in results:
            rows[number] = row
            if progress:
                progress(len(rows) / len(cells))
    return [rows[number] for number in sorted(rows)]


def fit_cell(task: SizingTask, cell: tuple[int, Gpu]) -> ModelFit:
    """One model, by its number, on one GPU."""
    number, gpu = cell
    model = task.models[number]
    return ModelFit(model.name, _fewest_that_hold(Target(model, gpu, 1, task.release), task.args[number], task.goal))


def size_json(rows: Sequence[ModelFit], goal: CapacityGoal, release: Release) -> dict[str, Any]:
    """The document that `legroom size --json` prints."""
    each_args = {"context": goal.context, "concurrency": goal.concurrency, "policy": goal.policy}
    return {"vllm": release.version, **each_args, "rows": [_row_json(row) for row in rows]}


def _row_json(row: ModelFit) -> dict[str, Any]:
    fit, plan = row.fit, row.fit.plan
    return {
        "model": row.model,
        "gpu": fit.gpu.name,
        "total_bytes": fit.gpu.total_bytes,
        "count": fit.count,
        "verdict": plan.verdict if plan else "does_not_fit",
        "limiting": fit.limiting,
        "gives_up": list(fit.losses),
        "tensor_parallel_size": plan.settings.tensor_parallel_size if plan else None,
        "pipeline_parallel_size": plan.settings.pipeline_parallel_size if plan else None,
        "data_parallel_size": plan.settings.data_parallel_size if plan else None,
        "enable_expert_parallel": plan.settings.enable_expert_parallel if plan else None,
        "tried": list(fit.tried),
        "short_bytes": fit.short_bytes,
        "max_concurrency": fit.holds if plan else None,
        "layout": layout_json(plan.layout) if plan else None,
        "command": ready_command(plan) if plan else None,
    }


def size(model: Model, release: Release, args: ServeArgs, goal: CapacityGoal, gpus: Sequence[Gpu]) -> Iterator[Fit]:
    """For each GPU the fewest of `wish.gpus` that hold the wish, as they are worked out."""
    for gpu in gpus:
        yield _fewest_that_hold(Target(model, gpu, 1, release), args, goal)


def _fewest_that_hold(target: Target, args: ServeArgs, goal: CapacityGoal) -> Fit:
    short, lacking_bytes = "", 0
    counts = tuple(sorted(goal.gpus))
    least_gpus = _weights_bytes(target, args) / target.gpu.total_bytes
    for number, count in enumerate(counts, 1):
        if count < min(least_gpus, counts[-1]):
            continue  # not even the weights, evenly spread
        result = search_flags([replace(target, gpus=count)], args, replace(goal, gpus=(count,)), max_answers=1)
        if result.best is not None:
            return Fit(target.gpu, result.best, result.losses, _largest_part(result.best), counts[:number])
        short, lacking_bytes = result.short_by, result.short_bytes
    return Fit(target.gpu, None, (), short, counts, lacking_bytes)


def _weights_bytes(target: Target, args: ServeArgs) -> int:
    """The weights on one card, had it the room; 0 where the flags put them elsewhere or split them in their own way."""
    if args.cpu_offload_gb or args.gpus_needed > 1:
        return 0
    try:
        settings = resolve(args, target.model, target.gpu, target.release)
    except LegroomError:
        return 0
    return weights(target.model, settings, target.gpu).bytes


def _largest_part(plan: Plan) -> str:
    layout = plan.layout
    parts = {
        "weights": layout.weights.bytes,
        "KV cache": plan.memory.kv.needed_bytes,
        "activations": layout.activation.bytes,
        "outside the budget": layout.outside.bytes,
    }
    return max(parts, key=lambda name: parts[name])


_EXAMPLE = "write it like: [h100] and, in the next line, usd_per_hour = 2.49"
_KEYS = ("usd_per_hour", "date", "source")


def read_price_file(path: str) -> dict[str, GpuPrice]:
    """By the name of the card in the facts; a card that is not in the file has no price."""
    try:
        tables = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise LegroomError(f"the prices in {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise LegroomError(f"the prices in {path} cannot be read: it is not UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        raise LegroomError(f"{path} is not TOML: {error}", _EXAMPLE) from error
    prices: dict[str, GpuPrice] = {}
    for name, table in tables.items():
        price = _price(path, name, table)
        if price.gpu in prices:
            raise LegroomError(f"{path} gives two prices for the {price.gpu}", "leave one of them out")
        prices[price.gpu] = price
    if not prices:
        raise LegroomError(f"{path} gives no price", _EXAMPLE)
    return prices


def _price(path: str, name: str, table: Any) -> GpuPrice:
    try:
        card = known_gpu(name)
    except LegroomError as error:
        raise LegroomError(f"{path} has a price for {name!r}, and legroom knows no such GPU", error.hint) from error
    if not isinstance(table, dict):
        raise LegroomError(f"{path}: {name} is not a table", _EXAMPLE)
    if unknown := sorted(set(table) - set(_KEYS)):
        raise LegroomError(f"{path}, [{name}]: {unknown[0]!r} is not a key of a price", f"there are {', '.join(_KEYS)}")
    usd = table.get("usd_per_hour")
    if isinstance(usd, bool) or not isinstance(usd, int | float) or not (0 <= usd < math.inf):
        raise LegroomError(f"{path}, [{name}]: usd_per_hour must be a number of at least 0", _EXAMPLE)
    return GpuPrice(card.name, float(usd), str(table.get("date", "")), str(table.get("source", path)))
