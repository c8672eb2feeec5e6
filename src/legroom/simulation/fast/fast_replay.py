"""Sets the rows up, runs the kernel, and reads the outcome back."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from legroom.simulation.fast import step_kernel
from legroom.simulation.fast.jit import compiled
from legroom.simulation.fast.rows import (
    ALL_BLOCKS,
    MOST_SAMPLES,
    NONE,
    REJECTED,
    WAITING,
    BlockRow,
    PlaceRow,
    RequestRow,
    Rules,
    SampleRow,
    SeatRow,
    Sim,
    StateRow,
    StepCost,
    column,
    fill,
    numbers,
    rows,
)
from legroom.simulation.scheduler_settings import LayerGroup, SchedulerSettings
from legroom.simulation.timeline import Clocks, PoolSample, Tally, Timeline, admissible
from legroom.simulation.trace import NO_PREFIX, Trace, stream
from legroom.units import cdiv

_FEW = 2


@dataclass
class Contents:
    """Per request: see the fields of the same names in `columns.RequestRow`."""

    prefix: list[int]
    prefix_blocks: list[int]
    straddle: list[int]
    tail: list[int]
    shared_blocks: list[int]
    num_streams: int

    @property
    def own_stream(self) -> int:
        """The first of the streams that belong to one request each."""
        return self.num_streams


class _Sorter:
    def __init__(self, trace: Trace, block_size: int) -> None:
        self.trace = trace
        self.block_size = block_size
        self.streams: dict[object, int] = {}
        self.prefix_tokens: dict[int, list[int]] = {}

    def stream_number(self, content: object) -> int:
        return self.streams.setdefault(content, len(self.trace.prefix_names) + len(self.streams))

    def prefix_token(self, group: int, place: int) -> int:
        known = self.prefix_tokens.get(group, [])
        if place >= len(known):
            parts = self.trace.prefix_segments(group, 2 * place + 16)
            known = [token for name, start, end in parts for token in stream("P" + name, end)[start:]]
            self.prefix_tokens[group] = known
        return known[place]

    def sort(self, r: int) -> tuple[int, int, int, int]:
        """(prefix, prefix blocks, straddle, tail) of one request."""
        group, prefix_len = self.trace.prefix_groups[r], self.trace.prefix_lens[r]
        own = self.trace.prompt_lens[r] - prefix_len
        few: tuple[int, ...] = ()
        if self.trace.prompt_lens[r] <= _FEW:
            prompt = [self.prefix_token(group, i) for i in range(prefix_len)]
            return NONE, 0, NONE, self.stream_number((*prompt, *self.own_tokens(r, own)))
        if own == 0:
            return group, prefix_len // self.block_size, NONE, self.stream_number((group, prefix_len, ()))
        if own <= _FEW:
            prefix_len, few = self.trim(group, prefix_len, self.own_tokens(r, own))
        tail = self.stream_number((group, prefix_len, few)) if own <= _FEW else NONE
        left = self.block_size - prefix_len % self.block_size
        straddle = NONE
        if group != NO_PREFIX and left <= _FEW and left < own:
            meeting = few[:left] if few else self.own_tokens(r, left)
            place, meeting = self.trim(group, prefix_len, meeting)
            if meeting:
                straddle = self.stream_number((group, place, meeting, "block"))
            else:
                prefix_len = place
        return group, prefix_len // self.block_size, straddle, tail

    def own_tokens(self, r: int, count: int) -> tuple[int, ...]:
        return tuple(stream("U" + self.trace.id_of(r), count))

    def trim(self, group: int, prefix_len: int, own: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Own tokens that happen to go on like the prefix are as good as more prefix."""
        while own and group != NO_PREFIX and own[0] == self.prefix_token(group, prefix_len):
            prefix_len, own = prefix_len + 1, own[1:]
        return prefix_len, own


def sort_contents(trace: Trace, block_size: int) -> Contents:
    """Sort all requests of a trace by content."""
    count = len(trace)
    prefix, prefix_blocks = [NONE] * count, [0] * count
    straddle, tail, shared = [NONE] * count, [NONE] * count, [0] * count
    sorter = _Sorter(trace, block_size)
    for r, (group, prompt_len) in enumerate(zip(trace.prefix_groups, trace.prompt_lens, strict=True)):
        if group == NO_PREFIX and prompt_len > _FEW:
            continue
        prefix[r], prefix_blocks[r], straddle[r], tail[r] = sorter.sort(r)
    _leave_out_loners(trace, prefix, prefix_blocks, straddle, tail)
    for r in range(count):
        shared[r] = ALL_BLOCKS if tail[r] != NONE else prefix_blocks[r] + (straddle[r] != NONE)
    return Contents(prefix, prefix_blocks, straddle, tail, shared, len(trace.prefix_names) + len(sorter.streams))


def _leave_out_loners(
    trace: Trace, prefix: list[int], prefix_blocks: list[int], straddle: list[int], tail: list[int]
) -> None:
    """Content that only one request has need not be told apart."""
    readers, twins = Counter(prefix), Counter(tail)
    # A prefix that begins another one is read by the readers of both.
    readers.update(parent for parent, _ in trace.prefix_parents for _ in range(2))
    readers.update(group for group, (parent, _) in enumerate(trace.prefix_parents) if parent != NO_PREFIX)
    for r, group in enumerate(prefix):
        if tail[r] != NONE and twins[tail[r]] == 1:
            tail[r] = NONE
        if group != NONE and readers[group] == 1 and tail[r] == NONE:
            prefix[r], prefix_blocks[r], straddle[r] = NONE, 0, NONE


Progress = Callable[[float], None]
"""Called now and then with the share of requests that are finished."""

_TURNS_PLAIN, _TURNS_COMPILED = 2_000, 200_000
_FEWEST_TOKENS_A_BLOCK = 4
_FREE_OF_CHARGE = StepCost(0.0, 0.0, 0.0, 0.0)


def can_replay(settings: SchedulerSettings) -> bool:
    """Whether the kernel knows these rules; the reference knows all."""
    return (
        settings.engine == "V1"
        and not settings.async_scheduling
        and settings.num_speculative_tokens == 0
        and settings.groups == (LayerGroup(),)
        and settings.block_size >= _FEWEST_TOKENS_A_BLOCK
    )


class Outgrown(Exception):
    """The replay reached a state that only the reference can tell apart."""


class FastReplay:
    """One replay over rows. `use_numba` picks the compiled twin."""

    def __init__(
        self, trace: Trace, settings: SchedulerSettings, cost: StepCost | None = None, use_numba: bool = False
    ) -> None:
        self.trace, self.settings, self.use_numba = trace, settings, use_numba
        self.cost = cost or _FREE_OF_CHARGE
        accepted, self.rejections = admissible(trace, settings)
        contents = _contents(trace, settings)
        self.rules = _rules(trace, settings, contents)
        self.sim = self._sim(contents)
        if self.rejections:
            states = [WAITING if is_accepted else REJECTED for is_accepted in accepted]
            fill(self.sim.requests, "state", states, use_numba)

    def _sim(self, contents: Contents) -> Sim:
        rules, numba = self.rules, self.use_numba
        return Sim(
            state=self._state(),
            requests=self._requests(contents),
            blocks=self._blocks(),
            places=rows(PlaceRow, rules.hash_mask + 1, numba),
            seats=self._seats(),
            running=numbers(rules.max_num_seqs + 1, numba),
            due=numbers(rules.max_num_seqs + 1, numba),
            table=numbers((rules.max_num_seqs + 1) * rules.row_width, numba),
            samples=rows(SampleRow, MOST_SAMPLES, numba),
            streams=self._streams(),
        )

    def _streams(self) -> Any:
        streams = numbers(2 * len(self.trace.prefix_names) + 2, self.use_numba)
        for group, (parent, parent_len) in enumerate(self.trace.prefix_parents):
            streams[2 * group] = parent
            streams[2 * group + 1] = parent_len // self.rules.block_size
        return streams

    def _state(self) -> Any:
        rules, state = self.rules, rows(StateRow, 1, self.use_numba)
        for name, value in (
            ("blank", rules.usable_blocks),
            ("spare_ids", rules.num_ids),
            ("spare_runs", rules.num_ids),
            ("spare_slots", rules.max_num_seqs),
            ("sample_width", 1),
        ):
            fill(state, name, [value], self.use_numba)
        return state

    def _requests(self, contents: Contents) -> Any:
        trace, numba = self.trace, self.use_numba
        requests = rows(RequestRow, len(trace), numba)
        urgencies = _urgencies(trace)
        by_urgency = numbers(len(trace), False)
        for r, urgency in enumerate(urgencies):
            by_urgency[urgency] = r
        totals = [p + o for p, o in zip(trace.prompt_lens, trace.output_lens, strict=True)]
        for name, values in (
            ("arrival", trace.arrivals),
            ("prompt", trace.prompt_lens),
            ("tokens", trace.prompt_lens),
            ("total", totals),
            ("urgency", urgencies),
            ("by_urgency", by_urgency),
            ("prefix", contents.prefix),
            ("prefix_blocks", contents.prefix_blocks),
            ("straddle", contents.straddle),
            ("tail", contents.tail),
            ("shared_blocks", contents.shared_blocks),
        ):
            fill(requests, name, values, numba)
        return requests

    def _blocks(self) -> Any:
        ids, numba = self.rules.num_ids, self.use_numba
        blocks = rows(BlockRow, 2 * ids + 1, numba)
        fill(blocks, "spare_id", range(ids), numba)
        fill(blocks, "spare_run", range(ids, 2 * ids), numba)
        end = 2 * ids
        fill(blocks, "before", [*[NONE] * end, end], numba)
        fill(blocks, "after", [*[NONE] * end, end], numba)
        return blocks

    def _seats(self) -> Any:
        seats = rows(SeatRow, max(self.rules.max_num_seqs + 1, self.rules.block_size), self.use_numba)
        fill(seats, "spare_slot", range(self.rules.max_num_seqs), self.use_numba)
        return seats

    def run(self, progress: Progress | None = None) -> Timeline:
        """Replay to the end, or until the user interrupts."""
        replay: Any = compiled("replay") if self.use_numba else step_kernel.replay
        turns = _TURNS_COMPILED if self.use_numba else _TURNS_PLAIN
        interrupted = False
        try:
            while replay(self.sim, self.rules, self.cost, turns):
                if progress:
                    progress(self._total("finished") / len(self.trace))
        except KeyboardInterrupt:
            interrupted = True
        if self._total("failed"):
            raise Outgrown
        return self._timeline(interrupted)

    def _total(self, name: str) -> int:
        return int(column(self.sim.state, name, self.use_numba)[0])

    def _column(self, name: str) -> Any:
        return column(self.sim.requests, name, self.use_numba)

    def _timeline(self, interrupted: bool) -> Timeline:
        trace = self.trace
        first_sched = self._column("first_sched")
        arrivals = first_sched if trace.in_seconds else array("q", (int(arrival) for arrival in trace.arrivals))
        return Timeline(
            self.settings,
            trace,
            Tally(**{name: self._total(name) for name in Tally.__dataclass_fields__}),
            first_sched,
            self._column("first_token"),
            self._column("finish"),
            self._column("preemptions"),
            arrivals,
            list(self._samples()),
            self.rejections,
            Clocks(*(self._column(name) for name in ("sched_s", "token_s", "finish_s"))) if trace.in_seconds else None,
            interrupted,
            self._total("step"),
        )

    def _samples(self) -> Iterator[PoolSample]:
        width = self._total("sample_width")
        points = [
            column(self.sim.samples, name, self.use_numba) for name in ("used", "running", "waiting", "preempted")
        ]
        for i, (used, running, waiting, preempted) in enumerate(zip(*points, strict=True)):
            if used != NONE:
                yield PoolSample(i * width, int(used), int(running), int(waiting), int(preempted))


def _most_ids(trace: Trace, settings: SchedulerSettings, contents: Contents) -> int:
    """How many blocks can come to be told apart, or runs of counted blocks to lie in the free queue.

    In a pool that holds all that the trace could ever take, nothing is evicted or preempted: every request takes the
    blocks that it shares once, and leaves one run.
    """
    lengths = zip(trace.prompt_lens, trace.output_lens, strict=True)
    blocks = [cdiv(min(prompt + output, settings.max_model_len), settings.block_size) for prompt, output in lengths]
    if sum(blocks) > settings.usable_blocks:
        return settings.usable_blocks
    return max(len(blocks), sum(map(min, blocks, contents.shared_blocks)))


def _rules(trace: Trace, settings: SchedulerSettings, contents: Contents) -> Rules:
    width = ids = 0
    hash_size = 16
    if settings.enable_prefix_caching:
        longest = max(p + o for p, o in zip(trace.prompt_lens, trace.output_lens, strict=True))
        most = cdiv(min(longest, settings.max_model_len), settings.block_size)
        # Any request may come to be told apart when the least urgent are thrown out.
        width = most if settings.scheduling_policy == "priority" else min(most, max(contents.shared_blocks))
        ids = _most_ids(trace, settings, contents)
        while hash_size < 2 * ids:
            hash_size *= 2
    return Rules(
        usable_blocks=settings.usable_blocks,
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        chunked=int(settings.enable_chunked_prefill),
        threshold=settings.long_prefill_token_threshold,
        by_priority=int(settings.scheduling_policy == "priority"),
        watermark_blocks=settings.watermark_blocks,
        reserve_full=int(settings.reserve_full_isl),
        caching=int(settings.enable_prefix_caching),
        in_seconds=int(trace.in_seconds),
        num_requests=len(trace),
        row_width=width,
        num_ids=ids,
        hash_mask=hash_size - 1,
        own_streams=contents.num_streams,
    )


def _contents(trace: Trace, settings: SchedulerSettings) -> Contents:
    if settings.enable_prefix_caching:
        return sort_contents(trace, settings.block_size)
    none, zero = [NONE] * len(trace), [0] * len(trace)
    return Contents(none, zero, none, none, zero, 0)


def _urgencies(trace: Trace) -> Any:
    """Places in the order of (priority, arrival)."""
    if not any(trace.priorities):
        return range(len(trace))
    order = sorted(range(len(trace)), key=trace.priorities.__getitem__)
    places = array("q", bytes(8 * len(trace)))
    for place, r in enumerate(order):
        places[r] = place
    return places
