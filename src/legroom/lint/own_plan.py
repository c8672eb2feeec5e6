"""The plan of a server as its own file describes it: the model it names, the GPU it asks for, the flags it is given."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from legroom.deployments.subjects import StartedServer
from legroom.errors import LegroomError
from legroom.facts.bundled import find, mirrored
from legroom.facts.releases import Release
from legroom.records import dataclass
from legroom.vllm.parse import parse_flags

if TYPE_CHECKING:
    from legroom.planning.plan import Plan

_NOT_KNOWN = re.compile(r"\$|\{\{|\{%|<[\w -]+>")
_SLICE = re.compile(r"mig|time-?slic|shared|vgpu", re.IGNORECASE)
"""A part of a card, of which the name does not say the size."""
_ANY_CARD = "h200"
"""Where no GPU is named: weights and host memory are the same on every card."""


@dataclass(frozen=True, slots=True)
class OwnPlan:
    plan: Plan
    is_card_known: bool
    """Whether the file names the GPU; otherwise only what no GPU changes may be taken from the plan."""

    @property
    def checkpoint_bytes(self) -> int:
        """What has to be read before the server is ready."""
        return self.plan.host.checkpoint_bytes


def own_plan(server: StartedServer, release: Release) -> OwnPlan | None:
    """None where the model is none of those legroom knows by heart, or a flag's value is put in later.

    Nothing is fetched: what a lint says must not depend on the network.
    """
    words = tuple(word.text for word in server.words)
    if server.call is not None or any(_NOT_KNOWN.search(word) for word in words):
        return None
    return _planned(words, release, _only_card(server), server.gpu_count)


def _only_card(server: StartedServer) -> str:
    """The card that it is put on; empty where the file leaves a choice."""
    return server.gpu_names[0] if len(server.gpu_names) == 1 else ""


@lru_cache(maxsize=256)
def _planned(words: tuple[str, ...], release: Release, gpu_name: str, gpus: int | None) -> OwnPlan | None:
    from legroom.planning.machine import Machine, make_plan  # only where a model is known

    parsed = parse_flags(words, release)
    if any(problem.stops_vllm for problem in parsed.problems):
        return None
    model = parsed.args.model
    if not model or (find(model) is None and mirrored(model) is None):
        return None
    is_card_known = bool(gpu_name) and not _SLICE.search(gpu_name)
    for name in (gpu_name, _ANY_CARD) if is_card_known else (_ANY_CARD,):
        try:
            plan = make_plan(parsed.args, release, Machine(name, gpus if name == gpu_name else None), advice=False)
        except LegroomError:
            continue
        return OwnPlan(plan, name == gpu_name)
    return None
