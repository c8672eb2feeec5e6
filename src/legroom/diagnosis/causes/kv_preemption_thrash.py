"""Running requests exhaust the pool: they are preempted, recomputed or stall instead of failing."""

from collections.abc import Iterator

from legroom.diagnosis.case import FULL_POOL_PERCENT
from legroom.diagnosis.causes import Assessment, Case, Cause, Fix, FixPlanner, Strength, known_fix, proof
from legroom.diagnosis.fixes.fix_planner import MAX_UTILIZATION
from legroom.vllm_logs.evidence import Evidence

_FEW_SEQUENCES = 8
"""Below this many sequences a step is bound by reading the weights, so that running fewer serves fewer."""


def examine(case: Case) -> Assessment | None:
    """Assesses preemption warnings and counters, and a KV pool that stays full while requests wait; else None."""
    preempted = case.all("preempted")
    failed = case.first("swap_exhausted", "block_pool_guard")
    counted = [
        item for item in case.all("preemptions_metric", "engine_stats") if _count_or_ratio(item, "preemptions") > 0
    ]
    full = [item for item in case.all("engine_stats", "kv_usage_line") if _kv_usage_percent(item) >= FULL_POOL_PERCENT]
    nearly_full = (item for item in case.all("engine_stats") if _kv_usage_percent(item) >= 90)
    waiting = [item for item in nearly_full if _count_or_ratio(item, "waiting") > 0]
    waiting = waiting or [item for item in case.all("engine_stats") if case.generates and _holds_others_back(item)]
    strength = Strength.NONE
    if failed:
        strength = Strength.NAMED
    elif preempted or counted or waiting:
        strength = Strength.SHOWN
    elif full:
        strength = Strength.NONE if holds_finished_blocks(case) else Strength.SUGGESTED
    if not strength:
        return None
    if case.has("failed_execution_dump") and not failed:
        strength = Strength.POSSIBLE  # the step crashed; a preemption before it is a side show
    elif case.has("engine_dead") and not failed:
        strength = Strength.FAINT  # a preemption ends no engine
    elif not failed and case.has("exception") and case.last_error is not None:
        last = max(item.line for item in (*preempted, *full, *waiting, *counted))
        if case.last_error.line > last:
            strength = Strength.USUAL  # preempting goes on for hours and ends nothing; the exception after it did
    proven = proof(preempted[:1], preempted[-1:], failed, waiting[:2], full[:2], counted[-1:])
    return Assessment(strength, proven, _explanation(case, preempted, waiting or full))


def _holds_others_back(item: Evidence) -> bool:
    """Whether a statistics line has waiting requests, and less free KV pool than the mean running request holds."""
    running, used = _count_or_ratio(item, "running"), _kv_usage_percent(item)
    return _count_or_ratio(item, "waiting") > 0 < running and used / running > 100 - used


def holds_finished_blocks(case: Case) -> bool:
    """Whether a full pool has over 3 times the KV blocks per running request than while more requests ran, so that
    finished ones keep blocks."""
    counts = [(_count_or_ratio(item, "running"), _kv_usage_percent(item)) for item in case.all("engine_stats")]
    busy = [(running, usage) for running, usage in counts if running]
    full = [(running, usage) for running, usage in busy if usage >= FULL_POOL_PERCENT]
    return any(usage / few > 3 * other / many for few, usage in full for many, other in busy if many > few)


def _explanation(case: Case, preempted: tuple[Evidence, ...], stats: list[Evidence]) -> str:
    """A sentence on the preemptions (`preempted`: their lines) and the highest KV cache usage in the `stats` lines."""
    last = preempted[-1] if preempted else None
    recomputed = last is not None and "SWAP" not in str(last.facts.get("mode"))
    count = last.facts.get("preemptions_count") if last else None
    parts = []
    if last is not None:
        parts.append(
            f"{count if count is not None else len(preempted)} preemptions ({last.facts.get('mode') or 'RECOMPUTE'})"
        )
    if stats:
        worst = max(stats, key=_kv_usage_percent)
        running, waiting = worst.facts.get("running_count"), worst.facts.get("waiting_count")
        beside = f" with {running} running and {waiting} waiting" if running is not None else ""
        parts.append(f"KV usage {_kv_usage_percent(worst):g} %{beside}")
    shown = "; ".join(parts) or "the pool ran out of blocks"
    return (
        f"{shown}. The pool was allocated at start-up and does not grow: the requests that run want more tokens at "
        f"once than it holds{', so work already done is thrown away and repeated' if recomputed else ''}."
    )


def _kv_usage_percent(item: Evidence) -> float:
    """KV cache usage in percent; 0 where the line has none."""
    value = item.facts.get("kv_usage_ratio")
    return float(value) if isinstance(value, int | float) else 0.0


def _count_or_ratio(item: Evidence, stem: str) -> float:
    """The fact `{stem}_count` of a log line, else `{stem}_ratio`; 0 where it has neither."""
    for ending in ("count", "ratio"):
        value = item.facts.get(f"{stem}_{ending}")
        if isinstance(value, int | float):
            return float(value)
    return 0.0


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes (None: not applicable): fewer sequences, a larger pool, shorter requests, fp8 KV cache, more GPUs."""
    case = planner.case
    running = [item.facts.get("running_count") for item in case.all("engine_stats")]
    most = max((count for count in running if isinstance(count, int)), default=0)
    if case.has("swap_exhausted"):
        yield known_fix("more_swap")
    startup = planner.case.startup
    whole = int(startup.max_concurrency) if startup.max_concurrency else 0
    # Once requests were preempted, those that still run are what the pool holds.
    stats = [item for item in case.all("engine_stats") if _count_or_ratio(item, "waiting") > 0]
    left = min((int(count) for item in stats if (count := _count_or_ratio(item, "running")) > 0), default=0)
    survive = left if 0 < left < most and not case.has("swap_exhausted") else 0
    seqs = survive or (max(most * 3 // 4, min(whole, most)) if most else whole)
    why, trades = f"The pool holds {seqs} of the requests that run, to their end.", "more requests wait"
    fewer = planner.plan_change("max_num_seqs", {"max_num_seqs": seqs}, why, trades=trades) if seqs else None
    if fewer is None and (given := planner.in_force("max_num_seqs") or 0) > _FEW_SEQUENCES:
        why = "Half of the sequences: each of those that run has twice the blocks."
        fewer = Fix("max_num_seqs", why, {"max_num_seqs": given // 2}, trades=trades, is_unplanned=True)
    shares = [{"gpu_memory_utilization": number / 100} for number in range(95, int(planner.utilization * 100), -1)]
    larger = planner.first_change_that_fits("raise_util", shares, "A larger pool, where the card has room.")
    if larger is None and planner.failed_plan is None and planner.utilization < MAX_UTILIZATION:
        # Who asks for less than half of a card means to share it.
        doubled = round(2 * planner.utilization, 2) if planner.utilization < 0.5 else MAX_UTILIZATION
        share = {"gpu_memory_utilization": min(doubled, MAX_UTILIZATION)}
        larger = planner.plan_change("raise_util", share, "The pool is what the share leaves beside the weights.")
        larger = planner.relative_to_share(larger) if larger and not planner.utilization_known else larger
    why, trades = "Twice the tokens in the same pool.", "keys and values in 8 bits"
    twice = planner.plan_change("kv_cache_dtype", {"kv_cache_dtype": "fp8"}, why, trades=trades)
    waiting = max((int(_count_or_ratio(item, "waiting")) for item in case.all("engine_stats")), default=0)
    if most == 1 and case.generates:
        yield known_fix("bounded_requests")  # one request holds the pool for as long as it may grow
    if planner.failed_plan is None and 3 * waiting > most > 0 and seqs < _FEW_SEQUENCES and not survive:
        # A few per cent of the card hold none of those that wait.
        yield from (known_fix("bounded_requests"), twice)
    # A few long requests fill the pool: fewer of them is no server any more, and more memory is what helps. Without
    # the number that runs, what fits is known for requests of full length only.
    is_server = survive or (seqs >= _FEW_SEQUENCES and most)
    yield from (fewer, larger) if is_server else (larger, fewer if most or not larger else None)
    yield known_fix("bounded_requests")
    yield twice
    yield planner.pull_lever("more GPUs", "More GPUs, a larger pool.")


CAUSE = Cause(entry="LR403", phase="serving")
