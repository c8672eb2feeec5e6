"""Free plus reserved-but-unallocated memory would cover the request; no single piece does."""

from collections.abc import Iterator
from dataclasses import replace

from legroom.diagnosis.causes import Assessment, Case, Cause, Fix, FixPlanner, known_fix, proof, reason
from legroom.diagnosis.causes.weights_too_big import nothing_was_freed
from legroom.diagnosis.finding import Strength
from legroom.diagnosis.fixes.step_savings import joined_segments_fix, large_steps_fix
from legroom.diagnosis.recorded_memory import assess_fragmentation
from legroom.units import gib, human_bytes


def examine(case: Case) -> Assessment | None:
    """Assesses fragmentation: torch's free and reserved memory cover the request, no single piece does; else None."""
    # While a graph is captured only its own pool serves, and nothing is given back: pieces elsewhere are no part of it.
    box = case.black_box if case.site != "graph" else None
    if box is not None and (recorded := assess_fragmentation(box, case.black_box_line)):
        return recorded
    oom, ledger = case.oom, case.ledger
    if oom is None or not ledger.reserve_covers_request or ledger.free_exceeds_request or oom.unallocated_bytes is None:
        return None
    strength = Strength.SUGGESTED
    if case.has_site_frame or case.site == "serving" or nothing_was_freed(case):
        strength = Strength.POSSIBLE
    total = oom.total_bytes or 0
    if oom.unallocated_bytes >= max(min(oom.wanted_bytes, total // 8 or oom.wanted_bytes), total // 20):
        strength = Strength.NAMED  # a twentieth of the card in unused pieces is no side effect
    elif oom.unallocated_bytes < total // (50 if oom.pools_bytes else 100):
        strength = Strength.USUAL  # what rounding, and the pool of graphs, leave on a full card
    if any("tried expandable_segments" in settings for settings, _ in case.reported):
        strength = Strength.USUAL  # by the text joined pieces did not help
    unused, free = oom.unallocated_bytes, oom.free_bytes or 0
    sizes = {"unused": unused, "free": free, "both": unused + free, "wanted": oom.wanted_bytes}
    why = reason("unused_pieces", {name: gib(size) for name, size in sizes.items()})
    return Assessment(strength, proof(case.first("torch_oom")), why)


def is_ruled_out(planner: FixPlanner) -> bool:
    """Whether fragmentation is ruled out: more weights were still to load than the free pieces hold together."""
    oom = planner.case.oom
    if oom is None or planner.case.site not in ("build", "load"):
        return False
    plan, joined = planner.failed_plan, (oom.unallocated_bytes or 0) + (oom.free_bytes or 0)
    if plan is None or oom.torch_bytes is None:
        return nothing_was_freed(planner.case)
    return plan.layout.weights.bytes - oom.torch_bytes > joined


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes (None: not applicable): expandable segments, a lower utilization, on a TPU a clean device."""
    oom = planner.case.oom
    if oom is not None and oom.platform == "TPU":
        yield known_fix("clean_device")
        return
    join, is_npu = joined_segments_fix(planner), oom is not None and oom.platform == "NPU"
    need = planner.case.ledger.shortage_bytes
    lower = planner.lower_utilization(need, "A few per cent outside the pool absorb the pieces.")
    joined = (oom.unallocated_bytes or 0) + (oom.free_bytes or 0) if oom else 0
    is_full = planner.utilization_known and planner.utilization > planner.default_utilization
    if (
        oom
        and join is not None
        and (joined < 2 * oom.wanted_bytes or is_full)
        and lower is not None
        and planner.case.site not in ("build", "load", "profile")
    ):
        # Segments end at 2 MiB and other tensors lie between: hardly enough pieces do not make one.
        share, total = lower.flags.get("gpu_memory_utilization"), planner.total_bytes
        less = human_bytes(round((planner.utilization - share) * total) if share and total else need)
        why = f"{join.why} They hardly cover what comes next, so the pool gives up {less} as well."
        join = replace(join, why=why, flags={**join.flags, **lower.flags}, trades=join.trades or lower.trades)
    if planner.case.site == "serving":
        yield large_steps_fix(planner, lower)
    if is_npu:
        yield lower  # new releases of vllm-ascend have them on unless sleep mode is
    yield from (join, lower)


CAUSE = Cause(entry="LR406")
