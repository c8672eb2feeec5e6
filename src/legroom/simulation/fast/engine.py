"""Sets the columns up, runs the kernel, and reads the outcome back."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any

from legroom.simulation.fast import columns as c
from legroom.simulation.fast import kernel
from legroom.simulation.fast.content import Contents, sort_contents
from legroom.simulation.fast.jit import compiled
from legroom.simulation.rejection import admissible
from legroom.simulation.settings import SchedulerSettings
from legroom.simulation.timeline import Sample, Tally, Timeline
from legroom.simulation.trace import Trace
from legroom.units import cdiv

_TURNS_PLAIN, _TURNS_COMPILED = 2_000, 200_000
_FEWEST_TOKENS_A_BLOCK = 4
Progress = Callable[[float], None]


def can_replay(settings: SchedulerSettings) -> bool:
    """Whether the kernel knows these rules; the reference knows all."""
    return (
        settings.engine == "V1"
        and not settings.async_scheduling
        and settings.num_speculative_tokens == 0
        and len(settings.groups) == 1
        and settings.groups[0].sliding_window is None
        and settings.block_size >= _FEWEST_TOKENS_A_BLOCK
    )


class Outgrown(Exception):
    """The replay reached a state that only the reference can tell apart."""


class FastReplay:
    """One replay over columns. `use_numba` picks the compiled twin."""

    def __init__(
        self, trace: Trace, settings: SchedulerSettings, cost: c.StepCost | None = None, use_numba: bool = False
    ) -> None:
        self.trace, self.settings, self.use_numba = trace, settings, use_numba
        accepted, self.rejections = admissible(trace, settings)
        contents = _contents(trace, settings)
        self.cost = cost or c.StepCost(1.0, 0.0, 0.0, 0.0)
        self.rules = self._rules(contents)
        self.requests = self._requests(contents, accepted)
        self.pool = self._pool()
        self.queues = self._queues()
        self.books = self._books()
        self.streams = self._ints([0, 0] * max(1, len(trace.prefix_names)))

    def _ints(self, values: Any) -> Any:
        if not self.use_numba:
            return values if isinstance(values, list) else list(values)
        import numpy as np

        return np.array(values, dtype=np.int64)

    def _full(self, count: int, value: int) -> Any:
        if not self.use_numba:
            return [value] * count
        import numpy as np

        return np.full(count, value, dtype=np.int64)

    def _floats(self, count: int) -> Any:
        if not self.use_numba:
            return [0.0] * count
        import numpy as np

        return np.zeros(count)

    def _rules(self, contents: Contents) -> c.Rules:
        settings, trace = self.settings, self.trace
        width = 0
        if settings.enable_prefix_caching:
            longest = max(p + o for p, o in zip(trace.prompt_lens, trace.output_lens, strict=True))
            most = cdiv(min(longest, settings.max_model_len), settings.block_size)
            by_priority = settings.scheduling_policy == "priority"
            width = most if by_priority else min(most, max(contents.shared_blocks))
        return c.Rules(
            settings.usable_blocks, settings.block_size, settings.max_num_seqs, settings.max_num_batched_tokens,
            int(settings.enable_chunked_prefill), settings.long_prefill_token_threshold,
            int(settings.scheduling_policy == "priority"), settings.watermark_blocks, int(settings.reserve_full_isl),
            int(settings.enable_prefix_caching), int(trace.in_seconds), width, contents.num_streams,
        )  # fmt: skip

    def _requests(self, contents: Contents, accepted: Any) -> c.Requests:
        trace, count = self.trace, len(self.trace)
        arrival: Any = list(trace.arrivals)
        if self.use_numba:
            import numpy as np

            arrival = np.array(trace.arrivals, dtype=np.float64)
        prompt = self._ints(trace.prompt_lens)
        output = self._ints(trace.output_lens)
        total = prompt + output if self.use_numba else [p + o for p, o in zip(prompt, output, strict=True)]
        empty = [self._full(count, value) for value in (0, 0, 0, 0, c.WAITING, 0, 0, c.NONE, 0, 0, c.NONE, 0, 0)]
        state = empty[4]
        for r, ok in enumerate(accepted):
            if not ok:
                state[r] = c.REJECTED
        empty[1] = prompt.copy()
        return c.Requests(
            arrival, prompt, total, self._ints(_urgencies(trace)), self._ints(contents.prefix),
            self._ints(contents.prefix_blocks), self._ints(contents.straddle), self._ints(contents.tail),
            self._ints(contents.shared_blocks), *empty, *[self._full(count, c.NONE) for _ in range(3)],
        )  # fmt: skip

    def _pool(self) -> c.Pool:
        rules, blocks = self.rules, self.rules.usable_blocks
        ids = blocks if rules.caching else 0
        end = 2 * ids
        counts = self._ints([blocks, 0, ids, ids, rules.max_num_seqs, 0])
        size = 16
        while size < 2 * ids:
            size *= 2
        before, after = self._full(end + 1, c.NONE), self._full(end + 1, c.NONE)
        before[end] = after[end] = end
        return c.Pool(
            counts, self._full(ids, 0), *[self._full(ids, c.NONE) for _ in range(4)], before, after,
            self._full(ids, 0), self._full(ids, c.NONE), self._ints(range(ids)), self._ints(range(ids)),
            self._ints(range(rules.max_num_seqs)), self._full(rules.max_num_seqs * rules.row_width + 1, c.NONE),
            self._full(rules.row_width + 1, c.NONE), self._full(size, c.NONE), self._full(size, c.NONE),
        )  # fmt: skip

    def _queues(self) -> c.Queues:
        seats, bs = self.rules.max_num_seqs, self.rules.block_size
        by_urgency = self._full(len(self.trace), 0)
        for r, urgency in enumerate(self.requests.urgency):
            by_urgency[urgency] = r
        return c.Queues(
            self._full(12, 0), *[self._full(seats + 1, 0) for _ in range(3)], self._full(bs, 0), self._full(bs, 0),
            self._full(len(self.trace) + 1, 0), by_urgency, self._full(seats + 1, 0), self._full(seats + 1, 0),
        )  # fmt: skip

    def _books(self) -> c.Books:
        totals = self._full(13, 0)
        totals[c.SAMPLE_WIDTH] = 1
        samples = self._full(c.MOST_SAMPLES * c.SAMPLE_FIELDS, c.NONE)
        timed = len(self.trace) if self.trace.in_seconds else 1
        return c.Books(totals, samples, *[self._floats(size) for size in (1, timed, timed, timed)])

    def run(self, progress: Progress | None = None) -> Timeline:
        """Replay to the end, or to the interruption by the user."""
        replay: Any = compiled("replay") if self.use_numba else kernel.replay
        turns = _TURNS_COMPILED if self.use_numba else _TURNS_PLAIN
        state = (self.rules, self.cost, self.queues, self.books, self.pool, self.requests, self.streams)
        interrupted = False
        try:
            while replay(*state, turns):
                if progress:
                    progress(self.books.totals[c.FINISHED] / len(self.trace))
        except KeyboardInterrupt:
            interrupted = True
        if self.pool.counts[c.FAILED]:
            raise Outgrown
        return self._timeline(interrupted)

    def _timeline(self, interrupted: bool) -> Timeline:
        totals = [int(value) for value in self.books.totals]
        requests, trace = self.requests, self.trace
        timeline = Timeline(
            self.settings, trace, Tally(*totals[:12]),
            requests.first_sched, requests.first_token, self._finish_steps(), requests.preemptions,
            array("q", (int(arrival) for arrival in trace.arrivals)) if not trace.in_seconds else requests.first_sched,
            list(self._samples(totals[c.SAMPLE_WIDTH])), self.rejections,
            interrupted=interrupted, last_step=int(self.queues.counts[c.STEP]),
        )  # fmt: skip
        return timeline

    def _finish_steps(self) -> Any:
        return self.requests.finish

    def _samples(self, width: int) -> Iterator[Sample]:
        points = self.books.samples
        for i in range(c.MOST_SAMPLES):
            used, running, waiting = (int(value) for value in points[i * 3 : i * 3 + 3])
            if used != c.NONE:
                yield Sample(i * width, used, running, waiting)


def _contents(trace: Trace, settings: SchedulerSettings) -> Contents:
    if settings.enable_prefix_caching:
        return sort_contents(trace, settings.block_size)
    none, zero = [c.NONE] * len(trace), [0] * len(trace)
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
