"""Budget minus weights minus peak is zero or less, and no neighbour explains it."""

import math
from collections.abc import Iterator
from dataclasses import replace

from legroom.diagnosis.causes import Assessment, Case, Cause, Fix, FixPlanner, known_fix, proof, reason
from legroom.diagnosis.finding import Strength
from legroom.diagnosis.fixes.card_holders import described_holder
from legroom.diagnosis.fixes.fix_planner import MAX_UTILIZATION, UNKNOWN_CARD_BYTES
from legroom.diagnosis.fixes.flag_repair import advised_utilization_fix, larger_pool_fix
from legroom.diagnosis.fixes.hardware_fixes import (
    budget_for_weights,
    is_likely_alone,
    other_hardware,
    smaller_weights_fix,
)
from legroom.diagnosis.fixes.log_accounting import BESIDE_BYTES
from legroom.diagnosis.fixes.step_savings import (
    LARGEST_DEFAULT_TOKENS,
    large_steps_fix,
    savings_fix,
    smaller_step_flags,
    smaller_step_tokens,
    without_draft,
)
from legroom.diagnosis.pasted_command import prose
from legroom.facts.releases import first_release, release
from legroom.units import GIB, MIB, gib
from legroom.vllm_logs.evidence import Evidence

_UNSEEN_POOL = "--num-gpu-blocks-override or --kv-cache-memory-bytes"
"""What a pool beyond the card was set with, where the text does not show which."""
_SHARE_OF_ONE_MEMORY = 0.75  # The rest is what the system and its page cache take of one memory.
_FEW_SEQUENCES = 64  # Logits of so many sequences take 64 x 150,000 x 4 bytes, 37 MiB.


def examine(case: Case) -> Assessment | None:
    """Assesses a KV cache left without memory: vLLM's check, a failed pool of a given size, or figures; else None."""
    failed_check = cpu_check_failure(case)
    if failed_check:
        budget, more = int(failed_check.facts.get("budget_bytes", 0)), -int(failed_check.facts["requested_bytes"])
        why = reason("cpu_budget_used", {"budget": gib(budget), "more": gib(more)})
        return Assessment(Strength.NAMED, proof(failed_check), why)
    if (pool := _explicit_pool_flag(case)) is not None and case.oom is not None:
        oom = case.oom
        free = f" with {gib(oom.free_bytes)} free" if oom.free_bytes is not None else ""
        facts = {"flag": pool[0], "size": pool[1], "wanted": gib(oom.wanted_bytes), "free": free}
        why = reason("pool_as_given", facts)
        return Assessment(Strength.NAMED, proof(case.first("torch_oom", "black_box")), why)
    error = case.first("no_cache_blocks")
    startup = case.startup
    negative = startup.available_kv_bytes is not None and startup.available_kv_bytes <= 0
    if error is None and not negative and startup.blocks != 0:
        return None
    proven = proof(case.last("profile_v0"), case.last("available_kv"), case.last("kv_sized"), error)
    known = startup.weights_bytes is not None and (startup.activation_bytes is not None or negative)
    return Assessment(Strength.SHOWN if known else Strength.SUGGESTED, proven, _explanation(case))


def is_ruled_out(planner: FixPlanner) -> bool:
    """Whether an empty pool is ruled out: vLLM's message has no figures beside it, and the plan of the command fits."""
    startup, plan = planner.case.startup, planner.failed_plan
    is_bare = startup.weights_bytes is None and startup.available_kv_bytes is None and startup.blocks is None
    return is_bare and planner.case.has("no_cache_blocks") and plan is not None and plan.verdict == "fits"


def _explicit_pool_flag(case: Case) -> tuple[str, str] | None:
    """(flag, value) of a KV pool set in bytes or blocks that could not be allocated; None without one."""
    if case.oom is None or case.site != "kv":
        return None
    if (blocks := case.startup.args.num_gpu_blocks_override) is not None:
        return "--num-gpu-blocks-override", f"{blocks:,} blocks"
    recorded = case.black_box.settings.get("kv_cache_memory_bytes") if case.black_box else None
    given = case.startup.args.kv_cache_memory_bytes or recorded
    if isinstance(given, int) and given > 0:
        return "--kv-cache-memory-bytes", gib(given)
    is_beyond_card = case.oom.wanted_bytes + (case.oom.torch_bytes or 0) > (case.oom.total_bytes or math.inf)
    # A share of the card gives no such pool.
    return (_UNSEEN_POOL, f"{gib(case.oom.wanted_bytes)} or more") if is_beyond_card and case.has_site_frame else None


def cpu_check_failure(case: Case) -> Evidence | None:
    """The CPU backend's error that nothing is left for the KV cache (0.27+); None where it is not logged."""
    requested = case.number("cpu_kv_short", "requested_bytes")
    return case.first("cpu_kv_short") if requested is not None and requested <= 0 else None


def _explanation(case: Case) -> str:
    """What the budget was spent on before the KV cache, with the log's figures."""
    startup = case.startup
    total, weights, peak = startup.gpu_total_bytes, startup.weights_bytes, startup.activation_bytes
    share = startup.args.gpu_memory_utilization
    if startup.available_kv_bytes is not None and (total is None or peak is None):
        parts = f" beside {gib(weights)} of weights" if weights is not None else ""
        if startup.available_kv_bytes == 0:
            return reason("pool_clamped", {"parts": parts})
        return reason("pool_as_counted", {"pool": gib(startup.available_kv_bytes), "parts": parts})
    if total is None or weights is None or peak is None:
        return "utilization x total, less the weights and the peak of the profile run, leaves nothing for the KV cache."
    rest = gib(startup.available_kv_bytes) if startup.available_kv_bytes is not None else "nothing"
    sizes = {"total": total, "weights": weights, "peak": peak, "others": startup.non_torch_bytes or 0}
    facts = {name: gib(size) for name, size in sizes.items()}
    return reason("budget_by_parts", {**facts, "share": "" if share is None else f"{share:g} x ", "rest": rest})


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes (None: not applicable): a larger budget if the card has free memory; smaller weights or peak; more GPUs."""
    failed_check = cpu_check_failure(planner.case)
    if failed_check:
        yield _larger_cpu_utilization_fix(planner, failed_check)
        return
    if (pool := _explicit_pool_flag(planner.case)) is not None and (oom := planner.case.oom) is not None:
        if pool[0] == "--num-gpu-blocks-override":
            yield _without_block_override_fix(planner)
            return
        need = max(oom.wanted_bytes - (oom.free_bytes or 0), 0)
        if planner.failed_plan is None or pool[0] == _UNSEEN_POOL:
            yield known_fix("measured_pool")  # of how many such pieces the pool consists is not known
        if pool[0] == _UNSEEN_POOL:
            return
        yield planner.lower_utilization(need, "A pool that leaves room for weights, steps and graphs.")
        yield known_fix("measured_pool")
        return
    if (given := planner.case.first("cpu_space_given")) is not None:
        free = given.number("free_bytes") or 0
        why = f"On the CPU backend the KV cache has a size of its own, in GiB; {gib(free)} of RAM are free."
        yield Fix("kv_cache_memory_bytes", why, env={"VLLM_CPU_KVCACHE_SPACE": str(max(free // 2 // GIB, 1))})
        return
    has_room = planner.utilization < planner.largest_utilization < 1
    if (holder := described_holder(planner.case)) and planner.accounting.pool_bytes is None and not has_room:
        why = f"By the text {gib(holder[1])} of the card are in other hands: a larger share cannot be had beside them."
        yield replace(known_fix("free_gpu"), why=why)
    yield larger_pool_fix(planner)
    yield advised_utilization_fix(planner, -(planner.accounting.pool_bytes or 0))
    if planner.failed_plan is not None:
        yield from _planned_fixes(planner)
        return
    yield from budget_for_weights(planner)
    made = planner.plan_by_config if planner.total_bytes is None and planner.utilization >= MAX_UTILIZATION else None
    if made is not None and 4 * made.layout.activation.bytes < made.layout.weights.bytes:
        yield smaller_weights_fix(planner)  # of nearly the whole card the peak is the smaller part
    yield _fused_attention_fix(planner)
    yield _charged_neighbour_fix(planner)
    more, eager, accounting = _raise_utilization_fix(planner), _without_graphs_fix(planner), planner.accounting
    if planner.case.platform.unified and (accounting.pool_bytes or 0) < 0:
        yield _pool_in_bytes_fix(planner, more)
        more = replace(more, steps=(*more.steps, *known_fix("drop_page_cache").steps)) if more is not None else None
    yield large_steps_fix(planner, more)
    is_measured = accounting.pool_bytes is not None and accounting.likely_total_bytes is not None
    yield from (more, eager) if is_measured else (eager, more)
    yield without_draft(planner)
    if accounting.pool_bytes is not None and accounting.pool_bytes <= 0:
        yield _smaller_peak_fix(planner)
        if more is None:
            yield savings_fix(planner, -accounting.pool_bytes)
            hardware = None if accounting.weights_bytes is None else other_hardware(planner)
            is_far = -accounting.pool_bytes > BESIDE_BYTES and not is_likely_alone(planner)
            yield from (hardware, smaller_weights_fix(planner)) if is_far else (smaller_weights_fix(planner), hardware)
    yield from _fixes_without_figures(planner)


def _pool_in_bytes_fix(planner: FixPlanner, more: Fix | None) -> Fix | None:
    """Fix: drop the page cache and give the pool in bytes; None where the printed parts alone fill the budget, or the
    fix `more` (a higher utilization) asks for at most 0.75 of the one memory."""
    known, share = planner.accounting, more.flags.get("gpu_memory_utilization", 1) if more is not None else 1
    parts = (known.weights_bytes or 0) + (known.peak_bytes or 0)
    if parts >= planner.utilization * (known.total_bytes or math.inf) or share <= _SHARE_OF_ONE_MEMORY:
        return None
    fix = known_fix("pool_in_bytes")
    return replace(fix, steps=(*known_fix("drop_page_cache").steps[:1], *fix.steps))


def _fused_attention_fix(planner: FixPlanner) -> Fix | None:
    """Fix: the variable that torch names as it warns of an unfused attention kernel for images; else None."""
    if (warned := planner.case.first("unfused_attention")) is None:
        return None
    why = "Without the fused kernel the attention scores of every dummy image are held in full, in the profile run."
    env = {str(warned.facts["variable"]): "1"}
    return planner.plan_change("other_engine_feature_off", {}, why, env=env, steps=("torch's warning names it",))


def _without_graphs_fix(planner: FixPlanner) -> Fix | None:
    """Fix: eager mode, where CUDA graphs count in the budget and take what the pool lacks or unknown bytes; or None."""
    accounting = planner.accounting
    size = accounting.graph_bytes
    profiled = any("Profiling CUDA graph memory" in item.text for item in planner.case.all("capturing"))
    if planner.known.args.enforce_eager or not (profiled if size is None else size > -(accounting.pool_bytes or 0)):
        return None
    why = f"The pool is charged with the CUDA graphs{f' ({gib(size)})' if size else ''}; without them it has that more."
    trades = "slower decoding, most of all for small batches"
    return planner.plan_change("eager_or_fewer_graphs", {"enforce_eager": True}, why, trades=trades)


def _planned_fixes(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes whose effect the memory model computes: utilization, smaller batches, quantized weights, more GPUs."""
    why = "Weights and peak are above the budget, and the card has room."
    shares = ({"gpu_memory_utilization": share} for share in (MAX_UTILIZATION, 0.9, 0.85, 0.8))
    single = [
        _utilization_by_parts_fix(planner),
        # Which share was given is not known: the largest has room for whatever peak was measured.
        planner.first_change_that_fits("raise_util", shares, why) if not planner.utilization_known else None,
        planner.pull_lever("raise utilization", why),
        planner.pull_lever("smaller batches", "A smaller dummy batch has a smaller peak."),
        planner.pull_lever("fewer sequences", "Fewer dummy sequences have a smaller peak."),
    ]
    yield from single
    yield _shorter_dummy_batch_fix(planner)
    combined, missing = None, -(planner.accounting.pool_bytes or 0)
    if not any(fix and fix.plan and fix.plan.verdict == "fits" for fix in single):
        combined = planner.pull_combined_levers("raise_util", "No single change is enough; these together are.")
    is_sure = combined is not None and combined.plan is not None and combined.plan.verdict == "fits"
    yield combined if is_sure else None
    why = "Smaller weights leave room for the pool."
    yield planner.pull_lever_for_weights("quantized weights", why) or planner.pull_lever("online quantization", why)
    more = "Split over more GPUs, each has room for a pool."
    split = planner.extend_until_fits(planner.pull_lever("more GPUs", more), more)
    yield from (split, combined)
    if planner.accounting.weights_over_budget_bytes:
        yield from budget_for_weights(planner)
    elif not any(single) and combined is None and 0 < missing < GIB:
        yield savings_fix(planner, missing)
    elif not any(single) and combined is None and not (split and planner.unpredicted_pool_bytes):
        yield other_hardware(planner)


def _utilization_by_parts_fix(planner: FixPlanner) -> Fix | None:
    """Fix: the utilization for planned weights, peak and one request, where V0's log shows no value; else None."""
    is_printed = planner.known.args.gpu_memory_utilization is not None or not planner.case.engine.before_brackets
    if (plan := planner.failed_plan) is None or not planner.unpredicted_pool_bytes or is_printed:
        return None
    layout = plan.layout
    parts = layout.weights.high + layout.activation.high + layout.non_torch.high
    share = math.ceil(20 * (parts + plan.memory.kv.needed_bytes + GIB) / layout.total_bytes) / 20
    why = reason("share_by_parts", {"parts": gib(parts), "total": gib(layout.total_bytes)})
    flags = {"gpu_memory_utilization": share}
    return Fix("raise_util", why, flags, is_unplanned=True) if share < 1 else None


def _shorter_dummy_batch_fix(planner: FixPlanner) -> Fix | None:
    """Fix: max_model_len cut to 8192, where V0 left no pool although the plan predicts one; else None."""
    pool, length = planner.unpredicted_pool_bytes, planner.in_force("max_model_len") or 0
    since = first_release(planner.model.architecture) if planner.model is not None else None
    may_be_v0 = (since is None or release(since).before("0.8.0")) and planner.case.engine.generation != "V1"
    if not pool or length <= LARGEST_DEFAULT_TOKENS or not may_be_v0:
        return None
    flags = {"max_model_len": LARGEST_DEFAULT_TOKENS}
    why = reason("peak_of_whole_prompt", {"pool": gib(pool), "length": f"{length:,}"})
    return Fix("max_model_len", why, flags, trades="requests longer than this are refused", is_unplanned=True)


def _without_block_override_fix(planner: FixPlanner) -> Fix:
    """Fix: remove --num-gpu-blocks-override, so that vLLM computes how many KV blocks fit."""
    flags = {"num_gpu_blocks_override": None}
    plan = planner.plan_with(flags)
    room = f" The plan has {plan.memory.kv.num_blocks:,}." if plan is not None else ""
    why = f"Without the flag vLLM measures what is left and takes as many blocks as fit.{room}"
    before = planner.failed_plan.layout if plan is not None and planner.failed_plan is not None else None
    return Fix("kv_cache_memory_bytes", why, flags, plan=plan, before=before, proven=True)


def _smaller_peak_fix(planner: FixPlanner) -> Fix | None:
    """Fix: fewer tokens per step; None where even three quarters of the measured peak would leave too small a pool."""
    peak, flags = planner.accounting.peak_bytes or 0, smaller_step_flags(planner, max(planner.step_tokens // 4, 512))
    why = f"The profile run peaked at {gib(peak)}, which follows the tokens of a step."
    if peak * 3 // 4 <= GIB // 2 - (planner.accounting.pool_bytes or 0):
        return None
    return planner.plan_change("max_num_batched_tokens", flags, why, trades="long prompts take more steps")


def _fixes_without_figures(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes where the log prints no memory figures: smaller steps; in V0 also a shorter max_model_len."""
    flags = smaller_step_flags(planner, smaller_step_tokens(planner), _FEW_SEQUENCES)
    if (planner.known.args.max_num_seqs or _FEW_SEQUENCES + 1) > _FEW_SEQUENCES:
        flags["max_num_seqs"] = _FEW_SEQUENCES
    why = "The peak of the profile run follows the tokens of a step."
    trades = "fewer requests run at once; long prompts take more steps"
    steps = known_fix("what_decides").steps if planner.case.startup.available_kv_bytes == 0 else ()
    yield planner.plan_change("max_num_batched_tokens", flags, why, steps=steps, trades=trades)
    if planner.case.engine.generation == "V0":
        yield known_fix("shorter_dummy_batch")


def _larger_cpu_utilization_fix(planner: FixPlanner, failed_check: Evidence) -> Fix | None:
    """Fix: a higher gpu_memory_utilization on the CPU backend, with process and pool within the free RAM; else None."""
    total, free = int(failed_check.facts["total_bytes"]), int(failed_check.facts["free_bytes"])
    used = int(failed_check.facts.get("budget_bytes", 0)) - int(failed_check.facts["requested_bytes"])
    needed, made = planner.one_request_bytes, planner.plan_by_config
    pool = max(min(4 * GIB, (free - used) // 2), 0, min(needed * 5 // 4, free))  # `free` is beside what is used
    share = math.ceil((used + pool) / total * 100) / 100
    left = int(share * total) - used
    flags = {"gpu_memory_utilization": share}
    why = f"The process uses {gib(used)}; {share:g} x {gib(total)} leaves {gib(left)} for the KV cache."
    if needed > left and made is not None:
        flags["max_model_len"] = made.settings.max_model_len * left // needed // 1024 * 1024 or 512
        why += f" One request of the whole length needs {gib(needed)}."
    return planner.plan_change("raise_util", flags, why)


def _raise_utilization_fix(planner: FixPlanner) -> Fix | None:
    """Fix: the utilization raised by the missing bytes, to 0.95 where these are unknown; None without room for it."""
    pool, total = planner.case.startup.available_kv_bytes, planner.accounting.likely_total_bytes
    told = planner.case.first("no_cache_blocks")
    if told is not None and told.is_told and planner.utilization_known and prose("smaller_share").search(told.text):
        return None  # with the share of the command it starts
    if pool == 0:
        why = "A pool below zero is printed as 0: how much is missing is not known."
        is_low = planner.utilization_known and planner.utilization < MAX_UTILIZATION - 0.1
        return planner.plan_change("raise_util", {"gpu_memory_utilization": MAX_UTILIZATION}, why) if is_low else None
    missing = max(-(pool or 0), 0)
    why = f"The pool is {gib(missing)} below zero{planner.at_share}."
    one_request = max(GIB, planner.one_request_bytes + GIB // 4)  # the next check asks for it
    # An estimate of the card needs room.
    for more in (one_request, GIB, GIB // 2, *((GIB // 4,) if planner.total_bytes else ())):
        if pool is not None and (fix := planner.raise_utilization(missing + more, why)):
            return fix
    if pool is not None and (
        total is not None or (MAX_UTILIZATION - planner.utilization) * UNKNOWN_CARD_BYTES < missing
    ):
        return None  # the numbers are there, and they say that the card has no room
    if planner.utilization >= MAX_UTILIZATION:
        return None
    # Who asks for less than half of a card shares it: the rest is not free.
    share = MAX_UTILIZATION if planner.utilization >= 0.5 else round(2 * planner.utilization, 3)
    why = reason("budget_taken_unknown") if pool is None else why
    flags, trades = {"gpu_memory_utilization": share}, "less of the card is left for what vLLM does not count"
    return planner.plan_change("raise_util", flags, why, steps=known_fix("what_decides").steps, trades=trades)


def _charged_neighbour_fix(planner: FixPlanner) -> Fix | None:
    """Fix: a pool in bytes, or find who holds the rest, where the pool lacks more than this server holds; or None."""
    weights, pool = planner.accounting.weights_bytes, planner.accounting.pool_bytes or 0
    if planner.total_bytes or (planner.known.args.max_num_batched_tokens or 0) > LARGEST_DEFAULT_TOKENS:
        return None
    if weights is not None and -pool > weights and planner.utilization_known:
        size, facts = max(weights // 4, GIB) // MIB * MIB, {"short": gib(-pool), "share": f"{planner.utilization:g}"}
        why = reason("charged_beyond_share", {**facts, "weights": gib(weights)})
        steps = ("nvidia-smi shows who holds the rest; or take a share above what the neighbour and this server hold",)
        return planner.plan_change("kv_cache_memory_bytes", {"kv_cache_memory_bytes": size}, why, steps=steps)
    # Weights that loaded are below the card's total, so the pool lacks at most the rest of the card and a peak.
    share_bytes = round(max(MAX_UTILIZATION - planner.utilization, 0) * UNKNOWN_CARD_BYTES)
    is_unexplained = weights is None and -pool > BESIDE_BYTES + share_bytes
    if not is_unexplained and not planner.case.has("several_servers"):
        return None
    return replace(known_fix("charged_or_full"), why=reason("more_than_a_share", {"short": gib(-pool)}))


CAUSE = Cause(entry="LR201", phase="startup_kv", usual_at=("kv",))
