"""The weights, as they are really stored, do not fit while the model is built or loaded."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from legroom.diagnosis.causes import Assessment, Case, Cause, Fix, FixPlanner, known_fix, proof, reason
from legroom.diagnosis.finding import Strength
from legroom.diagnosis.fixes.fix_planner import MAX_UTILIZATION
from legroom.diagnosis.fixes.hardware_fixes import (
    exceeds_machine,
    is_at_hand,
    is_likely_alone,
    keeps_16_bits,
    other_hardware,
    split_over_more_gpus,
)
from legroom.diagnosis.fixes.log_accounting import BESIDE_BYTES, FULL_OF_WEIGHTS, stated_weights_bytes
from legroom.diagnosis.fixes.step_savings import without_draft
from legroom.diagnosis.ledger import possible_moments
from legroom.units import GIB, MIB, gib

_LOADED = re.compile(r"(?i)\bload(?:s|ed) (?:fine|ok|successfully)\b")


def examine(case: Case) -> Assessment | None:
    """Assesses an allocation that fails while the model is built or loaded, as of a parameter; else None."""
    if not case.is_oom or case.ledger.larger_than_card or case.ledger.free_exceeds_request:
        return None
    if not (strength := _strength(case)):
        return None
    proven = proof(case.first("load_oom_hint"), case.first("torch_oom", "cuda_oom"), case.last("shards"))
    return Assessment(strength, proven, _explanation(case))


def _strength(case: Case) -> Strength:
    """How strongly the text shows that the allocation failed because the weights alone exceed the card."""
    if case.site == "build" or case.has("load_oom_hint") or weights_fill_budget(case):
        return Strength.SHOWN
    if case.site == "load":
        # Parameters are created before the first shard is read, so a failure between shards is some second copy.
        return Strength.SUGGESTED if case.last("shards") and not case.has_site_frame else Strength.SHOWN
    if (case.site and case.site != "quant") or case.has("forward_frame"):
        return Strength.NONE  # nothing is computed before the weights are there
    return Strength.LIKELY if nothing_was_freed(case) or case.has("first_card_told") else Strength.USUAL


def weights_fill_budget(case: Case) -> bool:
    """Whether an OOM of the profile run comes of weights above the budget, by their printed size or what torch held."""
    oom, weights = case.oom, case.startup.weights_bytes
    if case.site != "profile" or oom is None or not oom.total_bytes:
        return False
    if weights or "frame_vision" in case.frames:
        return (weights or 0) > case.budget_bytes
    # The sampler holds four tensors of that size: logits, probabilities, their sorted copy and its indices.
    return nothing_was_freed(case) and (oom.torch_bytes or 0) - case.budget_bytes > 4 * oom.wanted_bytes


def nothing_was_freed(case: Case) -> bool:
    """Whether torch filled the card, with hardly anything unused and no graph pool, as while parameters are created."""
    oom = case.oom
    if oom is None or oom.torch_bytes is None or oom.total_bytes is None or oom.pools_bytes:
        return False
    unused, outside = oom.unallocated_bytes or 0, case.ledger.outside_torch_bytes or 0
    # A context beside which ranks talk to each other takes up to a fortieth of the card.
    most = GIB if case.site else max(oom.total_bytes // 40, GIB)
    tight = unused < max(oom.total_bytes // 100, 64 * MIB) and outside < most
    return tight and oom.torch_bytes > oom.total_bytes * 0.8 and oom.wanted_bytes < oom.total_bytes // 10


def _explanation(case: Case) -> str:
    """That weights exceed the budget; else what torch held and asked for while the model was built, as far as known."""
    oom = case.oom
    if oom is None or oom.torch_bytes is None or oom.total_bytes is None:
        return "The GPU was full before the model was completely built; nothing but weights is allocated at that point."
    if weights_fill_budget(case):
        if weights := case.startup.weights_bytes:
            return reason("weights_over_budget", {"weights": gib(weights), "budget": gib(round(case.budget_bytes))})
        return "torch holds more than the budget and the profile run asks for little: the weights fill the card."
    sizes = {"torch": oom.torch_bytes, "total": oom.total_bytes, "wanted": oom.wanted_bytes}
    return reason("full_while_built", {name: gib(size) for name, size in sizes.items()})


def is_ruled_out(planner: FixPlanner) -> bool:
    """Whether weights are ruled out: the plan loads with ease, or torch held more than at load with no load frame."""
    oom, plan, case = planner.case.oom, planner.failed_plan, planner.case
    if loads_with_ease(planner):
        return True
    if oom is None or oom.torch_bytes is None or plan is None or case.has_site_frame or case.has("load_oom_hint"):
        return False
    is_past = planner.known.ranks_known and "load" not in possible_moments(case.ledger, plan.layout)
    return is_past and not _is_unsplit(planner)


def loads_with_ease(planner: FixPlanner) -> bool:
    """Whether the plan starts with a quarter of the card free while it loads, and no printed total contradicts it."""
    case, plan = planner.case, planner.failed_plan
    if plan is None or not plan.starts or not planner.known.ranks_known or case.ledger.total_bytes is not None:
        return False
    if plan.args.quantization is not None and plan.target.model.quantization is None:
        return False  # rounded as they load, beside a copy in 16 bits
    peak = max(plan.layout.weights.high, plan.layout.loading_peak_bytes) + (case.ledger.wanted_bytes or 0)
    return peak < 0.75 * plan.layout.total_bytes and not case.has("transformers_backend", "low_bit_load")


def _is_unsplit(planner: FixPlanner) -> bool:
    """Whether tensor parallelism took no effect: torch held more than a rank's part, less than all ranks' weights."""
    oom, plan, ranks = planner.case.oom, planner.failed_plan, planner.known.args.engine_ranks
    if oom is None or oom.torch_bytes is None or plan is None or ranks == 1 or not nothing_was_freed(planner.case):
        return False
    layout = plan.layout
    rank_bytes = max(layout.weights.high, layout.budget_bytes) + layout.activation.high
    return rank_bytes < oom.torch_bytes < ranks * layout.weights.high


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes (None: not applicable): a quantized checkpoint, more GPUs, CPU offload; no KV-cache flag helps."""
    if planner.known.args.dtype_bytes > 2:
        yield _half_precision_fix(planner)
    told = planner.case.first("need_told")
    asks_to_offload = any("offload" in line for line in planner.case.written_lines)
    if told is not None and asks_to_offload and planner.can_offload_weights:
        budget = planner.utilization * (planner.total_bytes or 0)
        rest = math.ceil(((told.number("need_bytes") or 0) - budget) / GIB) + 3
        why = f"What {gib(round(budget))} of the card lack, and 3 GiB for a step and KV, stays in host RAM: {rest} GiB."
        trades = "every step copies that part over the bus: much slower"
        yield Fix("cpu_offload", why, {"cpu_offload_gb": float(rest)}, trades=trades, is_unplanned=True)
    if planner.case.has("transformers_backend") and (planner.known.ranks > 1 or not planner.known.ranks_known):
        is_chosen = "--model-impl" in " ".join(planner.given_args.others)
        yield known_fix("backend_of_vllm" if is_chosen else "native_model")
    elif _is_unsplit(planner):
        yield known_fix("split_not_in_effect")
    yield _should_fit_fix(planner)
    yield _without_draft_fix(planner)
    yield _quantized_before_loading_fix(planner)
    fewer_bits = "A checkpoint with weights in fewer bits fits."
    smaller = planner.pull_lever_for_weights("quantized weights", fewer_bits)
    more = split_over_more_gpus(planner, "Split over more GPUs, each holds less of the weights.")
    yield smaller
    if smaller is None:
        yield planner.pull_lever("online quantization", "Rounded to 8 bits while they load, the weights fit.")
    hardware = other_hardware(planner)
    if planner.known.args.dtype_bytes > 2:
        halved = "without --dtype float, and as 16 bits take half and alone are not enough here:"
        hardware = replace(hardware, steps=(halved, *hardware.steps))
    is_out_of_reach = more is None or exceeds_machine(planner, more) or is_likely_alone(planner)
    is_out_of_reach = is_out_of_reach or (keeps_16_bits(planner) and not is_at_hand(planner, more))
    if smaller is None and is_out_of_reach:
        yield from (hardware, more)
    elif smaller is None and more is not None and not is_at_hand(planner, more) and len(hardware.steps) > 1:
        smaller_step = hardware.steps[not planner.known.ranks_known].removeprefix("or ")
        yield replace(more, why=f"{hardware.why} {more.why}", steps=(f"or {smaller_step}", *hardware.steps[2:]))
    else:
        yield more
    yield None if _is_unsplit(planner) else _cpu_offload_fix(planner)  # the plan knows only the split model


def _half_precision_fix(planner: FixPlanner) -> Fix | None:
    """Fix: weights in 16 bits, with the utilization they need; None where even these leave no room for KV cache."""
    total, weights = planner.total_bytes, planner.accounting.weights_bytes
    flags: dict[str, Any] = {"dtype": "half"}
    needed = (weights or 0) // 2 + BESIDE_BYTES
    if planner.failed_plan is None and total and weights and needed > planner.utilization * total:
        if needed > MAX_UTILIZATION * total:
            return None
        flags |= {"gpu_memory_utilization": math.ceil(needed / total * 100) / 100}
    return planner.plan_change("checkpoint_format", flags, "In 32 bits the weights take twice as much.")


def _should_fit_fix(planner: FixPlanner) -> Fix | None:
    """Fix: what to check where weights by the stated parameter count are far below the card; else None."""
    case, total, is_shown = planner.case, planner.total_bytes, planner.known.args.tensor_parallel_size is not None
    weights = stated_weights_bytes(case, planner.known.ranks)
    if planner.failed_plan is not None or not total or not 0 < weights < FULL_OF_WEIGHTS * total:
        return None
    if case.has("transformers_backend", "low_bit_load") or not (is_shown or planner.known.ranks > 1):
        return None
    fix = known_fix("whole_on_each_card")
    return replace(fix, why=fix.why.format(weights=gib(weights), total=gib(total)))


def _quantized_before_loading_fix(planner: FixPlanner) -> Fix | None:
    """Fix: a quantized checkpoint, where --quantization rounds 16-bit weights only as they load; else None."""
    made = planner.failed_plan
    if made is None or made.args.quantization in (None, "bitsandbytes") or made.target.model.quantization is not None:
        return None
    from legroom.planning.checkpoints import quantized_checkpoints

    models = quantized_checkpoints(made.target, replace(made.args, quantization=None))
    changes = ({"model": model.name, "quantization": None} for model in models)
    why = f"--quantization {made.args.quantization} rounds weights that are loaded in 16 bits; here they are rounded."
    trades = "another checkpoint, with weights in fewer bits"
    return planner.first_change_that_fits("checkpoint_format", changes, why, trades=trades)


def _without_draft_fix(planner: FixPlanner) -> Fix | None:
    """Fix: no draft model, where the main model was loaded or its weights fit the card, so that the draft did not."""
    total, weights = planner.total_bytes, planner.accounting.weights_bytes
    # By the text itself the main model was there.
    is_last = planner.case.has("weights_loaded", "draft_told") or planner.case.tells(_LOADED)
    if not is_last and (total is None or weights is None or weights > total - BESIDE_BYTES // 2):
        return None
    steps = ("or a checkpoint whose draft head is quantized, or shares embedding and lm_head with the model",)
    return without_draft(planner, steps)


def _cpu_offload_fix(planner: FixPlanner) -> Fix | None:
    """Fix: the smallest --cpu-offload-gb with which the plan fits, else starts; None without a plan that does."""
    oom = planner.case.oom
    missing = math.ceil(((oom.wanted_bytes if oom else 0) + 4 * GIB) / GIB)
    why, trades = "A part of the weights can stay in host RAM.", "every step copies that part over the bus: much slower"
    sizes = ({"cpu_offload_gb": float(missing + more)} for more in range(0, 64, 2))
    # Only a plan shows how much; the failed allocation does not include the weights still to be loaded.
    planned = planner.first_change_that_fits("cpu_offload", sizes, why, trades=trades)
    return planner.extend_until_fits(planned, why)


CAUSE = Cause(entry="LR101", phase="startup_load", usual_at=("build", "load"))
