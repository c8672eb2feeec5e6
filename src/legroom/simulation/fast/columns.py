"""The state of a replay as columns: lists in plain Python, NumPy arrays when compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

Column = Any
"""A list of int or a NumPy array of int64: the kernel uses only what both can do."""

# States of a request.
WAITING, DECODING, PREFILLING, PREEMPTED, DONE, REJECTED = range(6)

# Places in `Pool.counts`.
BLANK, CACHED, FREE_IDS, FREE_RUNS, FREE_SLOTS, FAILED = range(6)
"""Free blocks without and with cached content, stack heights, and whether a state arose that only the reference can do."""

# Places in `Queues.counts`.
RUNNING, PREFILLS, QUEUED, QUEUE_HEAD, NEXT_RANK, NEXT_ARRIVAL, STEP, BLOCKED, HELD, STORED, SHARED_DECODES, FINISHING = (
    range(12)
)

# Places in `Books.totals`.
(
    STEPS, PREEMPTIONS, SCHEDULED_TOKENS, RECOMPUTED_TOKENS, PROMPT_TOKENS, CACHED_TOKENS, FINISHED, PEAK_BLOCKS,
    PEAK_RUNNING, PEAK_WAITING, HELD_SLOT_STEPS, STORED_TOKEN_STEPS, SAMPLE_WIDTH,
) = range(13)  # fmt: skip

KEY_SPAN = 1 << 24
"""Blocks that one stream of content can have: a key is `stream * KEY_SPAN + block`."""
ALL_BLOCKS = 1 << 40
NONE = -1


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
    row_width: int
    own_streams: int
    """The first of the streams that belong to one request each."""


class StepCost(NamedTuple):
    """Seconds of a step: `overhead + max(token * tokens, weights + kv_token * tokens held)`."""

    overhead: float
    token: float
    weights: float
    kv_token: float


class Requests(NamedTuple):
    """One entry a request."""

    arrival: Column
    prompt: Column
    total: Column
    """Prompt and output."""
    urgency: Column
    """Place in the order of (priority, arrival)."""
    prefix: Column
    """Stream of the shared prefix, or NONE."""
    prefix_blocks: Column
    straddle: Column
    """Stream of the one block where prefix and own tokens meet, if others may have the same; else NONE."""
    tail: Column
    """Stream of what follows, if others may have the same; else NONE: nobody but the request itself can find it."""
    shared_blocks: Column
    """Blocks from the start that are told apart one by one; the rest are only counted."""
    computed: Column
    tokens: Column
    """Known tokens; of a decoding request always `computed + 1`."""
    base: Column
    """Of a decoding request: tokens computed before step t are `base + t`."""
    rank: Column
    """Place in the running list: it is ordered by admission."""
    state: Column
    held: Column
    cached: Column
    """Told-apart blocks whose content can be found."""
    run: Column
    """The run of counted blocks that a preempted request left in the free queue, or NONE."""
    slot: Column
    chunk: Column
    """Tokens in this step."""
    stamp: Column
    """The last step in which the slow path scheduled it."""
    peak: Column
    preemptions: Column
    first_sched: Column
    first_token: Column
    finish: Column


class Pool(NamedTuple):
    """Blocks. The free queue is `counts[BLANK]` blocks without content, then the list of cached ones.

    A node of the list is a told-apart block, or a run: so many counted blocks of one request, the last of them first.
    """

    counts: Column
    refs: Column
    keys: Column
    copy_next: Column
    copy_prev: Column
    copy_last: Column
    before: Column
    after: Column
    run_count: Column
    run_owner: Column
    free_ids: Column
    free_runs: Column
    free_slots: Column
    table: Column
    found: Column
    hash_keys: Column
    hash_blocks: Column


class Queues(NamedTuple):
    """Who runs, in order; who prefills; who finishes when; who waits."""

    counts: Column
    running: Column
    prefills: Column
    due: Column
    """Decoding requests, the one that finishes next at the end."""
    phases: Column
    """Decoding requests by the step, modulo the block size, in which they need a new block."""
    shared_phases: Column
    queue: Column
    by_urgency: Column
    finishing: Column
    needs: Column


class Books(NamedTuple):
    """What is being counted."""

    totals: Column
    samples: Column
    clock: Column
    """[now]: seconds at the start of the step."""
    sched_s: Column
    token_s: Column
    finish_s: Column


MOST_SAMPLES = 2048
SAMPLE_FIELDS = 3
