"""`legroom.plan` and `legroom.layout`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from legroom.deployments.described import deployment_from_arguments
from legroom.planning.machine import Machine, make_plan
from legroom.planning.plan import Plan
from legroom.records import dataclass

if TYPE_CHECKING:
    from legroom.drawing.terminal import Style
    from legroom.memory.layout import Layout
    from legroom.planning.plan import Verdict
    from legroom.vllm.args import Usage


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
        """The command line that was planned, ready to run."""
        from legroom.planning.plan import ready_command

        return ready_command(self.plan)

    def text(self, style: Style | None = None, explain_math: bool = False) -> str:
        """The text of `legroom plan`."""
        from legroom.drawing.terminal import PLAIN
        from legroom.render.plan_text import plan_text

        return plan_text(self.plan, style or PLAIN, explain_math)

    def svg(self) -> str:
        """The SVG of `legroom plan --svg`."""
        from legroom.render.plan_svg import plan_svg

        return plan_svg(self.plan)

    def json(self, explain_math: bool = False) -> dict[str, Any]:
        """The document that `legroom plan --json` prints."""
        from legroom.planning.plan_json import plan_json

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
