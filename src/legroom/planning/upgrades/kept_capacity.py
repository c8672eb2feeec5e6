"""The flags with which another release keeps the capacity and the headroom of the server."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Any

from legroom.planning.capacity_search import search_flags
from legroom.planning.plan import Plan, ready_command, try_flags
from legroom.planning.search_space import CapacityGoal
from legroom.records import dataclass
from legroom.units import MIB

_THOUSANDTHS = range(100, 991)  # Values of gpu_memory_utilization to try, in thousandths.
_SAME_HEADROOM_BYTES = 64 * MIB
_PINNED = ("max_num_seqs", "max_num_batched_tokens")  # Settings whose defaults trade activation memory for KV cache.


@dataclass(frozen=True)
class KeptCapacity:
    """A command for the new release, and whether it keeps capacity and headroom."""

    plan: Plan
    flags: Mapping[str, Any]
    """The flags that it changes."""
    keeps_requests: bool
    """It holds as many full-length requests as the old release."""
    keeps_headroom: bool
    gives_up: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """The `vllm serve` command of the plan, word by word."""
        return ready_command(self.plan)


def kept_capacity(old: Plan, new: Plan) -> KeptCapacity:
    """The new release's command that gives up least: unchanged if it starts and holds `old`'s requests; else with
    changed flags that hold them (if possible with as much free memory); else a searched one; else what holds most."""
    if not old.starts or old.memory.kv.shape.is_empty:
        return _capacity_of(old, new, {})
    choices = [_capacity_of(old, plan, flags) for flags, plan in _flag_choices(old, new)]
    good = [choice for choice in choices if choice.keeps_requests]
    # A command that may fail within the error band is named only where none is known to start: then the unchanged one.
    # An unchanged command that is sure to start and holds as much is never worse than a changed one.
    sure = [choice for choice in good if choice.plan.verdict == "fits"]
    if good and not good[0].flags and (good[0] in sure or (not sure and good[0].plan.layout.headroom_bytes >= 0)):
        return good[0]
    good = sure or good
    both = next((choice for choice in good if choice.keeps_headroom), None)
    if both is not None:
        return both
    if good:
        best = max(good, key=lambda choice: choice.plan.layout.headroom_bytes)
        if best.plan.layout.headroom_bytes >= 0:
            return best
    searched = _searched_capacity(old, new)
    if searched is not None:
        return searched
    starting = [choice for choice in (*good, *choices) if choice.plan.starts]
    return max(starting, key=lambda choice: choice.plan.memory.kv.max_concurrency, default=_capacity_of(old, new, {}))


def _capacity_of(old: Plan, plan: Plan, flags: Mapping[str, Any], gives_up: tuple[str, ...] = ()) -> KeptCapacity:
    """A plan made with `flags` as an answer: whether it holds the old plan's requests and keeps its free memory."""
    headroom = plan.layout.headroom_bytes >= old.layout.headroom_bytes - _SAME_HEADROOM_BYTES
    return KeptCapacity(plan, flags, _holds_old_requests(plan, old), headroom, gives_up)


def _holds_old_requests(plan: Plan, old: Plan) -> bool:
    """Whether the plan starts and holds (nearly) as many requests of the old max_model_len as the old plan."""
    if not plan.starts or plan.settings.max_model_len < old.settings.max_model_len:
        return False
    same_length = plan.memory.kv.max_concurrency * plan.settings.max_model_len / max(old.settings.max_model_len, 1)
    # A pool that is smaller by no more than a step of utilization counts as the old one.
    step_bytes = old.layout.total_bytes * _THOUSANDTHS.step / 1000
    lost_ratio = step_bytes / max(old.layout.kv_cache.bytes, step_bytes)
    return same_length >= old.memory.kv.max_concurrency * (1 - lost_ratio)


def _flag_choices(old: Plan, new: Plan) -> Iterator[tuple[dict[str, Any], Plan]]:
    """(flag changes, plan) to try: the old limits where new defaults differ, also with the smallest KV cache that
    suffices; then the same with old defaults, one by one and together."""
    kept: dict[str, Any] = {}
    if new.settings.max_model_len != old.settings.max_model_len and not old.settings.auto_fit_len:
        kept["max_model_len"] = old.settings.max_model_len
    if new.settings.max_num_seqs < old.settings.max_num_seqs:
        kept["max_num_seqs"] = old.settings.max_num_seqs
    start = try_flags(new, kept) if kept else new
    if start is None:
        return
    yield kept, start
    defaults = {name: getattr(old.settings, name) for name in _PINNED}
    pins = {name: value for name, value in defaults.items() if value != getattr(start.settings, name)}
    together = [pins] if len(pins) > 1 else []
    for pinned in ({}, *({name: value} for name, value in pins.items()), *together):
        base = try_flags(start, pinned) if pinned else start
        if base is None:
            continue
        flags = {**kept, **pinned}
        if pinned:
            yield flags, base
        yield from (({**flags, **pool}, plan) for pool, plan in _smallest_pools(old, base))


def _smallest_pools(old: Plan, base: Plan) -> Iterator[tuple[Mapping[str, Any], Plan]]:
    """(flags, plan) with the smallest KV cache that holds `old`'s requests: its bytes if given, else utilization."""
    if base.args.num_gpu_blocks_override is not None:
        return
    if base.args.kv_cache_memory_bytes is not None:
        choices: list[Mapping[str, Any]] = [
            {"kv_cache_memory_bytes": MIB * number} for number in range(1, base.layout.total_bytes // MIB)
        ]
    else:
        choices = [{"gpu_memory_utilization": thousandths / 1000} for thousandths in _THOUSANDTHS]

    def pool_suffices(flags: Mapping[str, Any]) -> bool:
        """Whether the KV cache holds `old`'s tokens, whatever the start-up checks say, so that larger ones do too."""
        plan = try_flags(base, flags)
        if plan is None:
            return False
        tokens = plan.memory.kv.max_concurrency * plan.settings.max_model_len
        return tokens >= old.memory.kv.max_concurrency * old.settings.max_model_len

    at = bisect_left(choices, True, key=pool_suffices)  # a larger pool holds more
    least = try_flags(base, choices[at]) if at < len(choices) else None
    if least is not None:
        yield choices[at], least


def _searched_capacity(old: Plan, new: Plan) -> KeptCapacity | None:
    """The flags that a search finds for the requests that all engines of the old plan hold; None if it finds none."""
    concurrency = old.memory.kv.max_concurrency * old.settings.data_parallel_size
    if old.memory.kv.max_concurrency < 1:
        return None
    goal = CapacityGoal(old.settings.max_model_len, concurrency, (new.settings.gpus_used,), "tight")
    result = search_flags([new.target], new.args, goal, max_answers=1)
    if result.best is None:
        return None
    found = vars(result.best.args)
    changed = {name: value for name, value in found.items() if value != getattr(new.args, name)}
    return _capacity_of(old, result.best, changed, result.losses)
