"""Shared prefixes: vLLM stores the blocks of an equal prefix once for all running requests. Like vLLM, a prompt becomes
a chain of hashes, each over one unit and all before it. Token ids are split at vLLM's block boundaries. The tokens of
texts are unknown, so they are split into units of about a block."""

from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

CHARS_PER_TOKEN = 4
"""Of English text; it only sets the length of a unit."""
SINGLE_UNITS, EIGHT_UNITS = 32, 256
"""A chain has a key for every unit up to the first, for every eighth up to the second, and for every 64th after it, so
that a long prompt has some hundred keys."""
MOST_KEYS = 256
"""Of one prompt: 200,000 tokens in blocks of 16."""
MOST_KEYS_PER_REQUEST = 4 * MOST_KEYS


class PrefixUnit(NamedTuple):
    """How the server splits prompts into blocks."""

    block_size: int
    own_tokens: int = 1
    """Last tokens of a prompt that vLLM always computes: one, and with speculative decoding a block more."""

    @property
    def characters(self) -> int:
        """Characters of text estimated to fill one KV block."""
        return self.block_size * CHARS_PER_TOKEN


class PrefixChain(NamedTuple):
    """The prefix of a prompt as hashes."""

    keys: tuple[int, ...]
    exact: bool = True
    """From token ids, so that a unit is a block."""


def chain_of_ids(ids: list[Any], unit: PrefixUnit, seed: int, most_keys: int = MOST_KEYS) -> PrefixChain | None:
    """At most `most_keys` prefix hashes, begun with `seed`, of a prompt's token ids; None if invalid or too short."""
    try:
        tokens = array("q", ids).tobytes()
    except (TypeError, ValueError, OverflowError):  # not token ids; the server refuses it
        return None
    size = 8 * unit.block_size
    return _hash_chain(tokens, size, (len(ids) - unit.own_tokens) // unit.block_size, seed, most_keys)


def chain_of_text(text: str, unit: PrefixUnit, seed: int, most_keys: int = MOST_KEYS) -> PrefixChain | None:
    """At most `most_keys` prefix hashes, begun with `seed`, of a text in estimated blocks; None if it is too short."""
    characters = unit.characters
    # The last unit may end within a token or block, so it is not shared.
    chain = _hash_chain(text, characters, len(text) // characters - 1, seed, most_keys)
    return chain and chain._replace(exact=False)


def _hash_chain(content: bytes | str, size: int, units: int, seed: int, most_keys: int) -> PrefixChain | None:
    """Hashes of ever longer prefixes, up to `units` units of `size` bytes or characters; None without a whole unit."""
    keys, key, start = [], seed, 0
    for end in _hashed_unit_counts(units):
        key = hash((key, content[start * size : end * size]))
        keys.append(key)
        start = end
        if len(keys) >= min(most_keys, MOST_KEYS):
            break
    return PrefixChain(tuple(keys)) if keys else None


def _hashed_unit_counts(units: int) -> Iterator[int]:
    """The prefix lengths in units that get a hash: each one, then every 8th, then every 64th."""
    yield from range(1, min(units, SINGLE_UNITS) + 1)
    yield from range(SINGLE_UNITS + 8, min(units, EIGHT_UNITS) + 1, 8)
    yield from range(EIGHT_UNITS + 64, units + 1, 64)


_ENDS = tuple(_hashed_unit_counts(EIGHT_UNITS + 64 * MOST_KEYS))[:MOST_KEYS]
UNIT_WIDTHS = tuple(end - start for start, end in zip((0, *_ENDS), _ENDS, strict=False))
