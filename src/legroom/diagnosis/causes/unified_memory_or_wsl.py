"""CPU and GPU share one pool, or a virtual machine limits it."""

import math
from collections.abc import Iterator

from legroom.diagnosis.causes import Assessment, Case, Cause, Fix, FixPlanner, known_fix, proof, reason
from legroom.diagnosis.causes.gpu_shared_or_not_free import (
    can_start_with_lower_utilization,
    is_page_cache_counted,
    utilization_within_free_memory,
)
from legroom.diagnosis.causes.host_ram_oom import is_of_container
from legroom.diagnosis.finding import Strength
from legroom.diagnosis.fixes.step_savings import smaller_step_flags, smaller_step_tokens
from legroom.facts.log_messages import message_group
from legroom.units import gib

_SHORTAGES = message_group("shared_memory_shortage")
_CACHE_SIGNS = ("page_cache_told", "free_below_desired", "free_below_desired_bare", "no_cache_blocks")


def examine(case: Case) -> Assessment | None:
    """Assesses a driver out of pages, free memory that failed to allocate, or a shared-memory platform; else None."""
    driver = case.first("driver_no_memory", "tegra_assert")
    if driver:
        why = reason("holders_not_listed" if driver.id == "tegra_assert" else "driver_without_pages")
        is_named = driver.id == "driver_no_memory" or case.has("unified")
        other = Strength.USUAL if "MIG" in driver.text else Strength.SUGGESTED  # NVML tells nothing of a slice
        return Assessment(Strength.NAMED if is_named else other, proof(driver, case.first("oom_killer")), why)
    oom = case.oom
    if oom and refuses_one_block(case):
        why = reason("block_refused", {"total": gib(oom.total_bytes or 0), "wanted": gib(oom.wanted_bytes)})
        return Assessment(Strength.NAMED, proof(case.first("torch_oom"), case.first("wsl")), why)
    if oom and case.ledger.free_exceeds_request and not case.ledger.larger_than_card:
        sizes = map(gib, (oom.free_bytes or 0, oom.total_bytes or 0, oom.wanted_bytes))
        why = reason("free_but_not_backed", dict(zip(("free", "total", "wanted"), sizes, strict=True)))
        has_other_reason = case.platform.trainer or case.has("cumem_oom", "sleep_on", "frame_wake")
        has_much_free = 4 * (oom.free_bytes or 0) >= (oom.total_bytes or 0) > 0
        has_sign = has_much_free or case.platform.unified or case.platform.wsl or case.has("prefetch_ram_short")
        if case.phase == "serving" and (oom.free_bytes or 0) < 2 * oom.wanted_bytes:
            has_sign = has_much_free  # pieces of a full card, which a request while serving finds too small
        strength = Strength.NAMED if has_sign and not has_other_reason else Strength.USUAL
        proven = proof(case.first("torch_oom"), case.first("prefetch_ram_short"), case.first("wsl"))
        return Assessment(strength, proven, why)
    return _assess_shared_memory(case)


def refuses_one_block(case: Case) -> bool:
    """Whether an Intel GPU, or a GPU under WSL, refused at most a quarter of its memory while torch held nothing."""
    oom = case.oom
    is_empty = oom is not None and oom.torch_bytes == 0 and not oom.others_bytes and oom.free_bytes is None
    is_small = oom is not None and 0 < 4 * oom.wanted_bytes <= (oom.total_bytes or 0)
    return is_empty and is_small and (case.platform.wsl or (case.oom is not None and case.oom.platform == "XPU"))


def _assess_shared_memory(case: Case) -> Assessment | None:
    """Assesses a shortage on unified memory (CPU and GPU share it) or WSL; None elsewhere or without a shortage."""
    if not (case.platform.unified or case.platform.wsl) or not (case.is_oom or case.has(*_SHORTAGES)):
        return None
    is_counted = is_page_cache_counted(case) or not case.has("free_below_desired")
    strength = Strength.LIKELY if is_counted else Strength.POSSIBLE
    if case.has("no_cache_blocks") and (case.startup.available_kv_bytes or 0) < 0:
        strength = Strength.POSSIBLE  # vLLM's own account says that the budget is short
    if case.platform.unified and case.is_oom and case.oom is None and case.has("page_cache_told"):
        strength = Strength.NAMED  # the text itself names the page cache
    if case.platform.wsl and case.is_oom and case.has("card_free_told"):
        strength = Strength.NAMED
    elif not case.platform.unified or is_of_container(case):
        strength = Strength.POSSIBLE  # WSL says so on every start; by itself it explains nothing
    why = reason("one_memory")
    if case.platform.integrated and (oom := case.oom) and oom.total_bytes:
        why = reason("integrated_amd", {"total": gib(oom.total_bytes)})
        strength = Strength.NAMED  # that share is the limit, whatever filled it
    return Assessment(strength, proof(case.first("unified", "wsl", "nv_sysmem"), case.first_failure), why)


def is_ruled_out(planner: FixPlanner) -> bool:
    """Whether shared memory is ruled out: only WSL with a discrete card speaks for it, and most such starts work."""
    case = planner.case
    return case.platform.wsl and not case.platform.unified and examine(case) is None and not case.has("unified")


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes (None: not applicable): drop the page cache, wait, more RAM for the VM or the GPU, a lower utilization."""
    case = planner.case
    drop = known_fix("drop_page_cache")
    wsl = known_fix("larger_virtual_machine")
    wait = known_fix("wait_for_memory")
    why, pool = "The system needs its part of the one memory.", planner.known.args.kv_cache_memory_bytes
    share = {"gpu_memory_utilization": round(max(planner.utilization - 0.1, 0.3), 2)}
    steps = tuple(f"or {step}" for step in known_fix("pool_in_bytes").steps)
    lower = planner.plan_change("lower_util", share, why, steps=steps, trades="a smaller KV pool")
    lower = lower if share["gpu_memory_utilization"] < planner.utilization else None
    if pool is not None:
        lower = planner.lower_utilization(pool // 4, why)
    weights, total = planner.accounting.weights_bytes, planner.total_bytes
    free, checked = (case.number("free_below_desired", name) or 0 for name in ("free_bytes", "total_bytes"))
    if refuses_one_block(case):
        yield known_fix("smaller_blocks")
    elif case.platform.integrated or (is_page_cache_counted(case) and (weights or 0) > (total or math.inf)):
        yield from (known_fix("larger_gpu_share"), lower, drop)
    elif can_start_with_lower_utilization(case) or (case.platform.unified and 3 * free > checked > 0):
        yield from (utilization_within_free_memory(planner), drop, wait)
    elif case.platform.wsl or case.has("prefetch_ram_short"):
        yield from (wsl, None if case.platform.wsl else drop, lower)
    elif case.site == "device" and not case.has("page_cache_told"):
        yield from (wait, drop, lower)
    else:
        is_large = pool is not None or (planner.utilization_known and case.has("sigkill", "killed_word", "oom_killer"))
        is_large = is_large or case.phase == "serving" or not case.has(*_CACHE_SIGNS)
        if case.phase_reached == "startup_profile" and not case.has(*_CACHE_SIGNS):
            yield known_fix("default_step")
        if case.has("empty_pool_told"):
            flags = smaller_step_flags(planner, smaller_step_tokens(planner))
            why = "The KV pool is nearly empty: what runs out is taken by the step of a long prompt, by its tokens."
            yield planner.plan_change("max_num_batched_tokens", flags, why, trades="long prompts take more steps")
        if case.has("no_cache_blocks") and case.has("page_cache_told") and pool is None:
            yield known_fix("pool_in_bytes")  # the cache is measured as vLLM's
            lower = None  # a smaller budget holds even fewer blocks
        yield from (lower, drop, wait) if is_large else (drop, lower, wait, None if case.platform.unified else wsl)


CAUSE = Cause(entry="LR502", domain="host")
