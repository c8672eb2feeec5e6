"""What running requests will hold a little later: who grows, and who will be done before that matters.

A request is admitted at its prompt's blocks and grows to its end, a token a step, like all that run beside it. So the
sum of what everybody may ever hold is far above what they hold at any one time, and a pool that is shared out by that
sum stands half empty (measured: 0.75 of the tokens a second that vLLM alone finishes). vLLM's own rule, what fits now,
fills the pool and then throws out the newest again and again. Between them lies a look ahead.

How long an answer gets is seldom known. `Growth.lives` are a few lengths, each as likely as the others: what a request
will hold is the average over those that it has not outlived.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

OVERDUE_SHARE = 0.5
"""An answer that outlived what was expected is expected to go on for this share of its length so far."""
LAST_STEPS_SHARE = 0.02
"""An answer that must be at its end, by its pace, is given this share of its steps more."""
MOST_MOMENTS = 12
"""At how many of the ends that are near the pool is looked at."""
NEWCOMERS_ENDS = tuple([2 ** (-power / 2) for power in range(12)])
"""Shares of the time ahead at which it is looked at beside. Those who come later end at moments of their own, short
ones sooner: without these nobody would see that a hundred who begin together fill the pool together."""


class Growth(NamedTuple):
    """How a request's hold grows."""

    start_blocks: float
    end_blocks: float
    steps: int
    """Tokens that each of its sequences is expected to generate."""
    most_steps: int
    """Tokens that each may generate."""
    lives: tuple[int, ...] = ()
    """Lengths that its answers may have, each as likely as the others; empty: `steps` is the one."""
    first_block_steps: int = 0
    """Steps until it takes its first further block, as its prompt left part of one free."""
    block_steps: int = 0
    """Steps from one further block to the next; 0: it grows evenly."""

    @property
    def average_steps(self) -> float:
        """Of the lengths that its answers may have; at least 1."""
        return max(1.0, sum(self.lives) / len(self.lives) if self.lives else self.steps)

    def without(self, blocks: float) -> Growth:
        """The same without blocks of its prompt that others hold, too."""
        less = min(blocks, self.start_blocks)
        return self._replace(start_blocks=self.start_blocks - less, end_blocks=self.end_blocks - less)

    def blocks_at(self, steps: float) -> float:
        """Blocks that it holds after so many steps."""
        grown = self.end_blocks - self.start_blocks
        if not self.block_steps:
            return self.start_blocks + grown * steps / max(1, self.steps)
        taken = math.ceil((steps - self.first_block_steps) / self.block_steps)
        taken_at_end = math.ceil((self.steps - self.first_block_steps) / self.block_steps)
        return self.start_blocks + (grown * taken / taken_at_end if taken > 0 and taken_at_end > 0 else 0)


class Holding(NamedTuple):
    """How far a request has come, and how many steps it may stay, each as likely as the others."""

    growth: Growth
    done_steps: float
    steps_left: tuple[float, ...]
    """The fewest first."""

    @property
    def blocks(self) -> float:
        """What it holds now."""
        return self.growth.blocks_at(self.done_steps)

    def after(self, steps: float) -> float:
        """Blocks that it holds so many steps on, by how likely it is still there."""
        left = self.steps_left
        staying = sum([life >= steps for life in left]) if len(left) > 1 else left[0] >= steps
        return self.growth.blocks_at(self.done_steps + steps) * staying / len(left) if staying else 0.0

    def at(self, moments: Sequence[float]) -> list[float]:
        """`after` each of these, in order. All that run are asked this again and again: it is written to be quick."""
        growth, left, done = self.growth, self.steps_left, self.done_steps
        start, size, first = growth.start_blocks, growth.block_steps, growth.first_block_steps
        if not size:
            return [self.after(moment) for moment in moments]
        blocks_at_end = math.ceil((growth.steps - first) / size)
        each = (growth.end_blocks - start) / blocks_at_end if blocks_at_end > 0 else 0.0
        last, lives, done = left[-1], len(left), done - first
        # A block is taken for every `size` steps begun: rounding up is rounding down of the negative.
        blocks = [
            (start + each * -(-(done + moment) // size) if done + moment > 0 else start) if moment <= last else 0.0
            for moment in moments
        ]
        if left[0] == last:
            return blocks
        return [
            part * (lives - bisect_left(left, moment)) / lives for part, moment in zip(blocks, moments, strict=True)
        ]


def hold_of(growth: Growth, done_steps: float, counted: bool) -> Holding:
    """`counted`: the steps were seen as they passed, rather than estimated by the clock."""
    if not growth.lives and done_steps < growth.steps:
        return Holding(growth, done_steps, (growth.steps - done_steps,))
    lives = growth.lives or (growth.steps,)
    left = tuple([life - done_steps for life in lives if life > done_steps])
    if not left:
        more = 0.0
        if growth.most_steps > lives[-1]:
            more = min(growth.most_steps - lives[-1], done_steps * OVERDUE_SHARE)
        elif not counted:
            done_steps = min(done_steps, growth.steps)
        left = (max(more, growth.steps * LAST_STEPS_SHARE),)
    return Holding(growth, done_steps, left)


class Outlook:
    """What all that run will hold together, just before each of them ends, up to some moment.

    What is held only falls when somebody ends, so these moments and the last one decide; of many, some do. They are
    counted from when a newcomer begins to run, `lead_steps` from now.
    """

    __slots__ = ("_seen_from_now", "first_end", "lead_steps", "made_s", "moments", "steps", "totals")

    def __init__(self, made_s: float, lead_steps: float, steps: float, holds: Sequence[Holding] = ()) -> None:
        self.made_s = made_s
        self.lead_steps = lead_steps
        self.steps = steps
        ends = sorted({life - lead_steps for hold in holds for life in hold.steps_left})
        ends = ends[bisect_right(ends, 0.0) : bisect_right(ends, steps)]
        self.first_end = ends[0] if ends else math.inf
        """Steps until somebody makes room for a newcomer."""
        if len(ends) > MOST_MOMENTS:
            ends = [ends[at * (len(ends) - 1) // (MOST_MOMENTS - 1)] for at in range(MOST_MOMENTS)]
        self.moments = (0.0, *sorted({*ends, *(steps * share for share in NEWCOMERS_ENDS)}))
        self._seen_from_now = [lead_steps + moment for moment in self.moments]
        self.totals = [0.0] * len(self.moments)

    def of(self, hold: Holding) -> list[float]:
        """One request's part."""
        return hold.at(self._seen_from_now)

    def of_newcomer(self, hold: Holding) -> list[float]:
        return hold.at(self.moments)

    def start(self, blocks: Sequence[Sequence[float]]) -> None:
        """The parts of all that run."""
        if blocks:
            self.totals = [sum(parts) for parts in zip(*blocks, strict=True)]

    def add(self, blocks: Sequence[float]) -> None:
        self.totals = [total + more for total, more in zip(self.totals, blocks, strict=True)]

    def remove(self, blocks: Sequence[float]) -> None:
        self.totals = [total - less for total, less in zip(self.totals, blocks, strict=True)]

    def has_room(self, newcomer: Holding, pool_blocks: float, ahead_steps: float) -> bool:
        """Whether the pool holds all of them, and a newcomer, for so many steps."""
        if self.totals[0] + newcomer.blocks > pool_blocks + 1e-6:  # mostly that decides
            return False
        return self.steps_to_overflow(newcomer, pool_blocks, ahead_steps) == math.inf

    def steps_to_overflow(self, newcomer: Holding, pool_blocks: float, ahead_steps: float) -> float:
        """For how many steps the pool holds all of them and a newcomer, which would be preempted then; infinite where
        that is for all of `ahead_steps`.
        """
        before, total_before, most = 0.0, self.totals[0], pool_blocks + 1e-6
        together_before = total_before + newcomer.blocks
        if together_before > most:
            return 0.0
        for moment, total in zip(self.moments, self.totals, strict=True):
            then, total_then = moment, total
            if moment > ahead_steps:
                then = ahead_steps
                total_then = total_before + (total - total_before) * (then - before) / (moment - before)
            together = total_then + newcomer.after(then)
            if together > most:
                return before + (then - before) * (most - together_before) / (together - together_before)
            if moment >= ahead_steps:
                break
            before, total_before, together_before = moment, total_then, together
        return math.inf

    def has_place_within(self, newcomer: Holding, pool_blocks: float, steps: float) -> bool:
        """Whether a newcomer that begins at some end in so many steps finds room for all its life."""
        most, life = pool_blocks + 1e-6, newcomer.steps_left[-1]
        for at, begin in enumerate(self.moments):
            if begin >= steps:
                return False
            later = zip(self.moments[at + 1 :], self.totals[at + 1 :], strict=True)
            if all(total + newcomer.after(moment - begin) <= most for moment, total in later if moment - begin <= life):
                return True
        return False
