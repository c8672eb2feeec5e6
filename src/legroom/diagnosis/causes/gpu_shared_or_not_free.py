"""Memory of the card is held or moved by another process, an orphan of an earlier run, or it is the wrong card."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from legroom.diagnosis.case import is_traceback_line
from legroom.diagnosis.causes import Assessment, Case, Cause, DeadEnd, Fix, FixPlanner, known_fix, proof
from legroom.diagnosis.finding import Strength, reason
from legroom.diagnosis.fixes import card_holders
from legroom.diagnosis.fixes.fix_planner import MAX_UTILIZATION
from legroom.diagnosis.fixes.hardware_fixes import budget_for_weights, split_over_idle_cards
from legroom.diagnosis.fixes.log_accounting import stated_weights_bytes
from legroom.diagnosis.fixes.step_savings import step_shortage_bytes
from legroom.diagnosis.ledger import own_process_bytes
from legroom.diagnosis.pasted_command import NUMBERS
from legroom.diagnosis.recorded_memory import assess_other_processes
from legroom.facts.releases import logged_release
from legroom.units import GIB, MIB, gib


def examine(case: Case) -> Assessment | None:
    """Assesses memory of other processes, printed by vLLM's start-up check or torch, or unaccounted for; else None."""
    if case.black_box is not None and (recorded := assess_other_processes(case.black_box, case.black_box_line)):
        return recorded
    checks = (
        _assess_startup_check,
        _assess_orphans,
        _assess_free_memory_change,
        _assess_neighbour_start,
        _assess_wrong_device,
        _assess_unequal_ranks,
        _assess_torch_process_list,
        _assess_described_neighbour,
        _assess_memory_charged_to_server,
        _assess_device_init,
        _assess_pool_allocation,
        _assess_block_pool,
    )
    return next(filter(None, (assess(case) for assess in checks)), None)


def _assess_startup_check(case: Case) -> Assessment | None:
    """Assesses vLLM's start-up error that less memory is free than utilization asks for; None without that error."""
    check = case.first("free_below_desired", "free_below_desired_bare")
    if check is None:
        return None
    strength, desired = Strength.NAMED, _desired_bytes(case)
    free, total = card_holders.free_and_total_bytes(case)
    if free is None or total is None or desired is None:
        is_cache = case.platform.unified and case.has("page_cache_told")
        why = "The card had less free memory at start-up than the share vLLM was told to take."
        return Assessment(Strength.SUGGESTED if is_cache else Strength.LIKELY, proof(check), why)
    if case.platform.unified and free > total // 6 and is_page_cache_counted(case):
        strength = Strength.SUGGESTED  # on shared memory the page cache counts as used
    elif case.platform.trainer:
        strength = Strength.SHOWN  # the trainer itself is the neighbour
    cut = None if check.number("desired_bytes") else case.startup.args.gpu_memory_utilization
    share = check.facts.get("utilization_ratio") or cut or round(desired / max(total, 1), 2)
    facts = {"free": free, "total": total, "desired": desired, "short": desired - free, "used": total - free}
    why = reason("short_at_start", {"share": share, **{name: gib(size) for name, size in facts.items()}})
    return Assessment(strength, proof(check), why)


def is_page_cache_counted(case: Case) -> bool:
    """Whether vLLM counts the page cache as used: on unified memory to 0.11.0, on AMD's APUs, or by the text."""
    named, version = case.all("unified", "free_below_desired"), case.startup.vllm
    is_old = version is not None and logged_release(version).before("0.11.1")
    is_amd = any(re.search(r"gfx|Strix|Ryzen|ROCm|HIP", item.text) for item in named)
    return is_old or is_amd or case.has("page_cache_told")


def is_ruled_out(planner: FixPlanner) -> bool:
    """Whether other processes are ruled out: none is shown, and the weights take most of the budget."""
    case, plan = planner.case, planner.failed_plan
    is_shown = case.has("used_before", "free_below_desired", "killed_by_hand", "several_servers", "profiling_error")
    is_shown = is_shown or case.has("neighbour_holds", "card_filled_told")
    if is_shown or case.neighbours or case.oom or case.other_processes_bytes is not None or _assess_unequal_ranks(case):
        return False
    if plan is None or plan.verdict == "fits" or not case.has("no_cache_blocks"):
        return False
    return plan.layout.weights.low * 2 > plan.layout.budget_bytes


def _assess_orphans(case: Case) -> Assessment | None:
    """Assesses workers that outlived their parent's SIGKILL; None unless the text tells of the kill and of them."""
    killed, again = case.first("killed_by_hand"), case.first("orphans_told")
    if killed is None or again is None or case.first_failure is None:
        return None
    return Assessment(Strength.NAMED, proof(killed, again, case.first_failure), reason("orphans_of_sigkill"))


def _assess_free_memory_change(case: Case) -> Assessment | None:
    """Assesses vLLM's error that free memory grew during profiling, as another process freed some; None without it."""
    error = case.first("profiling_error")
    if error is None:
        return None
    before, after = error.number("initial_bytes"), error.number("current_bytes")
    if before is not None and before == after:
        return None
    numbers = f" from {gib(before)} to {gib(after)}" if before is not None and after is not None else ""
    return Assessment(Strength.SHOWN, proof(error), reason("free_memory_grew", {"numbers": numbers}))


def _assess_neighbour_start(case: Case) -> Assessment | None:
    """Assesses another service of the log that loaded after this one began and took what its pool lacks; or None."""
    pool, own = case.startup.available_kv_bytes, case.startup.first_line
    if pool is None or pool > 0:
        return None
    taken = sum(
        (other.weights_bytes or 0) + max(other.available_kv_bytes or 0, 0) + (other.graph_bytes or 0)
        for other in case.neighbours
        if other.last_line > own
    )
    if not taken or taken < -pool:
        return None
    why = reason("neighbour_started", {"taken": gib(taken), "short": gib(-pool)})
    return Assessment(Strength.NAMED, proof(case.last("available_kv"), case.first("no_cache_blocks")), why)


def _assess_wrong_device(case: Case) -> Assessment | None:
    """Assesses a GPU that is not the intended one: `device=`, which vLLM ignores, or 0 bytes of weights; else None."""
    given = case.first("device_told")
    if given is not None and case.is_oom and case.ledger.total_bytes is None:
        why = "vLLM takes the first visible card, whatever device= says: that one is not free."
        return Assessment(Strength.NAMED, proof(given, case.first_failure), why)
    loaded = next((item for item in case.all("weights_loaded") if item.facts.get("weights_bytes") == 0), None)
    if loaded is None or not case.first_failure:
        return None
    why = "vLLM measured 0 bytes of weights: the model went to another GPU than the one being measured."
    return Assessment(Strength.LIKELY, proof(loaded, case.first_failure), why)


def _assess_unequal_ranks(case: Case) -> Assessment | None:
    """Assesses a tensor-parallel rank with 2 GiB less KV cache than another: its card is shared; None without one."""
    lines = {
        item.rank: item for item in case.all("available_kv") if item.rank is not None and "_PP" not in item.process
    }
    pools = sorted((size, rank) for rank, item in lines.items() if (size := item.number("available_bytes")) is not None)
    if len(pools) < 2 or case.has("pp_on") or pools[-1][0] - pools[0][0] < card_holders.UNEQUAL_BYTES:
        return None
    (least, rank), (most, other) = pools[0], pools[-1]
    facts = {"rank": rank, "other": other, "least": gib(least), "most": gib(most), "more": gib(most - least)}
    why = reason("unequal_ranks", facts)
    return Assessment(Strength.SHOWN if least <= 0 else Strength.POSSIBLE, proof(lines[rank], lines[other]), why)


def _assess_torch_process_list(case: Case) -> Assessment | None:
    """Assesses other processes' memory in torch's OOM message; None below 512 MiB, the request, or where not shown."""
    oom = case.oom
    if oom is None or oom.total_bytes is None:
        return None
    if (unowned := case.ledger.unowned_bytes) and not case.platform.unified:
        sizes = (unowned, oom.total_bytes, oom.free_bytes or 0, oom.torch_bytes or 0, oom.unallocated_bytes or 0)
        names = ("unowned", "total", "free", "torch", "unused")
        why = reason("unowned_memory", dict(zip(names, map(gib, sizes), strict=True)))
        strength = Strength.POSSIBLE if case.platform.trainer else Strength.NAMED
        return Assessment(strength, proof(case.first("torch_oom")), why)
    others = case.ledger.other_processes_bytes or 0
    if others < 512 * MIB or others < oom.wanted_bytes:
        return None
    own = oom.own_bytes or (own_process_bytes(oom) if oom.others_bytes else 0)
    named = [f"process {pid} {gib(size)}" for pid, size in zip(oom.other_pids, oom.others_bytes, strict=False)]
    named = [text for text in named if oom.own_bytes or not text.endswith(f" {gib(own)}")]
    facts = {"others": gib(others), "total": gib(oom.total_bytes), "wanted": gib(oom.wanted_bytes)}
    listed, rest = ", ".join(named[:3]) or "unnamed", gib(own) if own else "the rest"
    why = reason("others_hold", {**facts, "named": listed, "own": rest})
    strength = Strength.NAMED
    error = case.first("torch_oom")
    ranked = error is not None and (error.rank is not None or "Worker" in error.process)
    if ranked and max(oom.others_bytes, default=others) < oom.total_bytes // 10:
        strength = Strength.USUAL  # small shares beside a rank are its siblings' contexts
    elif _others_are_small(case):
        strength = Strength.USUAL if case.site else Strength.SUGGESTED
    elif not oom.others_bytes and case.has_site_frame and others < oom.total_bytes // 4:
        strength = Strength.SUGGESTED
    return Assessment(strength, proof(error), why)


def _others_are_small(case: Case) -> bool:
    """Whether torch's message shows that others hold less than a twentieth of the card, as CUDA contexts do."""
    others = case.ledger.other_processes_bytes or case.ledger.unowned_bytes
    return case.oom is not None and others < (case.oom.total_bytes or 0) // 20


def _assess_memory_charged_to_server(case: Case) -> Assessment | None:
    """Assesses other processes' memory that is charged to this server and leaves no cache blocks; else None."""
    error = case.first("no_cache_blocks")
    if error is None:
        return None
    startup, engine = case.startup, case.engine
    before, printed = case.first("used_before"), case.number("used_before", "used_bytes")
    used_before = printed if printed is not None else case.other_processes_bytes
    if used_before is not None and used_before > 2 * GIB:
        why = reason("used_before", {"used": gib(used_before)})
        return Assessment(Strength.NAMED, proof(before, error), why)
    parts = (startup.weights_bytes, startup.activation_bytes, startup.gpu_total_bytes)
    if all(part is not None for part in parts) or startup.available_kv_bytes is not None:
        weights, total = startup.weights_bytes or 0, startup.gpu_total_bytes or 0
        if total and weights and weights < total // 4:
            why = reason("charged_by_others", {"weights": gib(weights), "total": gib(total)})
            return Assessment(Strength.LIKELY, proof(error), why)
        return None
    charging = _charges_others(case)
    if engine.version is None:
        # By style: a V1 engine that logs this without a KV line above it is older than 0.9.1, unless its lines are
        # labelled or the message is the longer one of 0.13. A bare traceback has no line above it. Weights that are
        # shown may fill the card by themselves: only without them others are likelier.
        is_log = engine.generation == "V1" and engine.before_brackets is not None and not engine.is_labelled
        older = is_log and startup.weights_bytes is None and not case.has("available_kv")
        charging = older and not re.search(r"See \S+ for more|despite its", error.text)
    why = reason("others_are_charged")
    # Under WSL weights spill into the RAM of the host, so that a model larger than the card loads first.
    charging = charging or case.has("several_servers", "own_engines_told")
    return Assessment(Strength.LIKELY if charging and not case.platform.wsl else Strength.POSSIBLE, proof(error), why)


def _charges_others(case: Case) -> bool:
    """Whether the vLLM release counts memory of other processes as the server's own."""
    told = " ".join(item.text for item in case.all("second_server_told"))
    version = case.startup.vllm
    is_v1 = case.engine.generation == "V1" or "VLLM_USE_V1=1" in told
    is_v1 = is_v1 or (
        version is not None and not case.engine.generation and not logged_release(version).before("0.8.0")
    )
    spans = (("0.4.0", "0.4.0"), ("0.6.4", "0.6.4.post1"), *((("0.7.0", "0.9.0.1"),) if is_v1 else ()))
    return version is not None and any(logged_release(version).within(*span) for span in spans)


_KEPT = ("not_released_told", "engine_again_told", "free_below_desired")


def _assess_described_neighbour(case: Case) -> Assessment | None:
    """Assesses other processes on the card, or a dead server's memory, of which the text tells; None without them."""
    kept = case.first("not_released_told")
    if (leaving := case.first("releasing_told")) is not None and not case.has_site_frame:
        return Assessment(Strength.NAMED, proof(leaving, case.first_failure), reason("server_before_still_ends"))
    told = case.first("engine_again_told", "own_engines_told", "neighbour_told", "several_servers")
    shares, holder = stated_utilizations(case), card_holders.described_holder(case)
    is_failed = case.is_oom or (case.first_failure is None and case.has("failure_told"))
    is_failed = is_failed or (case.has("no_cache_blocks") and case.has("neighbour_holds", "card_filled_told"))
    if (line := holder[0] if holder else case.first("card_filled_told")) and is_failed and not case.ledger.total_bytes:
        why = "By the text another program fills the card: what it holds is missing here."
        if holder is not None:
            why = f"By the text {gib(holder[1])} of the card are in other hands: they are missing here."
        return Assessment(Strength.NAMED, proof(line, case.first_failure), why)
    if kept is not None:
        why = "What an ended server leaves running (VLLM::EngineCore, VLLM::Worker) holds its share until it ends too."
        # Where a traceback shows the failing step, the orphan may be what the failure left behind.
        strength = Strength.POSSIBLE if case.has_site_frame else Strength.SHOWN
        return Assessment(strength, proof(kept, case.first_failure), why)
    if (second := case.first("second_server_told")) is not None:
        why = reason("others_are_charged" if _charges_others(case) else "share_of_whole_card")
        return Assessment(Strength.LIKELY, proof(second), why)
    if (alone := case.first("works_alone_told")) is not None and case.is_oom and case.ledger.total_bytes is None:
        why = "By the text the same server starts where it is alone: what runs beside it holds the rest of the card."
        return Assessment(Strength.COMPARED, proof(alone, case.first_failure), why)
    is_open = case.is_oom and (case.oom is None or case.oom.total_bytes is None) and not case.has_site_frame
    is_open = is_open and not case.has("small_neighbour_told")
    if told is None or not (is_open or sum(shares) > 1) or case.platform.trainer:
        return None
    why = "Each server takes its share of the whole card, whatever the others hold."
    if sum(shares) > 1:
        why = f"{why} The shares {' + '.join(f'{share:g}' for share in shares)} are {sum(shares):g} of the card."
    elif told.id == "engine_again_told":
        why = "Every new engine takes its share of the card again, while the first one still holds its own."
        return Assessment(Strength.NAMED, proof(told, case.first_failure), why)
    is_told = case.first_failure is not None and case.first_failure.is_told
    is_sized = case.has("parameters_told", "model_size_told") or bool(case.startup.args.model)
    is_named = sum(shares) > 1 or (is_told and case.has("own_servers_told") and not is_sized)
    strength = Strength.NAMED if is_named else Strength.SHOWN if is_told else Strength.LIKELY
    return Assessment(strength, proof(told, case.first_failure), why)


def stated_utilizations(case: Case) -> list[float]:
    """The gpu_memory_utilization of each server where the text starts several on one card; empty for fewer than two."""
    told = case.first("shares_told")
    return [float(share) for share in str(told.facts["shares"]).split()] if told else []


def _assess_device_init(case: Case) -> Assessment | None:
    """Assesses a CUDA context that could not even be created; None where the failure was elsewhere."""
    error = case.first("cuda_oom", "cublas_alloc")
    if error is None or case.site != "device":
        return None
    why = "Not even a CUDA context could be created: the card was full before this process allocated anything."
    return Assessment(Strength.LIKELY, proof(error), why)


def _assess_pool_allocation(case: Case) -> Assessment | None:
    """Assesses a KV pool that fit the free memory at start and could not be allocated; None for another failure."""
    if not case.is_oom or case.site != "kv" or not case.has_site_frame or is_pool_oversized(case):
        return None
    if case.oom is None and not any(is_traceback_line(item.text) for item in case.all("frame_kv_alloc")):
        return None  # a step that a sentence names is not that sure
    wanted = gib(case.oom.wanted_bytes) if case.oom is not None else "parts"
    why = reason("pool_no_longer_free", {"wanted": wanted, "free": case.ledger.free_words})
    return Assessment(Strength.SUGGESTED, proof(case.first("torch_oom"), case.first("frame_kv_alloc")), why)


def _assess_block_pool(case: Case) -> Assessment | None:
    """Assesses V0's KV pool, sized by the whole card, that could not be allocated; None for another failure."""
    pool, weights = case.block_pool_bytes, case.startup.weights_bytes or 0
    if pool is None or case.site != "kv" or not case.is_oom:
        return None
    why = reason("block_pool", {"pool": gib(pool), "weights": gib(weights)})
    return Assessment(Strength.SHOWN, proof(case.last("kv_sized"), case.first_failure), why)


def _utilization_beside_block_pool(planner: FixPlanner) -> Fix | None:
    """Fix: a utilization scaled so that V0's failed pool fits the stated card, else 3/4 of the implied one; or None."""
    named, pool = planner.total_bytes, planner.case.block_pool_bytes
    if _assess_block_pool(planner.case) is None or pool is None:
        return None
    whole = (pool + (planner.case.startup.weights_bytes or 0)) / planner.utilization
    room = named if named is not None and named < whole else whole * 3 / 4
    flags = {"gpu_memory_utilization": math.floor(planner.utilization * room / whole * 100) / 100}
    facts = {"share": f"{planner.utilization:g}", "whole": gib(round(whole)), "room": gib(round(room))}
    why = reason("share_of_named", facts)
    return Fix("lower_util", why, flags, trades="a smaller KV pool", is_unplanned=True)


def is_pool_oversized(case: Case) -> bool:
    """Whether the KV pool failed to be allocated although no other process is on the card, so that it is too large."""
    ledger = case.ledger
    is_alone = ledger.outside_torch_bytes is not None and not ledger.unowned_bytes and not ledger.other_processes_bytes
    return case.oom is not None and case.site == "kv" and is_alone


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes (None: not applicable): an idle card, end what holds the card, a utilization beside it, an upgrade ..."""
    case, less = planner.case, _smaller_share(planner)
    free_it, in_turn = _card_freed(planner, less), known_fix("start_in_turn")
    known, engine = planner.known, case.engine
    is_old = engine.is_styled_before_0_9_2 or bool(engine.before_brackets)  # no bracket before the file name
    is_old = known.release.before("0.9.1") if known.release_known else is_old
    newer = known_fix("own_memory_only") if is_old else None
    yield known_fix("start_again") if case.has("releasing_told") else card_holders.idle_card_fix(planner)
    if is_of_siblings := case.has("siblings_told") and case.is_oom:
        free_it = known_fix("card_for_each_part")
        yield free_it
    shares = stated_utilizations(case)
    if not shares or case.has("no_cache_blocks"):
        yield _own_engines_fix(planner)
    if case.has("second_server_told"):
        yield from (in_turn, free_it) if newer is None else (newer, in_turn)
    elif case.has("no_cache_blocks"):
        if planner.accounting.weights_over_budget_bytes:
            yield from budget_for_weights(planner)
        if case.neighbours:
            yield in_turn
        is_held = card_holders.described_holder(case) is not None  # whatever the release, its bytes are missing
        yield from (free_it, in_turn, newer) if newer is None or is_held else (newer, in_turn, free_it)
    elif case.has("profiling_error"):
        if case.has("in_turn_told"):  # so they start already
            yield known_fix("pool_without_measuring")
        again = known_fix("start_again")
        yield from (replace(again, steps=again.steps[: 1 if case.has("in_turn_told") else 2]), free_it, newer)
    else:
        stages = ["Stage workers of the same launch, which have no rank"] * bool(_assess_unequal_ranks(case))
        holders = (stages if case.has("stages_told") else []) or card_holders.named_holders(case)
        if (named := holders or card_holders.listed_programs(case)) and not is_of_siblings:
            why = "to end, or to move to another card: whatever the flags say, its memory is missing here."
            free_it = replace(free_it, why=f"The card is held by {', '.join(named[:3])}. That has {why}")
        if holders and not is_of_siblings:
            if holders[0].startswith("Stage"):  # a living sibling, no orphan
                free_it = replace(known_fix("card_of_its_own"), why=free_it.why)
            yield from (split_over_idle_cards(planner), free_it)
        stays = card_holders.is_held_by_sibling(case) or bool(shares) or (less and less.plan and less.plan.starts)
        if stays or can_start_with_lower_utilization(case) or _others_are_small(case) or case.site == "kv":
            yield less
        yield free_it
        yield less or planner.pull_combined_levers("lower_util", "Beside what others hold, less of everything fits.")
        yield None if case.has("not_released_told", "in_turn_told") else in_turn


def _smaller_share(planner: FixPlanner) -> Fix | None:
    """Fix: the utilization, else the smaller pool, that fits beside what others hold; None where no size is known."""
    case = planner.case
    less, record = None, case.black_box
    if record is not None and assess_other_processes(record, case.black_box_line) is not None:
        need = step_shortage_bytes(planner)
        why = f"The other process may stay: {gib(need)} more are left beside the pool, which is what the step lacked."
        less = planner.lower_utilization(need, why)
    less = less or utilization_within_free_memory(planner) or _utilization_beside_block_pool(planner)
    if less is None and case.site == "kv" and case.is_oom:
        less = planner.lower_utilization(planner.case.ledger.shortage_bytes, "A smaller pool fits into what is free.")
    if less is None and _others_are_small(case):
        less = planner.lower_utilization(planner.case.ledger.shortage_bytes, "A smaller pool fits beside the others.")
    return less


def _card_freed(planner: FixPlanner, less: Fix | None) -> Fix:
    """Fix: the process on the card ends or moves, or servers split the card; `less`: the fix if that process stays."""
    case, shares = planner.case, stated_utilizations(planner.case)
    free_it = known_fix("one_engine") if case.has("engine_again_told") else card_holders.free_gpu_fix(planner, less)
    is_held = card_holders.described_holder(case) or case.has("card_filled_told")
    if ((is_held and not case.has("not_released_told")) or case.has("device_told")) and case.is_oom:
        free_it = replace(known_fix("card_of_its_own"), steps=(*known_fix("card_of_its_own").steps, *free_it.steps[:1]))
    elif (
        case.has("own_servers_told") and _assess_described_neighbour(case) and not case.has("own_engines_told", *_KEPT)
    ):
        free_it = known_fix("shares_below_one")
    if sum(shares) > 1 and not case.has("free_below_desired"):
        parts = ", ".join(
            f"{share:g} becomes {share * (1 - card_holders.SPARE_SHARE) / sum(shares):.2f}" for share in shares
        )
        steps = (parts, *known_fix("shares_below_one").steps)
        layout, total = planner.failed_plan.layout if planner.failed_plan else None, planner.total_bytes
        least = layout.weights.bytes + layout.activation.bytes if layout is not None else 0
        if total and least * len(shares) > (1 - card_holders.SPARE_SHARE) * total - len(shares) * GIB:
            needs = {"count": len(shares), "least": gib(least), "all": gib(len(shares) * least), "total": gib(total)}
            steps = (reason("shares_too_small", needs), *steps)
        free_it = replace(known_fix("shares_below_one"), steps=steps)
    return _with_utilization_of_free_card(planner, free_it)


def _with_utilization_of_free_card(planner: FixPlanner, free_it: Fix) -> Fix:
    """`free_it` with a step: the utilization to set once the card is free, or that even then it is too small."""
    layout = planner.failed_plan.layout if planner.failed_plan is not None else None
    total, weights = planner.total_bytes, layout.weights.bytes if layout else planner.accounting.weights_bytes
    needed = layout.budget_bytes - layout.kv_cache.bytes + planner.one_request_bytes if layout else 0
    if total and weights and weights > total:
        small = f"even free, this card is too small: the weights take {gib(weights)} of {gib(total)}; a smaller"
        return replace(free_it, steps=(f"{small} checkpoint, or more GPUs", *free_it.steps))
    if layout is None or layout.kv_cache.bytes >= planner.one_request_bytes > 0:
        return free_it
    # The share was made for what is free beside the others: on a free card it still holds no request.
    share = math.ceil((needed + GIB) / layout.total_bytes * 100) / 100
    more = f"then --gpu-memory-utilization {share:g} or more: the weights take {gib(layout.weights.bytes)}"
    return replace(free_it, steps=(*free_it.steps, more)) if share < 1 else free_it


def _own_engines_fix(planner: FixPlanner) -> Fix | None:
    """Fix: a card or a utilization for each engine, where the text tells of several on one card; else None."""
    told = planner.case.first("own_engines_told")
    if told is None or (planner.case.has("free_below_desired") and not planner.case.has("own_servers_told")):
        return None
    engines = int(NUMBERS.get(str(told.facts["what"]).lower(), told.facts["what"]))
    if planner.case.has("no_cache_blocks"):
        share = min(round(planner.utilization * engines, 2), MAX_UTILIZATION)
        why = "The others' memory counts here, so the share of the last engine covers all of them."
        return Fix("raise_util", why, steps=(f"--gpu-memory-utilization {share:g} for the engine that starts last",))
    if (planner.known.gpus or 1) >= engines:
        return known_fix("one_card_each")
    share = math.floor((1 - card_holders.SPARE_SHARE) / engines * 100) / 100
    below = known_fix("shares_below_one")
    return replace(below, flags={"gpu_memory_utilization": share}, is_unplanned=True)


def _desired_bytes(case: Case) -> int | None:
    """Bytes that vLLM's start-up check asks for; where its line is cut, utilization x total; None where unknown."""
    total, asked = case.number("free_below_desired", "total_bytes"), case.startup.args.gpu_memory_utilization
    return case.number("free_below_desired", "desired_bytes") or (round(asked * total) if asked and total else None)


def can_start_with_lower_utilization(case: Case) -> bool:
    """Whether 3/4 or more of what the start-up check asks for is free, so that a lower utilization starts."""
    free, desired = case.number("free_below_desired", "free_bytes"), _desired_bytes(case)
    return free is not None and desired is not None and 4 * free >= 3 * desired


def impossible(planner: FixPlanner) -> tuple[DeadEnd, ...]:
    """The dead end that vLLM's error advises, a lower utilization, where weights exceed the free memory; else empty."""
    free, weights = planner.case.number("free_below_desired", "free_bytes"), planner.accounting.weights_bytes
    if free is None or weights is None or weights <= free:
        return ()
    why = f"vLLM advises it, but the weights alone take {gib(weights)} and {gib(free)} were free"
    return (DeadEnd("lower gpu_memory_utilization", why),)


def utilization_within_free_memory(planner: FixPlanner, steps: tuple[str, ...] = ()) -> Fix | None:
    """Fix, with these extra `steps`: the utilization that fits what others leave free; None if unknown or below 0.1."""
    free, total = card_holders.free_and_total_bytes(planner.case)
    holder, ledger = card_holders.described_holder(planner.case), planner.case.ledger
    listed = ledger.other_processes_bytes or 0
    if free is None and (held := ledger.unowned_bytes or (0 if _others_are_small(planner.case) else listed)):
        total = ledger.total_bytes
        free = (total or 0) - held
    elif free is None and holder is not None and planner.total_bytes:
        free, total = planner.total_bytes - holder[1], planner.total_bytes
    if free is None or total is None or total <= 0:
        return None
    # The CUDA context, the graphs of V0, which are captured beside the budget, and what a live neighbour still takes.
    graphs = planner.case.startup.graph_bytes or (GIB if planner.case.engine.generation == "V0" else 0)
    graphs = 0 if planner.known.args.enforce_eager else graphs
    beside = GIB // 2 + graphs + len(card_holders.named_holders(planner.case)) * GIB
    share = math.floor((free - beside) / total * 100) / 100
    oom = planner.case.oom
    if oom is not None and planner.case.site in ("build", "load") and (oom.torch_bytes or 0) > share * total:
        return None  # the weights alone already took more
    if share < 0.1 or stated_weights_bytes(planner.case) > share * total:
        return None
    # What is used beside the budget must fit into the free memory, too: the first share that leaves room for it.
    lower = [{"gpu_memory_utilization": round(share - step / 100, 2)} for step in range(12) if share - step / 100 > 0.1]
    why = f"{gib(free)} of {gib(total)} are free; the budget and what is used beside it have to fit into them."
    fitting = planner.first_change_that_fits("lower_util", lower, why, trades="a smaller KV pool")
    fix = fitting or planner.lower_utilization_or_len(share, why)
    return replace(fix, steps=(*fix.steps, *steps)) if fix else None


CAUSE = Cause(entry="LR103")
