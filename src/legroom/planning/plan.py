"""A plan: one deployment, its memory, the verdict, and what would make it start."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from legroom.errors import LegroomError
from legroom.facts.gpus import gpu
from legroom.memory.deployment import DeploymentMemory, Measurements, deployment_memory
from legroom.planning.cold import cold_start
from legroom.planning.verdict import Verdict, verdict
from legroom.records import dataclass
from legroom.vllm.resolve import resolve

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from legroom.facts.gpus import Gpu
    from legroom.facts.model import Model
    from legroom.facts.releases import Release
    from legroom.memory.layout import Layout
    from legroom.vllm.args import EngineSettings, ServeArgs


@dataclass(frozen=True)
class Target:
    """What a plan is made for: a model on some GPUs under one release."""

    model: Model
    gpu: Gpu
    gpus: int
    release: Release
    seen: Measurements | None = None
    """What this user's own start-ups measured, if anything."""
    held_by_others_bytes: int = 0


@dataclass(frozen=True)
class Advice:
    """A change of flags that makes the server start or hold, with the memory it will have."""

    flags: Mapping[str, Any]
    why: str
    plan: Plan
    trades: str = ""


@dataclass(frozen=True)
class Plan:
    """One deployment and everything legroom knows about its memory."""

    target: Target
    args: ServeArgs
    settings: EngineSettings
    memory: DeploymentMemory
    verdict: Verdict
    reason: str
    advice: tuple[Advice, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def layout(self) -> Layout:
        """The tightest GPU's."""
        return self.memory.tightest


def plan_on_named_card(target: Target, args: ServeArgs) -> Plan:
    """The plan on the card that was named; a name two cards share means the larger if only that holds the weights."""
    made = plan(target, args)
    failure = made.memory.failure
    if failure is None or failure.id != "weights_too_big" or not target.gpu.larger:
        return made
    note = f"read as {target.gpu.larger}: the smaller card of that name does not hold the weights"
    return plan(replace(target, gpu=replace(gpu(target.gpu.larger), note=note)), args)


def plan(target: Target, args: ServeArgs) -> Plan:
    """Predict what vLLM does with these flags, without advice."""
    settings = resolve(args, target.model, target.gpu, target.release)
    needed = args.gpus_needed
    if needed > target.gpus:
        raise LegroomError(
            f"the flags ask for {needed} GPUs (the product of the parallel sizes) but only {target.gpus} are given",
            f"say --gpus {needed}, or lower the parallel sizes",
        )
    memory = deployment_memory(target.model, target.gpu, settings, target.seen, target.held_by_others_bytes)
    if settings.auto_fit_len and memory.kv.max_model_len != settings.max_model_len:
        settings = replace(settings, max_model_len=memory.kv.max_model_len)
    answer, reason = verdict(target.model, target.gpu, settings, memory)
    notes = (*(note for note in (target.release.note, target.gpu.note) if note), *settings.notes)
    made = Plan(target, args, settings, memory, answer, reason, notes=notes)
    if answer == "fits" and cold_start(made).memory.failure:
        return replace(made, verdict="tight", reason="a first start, with a cold compile cache, fails once")
    return made
