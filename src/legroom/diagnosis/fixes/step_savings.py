"""Savings beside the weights: smaller steps, no CUDA graphs and a larger share, by what the text shows of them."""

import math
import re
from dataclasses import replace
from typing import Any

from legroom.diagnosis.finding import Fix, known_fix
from legroom.diagnosis.fixes.fix_planner import MAX_UTILIZATION, UNKNOWN_CARD_BYTES, FixPlanner
from legroom.diagnosis.fixes.log_accounting import BESIDE_BYTES
from legroom.diagnosis.fixes.tried_changes import failed_values
from legroom.facts.releases import first_release, release
from legroom.units import GIB, gib

DEFAULT_STEP_TOKENS = 2048
"""vLLM's max_num_batched_tokens for a server on smaller cards (`EngineArgs.get_batch_defaults`)."""
LARGEST_DEFAULT_TOKENS = 8192
"""vLLM's max_num_batched_tokens for a server on cards of 70 GiB and more (`EngineArgs.get_batch_defaults`)."""

_V0_LINE = re.compile(r"# [CG]PU blocks: \d")
"""V1 prints tokens."""

_CARDS_BYTES = (24 * GIB, 48 * GIB, 80 * GIB)  # Examples where no card is named: the usual sizes of cards that serve.


def smaller_step_flags(planner: FixPlanner, tokens: int, seqs: int | None = None) -> dict[str, Any]:
    """Flags for `tokens` a step, at most as now, at least `seqs` or max_num_seqs; chunked prefill where it is off."""
    args, tokens = planner.known.args, min(tokens, planner.step_tokens)
    flags: dict[str, Any] = {"max_num_batched_tokens": max(tokens, seqs or args.max_num_seqs or 0)}
    may_be_v0 = planner.case.engine.generation == "V0" or planner.may_be_before_v1
    since = first_release(planner.model.architecture) if planner.model is not None else None
    is_open = not planner.known.release_known and not planner.case.engine.generation
    is_open = is_open and not planner.case.has("kv_bytes_short")  # V1's own message
    if is_open and (since is None or release(since).before("0.8.0")):
        length = planner.in_force("max_model_len") or (math.inf if planner.case.tells(_V0_LINE) else 0)
        may_be_v0 = may_be_v0 or length > flags["max_num_batched_tokens"]
    is_off = args.enable_chunked_prefill is False or (may_be_v0 and not args.enable_chunked_prefill)
    if is_off and flags["max_num_batched_tokens"] < planner.step_tokens:
        flags["enable_chunked_prefill"] = True
    return flags


def reduced_limit(planner: FixPlanner, number: int) -> int:
    """`number` (a flag's value) / 4, or / (2 x requested/free bytes) if less, down to a power of two; at least 4."""
    oom = planner.case.oom
    times = 4.0
    if oom and oom.free_bytes:
        times = max(times, 2 * oom.wanted_bytes / oom.free_bytes)
    return max(1 << (max(int(number / times), 1).bit_length() - 1), min(number, 4))


def smaller_step_tokens(planner: FixPlanner) -> int:
    """Tokens of a step to propose: 2,048 where the run has more, else half of its own, at least 512."""
    given = planner.step_tokens
    return DEFAULT_STEP_TOKENS if given > DEFAULT_STEP_TOKENS else max(given // 2, 512)


def without_draft(planner: FixPlanner, steps: tuple[str, ...] = ()) -> Fix | None:
    """Fix: no draft model or MTP head; None where the text shows none."""
    has_draft = planner.known.args.speculative_config is not None or planner.case.has("spec_on", "spec_told")
    fix = replace(known_fix("no_draft_model"), steps=steps, is_unplanned=not planner.flags_known)
    return fix if has_draft else None


def large_steps_fix(planner: FixPlanner, more: Fix | None = None) -> Fix | None:
    """Fix: fewer tokens a step, with the flags of `more`; None unless the run asks for more than any default, 8,192."""
    if (planner.known.args.max_num_batched_tokens or 0) <= LARGEST_DEFAULT_TOKENS:
        return None
    flags = smaller_step_flags(planner, DEFAULT_STEP_TOKENS) | (dict(more.flags) if more else {})
    why = "What a step takes follows its tokens, which are far above the default."
    return planner.plan_change("max_num_batched_tokens", flags, why, trades="long prompts take more steps")


def joined_segments_fix(planner: FixPlanner) -> Fix | None:
    """Fix: expandable segments; None where they are in force already or refused, so that only room helps."""
    oom, known = planner.case.oom, planner.known
    is_recent = known.release_known and known.release.at_least("0.11.1")
    name = "PYTORCH_ALLOC_CONF" if is_recent else "PYTORCH_CUDA_ALLOC_CONF"
    is_npu = oom is not None and oom.platform == "NPU"
    # Sleep mode's own allocator refuses them before 0.20. On ROCm torch ignores them before 2.11 (pytorch#177974), and
    # some builds hang with them since (pytorch#192259).
    sleeping = "--enable-sleep-mode" in known.args.others and known.release.before("0.20.0")
    is_tried = bool(failed_values(planner.case, "tried expandable_segments"))
    if is_tried or planner.case.has("expandable_on") or sleeping or (oom is not None and oom.platform == "HIP"):
        return None
    env = {"PYTORCH_NPU_ALLOC_CONF" if is_npu else name: "expandable_segments:True"}
    why = "Expandable segments join free pieces into one."
    if known.ranks == 1 or is_npu:
        return Fix("allocator_conf", why, {}, env)
    why += " With several ranks they clash with custom all-reduce, which goes off with them."
    return Fix("allocator_conf", why, {"disable_custom_all_reduce": True}, env, trades="slower all-reduce")


def with_joined_segments(planner: FixPlanner, fix: Fix | None) -> Fix | None:
    """The fix, with expandable segments where torch's unused pieces (5 % of the card or more) cover the request."""
    oom, join = planner.case.oom, joined_segments_fix(planner)
    is_large = oom is not None and (oom.unallocated_bytes or 0) >= max((oom.total_bytes or 0) // 20, GIB)
    if fix is None or join is None or not is_large or not planner.case.ledger.reserve_covers_request:
        return fix
    return replace(fix, why=f"{fix.why} {join.why}", flags={**fix.flags, **join.flags}, env=join.env)


def savings_fix(planner: FixPlanner, missing_bytes: int) -> Fix | None:
    """Fix: higher utilization, smaller steps and eager mode at once; None where these cannot free `missing_bytes`."""
    total, weights = planner.accounting.likely_total_bytes, planner.accounting.weights_bytes
    share_bytes = round(max(MAX_UTILIZATION - planner.utilization, 0) * (total or UNKNOWN_CARD_BYTES))
    is_known = planner.utilization_known or weights is not None
    if (is_known and not planner.utilization_known) or not 0 < missing_bytes < BESIDE_BYTES + share_bytes:
        return None
    if planner.total_bytes and weights and weights > (2 * MAX_UTILIZATION - 1) * planner.total_bytes:
        return None  # the peak and a pool do not fit into what is left
    flags: dict[str, Any] = {"gpu_memory_utilization": max(MAX_UTILIZATION, planner.utilization)}
    flags |= smaller_step_flags(planner, smaller_step_tokens(planner))
    # Before 0.20 graphs are no part of the budget.
    if counts := planner.known.release_known and not planner.captures_outside_budget:
        flags["enforce_eager"] = True
    parts = "the peak of the profile run and the CUDA graphs have" if counts else "the peak of the profile run has"
    trades = f"{'slower decoding, and ' if counts else ''}long prompts take more steps"
    why = f"{gib(missing_bytes)} are missing: {parts} to become smaller, beside what a larger share gives."
    steps: tuple[str, ...] = () if is_known else known_fix("what_decides").steps
    if not planner.utilization_known:
        steps = (_utilization_rule(planner, missing_bytes), *steps)
    short = ("with a --max-model-len as short as your requests: the pool will be small",)
    steps = (*short, *steps) if planner.known.args.max_model_len is None else steps
    fix = planner.plan_change("raise_util", flags, why, steps=steps, trades=trades)
    if fix is not None or planner.failed_plan is None:
        return fix
    # The pool is measured, and what the plan adds to it is not: it misses by less than that.
    return Fix("raise_util", why, flags, steps=short, trades=trades, is_unplanned=True)


def _utilization_rule(planner: FixPlanner, missing_bytes: int) -> str:
    """A step: by how much to raise an unknown utilization for `missing_bytes` and one request, by the card's size."""
    need, card = missing_bytes + max(planner.one_request_bytes, GIB), planner.total_bytes
    on = ", ".join(f"{need / size:.2f} on {gib(size)}" for size in ([card] if card else _CARDS_BYTES))
    sum_of = f"({gib(missing_bytes)} + one request, {gib(need - missing_bytes)} or what yours takes)"
    return f"the share that is in force grows by {sum_of} / the card: {on}; up to {MAX_UTILIZATION}"


LOGPROB_BYTES = 10
"""Per prompt token and vocabulary entry: bfloat16 logits, float32 log-probabilities and a copy for ranking
(`_get_prompt_logprobs_dict` and `gather_logprobs` of vLLM's V1 model runner)."""
_CHUNK_TOKENS = 1024
"""Chunk of prompt log-probabilities in the V2 model runner (`compute_prompt_logprobs_with_chunking`, 0.16 to 0.32)."""
RUNNER_V2 = "vllm/v1/worker/gpu/"


def step_shortage_bytes(planner: FixPlanner) -> int:
    """Bytes that the failed step lacked and would have asked for next: known for prompt logprobs (traceback or black
    box), else half of the request; the whole request if memory was fragmented; 1 GiB without sizes."""
    oom = planner.case.oom
    if oom is None:
        return GIB
    short = oom.wanted_bytes - (oom.free_bytes or 0)
    record = planner.case.black_box
    # What follows in the step is half as large again: an activation's output beside its input.
    follows = oom.wanted_bytes // 2 if record is None else 0
    if record is None and "_get_prompt_logprobs" in (
        frames := " ".join(i.text for i in planner.case.all("frame_logits"))
    ):
        # Of LOGPROB_BYTES the logits are 2 and come first; the other 8 are two copies in float32.
        follows = oom.wanted_bytes * (1 if "log_softmax" in frames or "gather_logprobs" in frames else 4)
    need = short + follows if short > 0 else oom.wanted_bytes  # fragmented
    if record is None or record.step is None or not record.step.prompt_logprobs or planner.failed_plan is None:
        return need
    tokens = max((request.scheduled_tokens for request in record.step.largest), default=0)
    if any(frame.file.startswith(RUNNER_V2) for frame in (record.request.frames if record.request else ())):
        tokens = min(tokens, _CHUNK_TOKENS)
    whole = tokens * planner.failed_plan.target.model.vocab_size * LOGPROB_BYTES
    return max(need, whole - (oom.free_bytes or 0) - (oom.unallocated_bytes or 0))
