"""`legroom.plan` and `legroom.layout`."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from legroom.deployments.described import deployment_from_arguments
from legroom.drawing.terminal import PLAIN, Style
from legroom.facts.releases import Release
from legroom.memory.layout import Layout
from legroom.planning.capacity_search import SearchAnswer, search_flags
from legroom.planning.checkpoints import quantized_checkpoints
from legroom.planning.machine import Machine, make_plan, make_target, with_notes
from legroom.planning.plan import Plan, Policy, Target, Verdict, ready_command
from legroom.planning.plan import plan as plan_target
from legroom.planning.plan_json import layout_json, plan_json
from legroom.planning.search_space import NODE_GPUS, CapacityGoal, counts_up_to
from legroom.records import dataclass
from legroom.render.plan_text import plan_text, search_text
from legroom.vllm.args import ServeArgs, Usage
from legroom.vllm.command_line import any_release_words


@dataclass(frozen=True)
class PlanReport:
    """The result of `legroom.plan`, as text, SVG or JSON."""

    plan: Plan

    @property
    def verdict(self) -> Verdict:
        """`fits`, `tight` or `does_not_fit`."""
        return self.plan.verdict

    @property
    def layout(self) -> Layout:
        """The memory layout of the tightest GPU."""
        return self.plan.layout

    @property
    def command(self) -> list[str]:
        """The planned command line, ready to run."""
        return ready_command(self.plan)

    def text(self, style: Style | None = None, explain_math: bool = False) -> str:
        """The text of `legroom plan`."""
        return plan_text(self.plan, style or PLAIN, explain_math)

    def svg(self) -> str:
        """The SVG of `legroom plan --svg`."""
        from legroom.render.plan_svg import plan_svg

        return plan_svg(self.plan)

    def json(self, explain_math: bool = False) -> dict[str, Any]:
        """The document that `legroom plan --json` prints."""
        return plan_json(self.plan, explain_math)

    def __str__(self) -> str:
        return self.text()


def plan(
    model: str,
    gpu: str,
    *,
    gpus: int | None = None,
    vllm: str | None = None,
    gpu_memory: str | None = None,
    gpu_used: str | None = None,
    env: Mapping[str, str] | None = None,
    usage: Usage = "serve",
    advice: bool = True,
    **flags: Any,
) -> PlanReport:
    """Predicts what vLLM does with `model` on `gpu`.

    `flags` are vLLM's engine arguments by their Python names (`max_model_len=32768`); what is not given is the
    release's default. `gpu_memory` overrides the card's total and `gpu_used` is what other processes hold of it.
    """
    deployment = deployment_from_arguments(model, flags, vllm, env, usage)
    machine = Machine(gpu, gpus, gpu_memory, gpu_used)
    return PlanReport(make_plan(deployment.args, deployment.release, machine, advice=advice))


def layout(model: str, gpu: str, **options: Any) -> Layout:
    """The memory layout of the tightest GPU; the arguments are those of `plan`."""
    return plan(model, gpu, advice=False, **options).layout


@dataclass(frozen=True)
class SearchReport:
    """The result of a search for flags, as text or JSON."""

    answer: SearchAnswer
    target: Target
    args: ServeArgs

    def text(self, style: Style) -> str:
        """The text of `legroom plan --want-context`."""
        return search_text(self.answer, style)

    def json(self, explain_math: bool = False) -> dict[str, Any]:
        """The best plan's document with the search in it; if nothing holds the load, that of the given flags."""
        answer = self.answer
        search = {
            "model": self.target.model.name,
            "want_context": answer.goal.context,
            "want_concurrency": answer.goal.concurrency,
            "policy": answer.goal.policy,
            "considered": answer.considered,
            "gives_up": list(answer.losses),
            "short_by": answer.short_by or None,
            "alternatives": [_alternative_json(other, losses) for other, losses in answer.alternatives],
        }
        if answer.best:
            return plan_json(answer.best, explain_math) | {"search": search}
        given = replace(self.args, max_model_len=self.args.max_model_len or answer.goal.context)
        document = plan_json(plan_target(self.target, given), explain_math)
        return document | {"verdict": "does_not_fit", "reason": answer.short_by, "search": search}


def _alternative_json(plan: Plan, losses: Sequence[str]) -> dict[str, Any]:
    """Another plan that holds the load, as JSON; `losses`: what it gives up, in words."""
    return {
        "gpus": plan.target.gpus,
        "gives_up": list(losses),
        "verdict": plan.verdict,
        "max_concurrency": plan.memory.kv.max_concurrency,
        "layout": layout_json(plan.layout),
        "command": ready_command(plan),
    }


def search(
    args: ServeArgs,
    release: Release,
    where: Machine,
    context: int | None,
    concurrency: float,
    policy: Policy,
    *,
    keep_model: bool = False,
) -> SearchReport:
    """Searches flags that hold `concurrency` requests of `context` tokens (None: the model's longest).

    Where `where` names no number of GPUs and one card is too small, it searches with more. `keep_model` leaves out
    quantized checkpoints.
    """
    most = where.gpus or (args.tensor_parallel_size or 1) * (args.pipeline_parallel_size or 1)
    target = make_target(args, release, replace(where, gpus=most))
    context = context or args.max_model_len or target.model.max_position_embeddings
    goal = CapacityGoal(context, concurrency, counts_up_to(most), policy)
    others = [] if keep_model else quantized_checkpoints(target, args)
    targets = [target, *(replace(target, model=model) for model in others)]
    on_one = search_flags(targets, args, goal)
    given = {name: value for name in _SEARCHED_FLAGS if (value := getattr(args, name)) is not None}
    answer = on_one = replace(on_one, kept=" ".join(any_release_words(given)))
    if most == 1 and not where.gpus:
        for count in counts_up_to(NODE_GPUS)[1:]:
            if answer.best is None:
                answer = replace(search_flags(targets, args, replace(goal, gpus=(count,))), kept=on_one.kept)
    if answer.best is None:
        more = [count for count in counts_up_to(NODE_GPUS) if answer.short_bytes and count > max(answer.goal.gpus)]
        holding = (n for n in more if search_flags(targets, args, replace(goal, gpus=(n,)), max_answers=1).best)
        enough = f"--gpus {count} holds it. " if (count := next(holding, 0)) else ""
        models = f"legroom models --gpu {shlex.quote(where.gpu)} --context {context} --concurrency {concurrency:g}"
        models += f" --gpu-used {shlex.quote(where.used)}" if where.used else ""
        return SearchReport(replace(answer, next_step=f"{enough}What this card holds: {models}"), target, args)
    best, losses = _on_used_gpus(with_notes(answer.best), answer.losses, most)
    alternatives = tuple(_on_used_gpus(*other, most) for other in answer.alternatives)
    answer = replace(answer, best=best, losses=losses, alternatives=alternatives, one_gpu_lacks=on_one.short_by)
    return SearchReport(answer, target, args)


_SEARCHED_FLAGS = (
    *("tensor_parallel_size", "pipeline_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("gpu_memory_utilization", "kv_cache_dtype", "block_size", "enforce_eager", "max_cudagraph_capture_size"),
)


def _on_used_gpus(plan: Plan, losses: tuple[str, ...], gpus_asked: int) -> tuple[Plan, tuple[str, ...]]:
    """(The plan on only the GPUs that it uses; `losses`, after a line where these are more than `gpus_asked`)."""
    used = plan.settings.gpus_used
    more = (f"{used} cards instead of {gpus_asked}",) if used > gpus_asked else ()
    return replace(plan, target=replace(plan.target, gpus=used)), (*more, *losses)
