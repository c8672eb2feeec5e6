"""Projects how many KV blocks the running requests will hold in the next steps.

A request starts with its prompt's blocks and grows by one token a step until it ends. The sum of what all may ever hold
is far above what they hold at any one time: a pool shared out by that sum stays half empty (0.75 of the tokens a second
that vLLM alone finishes). vLLM itself admits whatever fits now, fills the pool and then preempts. The projection lies
between the two.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from legroom.guard.request.prefixes import PrefixChain

PROBE_SHARES = tuple([2 ** (-power / 2) for power in range(12)])
"""Shares of the projected time at which blocks are also summed. Without them 100 requests that start together are not
seen to fill the pool together: goodput -5 % on short, 1,190 instead of 150 preemptions on several (0025)."""


class Growth(NamedTuple):
    """How many blocks a request holds after each step."""

    start_blocks: float
    end_blocks: float
    steps: int
    """Tokens that each of its sequences is expected to generate."""
    most_steps: int
    """Tokens that each may generate."""
    output_length_quantiles: tuple[int, ...] = ()
    """Equally likely output lengths in tokens, ascending; empty: `steps` is the only one."""
    first_block_steps: int = 0
    """Steps until the first further block is allocated."""
    block_steps: int = 0
    """Steps between further blocks; 0: blocks grow evenly."""

    @property
    def mean_steps(self) -> float:
        """Mean output length in tokens; at least 1."""
        lengths = self.output_length_quantiles or (self.steps,)
        return max(1.0, sum(lengths) / len(lengths))

    def without(self, blocks: float) -> "Growth":
        """The growth without `blocks` of the prompt's KV cache, which other running requests hold too."""
        shared = min(blocks, self.start_blocks)
        return self._replace(start_blocks=self.start_blocks - shared, end_blocks=self.end_blocks - shared)

    def blocks_at(self, steps: float) -> float:
        """KV blocks held after this many decode steps."""
        grown = self.end_blocks - self.start_blocks
        if not self.block_steps:
            return self.start_blocks + grown * steps / max(1, self.steps)
        taken = math.ceil((steps - self.first_block_steps) / self.block_steps)
        taken_at_end = math.ceil((self.steps - self.first_block_steps) / self.block_steps)
        return self.start_blocks + (grown * taken / taken_at_end if taken > 0 and taken_at_end > 0 else 0)


class Progress(NamedTuple):
    """How many steps a request has made, and how many it may have left."""

    growth: Growth
    done_steps: float
    steps_left: tuple[float, ...]
    """Equally likely, ascending."""

    def expected_blocks(self, steps: float) -> float:
        """KV blocks held `steps` later, times the probability that the request still runs then."""
        left = self.steps_left
        running = sum([life >= steps for life in left]) if len(left) > 1 else left[0] >= steps
        return self.growth.blocks_at(self.done_steps + steps) * running / len(left) if running else 0.0

    def expected_blocks_at(self, step_counts: Sequence[float]) -> list[float]:
        """`expected_blocks` after each of these step counts; called per running request, so written for speed."""
        growth, left, done = self.growth, self.steps_left, self.done_steps
        start, size, first = growth.start_blocks, growth.block_steps, growth.first_block_steps
        if not size:
            return [self.expected_blocks(moment) for moment in step_counts]
        blocks_at_end = math.ceil((growth.steps - first) / size)
        each = (growth.end_blocks - start) / blocks_at_end if blocks_at_end > 0 else 0.0
        last, count, done = left[-1], len(left), done - first
        # -(-x // size) rounds up: a block is allocated when its first token is written.
        blocks = [
            (start + each * -(-(done + moment) // size) if done + moment > 0 else start) if moment <= last else 0.0
            for moment in step_counts
        ]
        if left[0] == last:
            return blocks
        return [
            part * (count - bisect_left(left, moment)) / count for part, moment in zip(blocks, step_counts, strict=True)
        ]


def progress_of(growth: Growth, done_steps: float) -> Progress:
    """A request after `done_steps`; one that outlived all its expected lengths is taken to end with the next step."""
    lengths = growth.output_length_quantiles or (growth.steps,)
    left = tuple([length - done_steps for length in lengths if length > done_steps])
    return Progress(growth, done_steps, left) if left else Progress(growth, min(done_steps, growth.most_steps), (1.0,))


class BlockNeed(NamedTuple):
    """What one request takes from the pool."""

    blocks: int
    """At its longest."""
    sequences: int = 1
    growth: Growth | None = None
    """How it gets there; None: all blocks are counted from the start."""
    prompt_tokens: int = 0
    """Computed again after a preemption."""
    chains: tuple[PrefixChain, ...] = ()
    """Prefixes of its prompts; empty where the server shares none."""
    blocks_per_unit: float = 1.0

    def without(self, blocks: float) -> "BlockNeed":
        """This need with `blocks` fewer in growth and prompt tokens, as others hold them too; its `blocks` stay."""
        if not blocks or self.growth is None:
            return self
        kept = max(0.0, 1 - blocks / self.growth.start_blocks)
        return self._replace(growth=self.growth.without(blocks), prompt_tokens=round(self.prompt_tokens * kept))


class ReservationState(Enum):
    WAITING = "waiting"
    ADMITTED = "admitted"
    QUEUE_FULL = "queue full"
    TOO_LARGE = "too large"
    """It needs more than the whole pool."""
    RELEASED = "released"


@dataclass(slots=True, eq=False)
class Reservation:
    """One request's place in the pool or in its queue."""

    need: BlockNeed
    requested_s: float
    client: str = ""
    steps_seen: int = 0
    """Tokens of each sequence that were streamed so far."""
    projected_blocks: list[float] | None = None
    """Its part of the current projection."""
    shared_units: int = 0
    """Units of its prefixes that other running requests hold too."""
    is_small: bool = False
    """Admitted to the share of the pool that is kept for small requests."""
    state: ReservationState = ReservationState.WAITING
    on_admitted: Callable[[], None] | None = None
    admitted_s: float = field(init=False)
    _own_units: int = field(default=0, init=False)
    _own_need: BlockNeed = field(init=False)
    """The need without the units that other requests hold too."""

    def __post_init__(self) -> None:
        self.admitted_s = self.requested_s
        self._own_need = self.need

    @property
    def cost(self) -> float:
        """Mean blocks x steps, which fair queuing charges to the client; just blocks if its growth is unknown."""
        growth = self.need.growth
        if growth is None:
            return self.need.blocks
        return (growth.start_blocks + growth.end_blocks) / 2 * max(1, growth.steps)

    @property
    def shared_blocks(self) -> float:
        """The request's blocks that other running requests hold too."""
        return self.shared_units * self.need.blocks_per_unit

    def progress(self, estimated_steps: float, doubt: float = 0.0) -> Progress:
        """Steps made so far: the tokens streamed, or `estimated_steps` where none were. With estimated ones the request
        is expected to run longer by `doubt` times the steps made."""
        if self._own_units != self.shared_units:
            self._own_units, self._own_need = self.shared_units, self.need.without(self.shared_blocks)
        growth = self._own_need.growth
        if growth is None:
            own = max(0.0, self.need.blocks - self.shared_blocks)
            return Progress(Growth(own, own, 1, 1), 0.0, (math.inf,))
        if self.steps_seen:
            return progress_of(growth, self.steps_seen)
        progress = progress_of(growth, estimated_steps)
        if not doubt:
            return progress
        longer = doubt * progress.done_steps
        return progress._replace(steps_left=tuple([steps + longer for steps in progress.steps_left]))


class Projection:
    """Blocks that all running requests hold together, just before each of them ends. Blocks are freed only when a
    request ends, so the sum is largest at these moments. They are counted in steps from when a new request would start
    to run, `lead_steps` from now."""

    __slots__ = ("made_s", "moments", "moments_from_now", "steps", "totals")

    def __init__(self, made_s: float, lead_steps: float, steps: float, running: Sequence[Progress] = ()) -> None:
        self.made_s = made_s
        self.steps = steps
        ends = sorted({life - lead_steps for progress in running for life in progress.steps_left})
        ends = ends[bisect_right(ends, 0.0) : bisect_right(ends, steps)]
        most = 12  # of many ends, as many are probed as there are PROBE_SHARES; 6 cost 0.5 % on open-ended
        if len(ends) > most:
            ends = [ends[at * (len(ends) - 1) // (most - 1)] for at in range(most)]
        self.moments = (0.0, *sorted({*ends, *(steps * share for share in PROBE_SHARES)}))
        self.moments_from_now = [lead_steps + moment for moment in self.moments]
        self.totals = [0.0] * len(self.moments)

    def add(self, blocks: Sequence[float], sign: int = 1) -> None:
        """Add one request's blocks at each projected time to the sums; `sign` -1 removes them."""
        self.totals = [total + sign * more for total, more in zip(self.totals, blocks, strict=True)]

    def steps_to_overflow(self, candidate: Progress, pool_blocks: float, ahead_steps: float) -> float:
        """Steps until running requests and `candidate` exceed `pool_blocks`; infinite if not in `ahead_steps` steps."""
        before, total_before, most = 0.0, self.totals[0], pool_blocks + 1e-6
        together_before = total_before + candidate.growth.blocks_at(candidate.done_steps)
        if together_before > most:
            return 0.0
        for moment, total in zip(self.moments, self.totals, strict=True):
            then, total_then = moment, total
            if moment > ahead_steps:
                then = ahead_steps
                total_then = total_before + (total - total_before) * (then - before) / (moment - before)
            together = total_then + candidate.expected_blocks(then)
            if together > most:
                return before + (then - before) * (most - together_before) / (together - together_before)
            if moment >= ahead_steps:
                break
            before, total_before, together_before = moment, total_then, together
        return math.inf
