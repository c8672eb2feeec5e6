"""Which GPUs hold a model at a context and a concurrency, and how many: the sizing guide, computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from legroom.planning.plan import Target
from legroom.planning.search import find
from legroom.planning.wish import Wish
from legroom.records import dataclass

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.facts.model import Model
    from legroom.facts.releases import Release
    from legroom.planning.plan import Plan
    from legroom.vllm.args import ServeArgs


@dataclass(frozen=True, slots=True)
class Fit:
    """The smallest number of one GPU that holds the wish."""

    gpu: Gpu
    plan: Plan | None
    """None: not even the largest count holds it."""
    losses: tuple[str, ...]
    limiting: str
    """The part that takes most of the card, or what was missing."""

    @property
    def count(self) -> int:
        """How many GPUs; 0 where it does not fit."""
        if self.plan is None:
            return 0
        settings = self.plan.settings
        return settings.tensor_parallel_size * settings.pipeline_parallel_size


def size(model: Model, release: Release, args: ServeArgs, wish: Wish, gpus: Sequence[Gpu]) -> Iterator[Fit]:
    """For each GPU the fewest of `wish.gpus` that hold the wish, as they are worked out."""
    for gpu in gpus:
        yield _smallest(Target(model, gpu, 1, release), args, wish)


def _smallest(target: Target, args: ServeArgs, wish: Wish) -> Fit:
    short = ""
    for count in sorted(wish.gpus):
        result = find([replace(target, gpus=count)], args, replace(wish, gpus=(count,)), most=1)
        if result.best is not None:
            return Fit(target.gpu, result.best, result.losses, _largest_part(result.best))
        short = result.short_by
    return Fit(target.gpu, None, (), short)


def _largest_part(plan: Plan) -> str:
    layout = plan.layout
    parts = {
        "weights": layout.weights.bytes,
        "KV cache": plan.memory.kv.needed_bytes,
        "activations": layout.activation.bytes,
        "outside the budget": layout.outside.bytes,
    }
    return max(parts, key=lambda name: parts[name])
