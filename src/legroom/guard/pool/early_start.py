"""Whether a request that will be preempted should begin all the same.

Preempted, its prompt and the tokens it has made by then are to be computed again. These tokens are what it gains,
unless a place for all its life comes free before. Both are counted in steps of the engine. Chosen in simulation
(bench/guard_goodput.py --card, and without for pools of ten requests) and measured on an H200 (bench/guard_real.py).
"""

from __future__ import annotations

from typing import NamedTuple

from legroom.guard.pool.projection import Holding, Outlook
from legroom.guard.pool.reservation import Need

SEQUENCE_GAIN = 0.6
"""Of the tokens that one more sequence makes, those by which all make more: each makes every step longer. A step takes
5 ms and 0.02 for each sequence on an H200, 5 and 0.15 on two cores."""
FEW_RUN, MANY_RUN = 30, 60
"""Sequences. Where few run, each is a large part of the pool and it is long until one ends: it stands idle while one
waits for the other."""
FEW_GAIN = 4.0
"""`SEQUENCE_GAIN` where few run."""
LEFT_FREE = 0.4
"""Of the pool, what those that begin early leave free where many run: to those who are there and grow."""
FEW_WAITING = 4
"""Once so many times the sequences that wait are fewer than run, nobody comes after them: to compute again then costs
less, as the last ones would run nearly alone."""


class Crowd(NamedTuple):
    """Who is there beside a newcomer."""

    running: int
    """Sequences."""
    waiting: int
    """Sequences, its own among them; 0: nobody waits, not even it."""


def pays_to_begin(
    need: Need, newcomer: Holding, outlook: Outlook, room: float, crowd: Crowd, recompute_steps: float
) -> bool:
    """`recompute_steps`: what one token takes to compute again."""
    many = min(1.0, max(0.0, (crowd.running - FEW_RUN) / (MANY_RUN - FEW_RUN)))
    if outlook.totals[0] + newcomer.blocks > room * (1 - LEFT_FREE * many):
        return False
    steps = outlook.steps_to_overflow(newcomer, room, newcomer.steps_left[-1])
    sequences = crowd.running + need.seats
    if crowd.waiting:
        sequences = min(sequences, FEW_WAITING * crowd.waiting)
    gain = SEQUENCE_GAIN + (FEW_GAIN - SEQUENCE_GAIN) * (1 - many)
    again = recompute_steps * (need.prompt_tokens + need.seats * steps)
    least = again * sequences / (need.seats * gain)
    return 0 < least <= steps and not outlook.has_place_within(newcomer, room, least)
