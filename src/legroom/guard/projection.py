"""What running requests will hold a little later: who grows, and who will be done before that matters.

A request is admitted at its prompt's blocks and grows to its end, a token a step, like all that run beside it. So the
sum of what everybody may ever hold is far above what they hold at any one time, and a pool that is shared out by that
sum stands half empty (measured: 0.75 of the tokens a second that vLLM alone finishes). vLLM's own rule, what fits now,
fills the pool and then throws out the newest again and again. Between them lies a look ahead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

OVERDUE_SHARE = 0.5
"""An answer that outlived what was expected is expected to go on for this share of its length so far."""
LAST_STEPS_SHARE = 0.02
"""An answer that must be at its end, by its pace, is given this share of its steps more."""


class Growth(NamedTuple):
    """How a request's hold grows."""

    start_blocks: int
    end_blocks: int
    steps: int
    """Tokens that each of its sequences is expected to generate."""
    most_steps: int
    """Tokens that each may generate."""


class Holding(NamedTuple):
    """What a request holds now, what each step adds, and how many steps it stays."""

    blocks: float
    blocks_per_step: float
    steps_left: float


def hold_of(growth: Growth, done_steps: float, counted: bool) -> Holding:
    """`counted`: the steps were seen as they passed, rather than estimated by the clock."""
    steps = max(1, growth.steps)
    per_step = (growth.end_blocks - growth.start_blocks) / steps
    left = growth.steps - done_steps
    if left <= 0 and growth.most_steps > growth.steps:
        left = min(growth.most_steps - growth.steps, done_steps * OVERDUE_SHARE)
    elif not counted:
        done_steps = min(done_steps, growth.steps)
    return Holding(growth.start_blocks + per_step * done_steps, per_step, max(left, steps * LAST_STEPS_SHARE))


def fits(holds: Iterable[Holding], pool_blocks: int, ahead_steps: float) -> bool:
    """Whether the pool holds all of them for so many steps. What is held only falls when somebody ends, so these
    moments and the last one decide.
    """
    blocks = per_step = 0.0
    ordered = sorted(holds, key=lambda hold: hold.steps_left)
    for hold in ordered:
        blocks += hold.blocks
        per_step += hold.blocks_per_step
    for hold in ordered:
        if hold.steps_left >= ahead_steps:
            break
        if blocks + per_step * hold.steps_left > pool_blocks:
            return False
        blocks -= hold.blocks
        per_step -= hold.blocks_per_step
    return blocks + per_step * ahead_steps <= pool_blocks + 1e-6
