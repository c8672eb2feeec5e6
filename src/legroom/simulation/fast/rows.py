"""The state of a replay as rows of numbers: small objects in plain Python, NumPy records when compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

# States of a request.
WAITING, DECODING, PREFILLING, PREEMPTED, DONE, REJECTED = range(6)

KEY_SPAN = 1 << 24
"""Blocks that one stream of content can have: a key is `stream * KEY_SPAN + block`."""
ALL_BLOCKS = 1 << 40
NONE = -1
MOST_SAMPLES = 2048


class Rules(NamedTuple):
    """The settings as numbers."""

    usable_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked: int
    threshold: int
    by_priority: int
    watermark_blocks: int
    reserve_full: int
    caching: int
    in_seconds: int
    num_requests: int
    row_width: int
    """Blocks in a row of the table."""
    num_ids: int
    """Blocks that can be told apart: as many as the trace can take, or none without a prefix cache."""
    hash_mask: int
    own_streams: int
    """The first of the streams that belong to one request each."""


class StepCost(NamedTuple):
    """Seconds of a step: `overhead + max(computing, reading)`, and never less than the host needs to start its kernels.

    Computing: `token` for every token and `pair` for every earlier token that one of a prompt attends to. Reading:
    `weights`, as much of `experts` as the tokens of the step choose, and `kv_token` for every token held.
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
    """The least of a step in which every request decodes, and `host_request` more for each of them."""
    host_request: float = 0.0
    launch: float = 0.0
    """The least of a step with tokens of prompts; `launch_captured` where its tokens are no more than `captured`."""
    launch_captured: float = 0.0
    captured: float = 0.0
    """Tokens of the largest CUDA graph."""
    exchange: float = 0.0
    """For every token: what the cards of one server send each other."""


class Sim(NamedTuple):
    """Everything that changes. A row has the fields of the row type; a plain list or array has numbers."""

    state: Any
    """One `StateRow`."""
    requests: Any
    blocks: Any
    """Blocks that are told apart, then runs of counted blocks, then the end of the free queue."""
    places: Any
    """The hash table of the prefix cache."""
    seats: Any
    running: Any
    """Requests, in the order of admission."""
    due: Any
    """Decoding requests, the one that finishes next at the end."""
    table: Any
    """The told-apart blocks of every seat, and a last row for what a look-up found."""
    samples: Any
    streams: Any
    """Per prefix: the prefix it begins with, and for how many blocks."""


class NumberRow:
    """A row in plain Python: every field starts at 0 or NONE."""

    __slots__: tuple[str, ...] = ()
    starts_at_none: tuple[str, ...] = ()

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, NONE if name in self.starts_at_none else 0)


class StateRow(NumberRow):
    """Counts of the moment, and totals."""

    __slots__ = (
        "blank",
        "blocked",
        "cached",
        "cached_tokens",
        "failed",
        "finished",
        "held_blocks",
        "held_slot_steps",
        "next_arrival",
        "next_rank",
        "now",
        "num_finishing",
        "num_prefills",
        "num_running",
        "num_waiting",
        "peak_blocks",
        "peak_running",
        "peak_waiting",
        "preemptions",
        "prompt_tokens",
        "queue_head",
        "recomputed_tokens",
        "sample_width",
        "scheduled_tokens",
        "shared_decodes",
        "spare_ids",
        "spare_runs",
        "spare_slots",
        "step",
        "steps",
        "stored",
        "stored_token_steps",
    )


class RequestRow(NumberRow):
    """One request. Of a decoding one, `tokens` and `computed` are not kept up: `base + step` tokens are computed.

    `prefix`, `straddle` and `tail` name the streams of its content (see `content.py`), NONE where nobody else has it;
    the first `shared_blocks` blocks are told apart, the rest are only counted. `rank` is its place in the running
    list, `run` what it left in the free queue when it was preempted, `stamp` the step for which `chunk` tokens were
    scheduled. `queued` and `by_urgency` belong to the waiting queue, not to the request in the same row.
    """

    __slots__ = (
        "arrival",
        "base",
        "by_urgency",
        "cached",
        "chunk",
        "computed",
        "finish",
        "finish_s",
        "first_sched",
        "first_token",
        "held_blocks",
        "peak",
        "preemptions",
        "prefix",
        "prefix_blocks",
        "prompt",
        "queued",
        "rank",
        "run",
        "sched_s",
        "shared_blocks",
        "slot",
        "stamp",
        "state",
        "straddle",
        "tail",
        "token_s",
        "tokens",
        "total",
        "urgency",
    )
    starts_at_none = ("finish", "first_sched", "first_token", "run", "stamp", "prefix", "straddle", "tail")


class BlockRow(NumberRow):
    """A block that is told apart, or a run of counted blocks; `before` and `after` make the free queue.

    Blocks of equal content form a list from the one that was cached first. `spare_id` and `spare_run` are stacks.
    """

    __slots__ = (
        "after",
        "before",
        "copy_last",
        "copy_next",
        "copy_prev",
        "key",
        "refs",
        "run_count",
        "run_owner",
        "spare_id",
        "spare_run",
    )
    starts_at_none = ("key",)


class PlaceRow(NumberRow):
    """A place of the hash table: a key and the first block with that content."""

    __slots__ = ("block", "key")
    starts_at_none = ("key",)


class SeatRow(NumberRow):
    """Lists as long as there are seats; `decodes` and `shared_decodes` are counted by step modulo the block size."""

    __slots__ = ("decodes", "finishing", "need", "prefill", "shared_decodes", "spare_slot")


class SampleRow(NumberRow):
    """The worst of a stretch of steps."""

    __slots__ = ("preempted", "running", "used", "waiting")
    starts_at_none = ("used", "running", "waiting")


_REALS = frozenset({"now", "arrival", "sched_s", "token_s", "finish_s"})


def rows(kind: type[NumberRow], count: int, compiled: bool) -> Any:
    """`count` rows in their first state."""
    if not compiled:
        return [kind() for _ in range(count)]
    import numpy as np

    made = np.zeros(count, dtype=[(name, "f8" if name in _REALS else "i8") for name in kind.__slots__])
    for name in kind.starts_at_none:
        made[name] = NONE
    return made


def numbers(count: int, compiled: bool) -> Any:
    if not compiled:
        return [0] * count
    import numpy as np

    return np.zeros(count, dtype=np.int64)


def fill(table: Any, field: str, values: Any, compiled: bool) -> None:
    if compiled:
        import numpy as np

        table[field][: len(values)] = np.asarray(values)
        return
    for row, value in zip(table, values, strict=False):
        setattr(row, field, value)


def column(table: Any, field: str, compiled: bool) -> Any:
    return table[field] if compiled else [getattr(row, field) for row in table]
