"""The profile or warm-up run - batched tokens, dummy sequences, dummy images, the sampler - is what runs out."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from legroom.diagnosis.causes import Assessment, Case, Cause, Fix, FixPlanner, known_fix, proof, reason
from legroom.diagnosis.causes.gpu_shared_or_not_free import is_pool_oversized
from legroom.diagnosis.causes.weights_too_big import weights_fill_budget
from legroom.diagnosis.finding import Strength
from legroom.diagnosis.fixes.fix_planner import MAX_UTILIZATION
from legroom.diagnosis.fixes.flag_repair import smaller_media_fix
from legroom.diagnosis.fixes.hardware_fixes import budget_for_weights, other_hardware, split_over_more_gpus
from legroom.diagnosis.fixes.step_savings import (
    DEFAULT_STEP_TOKENS,
    LARGEST_DEFAULT_TOKENS,
    reduced_limit,
    smaller_step_flags,
    smaller_step_tokens,
    with_joined_segments,
)
from legroom.units import GIB, gib, human_bytes

_V0_MEDIA_LENGTH = 32768  # Two images of the most tokens that Qwen-VL makes of one (16,384).
_DUMMY_IMAGES = "The V0 engine profiles max_num_seqs sequences with all their images at once."


def examine(case: Case) -> Assessment | None:
    """Assesses an OOM of the profile run or sampler warm-up, or a peak that left too little KV cache; else None."""
    warmup = case.first("sampler_warmup_oom")
    peak_strength = _strength_peak_left_no_pool(case)
    if not case.is_oom and not peak_strength:
        return None
    strength = peak_strength or _strength(case)
    if not strength:
        return None
    proven = proof(
        warmup, case.first("torch_oom", "cuda_oom", "hbm_oom"), case.last("weights_loaded"), case.last("profile_v0")
    )
    return Assessment(strength, proven, _explanation(case))


def _strength(case: Case) -> Strength:
    """How strongly the text shows that the allocation failed in the profile run or the sampler's warm-up."""
    oom = case.oom
    if weights_fill_budget(case):
        return Strength.USUAL
    if case.has("hbm_oom") or case.site in ("sampler", "warmup"):
        return Strength.SHOWN
    if _is_sampler_table(case) or case.site == "profile" or (case.has_site_frame and is_pool_oversized(case)):
        return Strength.SHOWN
    if oom is None or case.has_site_frame or case.site == "serving" or case.ledger.free_exceeds_request:
        return Strength.NONE
    if oom.wanted_bytes >= max(2 * GIB, (oom.total_bytes or 0) // 10) and not oom.pools_bytes:
        return Strength.LIKELY  # no single weight is that large; a dummy batch through one layer is
    if oom.pools_bytes:
        return Strength.POSSIBLE  # after capture: the profile run is over, and only the sampler's warm-up is left
    return Strength.USUAL


def _is_sampler_table(case: Case) -> bool:
    """Whether the failed allocation is the table that Model Runner V2's sampler makes while the model loads."""
    return case.oom is not None and case.frames >= {"frame_load", "frame_sampler"}


def _strength_peak_left_no_pool(case: Case) -> Strength:
    """How strongly the text shows that the profiled activation peak left too small a KV pool; NONE where not at all."""
    startup = case.startup
    if not case.has("no_cache_blocks", "kv_bytes_short", "kv_tokens_short") or startup.activation_bytes is None:
        return Strength.NONE
    weights = startup.weights_bytes or 0
    return Strength.SHOWN if startup.activation_bytes > max(weights // 2, 3 * GIB) else Strength.USUAL


def _explanation(case: Case) -> str:
    """What the profile run or warm-up asked for, with the log's figures."""
    warmup, oom = case.first("sampler_warmup_oom"), case.oom
    if warmup is not None:
        return reason("sampler_warmup", {"count": warmup.facts.get("dummy_requests_count")})
    compiled = case.first("hbm_oom")
    if compiled is not None:
        used, total = (int(compiled.facts.get(name, 0)) for name in ("used_bytes", "total_bytes"))
        return reason("tpu_program", {"used": gib(used), "total": gib(total), "short": gib(used - total)})
    if oom is not None:
        facts = {"wanted": gib(oom.wanted_bytes), "wanted_human": human_bytes(oom.wanted_bytes)}
        facts |= {"free": case.ledger.free_words, "outside": gib(case.ledger.outside_torch_bytes or 0)}
        names = {"sampler": "sampler_asked", "warmup": "warmup_asked"}
        name = names.get(case.site, "pool_oversized" if is_pool_oversized(case) else "dummy_batch_asked")
        return reason("sampler_table" if _is_sampler_table(case) else name, facts)
    if not (peak := case.startup.activation_bytes):
        return "The profile run failed."
    return f"The profile run peaks at {gib(peak)} beside the weights, which starves the KV cache."


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes (None: not applicable): fewer sequences or tokens per step, media limits, lower utilization ..."""
    case = planner.case
    if is_pool_oversized(case):
        share = {"gpu_memory_utilization": round(planner.utilization * 3 / 4, 2)}
        why = f"How much of the pool was still to come is not printed: three quarters of {planner.utilization:g}."
        # What the plan says of the pool is what did not hold here.
        yield Fix("lower_util", why, share, trades="a smaller KV pool", is_unplanned=True)
        yield _fewer_sequences(planner)
        return
    if case.site == "warmup" or case.has("hbm_oom"):
        of_sampler = case.has("sampler_warmup_oom")  # sequences x vocabulary, whatever the tokens of a step
        fixes = (_lower_utilization_for_warmup(planner), None if of_sampler else _fewer_tokens(planner))
        yield from (_fewer_sequences(planner), *fixes) if of_sampler else (*fixes, _fewer_sequences(planner))
        return
    yield _shorter_scores_fix(planner)
    shorter = replace(known_fix("whole_prompts"), flags={"max_model_len": LARGEST_DEFAULT_TOKENS}, is_unplanned=True)
    is_whole = planner.known.args.enable_chunked_prefill is False and case.site in ("", "profile")
    yield shorter if is_whole and not planner.in_force("max_model_len") else None
    if planner.accounting.weights_over_budget_bytes:
        # The weights alone exceed the budget, so no smaller dummy batch helps.
        yield planner.pull_lever("quantized weights", "Smaller weights leave room for the run.")
        yield split_over_more_gpus(planner, "Split over more GPUs, each has room for the run.")
        yield from budget_for_weights(planner)
        return
    media = _profiles_media(planner)
    limited = smaller_media_fix(planner, "The dummy images and videos are as large and as many as the limits allow.")
    if "frame_vision" in case.frames and case.engine.generation != "V0":
        yield limited  # the encoder runs apart from the batch
    if planner.failed_plan is None and case.site not in ("sampler", "graph"):
        smaller, given = _smaller_dummy_batch_fix(planner), planner.utilization
        flags: dict[str, Any] = dict(smaller.flags) if smaller is not None else {}
        now, most = (_pool_bytes_after(planner, flags, at) for at in (given, MAX_UTILIZATION))
        if most is not None and most < GIB // 4:
            yield other_hardware(planner)
        elif smaller is not None and now is not None and now < GIB // 2 and given < MAX_UTILIZATION:
            why = f"{smaller.why} At {given:g} of the card the weights would leave no KV cache."
            flags["gpu_memory_utilization"] = MAX_UTILIZATION
            smaller = replace(smaller, flags=flags, why=why)
        yield with_joined_segments(planner, smaller)
    fewer_sequences, fewer_tokens = _fewer_sequences(planner), _fewer_tokens(planner)
    beside_pool = _lower_utilization_for_warmup(planner) if case.site in ("sampler", "graph") else None
    # A smaller pool always leaves room; fewer sequences do if there are as many as the log or the flags say.
    if not case.has("sampler_warmup_oom") and planner.known.args.max_num_seqs is None:
        yield beside_pool
    yield fewer_sequences
    if media:
        yield limited
    yield beside_pool
    yield fewer_tokens
    if fewer_sequences is None and fewer_tokens is None:
        yield planner.pull_combined_levers("max_num_batched_tokens", "No single change is enough; these together are.")
    is_long = planner.known.args.max_model_len is None and not case.has("sampler_warmup_oom")
    if case.engine.generation != "V1" and is_long:
        yield known_fix("shorter_dummy_batch_of_rope")
    yield planner.pull_lever("quantized weights", "Smaller weights leave room for the run.")


def _shorter_scores_fix(planner: FixPlanner) -> Fix | None:
    """Fix: the length at which unfused attention scores, heads x length x length, take a GiB; else None."""
    oom, length = planner.case.oom, planner.in_force("max_model_len")
    if not planner.case.has("frame_scores") or oom is None or not length or oom.wanted_bytes <= GIB:
        return None
    fits = 1 << int(length * math.sqrt(GIB / oom.wanted_bytes)).bit_length() - 1
    flags = {"max_model_len": fits, "max_num_batched_tokens": fits}
    why = (
        f"Unfused attention holds heads x length x length scores: {length:,} tokens are too many, {fits:,} take a GiB."
    )
    return Fix("max_model_len", why, flags, trades="requests longer than this are refused", is_unplanned=True)


def _profiles_media(planner: FixPlanner) -> bool:
    """Whether the dummy batch has images or videos: by the traceback, vLLM's lines, or in V0 the model's name."""
    case, name = planner.case, planner.known.args.model
    is_vision = _is_v0(planner) and re.search(r"(?i)[-_.]VL\b|vision|omni|llava|internvl|pixtral", name)
    return bool(case.frames & {"frame_vision"} or is_vision) or case.has("mm_profile_too_short", "encoder_budget")


def _is_v0(planner: FixPlanner) -> bool:
    """Whether the log or the release shows the V0 engine."""
    return planner.case.engine.generation == "V0" or (planner.known.release_known and planner.may_be_before_v1)


def _smaller_dummy_batch_fix(planner: FixPlanner) -> Fix | None:
    """Fix, not planned: lower --max-num-seqs and --max-num-batched-tokens; None if the log's figures rule it out."""
    case, args = planner.case, planner.known.args
    media = _profiles_media(planner)
    if media and case.engine.generation == "V0":
        # Every dummy sequence brings its images: as many as whole ones fit into a step, which is as long as a prompt.
        smaller, length = smaller_media_fix(planner, _DUMMY_IMAGES), planner.in_force("max_model_len") or 0
        seqs: dict[str, Any] = {"max_num_seqs": max((args.max_num_seqs or 256) // 16, 1)}
        shorter = {"max_model_len": _V0_MEDIA_LENGTH} if not 0 < length <= _V0_MEDIA_LENGTH else seqs
        limits = {**(shorter if "mm_processor_kwargs" in smaller.flags else seqs), **smaller.flags}
        return planner.plan_change("max_num_seqs", limits, _DUMMY_IMAGES, trades="fewer requests and media at once")
    flags: dict[str, Any] = {"max_num_seqs": reduced_limit(planner, args.max_num_seqs or 256)}
    if case.engine.generation != "V0" or planner.step_tokens > DEFAULT_STEP_TOKENS:  # V0 takes whole prompts in a step
        flags |= smaller_step_flags(planner, smaller_step_tokens(planner), flags["max_num_seqs"])
    why = "The dummy batch follows max_num_seqs (logits, media) and max_num_batched_tokens (the layers)."
    trades = "fewer requests run at once; long prompts take more steps"
    return planner.plan_change("max_num_seqs", flags, why, trades=trades)


def _pool_bytes_after(planner: FixPlanner, flags: Mapping[str, Any], share: float) -> int | None:
    """KV cache bytes at utilization `share` if the peak shrinks with the step tokens of `flags`; None if unknown."""
    case, total, weights, oom = planner.case, planner.total_bytes, planner.case.startup.weights_bytes, planner.case.oom
    if not total or not weights or oom is None or oom.torch_bytes is None or case.site != "profile":
        return None
    part = float(flags.get("max_num_batched_tokens", planner.step_tokens)) / planner.step_tokens
    peak = max(oom.torch_bytes + oom.wanted_bytes - weights, 0) * min(part, 1)
    return round(share * total - weights - peak) - (case.ledger.own_non_torch_bytes or 0)


def _lower_utilization_for_warmup(planner: FixPlanner) -> Fix | None:
    """Fix: a smaller KV pool, so that the warm-up or compiled program fits beside it; None where none starts."""
    oom = planner.case.oom
    compiled = planner.case.first("hbm_oom")
    need = planner.case.ledger.shortage_bytes if oom else min(GIB, (planner.total_bytes or 10 * GIB) // 10)
    if compiled is not None:
        need = int(compiled.facts.get("used_bytes", 0)) - int(compiled.facts.get("total_bytes", 0))
    why = "The warm-up comes after the pool was allocated: a smaller pool leaves room for it."
    return planner.lower_utilization(need, why)


def _fewer_sequences(planner: FixPlanner) -> Fix | None:
    """Fix: a lower --max-num-seqs; None where the memory model says that the server still would not start."""
    dummies = planner.case.number("sampler_warmup_oom", "dummy_requests_count")
    seqs = dummies if dummies is not None else planner.known.args.max_num_seqs or 256
    of_images = dummies is None and _is_v0(planner) and _profiles_media(planner)
    why = _DUMMY_IMAGES if of_images else "Logits and their copies grow with sequences x vocabulary."
    flags, trades = {"max_num_seqs": reduced_limit(planner, seqs)}, "fewer requests run at once"
    if dummies is not None:  # vLLM's own number, after every check of the pool was passed
        return Fix("max_num_seqs", why, flags, trades=trades, is_unplanned=True)
    if planner.failed_plan is not None:
        return planner.pull_lever("fewer sequences", why)
    return planner.plan_change("max_num_seqs", flags, why, trades=trades)


def _fewer_tokens(planner: FixPlanner) -> Fix | None:
    """Fix: a lower --max-num-batched-tokens; None where by the memory model the server still would not start."""
    why = "The peak grows with the tokens of a step."
    if planner.failed_plan is not None:
        return planner.pull_lever("smaller batches", why)
    flags = smaller_step_flags(planner, max(planner.step_tokens // 4, 512))
    return planner.plan_change("max_num_batched_tokens", flags, why, trades="long prompts take more steps")


CAUSE = Cause(entry="LR301", usual_at=("profile", "sampler", "warmup"))
