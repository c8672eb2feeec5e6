"""The state of PyTorch's caching allocator on one device, from any source."""

from __future__ import annotations

from legroom.black_box import AllocatorState
from legroom.memory.allocator_replay import AllocatorHistory, RefusedRequest
from legroom.memory.caching_allocator import AllocatorSettings
from legroom.records import dataclass


@dataclass(frozen=True, slots=True)
class CallSite:
    """A line of code that allocated, and what it still holds."""

    place: str
    bytes: int
    blocks: int


@dataclass(frozen=True, slots=True)
class KvSlots:
    """The KV pool as vLLM reports it."""

    running: int
    blocks: int
    block_size: int
    used_blocks: int

    @property
    def empty_slots(self) -> int:
        """Expected number of empty token slots: the last block of a request is half empty on average."""
        return round(self.running * (self.block_size - 1) / 2)


@dataclass(frozen=True, slots=True)
class AllocatorReading:
    """The allocator of one device. None or empty: the source does not say."""

    source: str
    device: str
    state: AllocatorState
    settings: AllocatorSettings
    requested_bytes: int | None = None
    """The requested size of all allocated blocks, before rounding."""
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
