"""Ranks or pipeline stages carry unequal or duplicated shares, and the poorest one decides for all."""

from collections.abc import Iterator
from dataclasses import replace

from legroom.diagnosis.causes import Assessment, Case, Cause, Fix, FixPlanner, known_fix, proof, reason
from legroom.diagnosis.causes.kv_too_small_for_max_len import longest_fitting_len
from legroom.diagnosis.finding import Strength
from legroom.units import gib


def examine(case: Case) -> Assessment | None:
    """Assesses KV sizes or weights that differ between ranks, or pipeline stages with too small a pool; else None."""
    pools = _last_value_by_process(case, "available_kv", "available_bytes")
    weights = _last_value_by_process(case, "weights_loaded", "weights_bytes")
    error = case.first("no_cache_blocks", "kv_bytes_short", "kv_tokens_short")
    if error is None and not case.is_oom:
        return None
    uneven = next((by for by in (pools, weights) if len(by) > 1 and min(by.values()) < 0.85 * max(by.values())), None)
    if uneven:
        low, high = gib(min(uneven.values())), gib(max(uneven.values()))
        why = f"The ranks are not alike: {low} on the poorest, {high} on the richest. The poorest decides for all."
        return Assessment(
            Strength.COMPARED if error else Strength.SUGGESTED,
            proof(case.all("available_kv", "weights_loaded"), error),
            why,
        )
    if case.is_oom and (unequal := case.first("unequal_cards_told")):
        return Assessment(Strength.NAMED, proof(unequal, case.first_failure), reason("unequal_cards"))
    if case.is_oom and (size := case.number("stage_told", "stage_bytes")):
        return Assessment(
            Strength.NAMED, proof(case.first("stage_told")), reason("heavy_stage", {"weights": gib(size)})
        )
    staged = case.first("pp_on") or ((case.startup.args.pipeline_parallel_size or 1) > 1 and case.first_failure)
    told = any("pipeline_parallel_size" in settings for settings, worked in case.reported if worked)
    staged = staged or case.first("stage_told") or (told and case.first_failure)
    if staged and (error or told or case.has("stage_told")):
        why = reason("smallest_stage")
        return Assessment(Strength.SUGGESTED, proof(case.first("pp_on"), error), why)
    return None


def _last_value_by_process(case: Case, id_: str, fact: str) -> dict[str, int]:
    """`process/rank/pid` -> the last integer `fact` that it printed with message `id_`; the engine core is left out."""
    values: dict[str, int] = {}
    for item in case.all(id_):
        value = item.facts.get(fact)
        if isinstance(value, int) and item.process != "EngineCore":  # two of these are two servers
            values[f"{item.process}/{item.rank}/{item.pid}"] = value
    return values


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes (None: not applicable): fewer layers on the outer stages, a length that fits, TP within the KV heads."""
    if planner.case.has("unequal_cards_told"):
        yield known_fix("larger_card_alone")
        return
    yield known_fix("fewer_layers_on_stage") if planner.case.number("stage_told", "stage_bytes") else None
    partition, fewer = _layer_partition(planner), known_fix("fewer_layers_at_both_ends")
    yield replace(fewer, env={"VLLM_PP_LAYER_PARTITION": partition}, steps=()) if partition else fewer
    if fits := longest_fitting_len(planner.case):
        flags = {"max_model_len": max(fits // 1024 * 1024, 128)}
        why = "The poorest stage holds this much; vLLM's estimate may be too high for uneven stages."
        yield planner.plan_change("max_model_len", flags, why, trades="requests longer than this are refused")
    yield known_fix("fewer_kv_copies")


def _layer_partition(planner: FixPlanner) -> str:
    """VLLM_PP_LAYER_PARTITION `6,8,8,6`: fewer layers on the outer stages; empty without inner stages or a model."""
    stages = planner.known.args.pipeline_parallel_size or 1
    layers = len(planner.failed_plan.target.model.layers) if planner.failed_plan is not None else 0
    if stages < 3 or layers <= stages:
        return ""
    end = (layers - 1) // stages
    inner, larger = divmod(layers - 2 * end, stages - 2)
    return ",".join(map(str, (end, *[inner + 1] * larger, *[inner] * (stages - 2 - larger), end)))


CAUSE = Cause(entry="LR204")
