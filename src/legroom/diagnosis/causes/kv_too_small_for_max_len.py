"""One request of max_model_len does not fit into the KV pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from legroom.diagnosis.causes import Assessment, Case, Cause, DeadEnd, Fix, FixPlanner, Localized, proof
from legroom.diagnosis.fixes.flag_repair import larger_pool_fix
from legroom.units import GIB, gib, human_bytes

_ROUNDED = GIB // 200
"""vLLM prints GiB with two digits; half of the last one may be missing."""
_MIN_LENGTH_GAIN = 4
"""Where a pool holds less than this part of the length that was asked for, the pool is raised first."""

_SHORT_CONTEXT_TOKENS = 2048
"""A server for shorter requests than this is hardly what was wanted."""
_MAX_UTILIZATION = 0.95
_TOO_SHORT = "The pool holds one request of {:,} tokens only, which is of little use."


def examine(case: Case) -> Assessment | None:
    """vLLM's own check, in the wording of any release."""
    error = case.first("kv_bytes_short", "kv_tokens_short")
    estimate = case.first("estimated_max_len")
    if error is None and estimate is None:
        return None
    return Assessment(0.93 if error else 0.7, proof(error, estimate), _why(case))


def longest_fitting_len(case: Case) -> int | None:
    """The length that the log says would fit."""
    tokens, estimate, error = (
        case.first("kv_tokens_short"),
        case.first("estimated_max_len"),
        case.first("kv_bytes_short"),
    )
    for evidence in (tokens, estimate):
        fits = evidence.facts.get("fits_len_count") if evidence else None
        if isinstance(fits, int) and fits > 0:
            return fits
    if error is None:
        return None
    wanted, needed, has = (error.facts.get(name) for name in ("max_model_len_count", "needed_bytes", "available_bytes"))
    if isinstance(wanted, int) and isinstance(needed, int) and isinstance(has, int) and needed > 0 and has > _ROUNDED:
        return min(int(wanted * (has - _ROUNDED) / (needed + _ROUNDED)), wanted)
    return None


def _why(case: Case) -> str:
    error = case.first("kv_bytes_short")
    if error is not None:
        needed, has = error.facts.get("needed_bytes"), error.facts.get("available_bytes")
        wanted = error.facts.get("max_model_len_count")
        if isinstance(needed, int) and isinstance(has, int) and isinstance(wanted, int) and needed > _ROUNDED:
            return (
                f"One request of {wanted:,} tokens needs {gib(needed)} of KV cache and {gib(has)} are left: "
                f"{gib(needed - has)} short. At {needed / max(wanted, 1) / 1024:,.1f} KiB a token, "
                f"{longest_fitting_len(case) or 0:,} tokens fit."
            )
    tokens = case.first("kv_tokens_short")
    if tokens is not None:
        wanted, fits = tokens.facts.get("max_model_len_count"), tokens.facts.get("fits_len_count")
        return f"One request may be {wanted:,} tokens long, and the pool holds {fits:,}."
    return f"The pool holds one request of {longest_fitting_len(case) or 0:,} tokens, which is less than max_model_len."


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """A length that fits, a higher utilization, fewer bytes per token, or more cards."""
    fits, asked = longest_fitting_len(planner.case) or 0, planner.given_args.max_model_len or 0
    larger = larger_pool_fix(planner, 0.75 if fits * _MIN_LENGTH_GAIN < asked else 0.7)
    # A pool that was given outright and holds next to nothing is what is wrong, not the length.
    if larger is not None and fits * _MIN_LENGTH_GAIN < asked:
        yield larger
    if 0 < fits < min(_SHORT_CONTEXT_TOKENS, checked_len(planner.case) // _MIN_LENGTH_GAIN):
        yield _raise_utilization_for_length(planner, fits)
        yield planner.pull_lever("more GPUs", "more_or_fewer_gpus_tp_pp", _TOO_SHORT.format(fits), 0.5)
    yield _shorter_len_fix(planner)
    if larger is not None and fits * _MIN_LENGTH_GAIN >= asked:
        yield larger
    short = _pool_shortage_bytes(planner)
    if short is not None:
        why = f"{human_bytes(short)} are missing and the card has more than that outside the budget."
        yield (
            planner.pull_lever("raise utilization", "raise_util", why, 0.5)
            if planner.failed_plan
            else planner.raise_utilization(short, why)
        )
    yield planner.pull_lever(
        "fewer sequences", "max_num_seqs", "Fewer dummy sequences leave more of the budget to the pool.", 0.45
    )
    yield planner.pull_lever(
        "smaller batches", "max_num_batched_tokens", "A smaller peak leaves more of the budget to the pool.", 0.45
    )
    yield planner.pull_lever("fp8 KV cache", "kv_cache_dtype", "Keys and values in 8 bits take half.", 0.45) or (
        planner.plan_change(
            "kv_cache_dtype",
            {"kv_cache_dtype": "fp8"},
            "Keys and values in 8 bits take half the bytes a token.",
            trades="keys and values are stored in 8 bits",
            confidence=0.4,
        )
        if planner.failed_plan is None
        else None
    )
    yield planner.pull_lever(
        "more GPUs", "more_or_fewer_gpus_tp_pp", "Split over more GPUs, the same context fits.", 0.4
    )


def checked_len(case: Case) -> int:
    """The length that vLLM checked; 0 where it is not printed."""
    error = case.first("kv_bytes_short", "kv_tokens_short")
    length = error.facts.get("max_model_len_count") if error else None
    return length if isinstance(length, int) else 0


def _raise_utilization_for_length(planner: FixPlanner, fits: int) -> Fix | None:
    """A higher utilization with the length it holds, where that is several times the present one."""
    accounting, total, asked = planner.accounting, planner.total_bytes, checked_len(planner.case)
    for share in (planner.default_utilization, _MAX_UTILIZATION):
        length = accounting.longest_at(share)
        if length is None or total is None or share <= planner.utilization or length < fits * _MIN_LENGTH_GAIN:
            continue
        if (1 - share) * total < GIB // 2 + (planner.case.startup.graph_bytes or 0):
            continue
        flags: dict[str, Any] = {"gpu_memory_utilization": share}
        if length < asked // 256 * 256:
            flags["max_model_len"] = length
        trades = "less of the card is left for what vLLM does not count"
        fix = planner.plan_change("raise_util", flags, _TOO_SHORT.format(fits), trades=trades, confidence=0.6)
        if fix is not None:
            return fix
    return None


def _shorter_len_fix(planner: FixPlanner) -> Fix | None:
    fits = longest_fitting_len(planner.case)
    if not fits:
        return planner.pull_lever("shorter context", "max_model_len", "The longest length the pool holds.", 0.7)
    step = 1024 if fits >= 4096 else 16
    # A hundredth stays free: the next start measures its peak anew, some MiB up or down.
    flags = {"max_model_len": max(int(fits * 0.99) // step * step, min(fits, 16))}
    why, trades = f"The pool holds one request of {fits:,} tokens.", "requests longer than this are refused"
    checked = planner.plan_change("max_model_len", flags, why, trades=trades, confidence=0.75)
    # The log's own number counts more than a model of it that disagrees or doubts.
    return replace(checked or Fix("max_model_len", why, flags, confidence=0.7, trades=trades), proven=True)


def _pool_shortage_bytes(planner: FixPlanner) -> int | None:
    error = planner.case.first("kv_bytes_short")
    needed, has = (error.facts.get(name) if error else None for name in ("needed_bytes", "available_bytes"))
    return needed - has if isinstance(needed, int) and isinstance(has, int) else None


CAUSE = Cause(
    label="kv_too_small_for_max_len",
    entry="LR203",
    title=Localized(
        "the KV cache cannot hold one request of max_model_len", "KV 缓存容纳不下一个 max_model_len 长度的请求"
    ),
    phase="startup_kv",
    examine=examine,
    remedies=remedies,
    dead_ends=(
        DeadEnd(
            "raise gpu_memory_utilization to 0.95 and more for a large shortfall",
            "it moves the failure into capture or serving: what is outside the budget is needed there",
        ),
        DeadEnd(
            "expect max_model_len to shrink the pool",
            "the pool is what is left of the budget; a shorter length lowers the requirement, not the pool",
        ),
        DeadEnd(
            "--swap-space or --max-num-on-the-fly-batches",
            "the first is not KV memory of the GPU, the second is in no release",
        ),
    ),
)
