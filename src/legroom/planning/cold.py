"""The first start on a machine: vLLM compiles, and its profile run sees more memory in use than on the next start."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from legroom.memory.activation import activation_cold
from legroom.memory.checks import first_failure
from legroom.memory.deployment import DeploymentMemory, kv_cache_figure
from legroom.memory.kv_plan import kv_plan
from legroom.planning.verdict import verdict

if TYPE_CHECKING:
    from legroom.memory.layout import Layout
    from legroom.planning.plan import Plan


def cold_start(warm: Plan) -> Plan:
    """The same deployment with an empty compile cache; the plan itself where that makes no difference."""
    ranks = tuple(_cold(warm, rank) for rank in warm.memory.ranks)
    if ranks == warm.memory.ranks:
        return warm
    model, gpu, settings = warm.target.model, warm.target.gpu, warm.settings
    kv = kv_plan(model, settings, gpu, [rank.kv_cache.bytes for rank in ranks])
    held = warm.target.held_by_others_bytes
    failure = first_failure(ranks, kv, warm.memory.graphs, settings, gpu=gpu, held_by_others_bytes=held)
    memory = DeploymentMemory(ranks, kv, warm.memory.graphs, failure)
    answer, reason = verdict(model, gpu, settings, memory)
    return replace(warm, memory=memory, verdict=answer, reason=reason)


def _cold(warm: Plan, rank: Layout) -> Layout:
    if rank.activation.kind == "measured":
        return rank
    activation = activation_cold(warm.target.model, warm.settings, warm.target.gpu, rank.rank)
    if activation.bytes <= rank.activation.bytes:
        return rank
    parts = (rank.weights, activation, rank.cuda_graph, rank.non_torch)
    kv_cache = kv_cache_figure(rank.budget_bytes, parts, warm.settings)
    return replace(rank, activation=activation, kv_cache=kv_cache)
