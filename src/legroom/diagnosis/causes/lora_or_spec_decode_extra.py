"""Adapters, draft weights or their buffers, which the profile run does not see."""

import re
from collections.abc import Iterator
from dataclasses import replace

from legroom.diagnosis.causes import Assessment, Case, Cause, Fix, FixPlanner, known_fix, proof, reason
from legroom.diagnosis.finding import FixKind, Strength
from legroom.units import GIB, gib

_LARGE_NON_TORCH = int(2.5 * GIB)
"""Plain servers stay below it; LoRA graphs and drafts with their own communicators do not."""


def examine(case: Case) -> Assessment | None:
    """Assesses a GPU OOM with LoRA or speculative decoding on, or in its traceback; None with neither."""
    if not case.is_oom:
        return None
    ledger, args = case.ledger, case.startup.args
    on = case.has("lora_on", "spec_on") or bool(args.enable_lora or args.speculative_config)
    told = {name for changed, worked in case.reported if worked for name in changed}
    on = on or bool(told & {"enable_lora", "speculative_config", "max_loras", "max_lora_rank"})
    inside = bool(case.frames & {"frame_spec", "frame_lora", "frame_draft"})
    non_torch = None if ledger.other_processes_bytes or ledger.unowned_bytes else ledger.outside_torch_bytes
    large = non_torch is not None and non_torch > _LARGE_NON_TORCH and not ledger.free_exceeds_request
    if not (inside or on):
        return None
    # By the text the pool was there: a step that verifies drafts makes sequences x (1 + drafts) x vocabulary.
    is_drafting = case.has("spec_on") and case.site == "serving" and not case.traceback_frames
    strength = Strength.NAMED if inside or is_drafting else Strength.SHOWN if large else Strength.LIKELY
    proven = proof(
        case.first("lora_on", "spec_on"), case.first("frame_spec", "frame_lora", "frame_draft"), case.first("torch_oom")
    )
    return Assessment(strength, proven, _explanation(case, non_torch if large else None))


def _explanation(case: Case, non_torch: int | None) -> str:
    """Why adapters or a draft exceed what was profiled; `non_torch`: bytes outside torch, None if usual or unknown."""
    oom = case.oom
    if non_torch is None or oom is None or oom.torch_bytes is None:
        return reason("adapters_unmeasured")
    names = ("total", "free", "torch", "unused")
    sizes = (oom.total_bytes or 0, oom.free_bytes or 0, oom.torch_bytes, oom.unallocated_bytes or 0)
    return reason("outside_of_adapters", {"size": gib(non_torch), **dict(zip(names, map(gib, sizes), strict=True))})


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes (None: not applicable): a lower utilization, no draft model, fewer adapters or sequences, more GPUs."""
    case, args = planner.case, planner.known.args
    spec = case.has("spec_on", "frame_spec", "frame_draft") or args.speculative_config is not None
    lora = case.has("lora_on", "frame_lora") or args.enable_lora or any("LoRA" in item.text for item in case.evidence)
    oom = case.oom
    need = oom.wanted_bytes - (oom.free_bytes or 0) if oom else GIB
    room = planner.lower_utilization(max(need, 0), "What the profile run does not see must fit outside the budget.")
    if planner.known.ranks > 1 and case.tells(re.compile("draft[_-]tensor[_-]parallel")):
        yield known_fix("draft_split_alike")
    yield None if spec and (case.site in ("build", "load", "quant") or "frame_draft" in case.frames) else room
    if spec:
        yield replace(known_fix("no_draft_model"), is_unplanned=not planner.flags_known)
    if lora:
        kind: FixKind = "other_engine_feature_off"
        why = "Fewer and smaller adapter slots: buffers grow with max_loras x max_lora_rank."
        halves = [{"max_loras": (args.max_loras or 1) >> half} for half in range(1, (args.max_loras or 1).bit_length())]
        yield planner.first_change_that_fits(kind, halves, why, trades="fewer adapters in one batch")
        yield Fix(kind, why, flags={"max_loras": 1, "max_lora_rank": args.max_lora_rank or 16})
    seqs = args.max_num_seqs or 256
    flags, why = {"max_num_seqs": max(seqs // 4, 4)}, "Speculative depth multiplies what every sequence needs."
    fewer = planner.plan_change("max_num_seqs", flags, why, trades="fewer requests run at once")
    yield fewer if spec or not lora else None
    yield planner.pull_lever("more GPUs", "Split over more GPUs there is room for both.")


CAUSE = Cause(entry="LR303", usual_at=("spec", "lora", "draft"))
