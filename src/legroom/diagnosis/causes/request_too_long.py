"""A request is longer than the server was configured for."""

import re
from collections.abc import Iterator
from dataclasses import replace

from legroom.diagnosis.causes import Assessment, Case, Cause, Fix, FixPlanner, known_fix, proof, reason
from legroom.diagnosis.causes.kv_too_small_for_max_len import model_limit
from legroom.diagnosis.finding import Strength
from legroom.units import round_up

_PARTS = re.compile(r"(\d+) in the (?:messages|prompt|input)\W{1,3}(?:and )?(\d+) in the completion")
_MESSAGES = ("context_exceeded", "prompt_too_long", "prompt_over_context", "max_tokens_too_large")


def examine(case: Case) -> Assessment | None:
    """Assesses the server's refusal of a request that is too long; None without one."""
    error = case.first(*_MESSAGES)
    if error is None:
        return None
    tokens_needed = error.facts.get("asked_count")
    output = error.number("output_count") or 0
    limit = error.facts.get("limit_count", error.facts.get("limit2_count"))
    are_known = tokens_needed is not None and limit is not None
    tokens = f"{tokens_needed:,} + {output:,}" if output else f"{tokens_needed or 0:,}"
    numbers = f"{tokens} tokens against a limit of {limit:,}" if are_known else "over the limit"
    why = reason("request_refused", {"numbers": numbers})
    crashed = case.is_oom or case.has("illegal_access", "no_cache_blocks")
    return Assessment(Strength.POSSIBLE if crashed else Strength.NAMED, proof(error), why)


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes (None: not applicable): a larger limit if memory allows, or a shorter request."""
    error = planner.case.first(*_MESSAGES)
    tokens_needed = error.facts.get("asked_count") if error else None
    if error is not None and error.id == "prompt_too_long" and isinstance(tokens_needed, int):
        tokens = round_up(tokens_needed, 1024)
        length = max(tokens, planner.known.args.max_model_len or 0) or None
        step = {"max_num_batched_tokens": tokens, "max_model_len": length}
        why = f"Without chunked prefill a prompt of {tokens_needed:,} tokens must fit into one step."
        yield planner.plan_change("max_num_batched_tokens", step, why, trades="a larger activation peak")
    parts = _PARTS.search(error.window) if error is not None else None
    limit = error.facts.get("limit_count", error.facts.get("limit2_count")) if error is not None else None
    shorter = known_fix("shorter_request")
    left = limit - int(parts[1]) if parts is not None and isinstance(limit, int) else 0
    if parts is not None and left > 0:
        why = (
            f"The prompt takes {int(parts[1]):,} of the {limit:,} tokens; the request asks for {int(parts[2]):,} more."
        )
        yield replace(shorter, why=why, steps=(f"in the request: max_tokens of {left:,} at most, or a shorter prompt",))
    current, longest = planner.known.args.max_model_len or 0, model_limit(planner)
    output = error.facts.get("output_count") if error is not None else None
    if isinstance(output, int) and isinstance(limit, int):
        why = f"Prompt and output share the {limit:,} tokens, and the chat template adds some to the prompt."
        steps = (f"a prompt below {limit - output:,} tokens for {output:,} of output, or a larger --max-model-len",)
        yield replace(shorter, why=why, steps=steps)
    elif isinstance(tokens_needed, int) and current < tokens_needed <= (longest or tokens_needed):
        flags = {"max_model_len": round_up(tokens_needed, 1024)}
        why = f"The request needs {tokens_needed:,} tokens, if the model was made for as many."
        yield planner.plan_change("max_model_len", flags, why, trades="one request may take more of the pool")
    yield shorter if left <= 0 and not output else None


CAUSE = Cause(entry="LR408", phase="serving", domain="settings")
