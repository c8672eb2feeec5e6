"""How the caching allocator is set, and the sizes that follow.

The rules are those of c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.cpp, PyTorch 2.4 to 2.13; what the
H200 answered to the same requests is checked in tests/memory/test_allocator.py.
"""

from __future__ import annotations

from legroom.records import dataclass
from legroom.units import MIB, round_up

SMALLEST_BLOCK = 512
SMALL_REQUEST = MIB
"""Up to here a request is served from the small pool."""
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT_FROM = 10 * MIB
"""From here on a request gets a segment of its own size, in steps of `SEGMENT_STEP`."""
SEGMENT_STEP = 2 * MIB
UNSPLIT_SLACK = LARGE_SEGMENT
"""How much larger than the request a block may be that is handed out whole because it must not be split."""


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """PYTORCH_ALLOC_CONF (PYTORCH_CUDA_ALLOC_CONF before 2.9), as far as it decides where a request goes."""

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    """None: blocks of any size may be split."""
    power2_divisions: int = 0
    """`roundup_power2_divisions`: requests are rounded up to this many steps between powers of two; 0: off."""

    def rounded(self, request_bytes: int) -> int:
        """The block that a request asks for."""
        if request_bytes < SMALLEST_BLOCK:
            return SMALLEST_BLOCK
        divisions = self.power2_divisions
        if divisions > 1 and request_bytes > SMALLEST_BLOCK * divisions:
            return _next_division(request_bytes, divisions)
        return round_up(request_bytes, SMALLEST_BLOCK)

    def may_split(self, block_bytes: int, wanted_bytes: int, *, is_small: bool) -> bool:
        """Whether what a block has beyond the request is cut off and stays free."""
        rest = block_bytes - wanted_bytes
        if is_small or self.expandable_segments:
            return rest >= SMALLEST_BLOCK
        return rest > SMALL_REQUEST and (self.max_split_bytes is None or wanted_bytes < self.max_split_bytes)

    def may_serve(self, block_bytes: int, wanted_bytes: int) -> bool:
        """Whether a free block of this size is handed to a request that it is large enough for."""
        limit = self.max_split_bytes
        if limit is None:
            return True
        if wanted_bytes < limit:
            return block_bytes < limit
        return block_bytes < wanted_bytes + UNSPLIT_SLACK

    def as_text(self) -> str:
        """As it is written into the environment; empty for the defaults."""
        words = ["expandable_segments:True"] if self.expandable_segments else []
        words += [f"max_split_size_mb:{self.max_split_bytes // MIB}"] if self.max_split_bytes is not None else []
        words += [f"roundup_power2_divisions:{self.power2_divisions}"] if self.power2_divisions else []
        return ",".join(words)


def segment_bytes(block_bytes: int) -> int:
    """What is taken from the card for a block that no free one serves."""
    if block_bytes <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if block_bytes < OWN_SEGMENT_FROM:
        return LARGE_SEGMENT
    return round_up(block_bytes, SEGMENT_STEP)


def _next_division(size: int, divisions: int) -> int:
    floor = 1 << (size.bit_length() - 1)
    if floor == size:
        return size
    return round_up(size - floor, max(floor // divisions, 1)) + floor


def parse_allocator_settings(text: str) -> AllocatorSettings:
    """From PYTORCH_ALLOC_CONF; options that move no block are passed over, and so is what cannot be read."""
    values = dict(part.partition(":")[::2] for part in text.replace(" ", "").split(",") if ":" in part)
    split, divisions = values.get("max_split_size_mb", ""), values.get("roundup_power2_divisions", "")
    return AllocatorSettings(
        values.get("expandable_segments", "").lower() == "true",
        int(split) * MIB if split.isdigit() else None,
        int(divisions) if divisions.isdigit() else 0,
    )
