"""Prompts that begin alike: vLLM holds the blocks of an equal beginning once, however many running requests have it.

It knows a block by a hash over its tokens and all before it, and so does this: a prompt becomes a chain of keys, each
of which stands for everything up to its place. Token ids are cut exactly where vLLM cuts them. Of texts the tokens are
not known here; they are cut into pieces of about a block, which count by the most tokens that a letter can be.

Only what running requests hold counts. vLLM also keeps blocks that nobody holds any more, but takes these for others
when it needs them: hitting one saves work, not room.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

CHARS_PER_TOKEN = 4
"""Of English text, roughly: it only decides how finely a text is cut."""
SINGLE_UNITS, EIGHT_UNITS = 32, 256
"""Up to these places a chain has a key for every unit and for every eighth one; behind them, for every 64th: a long
prompt has some hundred keys, and what is lost at the end of a shared part is small beside it."""
MOST_KEYS = 256
"""Of one prompt: enough for 200,000 tokens in blocks of 16."""
MOST_KEYS_A_REQUEST = 1024
MOST_KEYS_HELD = 200_000
"""Of all that run, some 40 MB at most: further requests are counted in full."""


class PrefixUnit(NamedTuple):
    """How the server's prompts are cut."""

    block_size: int
    own_tokens: int = 1
    """At the end of a prompt, those that vLLM computes for each request even where it holds them: the last one, and
    with drafts the block before it."""

    @property
    def letters(self) -> int:
        return self.block_size * CHARS_PER_TOKEN


class PrefixChain(NamedTuple):
    """A prompt's beginning, as keys."""

    keys: tuple[int, ...]
    exact: bool = True
    """Cut from token ids: a unit is a block."""


def chain_of_ids(ids: list[Any], unit: PrefixUnit, seed: int, most_keys: int = MOST_KEYS) -> PrefixChain | None:
    try:
        tokens = array("q", ids).tobytes()
    except (TypeError, ValueError, OverflowError):  # no token ids: the server will say so
        return None
    size = 8 * unit.block_size
    return _chain(tokens, size, (len(ids) - unit.own_tokens) // unit.block_size, seed, most_keys)


def chain_of_text(text: str, unit: PrefixUnit, seed: int, most_keys: int = MOST_KEYS) -> PrefixChain | None:
    letters = unit.letters
    # The last piece may end within a token or a block that goes on differently.
    chain = _chain(text, letters, len(text) // letters - 1, seed, most_keys)
    return chain and chain._replace(exact=False)


def _chain(content: bytes | str, size: int, units: int, seed: int, most_keys: int) -> PrefixChain | None:
    keys, key, start = [], seed, 0
    for end in _ends(units):
        key = hash((key, content[start * size : end * size]))
        keys.append(key)
        start = end
        if len(keys) >= most_keys:
            break
    return PrefixChain(tuple(keys)) if keys else None


def _ends(units: int) -> Iterator[int]:
    yield from range(1, min(units, SINGLE_UNITS) + 1)
    yield from range(SINGLE_UNITS + 8, min(units, EIGHT_UNITS) + 1, 8)
    yield from range(EIGHT_UNITS + 64, units + 1, 64)


_ENDS = tuple(_ends(EIGHT_UNITS + 64 * MOST_KEYS))[:MOST_KEYS]
_WIDTHS = tuple(end - start for start, end in zip((0, *_ENDS), _ENDS, strict=False))


class PrefixHolder(Protocol):
    """A request that runs."""

    chains: tuple[PrefixChain, ...]
    blocks_per_unit: float
    shared_units: int
    """Of its prompts, those that others hold, too."""


class _Place:
    """A piece of a prompt's beginning that running requests hold."""

    __slots__ = ("blocks", "holders", "of_holders")

    def __init__(self, blocks: float, holder: int) -> None:
        self.blocks = blocks
        self.holders = 1
        self.of_holders = holder
        """The sum of the holders' numbers: with one left it is that one's."""


class PrefixLedger:
    """What running requests hold in common. Who is alone with a block holds it itself; what several hold is counted
    once, here, as it stays until the last of them ends.
    """

    def __init__(self) -> None:
        self.shared_blocks = 0.0
        """Held by two or more."""
        self.saved_blocks = 0.0
        """What all would hold more if nothing were shared."""
        self._places: dict[int, _Place] = {}
        self._holders: dict[int, PrefixHolder] = {}

    def units_of(self, chains: Sequence[PrefixChain]) -> int:
        """Units that are there already."""
        places, units = self._places, 0
        if places:
            for chain in chains:
                for key, width in zip(chain.keys, _WIDTHS, strict=False):
                    if key not in places:
                        break
                    units += width
        return units

    def add(self, holder: PrefixHolder) -> None:
        if not holder.chains or len(self._places) > MOST_KEYS_HELD:
            return
        number, places = id(holder), self._places
        self._holders[number] = holder
        for chain in holder.chains:
            for key, width in zip(chain.keys, _WIDTHS, strict=False):
                place = places.get(key)
                if place is None:
                    places[key] = _Place(width * holder.blocks_per_unit, number)
                    continue
                if place.holders == 1:
                    self._share(self._holders[place.of_holders], width)
                    self._count(place.blocks)
                place.holders += 1
                place.of_holders += number
                self._share(holder, width)

    def remove(self, holder: PrefixHolder) -> None:
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
                place.of_holders -= number
                self._share(holder, -width)
                if place.holders == 1:
                    self._share(self._holders[place.of_holders], -width)
                    self._count(-place.blocks)
        del self._holders[number]
        if not places:  # rounding ends here
            self.shared_blocks = self.saved_blocks = 0.0

    def _share(self, holder: PrefixHolder, units: int) -> None:
        holder.shared_units += units
        self.saved_blocks += units * holder.blocks_per_unit

    def _count(self, blocks: float) -> None:
        self.shared_blocks += blocks
        self.saved_blocks -= blocks
