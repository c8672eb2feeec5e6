"""Which changes of flags make a server start and hold: every lever tried on the memory model, what works kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.known_bugs import KnownBug
from legroom.planning.capacity_search import SearchAnswer, search_flags
from legroom.planning.checkpoints import quantized_checkpoints
from legroom.planning.levers import LAST_RESORTS, LEVERS, SUPPORTED, Lever, less_utilization
from legroom.planning.plan import Advice, Plan, Target, lacks_room_for_page_cache, plan
from legroom.planning.search_space import CapacityGoal
from legroom.units import human_bytes
from legroom.vllm.args import ServeArgs
from legroom.vllm.command_line import any_release_words
from legroom.vllm.resolve import served_model

MOST_ADVICE = 5
USEFUL_CONTEXT = 4096
"""A context below this is no use for most: another checkpoint is named before it."""
_CONTEXTS = (131072, 65536, 32768, 16384, 8192, 4096, 2048)
_CLUSTER = (2, 4, 8, 16, 32)
_SEARCHED = ("max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization", "max_cudagraph_capture_size")
_COSTLY_FLAGS = frozenset({"kv_cache_dtype", "enforce_eager", "max_num_seqs", "max_num_batched_tokens"})
"""What a shorter context is preferred to, in a combination."""
_TOO_MANY_COSTLY = 2
_COST_OF_SHORT_CONTEXT = 7
USUAL_UTILIZATION = 0.96
"""Above this next to nothing is left for what vLLM does not count: whoever has another way takes it."""
_COST_OF_FULL_CARD = 15
_NO_FLAG_HELPS = frozenset({"unsupported_architecture"})
"""Only another release runs it."""


def with_advice(first: Plan, keep: Iterable[str] = (), *, enough: int | None = None) -> Plan:
    """The plan with what would fix it; `keep` names flags that must not change. A plan that fits needs none.

    One lever alone where that is enough; else several together, found as a wish is; else what nobody wants who has
    another way. A number of GPUs that was given is not exceeded. Who shows only the first few fixes says how many are
    `enough`: those are the same, without the search for others and for a number of GPUs that would do.
    """
    if first.verdict == "fits":
        return first
    if _host_memory_is_short(first):
        room = f"no flag helps where the host's memory is too small: allow {human_bytes(first.host.request_bytes)}"
        return replace(first, advised=True, notes=(*first.notes, room))
    kept = frozenset(keep)
    if first.bug is not None:
        return _around_bug(first, first.bug, kept)
    if first.starts and lacks_room_for_page_cache(first.target, first.settings, first.memory):
        # Only a smaller pool helps beside what the user does by hand.
        advice = next(
            (_working_proposal(lever, first, kept) for lever in LEVERS if lever.propose is less_utilization), None
        )
        return replace(first, advice=(advice,) if advice else (), advised=True)
    if first.memory.refused and (failure := first.memory.failure) and failure.id in _NO_FLAG_HELPS:
        return replace(first, advised=True)
    if first.memory.refused:
        advice = _working_proposal(SUPPORTED, first, kept) or _supported_and_more(first, kept)
        return replace(first, advice=(advice,) if advice else (), advised=True)
    working = _single_changes(first, kept, enough)
    if not _fits_on_these_gpus(working, first):
        working += _combined_changes(first, kept)
    wanted = any(advice.plan.verdict == "fits" for advice in working)
    if not _fits_on_these_gpus(working, first):
        working += [advice for lever in LAST_RESORTS if (advice := _last_resort(lever, first, kept))]
    sure = [advice for advice in working if advice.plan.verdict == "fits"] or working
    # Where only a last resort helps, the number of GPUs that would do is worth knowing beside it.
    notes = (*first.notes, *(() if wanted or enough is not None else _more_gpus_notes(first, kept)))
    return replace(first, advice=_ranked(sure), advised=True, notes=notes)


def with_quick_advice(first: Plan, enough: int, is_time_up: Callable[[], bool] = lambda: False) -> Plan:
    """The plan with its first fixes where one lever alone is a fix, which is quickly seen. Where it takes a search, or
    time is up before every lever was tried, it is not `advised`, and has the fixes that were seen by then."""
    if is_time_up():
        return first
    failure = first.memory.failure
    no_flag_helps = failure is not None and failure.id in _NO_FLAG_HELPS
    if first.memory.refused and not no_flag_helps and first.bug is None and not _host_memory_is_short(first):
        supported = _working_proposal(SUPPORTED, first, frozenset(), is_time_up)
        return replace(first, advice=(supported,), advised=True) if supported else first
    lacks_cache_room = first.starts and lacks_room_for_page_cache(first.target, first.settings, first.memory)
    if (
        first.verdict == "fits"
        or first.memory.refused
        or first.bug is not None
        or _host_memory_is_short(first)
        or lacks_cache_room
    ):
        return with_advice(first, enough=enough)
    working = _single_changes(first, frozenset(), enough, is_time_up)
    if not _fits_on_these_gpus(working, first):
        return first
    sure = [advice for advice in working if advice.plan.verdict == "fits"]
    return replace(first, advice=_ranked(sure), advised=not is_time_up())


def _single_changes(
    first: Plan, kept: frozenset[str], enough: int | None, is_time_up: Callable[[], bool] = lambda: False
) -> list[Advice]:
    """What each lever does alone, up to where the first `enough` that fit are cheaper than whatever else is left."""
    working: list[Advice] = []
    failure = first.memory.failure
    too_big = failure is not None and failure.id == "weights_too_big"
    for lever in LEVERS:
        if too_big and not lever.shrinks_weights:
            continue
        sure = [each for each in working if each.plan.verdict == "fits" and _cost(each) <= lever.cost]
        if is_time_up() or (enough is not None and len(sure) >= enough and _fits_on_these_gpus(sure, first)):
            break
        if advice := _working_proposal(lever, first, kept, is_time_up):
            working.append(advice)
    return working


def _ranked(advice: Iterable[Advice]) -> tuple[Advice, ...]:
    """The cheapest first, each change once: a lever and the search for a combination may find the same."""
    ranked: list[Advice] = []
    for each in sorted(advice, key=_cost):
        if all(each.flags != better.flags for better in ranked):
            ranked.append(each)
    return tuple(ranked[:MOST_ADVICE])


def _supported_and_more(first: Plan, kept: frozenset[str]) -> Advice | None:
    """What the release refuses left out or replaced, and what it takes beyond that to start."""
    for flags, changed in _planned_proposals(SUPPORTED, first, kept):
        if changed.memory.refused:
            continue
        more = next(iter(with_advice(changed, kept | flags.keys()).advice), None)
        if more is not None:
            trades = f"{SUPPORTED.trades}; {more.trades}"
            return Advice({**flags, **more.flags}, why(first, more.plan), more.plan, trades)
    return None


def _around_bug(first: Plan, bug: KnownBug, kept: frozenset[str]) -> Plan:
    """What keeps a bug of the release from ending the start: the flags or the steps that its threads name."""
    changed = _plan_with(first, bug.flags) if bug.flags and not kept.intersection(bug.flags) else None
    variables = [f"{name}={value}" for name, value in bug.env.items()]
    steps = [*([f"set {' '.join(variables)}"] if variables else []), *bug.steps]
    notes = (*first.notes, *(f"to be safe from that bug: {step}" for step in steps))
    works = changed is not None and changed.verdict == "fits"
    trades = f"{bug.title}: this keeps clear of it"
    advice = (Advice(bug.flags, why(first, changed), changed, trades),) if works and changed else ()
    return replace(first, advice=advice, advised=True, notes=notes)


def _host_memory_is_short(first: Plan) -> bool:
    """Whether it is the host's memory, and not the card's, that makes the verdict."""
    limit, failure = first.target.host_limit_bytes, first.memory.failure
    if failure is not None:
        return failure.id == "host_ram_oom"
    return limit is not None and limit < first.host.held_bytes


def _fits_on_these_gpus(working: Sequence[Advice], first: Plan) -> bool:
    """Whether some advice fits on the GPUs that are there, without giving up several things for it."""
    return any(
        each.plan.verdict == "fits"
        and each.plan.args.gpus_needed <= first.target.gpus
        and len(_COSTLY_FLAGS.intersection(each.flags)) < _TOO_MANY_COSTLY
        for each in working
    )


def _cost(advice: Advice) -> int:
    cost = sum(lever.cost for lever in (*LEVERS, *LAST_RESORTS) if lever.trades in advice.trades)
    short = advice.flags.get("max_model_len", USEFUL_CONTEXT) < USEFUL_CONTEXT
    is_full = advice.flags.get("gpu_memory_utilization", 0.0) > USUAL_UTILIZATION
    return (max(cost, _COST_OF_SHORT_CONTEXT) if short else cost) + (_COST_OF_FULL_CARD if is_full else 0)


def _working_proposal(
    lever: Lever, start: Plan, kept: frozenset[str], is_time_up: Callable[[], bool] = lambda: False
) -> Advice | None:
    """The first proposal that fits; failing that, the first that at least starts where the plan did not."""
    starts: Advice | None = None
    for flags, changed in _planned_proposals(lever, start, kept):
        if changed.verdict == "fits":
            return Advice(flags, why(start, changed), changed, lever.trades)
        if starts is None and changed.starts and not start.starts:
            starts = Advice(flags, why(start, changed), changed, lever.trades)
        if is_time_up():
            break
    return starts


def _last_resort(lever: Lever, start: Plan, kept: frozenset[str]) -> Advice | None:
    """A last resort, with whatever else it takes: the first proposal that fits so."""
    for flags, changed in _planned_proposals(lever, start, kept):
        if changed.verdict == "fits":
            return Advice(flags, why(start, changed), changed, lever.trades)
        pinned = kept | flags.keys()
        more = next(_longest_context([changed.target], changed.args, changed, pinned, _gpu_counts(start)), None)
        if more is not None:
            trades = f"{lever.trades}; {more.trades}"
            return Advice({**flags, **more.flags}, why(start, more.plan), more.plan, trades)
    return None


def _combined_changes(start: Plan, kept: frozenset[str]) -> list[Advice]:
    """Several flags at once, found as a wish for one request is. What the user gave is changed only where nothing else
    does, and GPUs are added only where no number of them was given."""
    for released in (False, True):
        found = list(_searched_changes(start, kept, released, _gpu_counts(start)))
        if found:
            return found
    if start.target.gpus_given or "tensor_parallel_size" in kept:
        return []
    return list(_searched_changes(start, kept, True, _larger_gpu_counts(start)))


def _gpu_counts(start: Plan) -> tuple[int, ...]:
    """Numbers of GPUs for one engine, up to those that are there."""
    there = start.target.gpus // start.settings.data_parallel_size
    return tuple(sorted({count for count in (1, *_CLUSTER) if count <= there} | {there}))


def _larger_gpu_counts(start: Plan) -> tuple[int, ...]:
    return tuple(count for count in _CLUSTER if count > start.target.gpus // start.settings.data_parallel_size)


def _more_gpus_notes(start: Plan, kept: frozenset[str]) -> Iterator[str]:
    """Where nothing helps on the GPUs that were given: how many would do."""
    if "tensor_parallel_size" in kept or not start.target.gpus_given:
        return
    more = next(iter(_searched_changes(start, kept, True, _larger_gpu_counts(start))), None)
    if more is not None:
        flags = " ".join(any_release_words(more.flags))
        yield f"{more.plan.args.gpus_needed} of these GPUs would hold it, with {flags}"


def _searched_changes(start: Plan, kept: frozenset[str], released: bool, gpus: tuple[int, ...]) -> Iterator[Advice]:
    """The same weights first, then quantized checkpoints where they save GPUs or hold more."""
    target, args = start.target, _args_to_search(start, kept, released)
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
    targets: Sequence[Target], args: ServeArgs, start: Plan, kept: frozenset[str], gpus: tuple[int, ...]
) -> Iterator[Advice]:
    """The longest context that holds with nothing but the parallel sizes and the share of the card changed; where that
    would never do, the longest that any setting holds."""
    costly: Advice | None = None
    for context in _contexts(start, kept):
        goal = CapacityGoal(context, 1.0, gpus, "safe")
        best = _advice_of(search_flags(targets, replace(args, max_model_len=context), goal, max_answers=1), start, goal)
        if best is None:
            continue
        if not _COSTLY_FLAGS.intersection(best.flags):
            yield best
            break
        costly = costly or best
    else:
        if costly is not None:
            yield costly


def _args_to_search(start: Plan, kept: frozenset[str], released: bool) -> ServeArgs:
    """The flags that the search leaves as they are: those that must not change, and unless `released` all given."""
    free = (*_SEARCHED, "tensor_parallel_size", "pipeline_parallel_size") if released else ()
    changed: dict[str, Any] = {name: None for name in free if name not in kept}
    # What must not change and was not given stays at the value that the release resolved.
    for name in kept.intersection(("max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization")):
        changed[name] = getattr(start.settings, name)
    if "tensor_parallel_size" in kept:
        changed["tensor_parallel_size"] = start.settings.tensor_parallel_size
    return replace(start.args, **changed)


def _contexts(start: Plan, kept: frozenset[str]) -> list[int]:
    requested_len = start.settings.max_model_len
    shorter = [] if "max_model_len" in kept else [context for context in _CONTEXTS if context < requested_len]
    return [requested_len, *shorter]


def _advice_of(result: SearchAnswer, start: Plan, goal: CapacityGoal) -> Advice | None:
    made = result.best
    if made is None or made.verdict != "fits":
        return None
    args = made.args
    if start.args.max_model_len is None and goal.context == start.settings.max_model_len:
        args = replace(args, max_model_len=None)
    flags = {
        each.name: value
        for each in fields(args)
        if (value := getattr(args, each.name)) != getattr(start.args, each.name) and value is not None
    }
    if made.target.model.name != start.target.model.name:
        flags["model"] = made.target.model.name
    changed = _plan_with(start, flags)
    if changed is None or changed.verdict != "fits":
        return None
    return Advice(flags, why(start, changed), changed, "; ".join(_trade_offs(flags, result, start)))


def _trade_offs(flags: Mapping[str, Any], result: SearchAnswer, start: Plan) -> Iterator[str]:
    """What a combination costs: as the levers say it where a lever does the same."""
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


def _planned_proposals(lever: Lever, start: Plan, kept: frozenset[str]) -> Iterator[tuple[dict[str, Any], Plan]]:
    """Every proposal of a lever that the release and the model take, laid out; none where its flag must not change."""
    for flags in lever.propose(start):
        if kept.intersection(flags):
            return
        changed = _plan_with(start, flags)
        if changed is not None:
            yield flags, changed


def _plan_with(start: Plan, flags: Mapping[str, Any]) -> Plan | None:
    try:
        args = replace(start.args, **flags)
        model = served_model(args) if "model" in flags else start.target.model
        return plan(replace(start.target, model=model, gpus=max(start.target.gpus, args.gpus_needed)), args)
    except LegroomError:
        return None  # the release or the model does not take this value, so it is no advice


def why(before: Plan, after: Plan) -> str:
    """One sentence with the numbers: what changes in the pool and the headroom."""
    old, new = before.layout, after.layout
    return (
        f"KV cache {human_bytes(max(old.kv_cache.bytes, 0))} -> {human_bytes(new.kv_cache.bytes)}, one request of "
        f"{after.settings.max_model_len:,} tokens needs {human_bytes(after.memory.kv.needed_bytes)}; "
        f"headroom {human_bytes(old.headroom_bytes)} -> {human_bytes(new.headroom_bytes)}"
    )
