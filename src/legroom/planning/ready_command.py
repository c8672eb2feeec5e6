"""A plan as the command line that starts it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from legroom.vllm.command import command
from legroom.vllm.secret_words import without_secrets

if TYPE_CHECKING:
    from legroom.planning.plan import Plan


def ready_command(plan: Plan) -> list[str]:
    """`vllm serve ...`, with the Hub id where the model was named by its bundled short name, and no secrets."""
    model = plan.target.model
    name = model.name if model.source.startswith("bundled") else plan.args.model
    return list(without_secrets(command(replace(plan.args, model=name), plan.target.release)))
