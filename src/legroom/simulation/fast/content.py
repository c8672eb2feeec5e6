"""Which blocks of which requests hold the same tokens, told without making up a single token where that can be.

Blocks of a shared prefix are the same for all who read that far. What follows is a request's own, with two exceptions:
a prompt that ends with its prefix (or a token or two after it) goes on with sampled tokens like its twins, and the one
block where the prefix ends may hold only one or two tokens of the request's own, which can be equal by chance. The
made-up tokens (see `trace.stream`) are looked at in those cases only: from three tokens on, chance is 1 in 8 billion.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from legroom.simulation.fast.columns import ALL_BLOCKS, NONE
from legroom.simulation.trace import NO_PREFIX, Trace, stream

_FEW = 2


@dataclass
class Contents:
    """Per request: see the fields of the same names in `columns.RequestRow`."""

    prefix: list[int]
    prefix_blocks: list[int]
    straddle: list[int]
    tail: list[int]
    shared_blocks: list[int]
    num_streams: int

    @property
    def own_stream(self) -> int:
        """The first of the streams that belong to one request each."""
        return self.num_streams


class _Sorter:
    def __init__(self, trace: Trace, block_size: int) -> None:
        self.trace = trace
        self.block_size = block_size
        self.streams: dict[object, int] = {}
        self.prefix_tokens: dict[int, list[int]] = {}

    def stream_number(self, content: object) -> int:
        return self.streams.setdefault(content, len(self.trace.prefix_names) + len(self.streams))

    def prefix_token(self, group: int, place: int) -> int:
        known = self.prefix_tokens.get(group, [])
        if place >= len(known):
            parts = self.trace.prefix_segments(group, 2 * place + 16)
            known = [token for name, start, end in parts for token in stream("P" + name, end)[start:]]
            self.prefix_tokens[group] = known
        return known[place]

    def sort(self, r: int) -> tuple[int, int, int, int]:
        """(prefix, prefix blocks, straddle, tail) of one request."""
        group, prefix_len = self.trace.prefix_groups[r], self.trace.prefix_lens[r]
        own = self.trace.prompt_lens[r] - prefix_len
        few: tuple[int, ...] = ()
        if self.trace.prompt_lens[r] <= _FEW:
            prompt = [self.prefix_token(group, i) for i in range(prefix_len)]
            return NONE, 0, NONE, self.stream_number((*prompt, *self.own_tokens(r, own)))
        if own == 0:
            return group, prefix_len // self.block_size, NONE, self.stream_number((group, prefix_len, ()))
        if own <= _FEW:
            prefix_len, few = self.trim(group, prefix_len, self.own_tokens(r, own))
        tail = self.stream_number((group, prefix_len, few)) if own <= _FEW else NONE
        left = self.block_size - prefix_len % self.block_size
        straddle = NONE
        if group != NO_PREFIX and left <= _FEW and left < own:
            meeting = few[:left] if few else self.own_tokens(r, left)
            place, meeting = self.trim(group, prefix_len, meeting)
            if meeting:
                straddle = self.stream_number((group, place, meeting, "block"))
            else:
                prefix_len = place
        return group, prefix_len // self.block_size, straddle, tail

    def own_tokens(self, r: int, count: int) -> tuple[int, ...]:
        return tuple(stream("U" + self.trace.id_of(r), count))

    def trim(self, group: int, prefix_len: int, own: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Own tokens that happen to go on like the prefix are as good as more prefix."""
        while own and group != NO_PREFIX and own[0] == self.prefix_token(group, prefix_len):
            prefix_len, own = prefix_len + 1, own[1:]
        return prefix_len, own


def sort_contents(trace: Trace, block_size: int) -> Contents:
    """Sort all requests of a trace by content."""
    count = len(trace)
    prefix, prefix_blocks = [NONE] * count, [0] * count
    straddle, tail, shared = [NONE] * count, [NONE] * count, [0] * count
    sorter = _Sorter(trace, block_size)
    for r, (group, prompt_len) in enumerate(zip(trace.prefix_groups, trace.prompt_lens, strict=True)):
        if group == NO_PREFIX and prompt_len > _FEW:
            continue
        prefix[r], prefix_blocks[r], straddle[r], tail[r] = sorter.sort(r)
    _leave_out_loners(trace, prefix, prefix_blocks, straddle, tail)
    for r in range(count):
        shared[r] = ALL_BLOCKS if tail[r] != NONE else prefix_blocks[r] + (straddle[r] != NONE)
    return Contents(prefix, prefix_blocks, straddle, tail, shared, len(trace.prefix_names) + len(sorter.streams))


def _leave_out_loners(
    trace: Trace, prefix: list[int], prefix_blocks: list[int], straddle: list[int], tail: list[int]
) -> None:
    """Content that only one request has need not be told apart."""
    readers, twins = Counter(prefix), Counter(tail)
    # A prefix that begins another one is read by the readers of both.
    readers.update(parent for parent, _ in trace.prefix_parents for _ in range(2))
    readers.update(group for group, (parent, _) in enumerate(trace.prefix_parents) if parent != NO_PREFIX)
    for r, group in enumerate(prefix):
        if tail[r] != NONE and twins[tail[r]] == 1:
            tail[r] = NONE
        if group != NONE and readers[group] == 1 and tail[r] == NONE:
            prefix[r], prefix_blocks[r], straddle[r] = NONE, 0, NONE
