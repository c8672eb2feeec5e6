"""A plan as the command line that starts it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from legroom.vllm.command import command

if TYPE_CHECKING:
    from legroom.planning.plan import Plan

_SECRET_FLAGS = {"--api-key": "YOUR_API_KEY", "--hf-token": "YOUR_HF_TOKEN"}
"""Flags whose value is never shown, and what stands for it."""


def ready_command(plan: Plan) -> list[str]:
    """`vllm serve ...`, with the Hub id where the model was named by its bundled short name, and no secrets."""
    model = plan.target.model
    name = model.name if model.source.startswith("bundled") else plan.args.model
    return list(without_secrets(command(replace(plan.args, model=name), plan.target.release)))


def without_secrets(words: Iterable[str]) -> Iterator[str]:
    """The words with a placeholder for every key and token."""
    hidden = ""
    for word in words:
        flag, joined, _ = word.partition("=")
        if hidden and not word.startswith("--"):
            yield hidden  # --api-key takes several keys
        elif flag in _SECRET_FLAGS and joined:
            yield f"{flag}={_SECRET_FLAGS[flag]}"
        else:
            hidden = _SECRET_FLAGS.get(word, "")
            yield word
