"""What the least pools leave of the cards, shared out: max-min fair by weight, so that nobody could have more without
someone who has less giving up some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from legroom.planning.packing.placement import servers_on

if TYPE_CHECKING:
    from legroom.planning.packing.needs import ServerNeeds
    from legroom.planning.packing.placement import PackingProblem, Placement

_HALVINGS = 60
_HUGE = float(1 << 50)


def share_pools(problem: PackingProblem, needs: Sequence[ServerNeeds], placement: Placement) -> dict[str, int]:
    """The pool of every server in bytes of each of its cards, in whole blocks."""
    pools = {each.server.name: float(each.least_pool_bytes) for each in needs}
    growing = {each.server.name for each in needs if each.block_bytes and each.most_pool_bytes > each.least_pool_bytes}
    while growing:
        low, high = 0.0, _HUGE
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if _holds(problem, needs, placement, _grown(needs, pools, growing, middle)):
                low = middle
            else:
                high = middle
        pools = _grown(needs, pools, growing, low)
        full = {each.server.name for each in needs if pools[each.server.name] >= each.most_pool_bytes}
        stuck = _stuck(problem, needs, placement, pools, growing - full)
        if not (growing & (full | stuck)):
            break
        growing -= full | stuck
    return {each.server.name: _whole_blocks(each, pools[each.server.name]) for each in needs}


def _grown(
    needs: Sequence[ServerNeeds], pools: Mapping[str, float], growing: set[str], level: float
) -> dict[str, float]:
    grown = dict(pools)
    for each in needs:
        if each.server.name in growing:
            more = pools[each.server.name] + level * each.server.weight
            grown[each.server.name] = min(more, float(each.most_pool_bytes))
    return grown


def _holds(
    problem: PackingProblem, needs: Sequence[ServerNeeds], placement: Placement, pools: Mapping[str, float]
) -> bool:
    for card in problem.cards:
        here = servers_on(card, placement, needs)
        for shift in problem.shifts:
            more = sum(
                each.footprint_bytes(int(pools[each.server.name])) - each.least_bytes
                for each in here
                if each.server.name in shift.awake
            )
            if more > problem.room_bytes(card, shift, here):
                return False
    return True


def _stuck(
    problem: PackingProblem,
    needs: Sequence[ServerNeeds],
    placement: Placement,
    pools: Mapping[str, float],
    growing: set[str],
) -> set[str]:
    """Those that cannot have a block more."""
    stuck = set()
    for each in needs:
        name = each.server.name
        if name in growing and not _holds(problem, needs, placement, {**pools, name: pools[name] + each.block_bytes}):
            stuck.add(name)
    return stuck


def _whole_blocks(needs: ServerNeeds, pool: float) -> int:
    if not needs.block_bytes:
        return 0
    return max(int(pool) // needs.block_bytes * needs.block_bytes, needs.least_pool_bytes)
