"""The fast replay of a trace: sets up the rows, runs the kernel, and reads the result back.

Which blocks hold equal tokens is found out without generating tokens where possible. Blocks of a shared prefix are
equal for all requests that share it. The rest of a prompt is its own, with two exceptions: a prompt that ends with its
prefix (or a token or two after it) continues with sampled tokens like others of that prefix, and the block where the
prefix ends may hold only one or two own tokens, which can be equal by chance. Tokens (see `trace.stream_tokens`) are
generated in those cases only: from three tokens on the chance is 1 in 8 billion.
"""

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from operator import add
from typing import Any

from legroom.simulation.fast import rows, step_kernel
from legroom.simulation.fast.jit import compiled
from legroom.simulation.scheduler_settings import LayerGroup, SchedulerSettings
from legroom.simulation.timeline import Clocks, PoolSample, Tally, Timeline, admissible_requests
from legroom.simulation.trace import NO_PREFIX, Trace, stream_tokens
from legroom.units import cdiv

_FEW = 2  # So few own tokens of a prompt can be equal to another's by chance, so they are generated and compared.


class _ContentStreams:
    """Numbers the token streams that fill blocks: prefix groups keep their numbers, other contents follow."""

    def __init__(self, trace: Trace, block_size: int) -> None:
        self.trace = trace
        self.block_size = block_size
        self.streams: dict[object, int] = {}
        self.prefix_tokens: dict[int, list[int]] = {}

    def stream_number(self, content: object) -> int:
        """A number for a token stream by its content (any hashable key), the same for equal contents."""
        return self.streams.setdefault(content, len(self.trace.prefix_names) + len(self.streams))

    def prefix_token(self, group: int, place: int) -> int:
        """The token id at position `place` of the shared prefix number `group`."""
        known = self.prefix_tokens.get(group, [])
        if place >= len(known):
            parts = self.trace.prefix_segments(group, 2 * place + 16)
            known = [token for name, start, end in parts for token in stream_tokens("P" + name, end)[start:]]
            self.prefix_tokens[group] = known
        return known[place]

    def streams_of_request(self, r: int) -> tuple[int, int, int, int]:
        """The fields `prefix`, `prefix_blocks`, `boundary` and `suffix` of request number `r`'s `rows.RequestRow`."""
        group, prefix_len = self.trace.prefix_groups[r], self.trace.prefix_lens[r]
        own = self.trace.prompt_lens[r] - prefix_len
        few: tuple[int, ...] = ()
        if self.trace.prompt_lens[r] <= _FEW:
            prompt = [self.prefix_token(group, i) for i in range(prefix_len)]
            return rows.NONE, 0, rows.NONE, self.stream_number((*prompt, *self.own_tokens(r, own)))
        if own == 0:
            return group, prefix_len // self.block_size, rows.NONE, self.stream_number((group, prefix_len, ()))
        if own <= _FEW:
            prefix_len, few = self.extend_prefix(group, prefix_len, self.own_tokens(r, own))
        suffix = self.stream_number((group, prefix_len, few)) if own <= _FEW else rows.NONE
        left = self.block_size - prefix_len % self.block_size
        boundary = rows.NONE
        if group != NO_PREFIX and left <= _FEW and left < own:
            meeting = few[:left] if few else self.own_tokens(r, left)
            place, meeting = self.extend_prefix(group, prefix_len, meeting)
            if meeting:
                boundary = self.stream_number((group, place, meeting, "block"))
            else:
                prefix_len = place
        return group, prefix_len // self.block_size, boundary, suffix

    def own_tokens(self, r: int, count: int) -> tuple[int, ...]:
        """The first `count` token ids of request number `r` that follow its shared prefix."""
        return tuple(stream_tokens("U" + self.trace.id_of(r), count))

    def extend_prefix(self, group: int, prefix_len: int, own: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """(`prefix_len` plus the leading tokens of `own` with which prefix `group` goes on, the rest of `own`)."""
        while own and group != NO_PREFIX and own[0] == self.prefix_token(group, prefix_len):
            prefix_len, own = prefix_len + 1, own[1:]
        return prefix_len, own


def shared_contents(trace: Trace, block_size: int) -> tuple[dict[str, list[int]], int]:
    """Which blocks of different requests can be equal, as columns of `rows.RequestRow` (name -> a value per request):
    those of a prefix or suffix that several have. And the number of different token streams."""
    count = len(trace)
    prefix, prefix_blocks = [rows.NONE] * count, [0] * count
    boundary, suffix = [rows.NONE] * count, [rows.NONE] * count
    streams = _ContentStreams(trace, block_size)
    for r, (group, prompt_len) in enumerate(zip(trace.prefix_groups, trace.prompt_lens, strict=True)):
        if group == NO_PREFIX and prompt_len > _FEW:
            continue
        prefix[r], prefix_blocks[r], boundary[r], suffix[r] = streams.streams_of_request(r)
    readers, twins = Counter(prefix), Counter(suffix)
    # A prefix that begins another one is read by the readers of both.
    readers.update(parent for parent, _ in trace.prefix_parents for _ in range(2))
    readers.update(group for group, (parent, _) in enumerate(trace.prefix_parents) if parent != NO_PREFIX)
    for r, group in enumerate(prefix):
        if suffix[r] != rows.NONE and twins[suffix[r]] == 1:
            suffix[r] = rows.NONE
        if group != rows.NONE and readers[group] == 1 and suffix[r] == rows.NONE:
            prefix[r], prefix_blocks[r], boundary[r] = rows.NONE, 0, rows.NONE
    columns = {
        "prefix": prefix,
        "prefix_blocks": prefix_blocks,
        "boundary": boundary,
        "suffix": suffix,
        "shared_blocks": [
            rows.ALL_BLOCKS if suffix[r] != rows.NONE else prefix_blocks[r] + (boundary[r] != rows.NONE)
            for r in range(count)
        ],
    }
    return columns, len(trace.prefix_names) + len(streams.streams)


Progress = Callable[[float], None]
"""Called from time to time with the share of finished requests."""

_TURNS_PLAIN, _TURNS_COMPILED = 2_000, 200_000
_FEWEST_TOKENS_A_BLOCK = 4


def can_replay(settings: SchedulerSettings) -> bool:
    """Whether the kernel implements these settings; other settings need `StepByStepReplay`."""
    return (
        settings.engine == "V1"
        and settings.num_speculative_tokens == 0
        and settings.groups == (LayerGroup(),)
        and settings.block_size >= _FEWEST_TOKENS_A_BLOCK
    )


class NeedsStepByStepReplay(Exception):
    """The replay reached a state that only the step-by-step replay can represent."""


class FastReplay:
    """One replay over rows; `use_numba` selects the compiled kernel."""

    def __init__(
        self, trace: Trace, settings: SchedulerSettings, cost: rows.StepCost | None = None, use_numba: bool = False
    ) -> None:
        accepted, self.rejections = admissible_requests(trace, settings)
        self.trace, self.num_asked, self.pauses_s = trace.first_questions(accepted)
        self.settings, self.use_numba = settings, use_numba
        self.cost = cost or rows.StepCost(0.0, 0.0, 0.0, 0.0)
        contents: dict[str, list[int]] = {}
        num_streams = self.max_extents = 0
        if settings.enable_prefix_caching:
            contents, num_streams = shared_contents(trace, settings.block_size)
            self.max_extents = _max_extents(trace, settings, contents["shared_blocks"])
        self.rules = rows.Rules(
            **{name: int(getattr(settings, name)) for name in rows.Rules._fields if hasattr(settings, name)},
            by_priority=int(settings.scheduling_policy == "priority"),
            in_seconds=int(trace.in_seconds),
            num_requests=len(trace),
            first_own_stream=num_streams,
        )
        self.sim = self._initial_sim(contents)
        if self.rejections:
            states = [rows.WAITING if is_accepted else rows.REJECTED for is_accepted in accepted]
            rows.fill(self.sim.requests, "state", states, use_numba)

    def _initial_sim(self, contents: dict[str, list[int]]) -> rows.Sim:
        """The kernel's tables before the first step, all blocks free; `contents`: columns from `shared_contents`."""
        rules, numba, parents = self.rules, self.use_numba, self.trace.prefix_parents
        seqs = rules.max_num_seqs + 1
        longest = max(map(add, self.trace.prompt_lens, self.trace.output_lens))
        state = rows.rows(rows.StateRow, 1, numba)
        rows.fill(state, "free_uncached", [rules.usable_blocks], numba)
        rows.fill(state, "num_asked", [self.num_asked], numba)
        for name in ("spare_extent", "spare_cell", "spare_hold", "sample_width"):
            rows.fill(state, name, [1], numba)
        streams = rows.numbers(2 * len(parents) + 2, numba)
        for group, (parent, parent_len) in enumerate(parents):
            streams[2 * group : 2 * group + 2] = parent, parent_len // rules.block_size
        return rows.Sim(
            state=state,
            requests=self._request_rows(contents),
            extents=self._spare_rows(rows.ExtentRow, "after", self.max_extents),
            cells=self._spare_rows(rows.CellRow, "following", self.max_extents),
            holds=self._spare_rows(rows.HoldRow, "below", 2 * self.max_extents),
            samples=rows.rows(rows.SampleRow, rows.MAX_SAMPLES, numba),
            running=rows.numbers(seqs, numba),
            finish_order=rows.numbers(seqs, numba),
            prefills=rows.numbers(seqs, numba),
            chunks=rows.numbers(seqs, numba),
            finishing=rows.numbers(seqs, numba),
            decodes_by_phase=rows.numbers(rules.block_size, numba),
            shared_decodes_by_phase=rows.numbers(rules.block_size, numba),
            hits=rows.numbers(cdiv(longest, rules.block_size), numba),
            first_cells=rows.numbers(rules.first_own_stream + len(self.trace), numba),
            streams=streams,
        )

    def _request_rows(self, contents: dict[str, list[int]]) -> Any:
        """A row for each request, in trace order, with `contents` (from `shared_contents`) as further columns."""
        trace, numba = self.trace, self.use_numba
        requests = rows.rows(rows.RequestRow, len(trace), numba)
        has_priorities, indices = any(trace.priorities), range(len(trace))
        by_priority_rank = sorted(indices, key=trace.priorities.__getitem__) if has_priorities else indices
        priority_ranks = rows.numbers(len(trace), False)
        for priority_rank, r in enumerate(by_priority_rank):
            priority_ranks[r] = priority_rank
        totals = [p + o for p, o in zip(trace.prompt_lens, trace.output_lens, strict=True)]
        columns: dict[str, Any] = {
            "arrival": trace.arrivals,
            "pause_s": self.pauses_s,
            "prompt": trace.prompt_lens,
            "tokens": trace.prompt_lens,
            "total": totals,
            "priority_rank": priority_ranks,
            "by_priority_rank": by_priority_rank,
            **contents,
        }
        for name, values in columns.items():
            rows.fill(requests, name, values, numba)
        return requests

    def _spare_rows(self, kind: Any, link: str, count: int) -> Any:
        """A table of `kind` rows: row 0, which stands for none, and `count` free ones, linked by the field `link`."""
        if not self.use_numba:
            return rows.SpareRows(kind, link, count)
        made = rows.rows(kind, count + 1, compiled=True)
        rows.fill(made, link, [0, *range(2, count + 1)], compiled=True)
        return made

    def run(self, progress: Progress | None = None) -> Timeline:
        """Replay to the end, or until the user interrupts; NeedsStepByStepReplay where the tables are too small."""
        replay: Any = compiled("replay") if self.use_numba else step_kernel.replay
        turns = _TURNS_COMPILED if self.use_numba else _TURNS_PLAIN
        interrupted = False
        try:
            while replay(self.sim, self.rules, self.cost, turns):
                if progress:
                    progress(self._tally_field("finished") / len(self.trace))
        except KeyboardInterrupt:
            interrupted = True
        if self._tally_field("failed"):
            raise NeedsStepByStepReplay
        return self._timeline(interrupted)

    def _tally_field(self, name: str) -> int:
        """A field of the kernel's `StateRow` by name, such as a total that `Tally` has too."""
        return int(rows.column(self.sim.state, name, self.use_numba)[0])

    def _column(self, name: str) -> Any:
        """A field of the kernel's request rows by name, for all requests in trace order."""
        return rows.column(self.sim.requests, name, self.use_numba)

    def _timeline(self, interrupted: bool) -> Timeline:
        """The result of the replay; `interrupted` marks it as incomplete."""
        trace = replace(self.trace, arrivals=array("d", self._column("arrival")))
        first_sched = self._column("first_sched")
        arrivals = first_sched if trace.in_seconds else array("q", (int(arrival) for arrival in trace.arrivals))
        width, figures = self._tally_field("sample_width"), ("used", "running", "waiting", "preempted")
        points = zip(*(rows.column(self.sim.samples, name, self.use_numba) for name in figures), strict=True)
        return Timeline(
            self.settings,
            trace,
            Tally(**{name: self._tally_field(name) for name in Tally.__dataclass_fields__}),
            first_sched,
            self._column("first_token"),
            self._column("finish"),
            self._column("preemptions"),
            arrivals,
            [PoolSample(i * width, *map(int, point)) for i, point in enumerate(points) if point[0] != rows.NONE],
            self.rejections,
            Clocks(*(self._column(name) for name in ("sched_s", "token_s", "finish_s"))) if trace.in_seconds else None,
            interrupted,
            self._tally_field("step"),
        )


def _max_extents(trace: Trace, settings: SchedulerSettings, shared_blocks: list[int]) -> int:
    """How many extents (runs of equal blocks) a replay needs at most; the size of the kernel's table of them."""
    lengths = zip(trace.prompt_lens, trace.output_lens, strict=True)
    blocks = [cdiv(min(prompt + output, settings.max_model_len), settings.block_size) for prompt, output in lengths]
    if sum(blocks) > settings.usable_blocks:
        return settings.usable_blocks
    return len(blocks) + sum(map(min, blocks, shared_blocks))
