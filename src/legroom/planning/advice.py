"""Which changes of flags make a server start and hold: every lever tried on the memory model, what works kept."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.bundled import checkpoint_role
from legroom.facts.flags import flags_changing
from legroom.facts.known_bugs import KnownBug
from legroom.planning.capacity_search import USUAL_UTILIZATION, SearchAnswer, search_flags
from legroom.planning.checkpoints import quantized_checkpoints
from legroom.planning.levers import LAST_RESORTS, LEVERS, SUPPORTED, Lever, idle_gpus, less_utilization, shorter_context
from legroom.planning.plan import Advice, Plan, Target, lacks_room_for_page_cache, plan
from legroom.planning.search_space import CapacityGoal
from legroom.units import human_bytes
from legroom.vllm.args import ServeArgs
from legroom.vllm.command_line import any_release_words
from legroom.vllm.resolve import served_model

MOST_ADVICE = 5
USEFUL_CONTEXT = 4096
"""A shorter context is proposed after another checkpoint."""
_CONTEXTS = (131072, 65536, 32768, 16384, 8192, 4096, 2048)
_CLUSTER = (2, 4, 8, 16, 32)
_SEARCHED = ("max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization", "max_cudagraph_capture_size")
_COSTLY_FLAGS = frozenset({"kv_cache_dtype", "enforce_eager", "max_num_seqs", "max_num_batched_tokens"})
"""In a combination, a shorter context is preferred to these."""
_COST_OF_CUT_LENGTH = next(lever.cost for lever in LEVERS if lever.name == "quantized weights")
"""That of another checkpoint, for less than the length that was given."""
_COST_OF_SHORT_CONTEXT = _COST_OF_CUT_LENGTH + 1
_COST_OF_FULL_CARD = 15  # A utilization above the usual is proposed last.
_NO_FLAG_HELPS = frozenset({"unsupported_architecture"})  # Failures that only another release avoids.
KeptFlags = frozenset[str]
"""Flags, by dest, that advice must not change."""


def with_advice(first: Plan, keep: Iterable[str] = (), *, enough: int | None = None) -> Plan:
    """The plan, if it does not fit, with flag changes that make it fit. `keep`: flags (dest) not to change; `enough`:
    stop after so many fitting single changes, and add no note on more GPUs."""
    # Single changes come first, then combinations from a search, then last resorts, all on the given GPUs.
    kept = frozenset(keep)
    if (advised := _advice_without_search(first, kept)) is not None:
        return advised
    if _host_memory_is_short(first):
        return _with_host_note(first, with_advice(_on_any_host(first), keep, enough=enough))
    if first.memory.refused:
        advice = _working_proposal(SUPPORTED, first, kept) or _supported_settings_advice(first, kept)
        return replace(first, advice=(advice,) if advice else (), advised=True)
    working = _single_changes(first, kept, enough)
    if not _fits_on_these_gpus(working, first):
        working += _combined_changes(first, kept)
    has_fit = any(advice.plan.verdict == "fits" for advice in working)
    if not _fits_on_these_gpus(working, first):
        working += [advice for lever in LAST_RESORTS if (advice := _last_resort(lever, first, kept))]
    fitting = [advice for advice in working if advice.plan.verdict == "fits"] or working
    # Where only a last resort helps, the note says how many GPUs would suffice.
    notes = (*first.notes, *(() if has_fit or enough is not None else _more_gpus_notes(first, kept)))
    return replace(first, advice=_ranked(first, fitting), advised=True, notes=notes)


def with_longer_context_first(advised: Plan) -> Plan:
    """The plan's advice with cuts of a given max_model_len last; if the first still cuts it, advice that allows at
    least twice that length is added, even if it is tight."""
    if advised.args.max_model_len is not None:

        def rank(each: Advice) -> int:
            """The loss rank; a cut of the given max_model_len counts more than any loss that keeps the checkpoint."""
            return max(_loss_rank(each), _COST_OF_CUT_LENGTH if "max_model_len" in each.flags else 0)

        advised = replace(advised, advice=tuple(sorted(advised.advice, key=rank)))
    first = next(iter(advised.advice), None)
    here = [each.plan for each in advised.advice if each.plan.args.gpus_needed <= advised.target.gpus]
    if first is None or not here or first.plan.verdict != "fits" or "max_model_len" not in first.flags:
        return advised
    longest, args = max(each.settings.max_model_len for each in here), _args_to_search(advised, frozenset(), False)
    for context in _context_lengths(advised, frozenset()):
        if context < 2 * longest:
            break
        goal = CapacityGoal(context, 1.0, _gpu_counts(advised), "balanced", USUAL_UTILIZATION)
        found = search_flags([first.plan.target], replace(args, max_model_len=context), goal, max_answers=1)
        if (longer := _advice_of(found, advised, goal, ("fits", "tight"))) is not None:
            others, added = advised.advice[: MOST_ADVICE - 1], (_with_role(advised, longer),)
            leads = longest < USEFUL_CONTEXT and not _fills_card(longer)
            return replace(advised, advice=added + others if leads else others + added)
    return advised


def with_quick_advice(first: Plan, enough: int, is_time_up: Callable[[], bool] = lambda: False) -> Plan:
    """The plan with advice of single flag changes, tried until `enough` of little loss fit or `is_time_up()`. `advised`
    stays False where time ran out or no single change makes it fit."""
    if is_time_up():
        return first
    if (advised := _advice_without_search(first, frozenset())) is not None:
        return advised
    if _host_memory_is_short(first):
        return _with_host_note(first, with_quick_advice(_on_any_host(first), enough, is_time_up))
    if first.memory.refused:
        supported = _working_proposal(SUPPORTED, first, frozenset(), is_time_up)
        return replace(first, advice=(supported,), advised=True) if supported else first
    working = _single_changes(first, frozenset(), enough, is_time_up)
    if not _fits_on_these_gpus(working, first):
        return first
    fitting = [advice for advice in working if advice.plan.verdict == "fits"]
    return replace(first, advice=_ranked(first, fitting), advised=not is_time_up())


def _advice_without_search(first: Plan, kept: KeptFlags) -> Plan | None:
    """The plan with advice if no search is needed: it fits, or its one remedy (or lack of one) is known; else None."""
    if first.verdict == "fits":
        return first
    failure = first.memory.failure
    if _host_memory_is_short(first) and (failure is None or failure.id == "host_ram_oom"):
        return _with_host_note(first, replace(first, advised=True))
    if first.bug is not None:
        return _with_bug_workaround(first, first.bug, kept)
    if first.starts and lacks_room_for_page_cache(first.target, first.settings, first.memory):
        # Only a smaller KV cache helps beside dropping the page cache by hand.
        lever = next(lever for lever in LEVERS if lever.propose is less_utilization)
        advice = _working_proposal(lever, first, kept)
        return replace(first, advice=(advice,) if advice else (), advised=True)
    if first.memory.refused and failure and failure.id in _NO_FLAG_HELPS:
        return replace(first, advised=True)
    return None


def _single_changes(
    first: Plan, kept: KeptFlags, enough: int | None, is_time_up: Callable[[], bool] = lambda: False
) -> list[Advice]:
    """The first working change of each lever, until `enough` cheap ones fit on these GPUs (None: of every lever)."""
    working: list[Advice] = []
    failure = first.memory.failure
    too_big = failure is not None and failure.id == "weights_too_big"
    for lever in LEVERS:
        if too_big and not lever.shrinks_weights:
            continue
        sure = [each for each in working if each.plan.verdict == "fits" and _loss_rank(each) <= lever.cost]
        if is_time_up() or (enough is not None and len(sure) >= enough and _fits_on_these_gpus(sure, first)):
            break
        if advice := _working_proposal(lever, first, kept, is_time_up):
            is_tight_on_idle = lever.propose is idle_gpus and advice.plan.verdict == "tight"
            more = _single_changes(advice.plan, kept | advice.flags.keys(), 1, is_time_up) if is_tight_on_idle else []
            sure = sorted((each for each in more if each.plan.verdict == "fits"), key=_loss_rank)
            working += [_joined_advice(lever, advice.flags, each, first) for each in sure[:1]] or [advice]
    return working


def _ranked(first: Plan, advice: Iterable[Advice]) -> tuple[Advice, ...]:
    """The MOST_ADVICE of least loss, no flags twice; a note where a chat model is to replace the base model `first`."""
    ranked: list[Advice] = []
    for each in sorted(advice, key=_loss_rank):
        if all(each.flags != better.flags for better in ranked):
            ranked.append(_with_role(first, each))
    return tuple(ranked[:MOST_ADVICE])


def _with_role(first: Plan, advice: Advice) -> Advice:
    """The advice, with a note where it names an instruction-tuned checkpoint in place of a base model."""
    name = advice.flags.get("model", "")
    if checkpoint_role(name) != "chat" or checkpoint_role(first.target.model.name) == "chat":
        return advice
    return replace(advice, trades=f"{advice.trades}; instruction-tuned, where {first.target.model.name} is not")


def _supported_settings_advice(first: Plan, kept: KeptFlags) -> Advice | None:
    """Advice that replaces the settings the release refuses and, if need be, changes more to make it fit; else None."""
    for flags, changed in _planned_proposals(SUPPORTED, first, kept):
        if changed.memory.refused:
            continue
        more = next(iter(with_advice(changed, kept | flags.keys()).advice), None)
        if more is not None:
            return _joined_advice(SUPPORTED, flags, more, first)
    return None


def _joined_advice(lever: Lever, flags: Mapping[str, Any], more: Advice, start: Plan) -> Advice:
    """The advice for `start` that makes the lever's change `flags` first, and then those of `more`, found after it."""
    return Advice({**flags, **more.flags}, why(start, more.plan), more.plan, f"{lever.trades}; {more.trades}")


def _with_bug_workaround(first: Plan, bug: KnownBug, kept: KeptFlags) -> Plan:
    """The plan with a bug's workaround: flags as advice if it fits and changes none of `kept`, other steps as notes."""
    changed = _plan_with(first, bug.flags) if bug.flags and not kept.intersection(bug.flags) else None
    variables = " ".join(f"{name}={value}" for name, value in bug.env.items())
    steps = (f"set {variables}", *bug.steps) if variables else bug.steps
    notes = (*first.notes, *(f"to be safe from that bug: {step}" for step in steps))
    advice: tuple[Advice, ...] = ()
    if changed is not None and changed.verdict == "fits":
        advice = (Advice(bug.flags, why(first, changed), changed, f"{bug.title}: this keeps clear of it"),)
    return replace(first, advice=advice, advised=True, notes=notes)


def _host_memory_is_short(first: Plan) -> bool:
    """Whether the server's host memory may exceed the host's limit, so that no change on the GPU makes it fit."""
    limit = first.target.host_limit_bytes
    return limit is not None and limit < first.host.held_bytes


def _on_any_host(first: Plan) -> Plan:
    """The plan without a limit of the host's memory, to find what helps on the GPU."""
    return replace(first, target=replace(first.target, host_limit_bytes=None))


def _with_host_note(first: Plan, advised: Plan) -> Plan:
    """The plan with the advice found without a host memory limit (`advised`), and a note on the limit that it needs."""
    note = f"no flag helps where the host's memory is too small: allow {human_bytes(first.host.request_bytes)}"
    advice = (replace(each, plan=_plan_with(first, each.flags) or each.plan) for each in advised.advice)
    return replace(advised, target=first.target, advice=tuple(advice), notes=(*advised.notes, note))


def _fits_on_these_gpus(working: Sequence[Advice], first: Plan) -> bool:
    """Whether some advice fits on no more GPUs than planned and changes at most one costly flag."""
    return any(
        each.plan.verdict == "fits"
        and each.plan.args.gpus_needed <= first.target.gpus
        and len(_COSTLY_FLAGS.intersection(each.flags)) <= 1
        for each in working
    )


def _loss_rank(advice: Advice) -> int:
    """Rank of an advice by what it gives up (speed, length, precision ...); the lowest is proposed first."""
    cost = sum(lever.cost for lever in (*LEVERS, *LAST_RESORTS) if lever.trades in advice.trades)
    short = advice.flags.get("max_model_len", USEFUL_CONTEXT) < USEFUL_CONTEXT
    return (max(cost, _COST_OF_SHORT_CONTEXT) if short else cost) + (_COST_OF_FULL_CARD if _fills_card(advice) else 0)


def _fills_card(advice: Advice) -> bool:
    """Whether an advice raises gpu_memory_utilization above USUAL_UTILIZATION."""
    return bool(advice.flags.get("gpu_memory_utilization", 0.0) > USUAL_UTILIZATION)


def _working_proposal(
    lever: Lever, start: Plan, kept: KeptFlags, is_time_up: Callable[[], bool] = lambda: False
) -> Advice | None:
    """The lever's first proposal that fits; else the first that starts, if the plan does not start; else None."""
    starts: Advice | None = None
    for flags, changed in _planned_proposals(lever, start, kept):
        if changed.verdict == "fits":
            return Advice(flags, why(start, changed), changed, lever.trades)
        if starts is None and changed.starts and not start.starts:
            starts = Advice(flags, why(start, changed), changed, lever.trades)
        if is_time_up():
            break
    return starts


def _last_resort(lever: Lever, start: Plan, kept: KeptFlags) -> Advice | None:
    """The first proposal of a costly lever (a smaller model ...) that fits, alone or with more changes; else None."""
    for flags, changed in _planned_proposals(lever, start, kept):
        if changed.verdict == "fits":
            return Advice(flags, why(start, changed), changed, lever.trades)
        pinned = kept | flags.keys()
        more = next(_longest_context([changed.target], changed.args, changed, pinned, _gpu_counts(start)), None)
        if more is not None:
            return _joined_advice(lever, flags, more, start)
    return None


def _combined_changes(start: Plan, kept: KeptFlags) -> list[Advice]:
    """Flag combinations that hold one full-length request: with the given flags, else without, else on more GPUs."""
    given, freed = (_args_to_search(start, kept, released) for released in (False, True))
    for args in (given,) if freed == given else (given, freed):
        found = list(_searched_changes(start, kept, args, _gpu_counts(start)))
        if found:
            return found
    if start.target.gpus_given or "tensor_parallel_size" in kept:
        return []
    return list(_searched_changes(start, kept, freed, _larger_gpu_counts(start)))


def _gpu_counts(start: Plan) -> tuple[int, ...]:
    """Numbers of GPUs of one engine to search, up to the planned number."""
    there = start.target.gpus // start.settings.data_parallel_size
    return tuple(sorted({count for count in (1, *_CLUSTER) if count <= there} | {there}))


def _larger_gpu_counts(start: Plan) -> tuple[int, ...]:
    """The usual GPU counts (2 to 32) above what one data-parallel replica of the plan uses."""
    return tuple(count for count in _CLUSTER if count > start.target.gpus // start.settings.data_parallel_size)


def _more_gpus_notes(start: Plan, kept: KeptFlags) -> Iterator[str]:
    """A note with the number of GPUs that suffices, where no advice helps on the given ones; nothing else."""
    if "tensor_parallel_size" in kept or not start.target.gpus_given:
        return
    freed = _args_to_search(start, kept, True)
    more = next(_searched_changes(start, kept, freed, _larger_gpu_counts(start)), None)
    if more is not None:
        flags = " ".join(any_release_words(more.flags))
        yield f"{more.plan.args.gpus_needed} of these GPUs would hold it, with {flags}"


def _searched_changes(start: Plan, kept: KeptFlags, args: ServeArgs, gpus: tuple[int, ...]) -> Iterator[Advice]:
    """Combinations found with the flags of `args` fixed: of the same weights, then of quantized ones on fewer GPUs."""
    if not gpus:
        return
    target = start.target
    same = list(_longest_context([target], args, start, kept, gpus))
    yield from same
    others = [] if "model" in kept else quantized_checkpoints(target, start.args)
    used = min((each.plan.args.engine_ranks for each in same), default=0)
    fewer = tuple(count for count in gpus if count < used) if used else gpus
    if others and fewer:
        yield from _longest_context(
            [target, *(replace(target, model=model) for model in others)], args, start, kept, fewer
        )


def _longest_context(
    targets: Sequence[Target], args: ServeArgs, start: Plan, kept: KeptFlags, gpus: tuple[int, ...]
) -> Iterator[Advice]:
    """One advice, with the longest max_model_len that needs no costly flag, else the longest with costly ones."""
    costly: Advice | None = None
    for context in _context_lengths(start, kept):
        goal = CapacityGoal(context, 1.0, gpus, "safe")
        best = _advice_of(search_flags(targets, replace(args, max_model_len=context), goal, max_answers=1), start, goal)
        if best is None:
            continue
        best = _lengthened(best, start)
        if not _COSTLY_FLAGS.intersection(best.flags):
            yield best
            break
        costly = costly or best
    else:
        if costly is not None:
            yield costly


def _lengthened(found: Advice, start: Plan) -> Advice:
    """The advice with the longest max_model_len that its other flags surely hold, if longer than the searched one."""
    whole = _plan_with(start, {name: value for name, value in found.flags.items() if name != "max_model_len"})
    for shorter in shorter_context(whole) if whole and "max_model_len" in found.flags else ():
        if shorter["max_model_len"] <= found.flags["max_model_len"]:
            break
        longer = _plan_with(start, {**found.flags, **shorter})
        if longer and longer.verdict == "fits":
            return replace(found, flags={**found.flags, **shorter}, why=why(start, longer), plan=longer)
    return found


def _args_to_search(start: Plan, kept: KeptFlags, released: bool) -> ServeArgs:
    """The arguments that a search keeps: those given, or if `released` without those it may change (not in `kept`)."""
    free = (*_SEARCHED, "tensor_parallel_size", "pipeline_parallel_size") if released else ()
    changed: dict[str, Any] = {name: None for name in free if name not in kept}
    # What must not change and was not given stays at the value that the release resolved.
    for name in kept.intersection(("max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization")):
        changed[name] = getattr(start.settings, name)
    if "tensor_parallel_size" in kept:
        changed["tensor_parallel_size"] = start.settings.tensor_parallel_size
    return replace(start.args, **changed)


def _context_lengths(start: Plan, kept: KeptFlags) -> list[int]:
    """The planned max_model_len, then the usual shorter lengths; the planned one alone if the flag is `kept`."""
    requested_len = start.settings.max_model_len
    shorter = [] if "max_model_len" in kept else [context for context in _CONTEXTS if context < requested_len]
    return [requested_len, *shorter]


def _advice_of(
    result: SearchAnswer, start: Plan, goal: CapacityGoal, accepted: Collection[str] = ("fits",)
) -> Advice | None:
    """A search's best plan as advice: the flags that differ from `start`'s; None if its verdict is not `accepted`."""
    made = result.best
    if made is None:
        return None
    args = made.args
    if start.args.max_model_len is None and goal.context == start.settings.max_model_len:
        args = replace(args, max_model_len=None)
    given = ((name, value) for name, value in vars(args).items() if value is not None)
    flags = {name: value for name, value in given if value != getattr(start.args, name)}
    if made.target.model.name != start.target.model.name:
        flags["model"] = made.target.model.name
    changed = _plan_with(start, flags)
    if changed is None or changed.verdict not in accepted:
        return None
    return Advice(flags, why(start, changed), changed, "; ".join(_trade_offs(flags, result, start)))


def _trade_offs(flags: Mapping[str, Any], result: SearchAnswer, start: Plan) -> Iterator[str]:
    """What a combination of flags gives up, in the words of the levers (single changes) it consists of."""
    lever_names = {
        "model": "quantized weights",
        "tensor_parallel_size": "idle GPUs",
        "pipeline_parallel_size": "idle GPUs",
        "max_model_len": "shorter context",
        "kv_cache_dtype": "fp8 KV cache",
        "enforce_eager": "no CUDA graphs",
        "max_num_seqs": "fewer sequences",
        "max_num_batched_tokens": "smaller batches",
        "max_cudagraph_capture_size": "fewer captured graphs",
    }
    names = list(dict.fromkeys(lever_names[name] for name in flags if name in lever_names))
    if result.best and result.best.args.gpus_needed > start.target.gpus:
        names = ["more GPUs" if name == "idle GPUs" else name for name in names]
    if flags.get("gpu_memory_utilization", 0) > start.settings.gpu_memory_utilization:
        names.append("raise utilization")
    yield from (lever.trades for lever in LEVERS if lever.name in names)


def _planned_proposals(lever: Lever, start: Plan, kept: KeptFlags) -> Iterator[tuple[dict[str, Any], Plan]]:
    """(flags, plan) of a lever's proposals that release and model accept; ends at one that changes a `kept` flag."""
    for flags in lever.propose(start):
        if kept.intersection(flags):
            return
        changed = _plan_with(start, flags)
        if changed is not None:
            yield flags, changed


def _plan_with(start: Plan, flags: Mapping[str, Any]) -> Plan | None:
    """The plan with these flags (by dest) changed; None where the release or the model refuses them."""
    try:
        args = replace(start.args, **flags)
        model = served_model(args) if "model" in flags else start.target.model
        seen = None if flags.keys() & flags_changing("weights") else start.target.seen
        return plan(replace(start.target, model=model, gpus=max(start.target.gpus, args.gpus_needed), seen=seen), args)
    except LegroomError:
        return None  # the release or the model does not take this value, so it is no advice


def why(before: Plan, after: Plan) -> str:
    """Why a change helps: weights beyond the card, KV cache before and after, a request's need, memory left free."""
    held, total = before.layout.weights.bytes, before.layout.total_bytes
    lack = f"As it was, the weights need {human_bytes(held)}, and the card has {human_bytes(total)}. " * (held > total)
    old, new = (human_bytes(had) if (had := each.layout.kv_cache.bytes) > 0 else "none" for each in (before, after))
    return (
        f"{lack}The KV cache has {new}{f' instead of {old}' if old != new else ''}, and one request of "
        f"{after.settings.max_model_len:,} tokens needs {human_bytes(after.memory.kv.needed_bytes)}; "
        f"{human_bytes(max(after.layout.headroom_bytes, 0))} of the card stays free"
    )
