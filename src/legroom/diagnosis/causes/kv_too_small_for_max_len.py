"""One request of max_model_len does not fit into the KV pool."""

import math
from collections.abc import Iterator
from dataclasses import replace

from legroom.diagnosis.causes import Assessment, Case, Cause, Fix, FixPlanner, known_fix, proof, reason
from legroom.diagnosis.finding import Strength
from legroom.diagnosis.fixes.fix_planner import MAX_UTILIZATION
from legroom.diagnosis.fixes.flag_repair import advised_utilization_fix, has_given_pool, larger_pool_fix
from legroom.diagnosis.fixes.hardware_fixes import is_4_bit, other_hardware, quantized_fix, smaller_weights_fix
from legroom.diagnosis.fixes.log_accounting import BESIDE_BYTES, pool_bytes, stated_weights_bytes
from legroom.diagnosis.fixes.step_savings import LARGEST_DEFAULT_TOKENS, large_steps_fix, savings_fix, without_draft
from legroom.diagnosis.pasted_command import prose
from legroom.units import GIB, gib, human_bytes
from legroom.vllm.args import env_flag
from legroom.vllm.batching import CHUNKED_ABOVE_TOKENS
from legroom.vllm.resolve import default_and_longest_len

_ROUNDED = GIB // 200  # Rounding error of GiB printed with two digits.
_MIN_LENGTH_GAIN = 4  # A pool that holds less than a quarter of max_model_len is raised before the length is lowered.

_SHORT_CONTEXT_TOKENS = 4096  # Contexts below this are of little use: more memory is proposed first.
_HARDLY_USABLE_PART = 10  # Where the length is not printed, a tenth of it is not what the server was started for.
_TOO_SHORT = "The pool holds one request of {:,} tokens only, which is of little use."


def examine(case: Case) -> Assessment | None:
    """Assesses vLLM's check that the KV pool holds one request of max_model_len; None where it did not fail."""
    error = case.first("kv_bytes_short", "kv_tokens_short")
    estimate = case.first("estimated_max_len")
    if (left := case.startup.available_kv_bytes) is not None and left <= 0:
        return None  # a rank without any pool holds no request of any length
    if error is None and estimate is None:
        return _assess_unprinted_check(case)
    why, tokens = _explanation(case), case.startup.args.max_num_batched_tokens or 0
    if tokens > LARGEST_DEFAULT_TOKENS and case.startup.args.num_gpu_blocks_override is None:
        why += f" The profile run of {tokens:,} tokens a step takes a large part of the budget: fewer leave more of it."
    return Assessment(Strength.LIKELY if case.has("releasing_told") else Strength.NAMED, proof(error, estimate), why)


def _assess_unprinted_check(case: Case) -> Assessment | None:
    """Assesses a failed KV cache check only told, or implied by concurrency, blocks or the last line; else None."""
    left = case.startup.available_kv_bytes
    if told := case.first("kv_check_told"):
        has = "" if left is None else f" {gib(left)} are left for the KV cache."
        return Assessment(Strength.LIKELY, proof(told), f"The pool does not hold one request of max_model_len.{has}")
    if (held := case.startup.max_concurrency) is not None and held < 1 and not case.has("request_served"):
        why = f"The pool holds {held:g} requests of {case.startup.concurrency_len or 0:,} tokens, by vLLM's own line."
        return Assessment(Strength.SHOWN, proof(case.last("kv_sized")), why)
    failed, last = case.secondary_failure or case.truncated_traceback, case.milestones[-1:]
    is_cut = failed is not None and case.last_error is None and not case.has("request_served")
    if is_cut and (tokens := _tokens_of_blocks(case)):
        why = reason("blocks_below_length", {"tokens": f"{tokens:,}", "length": f"{case.startup.args.max_model_len:,}"})
        return Assessment(Strength.SUGGESTED, proof(case.first("kv_sized"), failed), why)
    if left is None or failed is None or case.last_error or not last or last[0].id != "available_kv":
        return None
    return Assessment(Strength.SUGGESTED, proof(last, failed), reason("stopped_at_the_check", {"left": gib(left)}))


def is_ruled_out(planner: FixPlanner) -> bool:
    """Whether a failed check is ruled out: it is only told, servers share the card, and one of them alone passes."""
    case, plan = planner.case, planner.failed_plan
    is_printed = case.has("kv_bytes_short", "kv_tokens_short", "estimated_max_len", "available_kv")
    return case.has("shares_told") and not is_printed and plan is not None and plan.verdict == "fits"


def longest_fitting_len(case: Case) -> int | None:
    """The longest max_model_len in tokens that fits according to the log; None where it is not printed."""
    if (printed := _printed_len(case)) is not None:
        return printed
    wanted, needed, has = _printed_shortage(case)
    if wanted is None or needed is None or has is None or needed <= 0 or has <= 4 * _ROUNDED:
        return _tokens_of_blocks(case)
    return min(int(wanted * (has - _ROUNDED) / (needed + _ROUNDED)), wanted)


def _printed_len(case: Case) -> int | None:
    """The longest max_model_len that fits, as vLLM prints it; None where it does not."""
    lengths = (case.number(id_, "fits_len_count") or 0 for id_ in ("kv_tokens_short", "estimated_max_len"))
    return next((length for length in lengths if length > 0), None)


def _at_least(case: Case) -> str:
    """`at least ` to put before the length that fits where it comes from rounded sizes; empty where vLLM prints it."""
    is_computed = _printed_len(case) is None and _printed_shortage(case)[1] is not None
    return "at least " if is_computed else ""


def _tokens_of_blocks(case: Case) -> int | None:
    """Tokens that the printed KV blocks, else the printed concurrency, hold, where below max_model_len; else None."""
    args, length = case.startup.args, case.startup.args.max_model_len or case.startup.concurrency_len or 0
    tokens = (case.number("kv_sized", "blocks_count") or 0) * (args.block_size or 16)
    tokens = tokens or int(((case.startup.max_concurrency or 0) - 0.005) * length)  # printed with two digits
    return tokens if 0 < tokens < length else None


def _printed_shortage(case: Case) -> tuple[int | None, int | None, int | None]:
    """(max_model_len in tokens, KV bytes that one request needs, KV bytes left); each None if not printed."""
    names = ("max_model_len_count", "needed_bytes", "available_bytes")
    wanted, needed, has = (case.number("kv_bytes_short", name) for name in names)
    has = has if has is not None or needed is None else pool_bytes(case) or case.startup.available_kv_bytes
    return wanted or case.startup.args.max_model_len, needed, has


def _length_independent_bytes(case: Case) -> int:
    """KV bytes that a request needs at any length (Mamba state), where large beside what is left; else 0."""
    wanted, needed, has = _printed_shortage(case)
    fits = case.number("estimated_max_len", "fits_len_count")
    if wanted is None or needed is None or has is None or fits is None or fits >= wanted:
        return 0
    if needed - has < 10 * _ROUNDED:
        return 0  # rounding decides
    fixed = round(needed - wanted * (needed - has) / (wanted - fits))
    return fixed if fixed > max(has // 2, 4 * _ROUNDED * wanted // (wanted - fits)) else 0


def _explanation(case: Case) -> str:
    """What one request of max_model_len needs, what the pool has, and the length that fits."""
    wanted, needed, has = _printed_shortage(case)
    if wanted is not None and has is not None and needed is not None and needed > _ROUNDED:
        fixed, held = _length_independent_bytes(case), longest_fitting_len(case) or 0
        short = f"One request of {wanted:,} tokens needs {gib(needed)} of KV cache and {gib(has)} are left: "
        short += f"{human_bytes(needed - has)} short."
        is_noise = has < 10 * _ROUNDED or abs(held * needed - wanted * has) > wanted * (has // 50 + 2 * _ROUNDED)
        if not held or (is_noise and not fixed):
            return f"{short} {held:,} tokens fit, by vLLM's own estimate." if held else short
        rate = f"{(needed - fixed) / max(wanted, 1) / 1024:,.1f} KiB a token"
        rate += f" and {gib(fixed)} whatever its length" if fixed else ""
        return f"{short} At {rate}, {_at_least(case)}{held:,} tokens fit."
    tokens = case.first("kv_tokens_short")
    if tokens is not None:
        longest, fits = tokens.facts.get("max_model_len_count"), tokens.facts.get("fits_len_count")
        may_be = f"{longest:,} tokens long" if longest else "longer than that"
        return f"One request may be {may_be}, and the pool holds {f'{fits:,}' if fits else 'fewer'}."
    if needed is not None and has is not None:
        return f"One request of max_model_len needs {gib(needed)} of KV cache and {gib(has)} are left."
    if has is not None and not longest_fitting_len(case):
        length = f"{wanted:,} tokens" if wanted else "max_model_len"
        return f"{gib(has)} are left for the KV cache, and one request of {length} needs more."
    if (fits := longest_fitting_len(case)) is None:
        return "One request of max_model_len needs more than the pool holds."
    return f"The pool holds one request of {fits:,} tokens, which is less than max_model_len."


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes (None: not applicable): a length that fits, a higher utilization, fewer bytes per token, more GPUs."""
    fits, max_len = longest_fitting_len(planner.case) or 0, planner.given_args.max_model_len or 0
    larger = larger_pool_fix(planner)
    if 0 < (planner.case.number("kv_bytes_short", "available_bytes") or 0) < GIB // 10:
        yield without_draft(planner)  # nothing is left, and a draft is what can be taken out
    # An explicit pool that holds a small part of the length, or less than was measured, is the error.
    needed = planner.case.number("kv_bytes_short", "needed_bytes") or 0
    has_room = (planner.case.startup.available_kv_bytes or 0) >= needed > _ROUNDED
    is_limit = has_room or fits * _MIN_LENGTH_GAIN < max_len or planner.given_args.num_gpu_blocks_override is not None
    _, printed, has = _printed_shortage(planner.case)
    short = None if printed is None or has is None else printed - has
    told, made = planner.case.first("kv_check_told", "kv_tokens_short"), planner.failed_plan
    said = prose("length").search(told.text) if told is not None else None
    length = int(said[1]) * 1024 if said else checked_len(planner.case) or planner.in_force("max_model_len")
    is_told = told is not None and planner.case.startup.available_kv_bytes is None
    is_missed = made is not None and made.starts and not fits and short is None  # what failed, the plan lets start
    if is_missed and not is_told and planner.known.args.max_model_len is None:
        yield known_fix("length_that_fits")
        return
    if is_told and not fits and length and (made is None or is_missed):
        why, flags = f"How much of {length:,} tokens fits is not told: half of them.", {"max_model_len": length // 2}
        yield Fix("max_model_len", why, flags, is_unplanned=True)
    yield advised_utilization_fix(planner, short or 0)
    if is_limit:
        yield larger
    if _is_hardly_usable(planner.case) or (planner.failed_plan is None and _length_independent_bytes(planner.case)):
        yield from _fixes_that_keep_the_length(planner, fits, short or 0)
    share = {"gpu_memory_utilization": MAX_UTILIZATION}
    # Who asks for less than half of a card shares it: the rest is not free.
    if not fits and short is None and planner.utilization_known and 0.5 <= planner.utilization < MAX_UTILIZATION:
        why = "How much is missing is not printed; a small part is in what the share leaves of the card."
        yield planner.plan_change("raise_util", share, why) if planner.failed_plan is None else None
    yield _shorter_len_fix(planner) or _fraction_of_len_fix(planner)
    yield None if larger else large_steps_fix(planner)
    if not fits and (planner.failed_plan is None or is_told):
        yield known_fix("length_that_fits")
    if not is_limit:
        yield larger
    if short is not None:
        # The printed pair counts more than the plan's own need.
        why = f"{human_bytes(short)} are missing{planner.at_share}."
        # The measured pool varies by some MiB from start to start.
        yield planner.raise_utilization(short + GIB // 8, why) or planner.raise_utilization(short, why)
    else:
        yield planner.pull_lever("raise utilization", "A larger share of the card leaves more for the pool.")
    yield planner.pull_lever("fewer sequences", "Fewer dummy sequences leave more of the budget to the pool.")
    yield planner.pull_lever("smaller batches", "A smaller peak leaves more of the budget to the pool.")
    yield from _fixes_by_fewer_bytes(planner, fits, larger)


def _fixes_by_fewer_bytes(planner: FixPlanner, fits: int, larger: Fix | None) -> Iterator[Fix | None]:
    """Fixes: KV cache or weights in fewer bits, more GPUs; `fits`: tokens that fit now, `larger`: a larger pool."""
    why, trades = "Keys and values in 8 bits take half the bytes a token.", "keys and values are stored in 8 bits"
    half = planner.pull_lever("fp8 KV cache", "Keys and values in 8 bits take half.")
    if half is None and planner.failed_plan is None and not 0 < 2 * fits < checked_len(planner.case):
        half = planner.plan_change("kv_cache_dtype", {"kv_cache_dtype": "fp8"}, why, trades=trades)
    yield half
    if planner.failed_plan is None and not _is_hardly_usable(planner.case):
        yield smaller_weights_fix(planner)
    if half is None and larger is None:
        yield quantized_fix(planner, "Smaller weights leave room for the whole length on the same card.")
    yield planner.pull_lever("more GPUs", "Split over more GPUs, the same context fits.")


def _is_hardly_usable(case: Case) -> bool:
    """Whether the length that fits is below 4,096 and 1/4 of the wanted one; unprinted, a tenth of the bytes needed."""
    fits, wanted = longest_fitting_len(case) or 0, checked_len(case)
    _, needed, has = _printed_shortage(case)
    if not wanted and needed and has is not None:
        return has * _HARDLY_USABLE_PART < needed
    return 0 < fits < min(_SHORT_CONTEXT_TOKENS, wanted // _MIN_LENGTH_GAIN)


def _fixes_that_keep_the_length(planner: FixPlanner, fits: int, short_bytes: int) -> Iterator[Fix | None]:
    """Fixes: more of the card, smaller steps or weights; `fits`: tokens that fit, `short_bytes`: missing; 0:
    unknown."""
    why = _TOO_SHORT.format(fits) if fits else f"Only a small part of the length fits; {gib(short_bytes)} are missing."
    for lever in ("raise utilization", "smaller batches", "fewer sequences"):
        yield planner.pull_lever(lever, why)
    yield planner.pull_combined_levers("raise_util", why, keep=("max_model_len",))
    if planner.failed_plan is None and short_bytes:
        yield planner.raise_utilization(short_bytes, why)
        yield savings_fix(planner, short_bytes)
        yield smaller_weights_fix(planner)
    yield _larger_share_and_shorter_len(planner)
    yield planner.pull_lever("more GPUs", why)
    if is_4_bit(planner):
        hardware = other_hardware(planner)  # the weights leave no room, and no smaller copy of them exists
        yield replace(hardware, why=f"{why} {hardware.why}")


def _larger_share_and_shorter_len(planner: FixPlanner) -> Fix | None:
    """Fix: the largest utilization (without a plan, and eager mode) and the max_model_len that then fits; else None."""
    wanted, needed, has = _printed_shortage(planner.case)
    most, told = min(MAX_UTILIZATION, planner.largest_utilization), stated_weights_bytes(planner.case)
    total = planner.accounting.likely_total_bytes
    total = total or (round((told + (has or 0) + BESIDE_BYTES) / planner.utilization) if told else None)
    if not planner.utilization_known or not total or not needed or has is None:
        return None
    trades, eager = "requests longer than this are refused", {"enforce_eager": True}
    for share in (step / 100 for step in range(round(most * 100), round(planner.utilization * 100), -1)):
        pool = has + round((share - planner.utilization) * total)
        if pool >= needed or pool < 2 * has:
            return None  # the share alone is enough, or hardly anything
        part = math.floor(pool / needed * 97) / 100
        facts = {"share": f"{share:g}", "total": gib(total), "pool": gib(pool), "needed": gib(needed)}
        flags = {"gpu_memory_utilization": share}
        flags |= {"max_model_len": max(int(wanted * part) // 256 * 256, 256)} if wanted else {}
        if planner.failed_plan is None:
            steps = () if wanted else (f"and lower --max-model-len to {part:g} of what it is now",)
            why, slower = reason("share_and_length", facts), f"{trades}; slower decoding"
            return planner.plan_change("max_model_len", flags | eager, why, steps=steps, trades=slower)
        fix = planner.plan_change("max_model_len", flags, reason("share_and_shorter_length", facts), trades=trades)
        if fix is not None and fix.plan is not None and fix.plan.verdict == "fits":
            return fix
    return None


def checked_len(case: Case) -> int:
    """The max_model_len in tokens that vLLM's KV cache check used; 0 where it is not printed."""
    error = case.first("kv_bytes_short", "kv_tokens_short")
    return (error.number("max_model_len_count") if error else None) or 0


def _fraction_of_len_fix(planner: FixPlanner) -> Fix | None:
    """Fix: max_model_len times available / needed bytes, in words where the text gives no length; else None."""
    wanted, needed, has = _printed_shortage(planner.case)
    if wanted is not None or needed is None or has is None or has <= 0:
        return None
    part = math.floor((has - _ROUNDED) / (needed + _ROUNDED) * 100) / 100
    why = f"{gib(has)} of the {gib(needed)} are there, and KV cache grows with the length."
    length = int((planner.in_force("max_model_len") or 0) * part) // 16 * 16
    trades = "requests longer than this are refused"
    steps = (f"lower --max-model-len to {part:g} of what it is now (the log and config.json name it)",)
    if length:
        return Fix("max_model_len", why, {"max_model_len": length}, trades=trades, is_unplanned=True)
    return Fix("max_model_len", why, steps=steps, trades=trades)


def _shorter_len_fix(planner: FixPlanner) -> Fix | None:
    """Fix: the max_model_len that vLLM says fits, 1 % less where the pool varies; else the plan's; or None."""
    fits = longest_fitting_len(planner.case)
    if not fits:
        return planner.pull_lever("shorter context", "The longest length the pool holds.")
    step = 1024 if fits >= 4096 else 16
    # 1 % stays free: the measured peak varies by some MiB from start to start.
    kept = fits if has_given_pool(planner.given_args) else max(int(fits * 0.99) // step * step, min(fits, 16))
    limit, wanted = model_limit(planner), checked_len(planner.case)
    flags = {"max_model_len": min(kept, limit or kept)}
    holds = f"The pool holds one request of {_at_least(planner.case)}{fits:,} tokens."
    why, trades = holds, "requests longer than this are refused"
    if flags["max_model_len"] < fits != limit:
        why += f" Rounded down to a multiple of {step:,}: the pool varies from start to start."
    if limit and wanted > limit:
        why += f" {wanted:,} is above the {limit:,} tokens that the model was made for."
    if _is_hardly_usable(planner.case):
        why += " That starts, and is hardly usable."
    if _loses_chunked_prefill(planner, wanted, flags["max_model_len"]):
        flags["enable_chunked_prefill"] = True
        why += " The V0 engine splits prompts by itself only above 32,768 tokens; whole, they leave a smaller pool."
    checked = planner.plan_change("max_model_len", flags, why, trades=trades)
    # The length that the log prints is certain, even where the memory model disagrees.
    return replace(checked or Fix("max_model_len", why, flags, trades=trades), proven=True)


def _loses_chunked_prefill(planner: FixPlanner, wanted: int, shorter: int) -> bool:
    """Whether V0, which wrote the error, chunks prefills by default at `wanted` tokens of context, not at `shorter`."""
    made, args = planner.failed_plan, planner.given_args
    if not (planner.case.has("kv_tokens_short") and shorter <= CHUNKED_ABOVE_TOKENS < wanted):
        return False
    if planner.case.engine.generation == "V1" or args.enable_chunked_prefill is not None or args.enable_lora:
        return False
    return not planner.known.release.before("0.5.3") and (made is None or made.settings.enable_chunked_prefill)


def model_limit(planner: FixPlanner) -> int | None:
    """The longest max_model_len that vLLM takes for the model; None where unknown or where a variable lifts it."""
    args, release = planner.known.args, planner.known.release
    if planner.model is None or env_flag(args, "VLLM_ALLOW_LONG_MAX_MODEL_LEN"):
        return None
    return default_and_longest_len(args, planner.model, release)[1]


CAUSE = Cause(entry="LR203", phase="startup_kv")
