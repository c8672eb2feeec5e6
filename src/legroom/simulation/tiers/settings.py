"""What a tier is told before the first request arrives."""

from __future__ import annotations

from dataclasses import dataclass

from legroom.errors import LegroomError
from legroom.simulation.tiers.policies import POLICIES, PolicyName


@dataclass(frozen=True)
class TierSettings:
    """Room on the host, and how fast KV cache gets there and back."""

    num_chunks: int
    blocks_per_chunk: int = 1
    """Blocks that are stored, loaded and evicted together (`blocks_per_chunk` of the connector)."""
    policy: PolicyName = "lru"
    store_threshold: int = 0
    """From 2 on: how often a chunk must be offered before it is stored."""
    max_tracker_size: int = 64_000
    """Chunks whose offers are counted."""
    prompt_only: bool = True
    """Generated tokens are not stored (`offload_prompt_only`, the default of 0.32)."""
    block_bytes: int = 0
    """Of one block over all ranks; 0: not known."""
    load_s_per_block: float = 0.0
    store_s_per_block: float = 0.0
    disk_s_per_chunk: float | None = None
    """Of a tier of files behind this one, each way; None: there is none."""

    def __post_init__(self) -> None:
        if self.num_chunks < 1:
            raise LegroomError("a tier that cannot hold one chunk stores nothing", "give the tier more room")
        if self.blocks_per_chunk < 1:
            raise LegroomError(f"blocks_per_chunk is {self.blocks_per_chunk}, but must be at least 1")
        if self.policy not in POLICIES:
            raise LegroomError(f"no eviction policy {self.policy!r}", "vLLM has lru and arc")
        if self.disk_s_per_chunk is not None and self.store_threshold >= 2:
            raise LegroomError("vLLM refuses store_threshold together with a tier of files", "leave out one of them")
