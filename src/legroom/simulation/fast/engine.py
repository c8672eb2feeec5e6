"""Sets the rows up, runs the kernel, and reads the outcome back."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any

from legroom.simulation.fast import kernel
from legroom.simulation.fast.columns import (
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
from legroom.simulation.fast.content import Contents, sort_contents
from legroom.simulation.fast.jit import compiled
from legroom.simulation.settings import LayerGroup, SchedulerSettings
from legroom.simulation.timeline import Clocks, PoolSample, Tally, Timeline, admissible
from legroom.simulation.trace import Trace
from legroom.units import cdiv

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
        replay: Any = compiled("replay") if self.use_numba else kernel.replay
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
