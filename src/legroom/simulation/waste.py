"""Internal fragmentation by block size: slots in a request's last block that hold no token yet.

There is no external fragmentation in a paged pool: any free block serves any request, so no hole is ever too small.
"""

from __future__ import annotations

from legroom.simulation.trace import Trace

BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)


def waste_by_block_size(trace: Trace, block_sizes: tuple[int, ...] = BLOCK_SIZES) -> dict[int, float]:
    """Share of allocated slots that hold nothing, averaged over the decode steps of every request of the trace."""
    stored = 0
    held = dict.fromkeys(block_sizes, 0)
    for prompt_len, output_len in zip(trace.prompt_lens, trace.output_lens, strict=True):
        last = prompt_len + output_len - 1
        stored += (prompt_len + last) * output_len // 2
        for size in block_sizes:
            held[size] += size * (_blocks_up_to(last, size) - _blocks_up_to(prompt_len - 1, size))
    return {size: (slots - stored) / slots for size, slots in held.items() if slots}


def _blocks_up_to(length: int, size: int) -> int:
    """Sum of the blocks that 1, 2, ... `length` tokens take."""
    whole, rest = divmod(length, size)
    return size * whole * (whole + 1) // 2 + rest * (whole + 1)
