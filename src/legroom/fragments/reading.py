"""What a source says of one device's allocator, whatever the source was."""

from __future__ import annotations

from legroom.black_box import AllocatorState
from legroom.memory.allocator_replay import AllocatorHistory, RefusedRequest
from legroom.memory.caching_allocator import AllocatorSettings
from legroom.records import dataclass


@dataclass(frozen=True, slots=True)
class CallSite:
    """A place in a program that allocated, and what of it is still allocated."""

    place: str
    bytes: int
    blocks: int


@dataclass(frozen=True, slots=True)
class KvSlots:
    """The KV pool as vLLM counts it. The last block of a request is half empty on average."""

    running: int
    blocks: int
    block_size: int
    used_blocks: int

    @property
    def empty_slots(self) -> int:
        """Token slots in last blocks that hold nothing, by expectation."""
        return round(self.running * (self.block_size - 1) / 2)


@dataclass(frozen=True, slots=True)
class AllocatorReading:
    """None or empty: the source does not say."""

    source: str
    device: str
    state: AllocatorState
    settings: AllocatorSettings
    requested_bytes: int | None = None
    """What the allocated blocks were asked for, before rounding."""
    history: AllocatorHistory | None = None
    refused: RefusedRequest | None = None
    sites: tuple[CallSite, ...] = ()
    non_torch_bytes: int | None = None
    non_torch_growth_bytes: int | None = None
    """Between the first and the last reading that the source has."""
    card_free_bytes: int | None = None
    others_bytes: int | None = None
    """Held on the card by other processes."""
    kv: KvSlots | None = None
    is_host: bool = False
    """Of a worker without a GPU: the memory of its process, of which PyTorch keeps no reserve."""
