"""Placement of servers on cards: exact bin packing for the few servers of a machine."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from legroom.facts.gpus import Gpu
from legroom.memory.overhead import desktop_bytes, reserve_bytes
from legroom.planning.packing.needs import OtherProgram, ServerNeeds
from legroom.records import dataclass, field

_MOST_TRIED = 200_000


@dataclass(frozen=True, slots=True)
class Card:
    """One card or slice of the machine."""

    number: int
    gpu: Gpu
    reserve_bytes: int = 0
    """Memory held back on the card for a desktop or, on unified memory, for the host."""
    others: tuple[OtherProgram, ...] = ()

    @property
    def is_slice(self) -> bool:
        """Whether it is a MIG slice, which CUDA_VISIBLE_DEVICES names by UUID."""
        return " MIG " in self.gpu.name

    @property
    def others_bytes(self) -> int:
        """Bytes that programs other than the packed servers hold on the card."""
        return sum(other.bytes for other in self.others)


def offered_cards(
    gpus: Sequence[Gpu], others: Sequence[tuple[int, OtherProgram]] = (), used_bytes: int = 0
) -> tuple[Card, ...]:
    """The cards of a machine; `others`: (card number, program that uses it); `used_bytes`: in use on every card."""
    in_use = [OtherProgram("in use", used_bytes)] if used_bytes else []
    programs = [(*in_use, *(its for at, its in others if at == number)) for number in range(len(gpus))]
    reserves = [desktop_bytes(gpu) + reserve_bytes(gpu) for gpu in gpus]
    return tuple(map(Card, range(len(gpus)), gpus, reserves, programs))


@dataclass(frozen=True, slots=True)
class Shift:
    """Servers that are awake at the same time; the others sleep."""

    name: str
    awake: frozenset[str]


@dataclass(frozen=True, slots=True)
class PackingProblem:
    """The cards, the shifts and the share of the error bands to hold back."""

    cards: tuple[Card, ...]
    shifts: tuple[Shift, ...]
    band_kept: float = 1.0

    def room_bytes(self, card: Card, shift: Shift, here: Sequence[ServerNeeds]) -> int:
        """Free bytes of a card in one shift with these servers at their smallest KV cache; negative: no fit."""
        taken = card.others_bytes + int(card.reserve_bytes * self.band_kept)
        for needs in here:
            if needs.server.name in shift.awake:
                taken += needs.least_bytes + int(needs.spread_bytes * self.band_kept)
            else:
                taken += needs.asleep_bytes
        return card.gpu.total_bytes - taken

    def least_room_bytes(self, card: Card, here: Sequence[ServerNeeds]) -> int:
        """Free bytes of a card in its fullest shift with these servers at their smallest KV cache; negative: no fit."""
        return min(self.room_bytes(card, shift, here) for shift in self.shifts)


Placement = Mapping[str, tuple[int, ...]]
"""Card numbers by server name."""


@dataclass(slots=True)
class _Search:
    problem: PackingProblem
    here: list[list[ServerNeeds]]
    placed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tried: int = 0

    def place(self, left: Sequence[ServerNeeds]) -> bool:
        """Places the servers in `left` by backtracking; False if no placement fits or too many were tried."""
        if not left:
            return True
        needs, rest = left[0], left[1:]
        for cards in self._choices(needs):
            self.tried += 1
            if self.tried > _MOST_TRIED:
                return False
            for number in cards:
                self.here[number].append(needs)
            self.placed[needs.server.name] = cards
            if all(self._room_bytes(number) >= 0 for number in cards) and self.place(rest):
                return True
            for number in cards:
                self.here[number].pop()
            del self.placed[needs.server.name]
        return False

    def _choices(self, needs: ServerNeeds) -> Iterator[tuple[int, ...]]:
        """Tuples of card numbers for a server, the emptiest cards first, without those equal to one tried before."""
        rooms = {card.number: self._room_bytes(card.number) for card in self.problem.cards}
        order = sorted(rooms, key=lambda number: (-rooms[number], number))
        equivalent: set[tuple[tuple[int, int], ...]] = set()
        for cards in combinations(order, needs.server.gpus):
            key = tuple(sorted((rooms[card], self.problem.cards[card].gpu.total_bytes) for card in cards))
            if key not in equivalent:
                equivalent.add(key)
                yield tuple(sorted(cards))

    def _room_bytes(self, number: int) -> int:
        """Free bytes of card `number` in its fullest shift, with the servers placed on it so far."""
        return self.problem.least_room_bytes(self.problem.cards[number], self.here[number])


def place(problem: PackingProblem, needs: Sequence[ServerNeeds]) -> Placement | None:
    """Cards for every server, placing the largest first; None where no placement that holds them all is found."""
    if any(each.server.gpus > len(problem.cards) for each in needs):
        return None
    search = _Search(problem, [[] for _ in problem.cards])
    largest_first = sorted(needs, key=lambda each: (-each.server.gpus, -each.least_bytes, each.server.name))
    return search.placed if search.place(largest_first) else None


def servers_on(card: Card, placement: Placement, needs: Sequence[ServerNeeds]) -> list[ServerNeeds]:
    """The servers of one card, in the order of the request."""
    return [each for each in needs if card.number in placement[each.server.name]]


_HALVINGS = 60
_HUGE = float(1 << 50)


def share_pools(problem: PackingProblem, needs: Sequence[ServerNeeds], placement: Placement) -> dict[str, int]:
    """KV cache bytes of each server per card, in whole blocks; free memory is shared in proportion to their weight."""
    pools = {each.server.name: float(each.least_pool_bytes) for each in needs}
    growing = {each.server.name for each in needs if each.block_bytes and each.most_pool_bytes > each.least_pool_bytes}
    while growing:
        low, high = 0.0, _HUGE
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if _pools_fit(problem, needs, placement, _grow_pools(needs, pools, growing, middle)):
                low = middle
            else:
                high = middle
        pools = _grow_pools(needs, pools, growing, low)
        full = {each.server.name for each in needs if pools[each.server.name] >= each.most_pool_bytes}
        larger = {each.server.name: pools[each.server.name] + each.block_bytes for each in needs}
        one_block_more = {name: {**pools, name: larger[name]} for name in growing - full}
        blocked = {name for name, more in one_block_more.items() if not _pools_fit(problem, needs, placement, more)}
        if not (growing & (full | blocked)):
            break
        growing -= full | blocked
    whole: dict[str, int] = {}
    for each in needs:  # without a KV cache the least is 0
        blocks = int(pools[each.server.name]) // max(each.block_bytes, 1)
        whole[each.server.name] = max(blocks * each.block_bytes, each.least_pool_bytes)
    return whole


def _grow_pools(
    needs: Sequence[ServerNeeds], pools: Mapping[str, float], growing: set[str], level: float
) -> dict[str, float]:
    """KV cache bytes by server, those of `growing` raised by `level` x the server's weight, up to its maximum."""
    raised = {each.server.name: (level * each.server.weight, float(each.most_pool_bytes)) for each in needs}
    return {**pools, **{name: min(pools[name] + raised[name][0], raised[name][1]) for name in growing}}


def _pools_fit(
    problem: PackingProblem, needs: Sequence[ServerNeeds], placement: Placement, pools: Mapping[str, float]
) -> bool:
    """Whether KV caches of these bytes (by server) fit on every card in every shift."""
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
