"""Cached prefix blocks fill the pool, or their alignment raises what it needs."""

from collections.abc import Iterator

from legroom.diagnosis.causes import Assessment, Case, Cause, Fix, FixPlanner, known_fix, proof, reason
from legroom.diagnosis.causes.kv_preemption_thrash import holds_finished_blocks
from legroom.diagnosis.finding import Strength


def examine(case: Case) -> Assessment | None:
    """Assesses cached prefixes that fill the pool: likely where usage is shown without preemptions or finished requests
    hold blocks; possible at over 90 % usage with under 5 % hits. None otherwise and after an OOM."""
    metric = case.all("kv_usage_metric")
    stats = case.all("engine_stats")
    if case.has("preempted", "swap_exhausted") or case.is_oom:
        return None
    if metric and not stats and not case.has("preemptions_metric"):
        why = reason("pool_of_prefixes")
        return Assessment(Strength.LIKELY, proof(metric[:1], metric[-1:]), why)
    if holds_finished_blocks(case) and not any(item.facts.get("waiting_count", 1) for item in stats):
        return Assessment(Strength.LIKELY, proof(stats[:1], stats[-1:]), reason("blocks_of_finished"))
    evicting = []
    for item in stats:
        hits, usage = item.facts.get("prefix_hit_ratio"), item.facts.get("kv_usage_ratio")
        if isinstance(hits, float) and hits < 5 and isinstance(usage, float) and usage > 90:
            evicting.append(item)
    return Assessment(Strength.POSSIBLE, proof(evicting[:2]), reason("prefixes_evicted")) if evicting else None


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes (None: not applicable): watch waiting requests, as a full pool is normal; a larger one; no prefix
    caching."""
    yield known_fix("watch_waiting")
    yield planner.pull_lever("raise utilization", "A larger pool keeps prefixes longer.")
    yield known_fix("no_prefix_caching")


CAUSE = Cause(entry="LR404", phase="serving")
