"""Fixes where no flag helps: another checkpoint, more GPUs or larger ones."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from legroom.diagnosis.finding import Fix, FixKind, reason
from legroom.diagnosis.fixes.fix_planner import FixPlanner
from legroom.diagnosis.fixes.log_accounting import BESIDE_BYTES, FULL_OF_WEIGHTS
from legroom.diagnosis.fixes.step_savings import smaller_step_flags
from legroom.diagnosis.pasted_command import prose
from legroom.facts.gpus import all_gpus
from legroom.units import GIB, gib

_RANK_FLAGS = ("tensor_parallel_size", "pipeline_parallel_size")
WORKSTATION_BYTES = 33 * GIB
"""Above the largest GeForce, 32 GiB; cards above it are sold for servers with several."""
_RANKS_OF_NODE = 8  # Tensor parallelism beyond a node is bound by its network.
_EVEN_SPLITS = (2, 4, 8)  # Ranks that divide the attention heads of nearly every model.
_BILLIONS = re.compile(r"(?i)[-_](\d+(?:\.\d+)?)B(?![a-z])(?!-A\d)")
_FOUR_BIT_NAME = re.compile(r"(?i)(?:awq|gptq|int4|w4|4bit|nvfp4|mxfp4|fp4|bnb|q4)")


def is_quantized(planner: FixPlanner) -> bool:
    """Whether the checkpoint is quantized, by its config, flags or name."""
    if planner.failed_plan is not None:
        return planner.failed_plan.target.model.quantization is not None
    args = planner.known.args
    return bool(args.quantization) or bool(prose("quantized_name").search(args.model))


def is_4_bit(planner: FixPlanner) -> bool:
    """Whether the weights have 4 bits or fewer, so that no smaller checkpoint exists."""
    if planner.failed_plan is not None:
        quantization = planner.failed_plan.target.model.quantization
        return quantization is not None and quantization.weight_bits <= 4 and not keeps_16_bits(planner)
    return bool(_FOUR_BIT_NAME.search(f"{planner.known.args.model} {planner.known.args.quantization or ''}"))


def keeps_16_bits(planner: FixPlanner) -> bool:
    """Whether a 4-bit checkpoint keeps so many layers in 8 or 16 bits (6 a parameter) that a smaller one exists."""
    plan, by_name = planner.failed_plan, _BILLIONS.search(planner.known.args.model)
    quantization = plan.target.model.quantization if plan is not None else None
    if plan is None or by_name is None or quantization is None or quantization.weight_bits > 4:
        return False
    # With its scales a weight of 4 bits takes 4.5.
    return 8 * plan.layout.weights.bytes * planner.known.ranks / (float(by_name[1]) * 1e9) >= 6


def bytes_before_kv_cache(planner: FixPlanner) -> int | None:
    """Bytes that one rank needs before the KV cache, by the plan or the log; None where neither tells."""
    if planner.failed_plan is not None:
        layout = planner.failed_plan.layout
        held = max(layout.weights.bytes + layout.activation.bytes, layout.loading_peak_bytes)
        return held + layout.non_torch.bytes
    startup = planner.case.startup
    if startup.weights_bytes:
        return startup.weights_bytes + (startup.activation_bytes or 0) + (startup.non_torch_bytes or 0)
    return None


def split_over_more_gpus(planner: FixPlanner, why: str) -> Fix | None:
    """Fix: the ranks that the plan needs, else all named GPUs or twice the ranks; None if unknown or not enough."""
    planned = planner.pull_lever_for_weights("idle GPUs", why) or planner.pull_lever("more GPUs", why)
    if planned is not None or planner.failed_plan is not None:
        return planner.extend_until_fits(planned, why)
    ranks, gpus = planner.known.ranks, planner.known.gpus or 0
    if not planner.known.ranks_known and ranks < gpus and gpus in _EVEN_SPLITS:
        flags = {"tensor_parallel_size": gpus}
        why = f"{why} The text tells of {gpus} GPUs and of no split."
        return Fix("more_or_fewer_gpus_tp_pp", why, flags, is_unplanned=True)
    if not planner.known.ranks_known:
        return None  # the number to double is not known
    stages = planner.known.args.pipeline_parallel_size or 1
    size = 2 * ranks // stages if stages < ranks else 2 * ranks
    return planner.plan_change(
        "more_or_fewer_gpus_tp_pp",
        {"tensor_parallel_size": size},
        f"{why} Over {2 * ranks} instead of {ranks}, each holds about half.",
        trades=f"{2 * ranks} GPUs instead of {ranks}",
        steps=("legroom size MODEL says how many of which GPU hold it",),
    )


def split_over_idle_cards(planner: FixPlanner) -> Fix | None:
    """Fix: TP over the visible cards, where only one is used and the weights are larger than it; else None."""
    cards, weights, total = planner.known.gpus or 0, planner.accounting.weights_bytes, planner.total_bytes
    if cards <= planner.known.ranks or planner.known.ranks > 1 or not weights or not total or weights < total:
        return None
    why = f"The weights take {gib(weights)}, one card has {gib(total)}, and of {cards} visible cards only one is used."
    steps = ("CUDA_VISIBLE_DEVICES with as many cards that are free: nvidia-smi shows them",)
    flags = {"tensor_parallel_size": max(size for size in _EVEN_SPLITS if size <= cards)}
    return Fix("more_or_fewer_gpus_tp_pp", why, flags, steps=steps, is_unplanned=True)


def is_likely_alone(planner: FixPlanner) -> bool:
    """Whether the machine has one GPU, used by one rank: by the text, or below 33 GiB with no other mentioned."""
    is_of_workstation = planner.known.gpus is None and 0 < (planner.total_bytes or 0) < WORKSTATION_BYTES
    return planner.known.ranks == 1 and (planner.known.gpus == 1 or is_of_workstation)


def is_at_hand(planner: FixPlanner, fix: Fix | None) -> bool:
    """Whether the machine is known to have the GPUs that a fix asks for, more than the failed run used."""
    return planner.known.ranks < _ranks_asked(fix) <= (planner.known.gpus or 0)


def exceeds_machine(planner: FixPlanner, fix: Fix) -> bool:
    """Whether a fix asks for more GPUs than the machine is known to have."""
    return bool(planner.known.gpus) and _ranks_asked(fix) > max(planner.known.gpus or 0, planner.known.ranks)


def _ranks_asked(fix: Fix | None) -> int:
    """The number of ranks that a fix's flags ask for, 1 where they ask for none; 0 for None."""
    return math.prod(fix.flags.get(name) or 1 for name in _RANK_FLAGS) if fix else 0


def smaller_weights_fix(planner: FixPlanner) -> Fix | None:
    """Fix: weights in FP8 or 4 bits; None where they are in 4, of unknown size, or the pool would stay below 1 GiB."""
    weights, pool = planner.accounting.weights_bytes, planner.accounting.pool_bytes
    if weights is None or pool is None or weights // 2 < GIB - pool or is_4_bit(planner):
        return None
    quantized, four_bit = is_quantized(planner), "a checkpoint of the same model in 4 bits (AWQ, GPTQ, NVFP4)"
    bits, less = (4, "a quarter of 16-bit weights") if quantized else (8, f"about {gib(weights // 2)}")
    return Fix(
        "checkpoint_format",
        f"The weights take {gib(weights)} and leave {gib(pool)} for the KV cache; in {bits} bits they take {less}.",
        flags={} if quantized else {"quantization": "fp8"},
        steps=(four_bit if quantized else f"or {four_bit}, which takes a quarter",),
        trades="weights are rounded",
    )


def quantized_fix(planner: FixPlanner, why: str) -> Fix | None:
    """Fix: a published quantized checkpoint that starts with what was asked for, if need be with an 8-bit KV cache;
    None without a plan of the failed run, or where none does."""
    if planner.failed_plan is None:
        return None
    from legroom.planning.levers import LEVERS

    levers = {lever.name: lever for lever in LEVERS}
    checkpoint, cache = levers["quantized weights"], levers["fp8 KV cache"]
    for half, trades in ({}, checkpoint.trades), ({"kv_cache_dtype": "fp8"}, f"{checkpoint.trades}; {cache.trades}"):
        changes = ({**flags, **half} for flags in checkpoint.propose(planner.failed_plan))
        if fix := planner.first_change_that_fits("checkpoint_format", changes, why, trades=trades):
            return fix
    return None


def budget_for_weights(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes where the weights exceed utilization x total: raise it; where they fill the card, other hardware too."""
    accounting, total = planner.accounting, planner.total_bytes
    weights = accounting.weights_bytes
    if not total or not weights or not accounting.weights_over_budget_bytes:
        return
    budget = round(planner.utilization * total)
    shortage = f"The weights take {gib(weights)}, and {planner.utilization:g} x {gib(total)} is {gib(budget)}."
    pool = max(GIB, weights // 20)
    beside = (accounting.peak_bytes or GIB) + (accounting.non_torch_bytes or 0)
    yield planner.raise_utilization(weights - budget + beside + pool, shortage)
    if (bytes_before_kv_cache(planner) or weights) + BESIDE_BYTES >= total:
        hardware = other_hardware(planner)
        yield replace(hardware, why=f"{shortage} {hardware.why}")


def _less_beside_weights(planner: FixPlanner, needed: int, total: int) -> Fix | None:
    """Fix: smaller steps and pool, where the card's `total` bytes exceed those `needed` before the KV cache; None where
    by its plan that does not start."""
    short = planner.case.ledger.shortage_bytes + GIB
    flags = smaller_step_flags(planner, max(planner.step_tokens // 2, 512))
    share = math.floor((planner.utilization - short / total) * 100) / 100
    if planner.case.ledger.shortage_bytes and 0 < share < planner.case.failed_share and needed < share * total:
        flags["gpu_memory_utilization"] = share
    if (made := planner.plan_as_asked(flags)) is not None and made.verdict == "does_not_fit":
        return None
    why = reason("on_top_of_the_pool", {"needed": gib(needed), "total": gib(total)})
    steps = ("with a shorter --max-model-len, where the smaller pool would not hold one request",)
    command, comment = planner.command(flags), planner.known.rebuilt.remark(flags, {})
    return Fix("max_num_batched_tokens", why, flags, steps=steps, command=command, comment=comment)


def other_hardware(planner: FixPlanner) -> Fix:
    """Fix: larger or more GPUs, or a smaller checkpoint; smaller steps where the needed bytes are below the card."""
    ranks, needed, total = planner.known.ranks, bytes_before_kv_cache(planner), planner.total_bytes
    oom = planner.case.oom
    if needed is not None and total is not None and planner.case.site != "load":
        less = _less_beside_weights(planner, needed, total) if needed + BESIDE_BYTES < total else None
        if less := less or planner.pull_lever("shorter context", reason("weights_fit", {"total": gib(total)})):
            return less
    why = "Smaller weights, more GPUs or larger ones hold it."
    is_loading = planner.case.site in ("", "build", "load", "quant")
    if total is not None and needed is None and oom is not None and oom.torch_bytes is not None and is_loading:
        more = gib(oom.torch_bytes + oom.wanted_bytes)
        why = reason("full_before_complete", {"total": gib(total), "more": more})
    elif total is not None and needed is not None and needed > total:
        why = reason("needed_before_pool", {"needed": gib(needed), "total": gib(total)})
    more, is_alone = f"--tensor-parallel-size {2 * ranks} on {2 * ranks} of these GPUs", is_likely_alone(planner)
    if ranks >= _RANKS_OF_NODE:
        stages = 2 * (planner.known.args.pipeline_parallel_size or 1)
        more = f"--pipeline-parallel-size {stages} over twice the nodes, {2 * ranks} of these GPUs"
    elif not planner.known.ranks_known and not is_alone:
        more = "twice as many of these GPUs (double --tensor-parallel-size; 2 where it was not given)"
    larger = "larger ones"
    if needed is not None:
        card = math.ceil((needed + (0 if planner.failed_plan else BESIDE_BYTES)) / 0.9 / GIB)
        if max(gpu.total_bytes for gpu in all_gpus()) > card * GIB > (total or 0) + GIB:
            larger = f"{'one' if ranks == 1 else f'{ranks}'} with {card} GiB or more"
        count = 1 << max(math.ceil(math.log2(ranks * card * GIB / (total or GIB * card))), 0)
        if count > max(2 * ranks, _RANKS_OF_NODE):
            flags = f"--tensor-parallel-size {_RANKS_OF_NODE} --pipeline-parallel-size {count // _RANKS_OF_NODE}"
            more = f"{count} of these GPUs: {flags}"
        elif count > 2 * ranks:
            more = f"--tensor-parallel-size {count} on {count} of these GPUs"
    weights, room = planner.accounting.weights_bytes or 0, FULL_OF_WEIGHTS * (total or math.inf)
    is_large = is_quantized(planner) or weights // 2 > room
    bits = "4 bits (AWQ, GPTQ, NVFP4)" if is_large else "8 or 4 bits (FP8, AWQ, GPTQ)"
    smaller = f"a checkpoint of the same model with weights in {bits}"
    if keeps_16_bits(planner):
        smaller = "a checkpoint with all its layers in 4 bits (AWQ, GPTQ, NVFP4): this one keeps some in 16"
    if is_4_bit(planner):
        smaller = "a smaller model: this checkpoint is in 4 bits already"
    elif not is_quantized(planner) and weights // 4 > room:
        smaller = "a smaller model: even in 4 bits its weights are larger than the card"
    choices = [f"{more}, or {larger}", smaller]
    if (planner.known.ranks_known or is_alone) and not (ranks >= _RANKS_OF_NODE and is_4_bit(planner)):
        choices.reverse()  # more cards may not exist, and fewer bits may
    steps = [choices[0], f"or {choices[1]}"]
    model = planner.known.args.model or "MODEL"
    steps.append(f"legroom size {model} says which GPUs hold it, and how many")
    kind: FixKind = "checkpoint_format" if planner.known.ranks_known or is_alone else "more_or_fewer_gpus_tp_pp"
    return Fix(kind, why, steps=tuple(steps), trades="other hardware")
