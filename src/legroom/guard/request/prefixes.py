"""Shared prefixes: vLLM stores the blocks of an equal prefix once for all running requests.

Like vLLM, a prompt becomes a chain of hashes, each over one unit and all before it. Token ids are split at vLLM's block
boundaries. The tokens of texts are unknown, so they are split into units of about a block.

Only blocks of running requests count: vLLM evicts cached blocks of finished ones when it needs room.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from legroom.guard.pool.projection import Reservation

CHARS_PER_TOKEN = 4
"""Of English text; it only sets the length of a unit."""
SINGLE_UNITS, EIGHT_UNITS = 32, 256
"""A chain has a key for every unit up to the first, for every eighth up to the second, and for every 64th after it, so
that a long prompt has some hundred keys."""
MOST_KEYS = 256
"""Of one prompt: 200,000 tokens in blocks of 16."""
MOST_KEYS_PER_REQUEST = 4 * MOST_KEYS
MOST_KEYS_HELD = 200_000
"""Of all running requests, about 40 MB; further requests are counted in full."""


class PrefixUnit(NamedTuple):
    """How the server splits prompts into blocks."""

    block_size: int
    own_tokens: int = 1
    """Last tokens of a prompt that vLLM always computes: one, and with speculative decoding a block more."""

    @property
    def characters(self) -> int:
        return self.block_size * CHARS_PER_TOKEN


class PrefixChain(NamedTuple):
    """The prefix of a prompt as hashes."""

    keys: tuple[int, ...]
    exact: bool = True
    """From token ids, so that a unit is a block."""


def chain_of_ids(ids: list[Any], unit: PrefixUnit, seed: int, most_keys: int = MOST_KEYS) -> PrefixChain | None:
    try:
        tokens = array("q", ids).tobytes()
    except (TypeError, ValueError, OverflowError):  # not token ids; the server refuses it
        return None
    size = 8 * unit.block_size
    return _hash_chain(tokens, size, (len(ids) - unit.own_tokens) // unit.block_size, seed, most_keys)


def chain_of_text(text: str, unit: PrefixUnit, seed: int, most_keys: int = MOST_KEYS) -> PrefixChain | None:
    characters = unit.characters
    # The last unit may end within a token or block, so it is not shared.
    chain = _hash_chain(text, characters, len(text) // characters - 1, seed, most_keys)
    return chain and chain._replace(exact=False)


def _hash_chain(content: bytes | str, size: int, units: int, seed: int, most_keys: int) -> PrefixChain | None:
    keys, key, start = [], seed, 0
    for end in _hashed_unit_counts(units):
        key = hash((key, content[start * size : end * size]))
        keys.append(key)
        start = end
        if len(keys) >= most_keys:
            break
    return PrefixChain(tuple(keys)) if keys else None


def _hashed_unit_counts(units: int) -> Iterator[int]:
    yield from range(1, min(units, SINGLE_UNITS) + 1)
    yield from range(SINGLE_UNITS + 8, min(units, EIGHT_UNITS) + 1, 8)
    yield from range(EIGHT_UNITS + 64, units + 1, 64)


_ENDS = tuple(_hashed_unit_counts(EIGHT_UNITS + 64 * MOST_KEYS))[:MOST_KEYS]
_WIDTHS = tuple(end - start for start, end in zip((0, *_ENDS), _ENDS, strict=False))


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
        """Units of these prefixes that running requests hold."""
        places, units = self._places, 0
        if places:
            for chain in chains:
                for key, width in zip(chain.keys, _WIDTHS, strict=False):
                    if key not in places:
                        break
                    units += width
        return units

    def add(self, holder: Reservation) -> None:
        if not holder.chains or len(self._places) > MOST_KEYS_HELD:
            return
        number, places = id(holder), self._places
        self._holders[number] = holder
        for chain in holder.chains:
            for key, width in zip(chain.keys, _WIDTHS, strict=False):
                place = places.get(key)
                if place is None:
                    places[key] = _HeldUnits(width * holder.blocks_per_unit, number)
                    continue
                if place.holders == 1:
                    self._add_shared_units(self._holders[place.holder_sum], width)
                    self._count_as_shared(place.blocks)
                place.holders += 1
                place.holder_sum += number
                self._add_shared_units(holder, width)

    def remove(self, holder: Reservation) -> None:
        number, places = id(holder), self._places
        if number not in self._holders:
            return
        for chain in holder.chains:
            for key, width in zip(chain.keys, _WIDTHS, strict=False):
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
        holder.shared_units += units
        self.saved_blocks += units * holder.blocks_per_unit

    def _count_as_shared(self, blocks: float) -> None:
        self.shared_blocks += blocks
        self.saved_blocks -= blocks
