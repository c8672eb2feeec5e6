"""Which prefix blocks the running requests share: vLLM evicts cached blocks of finished ones when it needs room."""

from collections.abc import Sequence

from legroom.guard.pool.projection import Reservation
from legroom.guard.request.prefixes import UNIT_WIDTHS, PrefixChain

MOST_KEYS_HELD = 200_000
"""Of all running requests, about 40 MB; further requests are counted in full."""


class _HeldUnits:
    """Units of a prefix and the running requests that hold them."""

    __slots__ = ("blocks", "holder_sum", "holders")

    def __init__(self, blocks: float, holder: int) -> None:
        self.blocks = blocks
        self.holders = 1
        self.holder_sum = holder
        """The sum of the holders' ids; with one holder left it is that one's id."""


class PrefixLedger:
    """Prefix blocks that several running requests hold; they stay until the last of these ends."""

    def __init__(self) -> None:
        self.shared_blocks = 0.0
        """Held by two or more requests."""
        self.saved_blocks = 0.0
        """Further blocks that would be held without sharing."""
        self._places: dict[int, _HeldUnits] = {}
        self._holders: dict[int, Reservation] = {}

    def units_of(self, chains: Sequence[PrefixChain]) -> int:
        """How many prefix units (hashed blocks) of these prompts running requests already hold."""
        places, units = self._places, 0
        if places:
            for chain in chains:
                for key, width in zip(chain.keys, UNIT_WIDTHS, strict=False):
                    if key not in places:
                        break
                    units += width
        return units

    def add(self, holder: Reservation) -> None:
        """Count an admitted request as holder of its prefix blocks, unless MOST_KEYS_HELD are already counted."""
        if not holder.need.chains or len(self._places) > MOST_KEYS_HELD:
            return
        number, places = id(holder), self._places
        self._holders[number] = holder
        for chain in holder.need.chains:
            for key, width in zip(chain.keys, UNIT_WIDTHS, strict=False):
                place = places.get(key)
                if place is None:
                    places[key] = _HeldUnits(width * holder.need.blocks_per_unit, number)
                    continue
                if place.holders == 1:
                    self._add_shared_units(self._holders[place.holder_sum], width)
                    self._count_as_shared(place.blocks)
                place.holders += 1
                place.holder_sum += number
                self._add_shared_units(holder, width)

    def remove(self, holder: Reservation) -> None:
        """Stop counting a request as holder; blocks that no other request holds are forgotten."""
        number, places = id(holder), self._places
        if number not in self._holders:
            return
        for chain in holder.need.chains:
            for key, width in zip(chain.keys, UNIT_WIDTHS, strict=False):
                place = places[key]
                if place.holders == 1:
                    del places[key]
                    continue
                place.holders -= 1
                place.holder_sum -= number
                self._add_shared_units(holder, -width)
                if place.holders == 1:
                    self._add_shared_units(self._holders[place.holder_sum], -width)
                    self._count_as_shared(-place.blocks)
        del self._holders[number]
        if not places:  # resets rounding errors
            self.shared_blocks = self.saved_blocks = 0.0

    def _add_shared_units(self, holder: Reservation, units: int) -> None:
        """Add `units` to those that the request shares with others, and their blocks to `saved_blocks`."""
        holder.shared_units += units
        self.saved_blocks += units * holder.need.blocks_per_unit

    def _count_as_shared(self, blocks: float) -> None:
        """Move `blocks` from `saved_blocks` to `shared_blocks`, or back if negative."""
        self.shared_blocks += blocks
        self.saved_blocks -= blocks
