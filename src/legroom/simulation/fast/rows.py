"""The state of a fast replay as rows of numbers: small objects in plain Python, NumPy records when compiled."""

from dataclasses import make_dataclass
from typing import Any, NamedTuple

# States of a request.
WAITING, DECODING, PREFILLING, PREEMPTED, DONE, REJECTED, FINISHING = range(7)

ALL_BLOCKS = 1 << 40
"""As `shared_blocks`: every block of the request, generated ones included, can be found by another one."""
NONE = -1
MAX_SAMPLES = 2048
"""Points of a timeline: more than a picture has pixels."""


class Rules(NamedTuple):
    """`SchedulerSettings`, by their names where they have one, and the trace as numbers."""

    usable_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: int
    long_prefill_token_threshold: int
    by_priority: int
    watermark_blocks: int
    reserve_full_isl: int
    enable_prefix_caching: int
    in_seconds: int
    num_requests: int
    async_scheduling: int
    """1 with asynchronous scheduling: a step is scheduled before the tokens of the one before are known."""
    remote_prefill: int
    first_own_stream: int
    """The first of the streams that belong to one request each."""


class StepCost(NamedTuple):
    """Seconds of a step: `overhead + max(computing, reading)`, and never less than the host needs to start its kernels.

    Computing: `token` for every token and `pair` for every earlier token that one of a prompt attends to. Reading:
    `weights`, `kv_token` for every token held and `window_token` for the last `window` of each request. Experts are
    read beside that, as much of `experts` as the tokens of the step choose: the group of each is too small to hide it.
    """

    overhead: float
    token: float
    weights: float
    kv_token: float
    experts: float = 0.0
    idle: float = 0.0
    """The chance that a token does not choose a given expert."""
    pair: float = 0.0
    request: float = 0.0
    """Overhead for every running request."""
    host: float = 0.0
    """Minimum of a step in which every request decodes, and `host_request` more for each of them."""
    host_request: float = 0.0
    launch: float = 0.0
    """Minimum of a step with prefill tokens; `launch_captured` where its tokens are no more than `captured`."""
    launch_captured: float = 0.0
    captured: float = 0.0
    """Tokens of the largest CUDA graph."""
    exchange: float = 0.0
    """Communication between the GPUs of one server, for every token."""
    window: float = 0.0
    window_token: float = 0.0
    choice_exponent: float = 1.0
    window_pair: float = 0.0


class Sim(NamedTuple):
    """All mutable state. `state` to `samples` hold rows of the types below; the rest are lists of numbers."""

    state: Any
    """One `StateRow`."""
    requests: Any
    extents: Any
    """Cached blocks; row 0 is the end of the free queue."""
    cells: Any
    holds: Any
    samples: Any
    running: Any
    """Requests, in the order of admission."""
    finish_order: Any
    """Decoding requests, the one that finishes next at the end."""
    prefills: Any
    """Prefilling requests, in the order of admission."""
    chunks: Any
    """Tokens that each of `prefills` gets in this step."""
    finishing: Any
    """Requests that have sampled their last token and are still in `running`."""
    decodes_by_phase: Any
    """Decoding requests by the step, modulo the block size, in which they need a new block."""
    shared_decodes_by_phase: Any
    """Those of them whose generated blocks another request can find."""
    hits: Any
    """Extents that the last cache lookup found."""
    first_cells: Any
    """The first cell of each stream, 0 where nothing of it is cached."""
    streams: Any
    """Per prefix: the prefix it begins with, and for how many blocks."""


def _row_type(name: str, fields: str, starts_at_none: str = "") -> Any:
    """A row class with integer `fields` (separated by spaces) that start at 0, or at NONE if in `starts_at_none`."""
    starts = dict.fromkeys(fields.split(), 0) | dict.fromkeys(starts_at_none.split(), NONE)
    none, typed = {"starts_at_none": tuple(starts_at_none.split())}, [(field, int, at) for field, at in starts.items()]
    return make_dataclass(name, typed, namespace=none, repr=False, eq=False, slots=True)


StateRow = _row_type(
    "StateRow",
    "blocked cached_tokens failed finished free_cached free_uncached held_blocks held_slot_steps next_arrival "
    "next_rank now num_asked num_decodes num_finishing num_hits num_prefills num_running num_waiting peak_blocks "
    "peak_running peak_waiting preemptions prompt_tokens queue_head recomputed_tokens sample_width scheduled_tokens "
    "shared_decodes spare_cell spare_extent spare_hold step steps stored stored_token_steps",
)
"""Current counts, and totals."""

RequestRow = _row_type(
    "RequestRow",
    "arrival step_offset by_priority_rank cached chunk computed finish_s held_blocks last_hold peak preemptions "
    "pause_s prefix_blocks prompt queued rank sched_s shared_blocks state token_s tokens total priority_rank",
    starts_at_none="finish first_sched first_token scheduled_step skipped_step prefix boundary suffix",
)
"""One request. `tokens` of a decoding one is not updated: `step_offset + step` tokens are computed, and `computed` is
the number that were certain to be cached at its last change.

`prefix`, `boundary` and `suffix` name the streams of its content (see `shared_contents`), NONE where no other request
has it; the first `shared_blocks` blocks are cached as soon as they are full, the rest when they are freed. `rank` is
its place in the running list, `scheduled_step` the step in which `chunk` tokens were scheduled, `skipped_step` the last
one that had no token for it. `queued` and `by_priority_rank` belong to the waiting queue, not to the request in the
same row.
"""

ExtentRow = _row_type("ExtentRow", "after before cell earlier_part next_copy previous_copy refs")
"""One copy of a cell's blocks; `before` and `after` link the free queue, `earlier_part` what was split off in front."""

CellRow = _row_type("CellRow", "end first_copy following last_copy previous start stream")
"""Blocks `start` to `end` of a stream, and their copies from the one that was cached first."""

HoldRow = _row_type("HoldRow", "below extent start")
"""An extent and its earlier parts down to `start`, held by a request; `below` is the one held before."""

SampleRow = _row_type("SampleRow", "preempted", starts_at_none="running used waiting")
"""Maxima over some steps."""

_FLOATS = frozenset({"now", "arrival", "pause_s", "sched_s", "token_s", "finish_s"})


def rows(kind: Any, count: int, compiled: bool) -> Any:
    """`count` rows of the class `kind` in their initial state: a structured NumPy array if `compiled`, else a list."""
    if not compiled:
        return [kind() for _ in range(count)]
    import numpy as np

    made = np.zeros(count, dtype=[(name, "f8" if name in _FLOATS else "i8") for name in kind.__slots__])
    for name in kind.starts_at_none:
        made[name] = NONE
    return made


class SpareRows(dict[int, Any]):
    """Plain rows made at their first use, each linked to the next of `count` by the field `link`; row 0 is none."""

    def __init__(self, kind: Any, link: str, count: int) -> None:
        self.kind, self.link, self.count = kind, link, count

    def __missing__(self, index: int) -> Any:
        row = self[index] = self.kind(**{self.link: index + 1 if 0 < index < self.count else 0})
        return row


def numbers(count: int, compiled: bool) -> Any:
    """`count` zeros, in a NumPy array if `compiled`, else in a list."""
    if not compiled:
        return [0] * count
    import numpy as np

    return np.zeros(count, dtype=np.int64)


def fill(table: Any, field: str, values: Any, compiled: bool) -> None:
    """Sets `field` in the first len(values) rows of a table; `compiled`: the table is a NumPy array, not a list."""
    if compiled:
        import numpy as np

        table[field][: len(values)] = np.asarray(values)
        return
    for row, value in zip(table, values, strict=False):
        setattr(row, field, value)


def column(table: Any, field: str, compiled: bool) -> Any:
    """`field` of all rows of a table: an array column if `compiled`, else a list."""
    return table[field] if compiled else [getattr(row, field) for row in table]
