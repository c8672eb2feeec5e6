"""What would hold a load that one server does not: more of them, or another card."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from legroom.simulation.choose import Candidate, Choice, best_of, is_sustained, replay_task, try_one
from legroom.simulation.outcome import ReplayOutcome
from legroom.simulation.trace import Trace

MOST_REPLICAS = 1024
_FEW = 4


@dataclass(frozen=True)
class HoldingFleet:
    """Equal servers that hold the load together."""

    gpu: str
    """The card of each; empty where the pool was given as a number of blocks."""
    replicas: int
    outcome: ReplayOutcome

    def as_json(self, command: Sequence[str]) -> dict[str, Any]:
        return {
            "gpu": self.gpu or None,
            "replicas": self.replicas,
            "outcome": self.outcome.as_json(),
            "command": list(command),
        }


def promising(trace: Trace, choice: Choice, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The few candidates with which more servers or another card are tried: the best setting, then the best of those
    that differ from it in how many requests run at once (or, where that was given, in the tokens of a step)."""
    by_flags = {tuple(candidate.flags.items()): candidate for candidate in candidates}
    rivals, few = list(choice.outcomes), list[Candidate]()
    while rivals and len(few) < _FEW:
        best = best_of(rivals, choice.goal, trace.arrives_at_once)
        few.append(by_flags[tuple(best.flags.items())])
        rivals = [outcome for outcome in rivals if _kind(outcome.flags) != _kind(best.flags)]
    return few


def _kind(flags: dict[str, Any]) -> int | None:
    return flags.get("max_num_seqs", flags.get("max_num_batched_tokens"))


def replicas_that_hold(trace: Trace, choice: Choice, gpu: str, few: Sequence[Candidate]) -> HoldingFleet | None:
    """The fewest servers with which one of a few candidates meets the goal; None where no number of them does."""
    if not choice.best.finished:
        return None
    most = min(len(trace), MOST_REPLICAS)
    task = replay_task(trace, choice.goal)

    def is_held_by(replicas: int) -> bool:
        share = replace(task, replicas=replicas)
        return any(choice.goal.is_met(try_one(share, candidate)) for candidate in few)

    # A server whose waits grow by 2 s a second was sent three times what it serves. A load that lasts less long than
    # its answers would be held by fewer than three, but not if it went on.
    least = min(most, max(2, ceil(1 + choice.best.wait_growth_ratio)))
    fewest = fewest_replicas(is_held_by, least, most)
    if fewest is None:
        return None
    share = replace(task, replicas=fewest)
    tried = [try_one(share, candidate) for candidate in few]
    return HoldingFleet(gpu, fewest, best_of(tried, choice.goal, task.trace.arrives_at_once))


def fewest_replicas(is_held_by: Callable[[int], bool], least: int, most: int) -> int | None:
    """The smallest number from `least` to `most` that holds the load; more never hold less. None where none does."""
    if most < least:
        return None
    low, high = least - 1, least
    while not is_held_by(high):
        if high == most:
            return None
        low, high = high, min(most, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        if is_held_by(middle):
            high = middle
        else:
            low = middle
    return high


def card_that_holds(
    trace: Trace, choice: Choice, cards: Iterable[tuple[str, Sequence[Candidate]]]
) -> HoldingFleet | None:
    """The first of `cards` of which one server meets the goal, also if the load went on, and its best candidate."""
    task = replay_task(trace, choice.goal)
    for gpu, candidates in cards:
        if not candidates:
            continue
        tried = [try_one(task, candidate) for candidate in candidates]
        best = best_of(tried, choice.goal, task.trace.arrives_at_once)
        if choice.goal.is_met(best) and is_sustained(task, candidates[tried.index(best)], best) is not False:
            return HoldingFleet(gpu, 1, best)
    return None
