"""A transient of real traffic - a prefill chunk, logits, log-probabilities - fails while serving."""

import re
from collections.abc import Iterator

from legroom.diagnosis.causes import Assessment, Case, Cause, Fix, FixPlanner, known_fix, proof, reason
from legroom.diagnosis.finding import Strength
from legroom.diagnosis.fixes import step_savings as savings
from legroom.diagnosis.recorded_memory import assess_burst
from legroom.units import GIB, gib, human_bytes


def examine(case: Case) -> Assessment | None:
    """Assesses an allocation that fails in a model step after the server was ready; else None."""
    if case.black_box is not None and (recorded := assess_burst(case.black_box, case.black_box_line)):
        return recorded
    if not case.is_oom:
        other_failure = case.first_failure is not None and case.first_failure.id != "exception"
        if case.has("captured", "kv_sized") and case.has("frame_serving") and not other_failure:
            why = "The log ends in a model step right after start-up, with the pool holding the whole budget."
            return Assessment(Strength.POSSIBLE, proof(case.first("frame_serving"), case.last("profile_v0")), why)
        return None
    if not (strength := _strength(case)):
        return None
    proven = proof(
        case.first("torch_oom", "cuda_oom", "torch_oom_unsized"), case.first("engine_dead"), case.first("frame_logits")
    )
    return Assessment(strength, proven, _explanation(case))


def _strength(case: Case) -> Strength:
    """How strongly the text shows that the allocation failed in a model step of real traffic."""
    if case.ledger.larger_than_card or (case.ledger.free_exceeds_request and not steps_ran(case)):
        return Strength.FAINT
    if case.site == "serving" or (not case.has_site_frame and _was_running(case)):
        return Strength.SHOWN
    if case.site in ("spec", "lora", "sampling"):
        return Strength.SUGGESTED
    if not case.has_site_frame and case.site in ("kv", "graph") and steps_ran(case):
        return Strength.SHOWN
    if case.site or case.has("engine_start_failed", "start_told"):
        return Strength.NONE
    is_started = case.oom is not None and case.oom.pools_bytes  # graphs had a pool: the start was over
    return Strength.SUGGESTED if is_started else Strength.POSSIBLE


def steps_ran(case: Case) -> bool:
    """Whether eager model steps ran before: torch keeps memory that they freed, and no CUDA graph has a pool yet."""
    oom, unused = case.oom, case.ledger.unused_bytes or 0
    return oom is not None and not oom.pools_bytes and unused >= max(oom.wanted_bytes, (oom.total_bytes or 0) // 20)


def _was_running(case: Case) -> bool:
    """Whether, without a traceback, the engine loop logged the error or the server reports that the engine died."""
    if case.site in ("kv", "graph", "sampler"):
        return False
    error = case.first("torch_oom", "cuda_oom", "torch_oom_unsized")
    by_the_loop = error is not None and error.at.lstrip("[") in ("engine.py", "async_llm_engine.py")
    return case.has("engine_dead", "failed_execution_dump") or (by_the_loop and not case.site)


def _explanation(case: Case) -> str:
    """What a step asked for while serving, and what was free."""
    oom, logits = case.oom, reason("through_logits") if case.frames & {"frame_logits"} else ""
    if oom is None:
        return f"A model step of real traffic needed more than what was left beside the KV cache.{logits}"
    free = reason("free_in_pieces") if (oom.free_bytes or 0) >= oom.wanted_bytes else ""
    return reason("step_asked", {"wanted": gib(oom.wanted_bytes), "free": case.ledger.free_words}) + free + logits


def is_ruled_out(planner: FixPlanner) -> bool:
    """Whether a step is ruled out: torch held more than planned budget and step, with no traceback or ready line."""
    oom, plan = planner.case.oom, planner.failed_plan
    if oom is None or oom.torch_bytes is None or plan is None or planner.case.has_site_frame or planner.case.was_ready:
        return False
    return planner.utilization_known and oom.torch_bytes > plan.layout.budget_bytes + plan.layout.activation.bytes


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes (None: not applicable): a lower utilization, smaller steps, fewer log-probabilities, more GPUs."""
    case = planner.case
    oom = case.oom
    need = savings.step_shortage_bytes(planner)
    of_logits = bool(case.frames & {"frame_logits"})
    given = planner.step_tokens
    is_large = given > savings.LARGEST_DEFAULT_TOKENS
    # Logits are followed by two copies for log-probabilities and ranking.
    tokens = max(given // (4 if of_logits or is_large else 2), 512)
    if of_logits and oom is not None and oom.free_bytes and case.black_box is None:  # what fits into the free bytes
        tokens = max(min(tokens, 1 << (given * oom.free_bytes // (need + oom.free_bytes)).bit_length() - 1), 512)
    flags = savings.smaller_step_flags(planner, tokens)
    less = planner.lower_utilization(need // 4 if is_large else need, "") if planner.utilization_known else None
    free, wanted = (oom.free_bytes or 0, oom.wanted_bytes) if oom is not None else (0, 0)
    is_enough = is_large and wanted * tokens // given < free < wanted
    if (is_large or of_logits) and less is not None and not is_enough:
        flags |= less.flags
    why = f"A step of {tokens:,} tokens has a smaller transient, in proportion."
    why, trades = f"{_logprob_sentence(planner, tokens)} {why}" if of_logits else why, "long prompts take more steps"
    is_asked = not (planner.utilization_known or planner.failed_plan) and case.tells(re.compile("prompt_logprobs"))
    if is_asked:
        yield known_fix("no_prompt_logprobs")
    steps = known_fix("fewer_prompt_logprobs").steps if of_logits and not is_asked else ()
    smaller = planner.plan_change("max_num_batched_tokens", flags, why, steps=steps, trades=trades)
    if smaller is None and of_logits:  # the plan counts no log-probabilities of prompts
        smaller = Fix("max_num_batched_tokens", why, flags, steps=steps, trades=trades, is_unplanned=True)
    # Model Runner V2 makes prompt logits in chunks of 1,024 positions, whatever the tokens of a step.
    in_chunks = any("with_chunking" in item.text or savings.RUNNER_V2 in item.text for item in case.all("frame_logits"))
    if (of_logits or is_large) and planner.failed_plan is None and not in_chunks:
        yield smaller
    why = "How much was missing is not printed: the pool has to leave more beside it."
    if oom is not None:
        why = f"{human_bytes(need)} more must stay free while serving; the pool has to leave them."
    lower = planner.lower_utilization(need, why)
    yield lower
    if lower is None and less is None and smaller is None:
        why = "A smaller pool would hold no request: weights in fewer bits leave room for both."
        yield planner.pull_lever_for_weights("quantized weights", why)
    yield smaller
    if oom and oom.total_bytes and planner.known.release.at_least("0.10.2"):
        pool = case.startup.available_kv_bytes
        if pool and pool > need + GIB:
            flags = {"kv_cache_memory_bytes": pool - need - GIB // 2}
            why = "The pool in bytes: exactly what the transient needs is taken off it."
            yield planner.plan_change("kv_cache_memory_bytes", flags, why, trades="a smaller KV pool")
    yield planner.pull_lever("more GPUs", "Split over more GPUs, a step's transient is split too.")


def _logprob_sentence(planner: FixPlanner, tokens: int) -> str:
    """A sentence: the bytes of a prompt's log-probabilities, for a step of `tokens` where the model is known."""
    entries = planner.model.vocab_size if planner.model is not None else None
    if not entries:
        return "Log-probabilities of a prompt take tokens x vocabulary x 4 bytes, and the logits beside them half."
    size = human_bytes(tokens * entries * savings.LOGPROB_BYTES)
    return f"Log-probabilities of a prompt take tokens x {entries:,} x 10 bytes: {size} for {tokens:,} tokens."


CAUSE = Cause(entry="LR401", phase="serving", usual_at=("serving",))
