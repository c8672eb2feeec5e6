"""The memory of one card when an allocation failed, entry by entry, and as the plan expects it at each moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.records import dataclass
from legroom.units import GIB, MIB, gib

if TYPE_CHECKING:
    from legroom.memory.layout import Layout
    from legroom.vllm_logs.evidence import TorchOom

_OWN_SHARE = 5
"""33 published messages name the process's own size: outside torch it holds at most 18 % of the card (9.6 GiB)."""
_DRIVER_BYTES = GIB  # The driver keeps less for itself (at most 0.6 GiB in the published messages).
_ROUNDING_BYTES = GIB // 100  # Sizes are printed in hundredths of a GiB.


@dataclass(frozen=True, slots=True)
class Ledger:
    """One card at one moment. None: not printed and not computable."""

    total_bytes: int | None = None
    other_processes_bytes: int | None = None
    own_non_torch_bytes: int | None = None
    allocated_bytes: int | None = None
    unused_bytes: int | None = None
    """Reserved by torch and not allocated."""
    free_bytes: int | None = None
    wanted_bytes: int | None = None

    @property
    def outside_torch_bytes(self) -> int | None:
        """Bytes in use on the card outside this process's torch, by itself or by others; None where not printed."""
        if self.total_bytes is None or self.free_bytes is None or self.allocated_bytes is None:
            return None
        return self.total_bytes - self.free_bytes - self.allocated_bytes - (self.unused_bytes or 0)

    @property
    def unowned_bytes(self) -> int:
        """Bytes outside torch of unprinted owners, where over a fifth of the card, as no CUDA context is; else 0."""
        outside = self.outside_torch_bytes
        if outside is None or self.total_bytes is None or self.other_processes_bytes is not None:
            return 0
        return outside if outside > self.total_bytes // _OWN_SHARE else 0

    @property
    def shortage_bytes(self) -> int:
        """What the failed allocation lacked; 0 where no size is printed."""
        return max((self.wanted_bytes or 0) - (self.free_bytes or 0), 0)

    @property
    def free_words(self) -> str:
        """`2.0 GiB were free`, or `less was free` where it is not printed."""
        return "less was free" if self.free_bytes is None else f"{gib(self.free_bytes)} were free"

    @property
    def reserve_covers_request(self) -> bool:
        """Whether free plus reserved but unallocated memory covers the request, so that only fragmentation failed."""
        if self.unused_bytes is None or self.wanted_bytes is None:
            return False
        return self.unused_bytes + (self.free_bytes or 0) >= self.wanted_bytes

    @property
    def free_exceeds_request(self) -> bool:
        """Whether clearly more was free than requested (5 % and 64 MiB at least), so that another limit applied."""
        if self.free_bytes is None or self.wanted_bytes is None:
            return False
        return self.free_bytes >= self.wanted_bytes + max(64 * MIB, self.wanted_bytes // 20)

    @property
    def larger_than_card(self) -> bool:
        """Whether the request exceeds the whole card (128 GiB where unknown): a wrong shape, not a shortage."""
        return (self.wanted_bytes or 0) > (self.total_bytes or 128 * GIB)


def ledger_of(oom: TorchOom | None) -> Ledger:
    """One card's memory by torch's OOM message, in whose process list one entry may be this process; empty for None."""
    if oom is None:
        return Ledger()
    others: int | None = None
    if oom.own_bytes:
        others = sum(oom.others_bytes)
        unlisted = (oom.total_bytes or 0) - (oom.free_bytes or 0) - oom.own_bytes
        if oom.free_bytes is not None and unlisted > max(others, _DRIVER_BYTES):
            others = unlisted  # processes of other containers are not listed
    elif oom.others_bytes:
        others = sum(oom.others_bytes) - own_process_bytes(oom)
    sizes = (oom.torch_bytes, oom.unallocated_bytes, oom.free_bytes, oom.wanted_bytes)
    outside = Ledger(oom.total_bytes, others, None, *sizes).outside_torch_bytes
    own = None if outside is None or others is None else max(outside - others, 0)
    return Ledger(oom.total_bytes, others, own, *sizes)


def own_process_bytes(oom: TorchOom) -> int:
    """This process's bytes in torch's list of processes: the entry nearest above what torch holds, else the largest."""
    held = None if oom.torch_bytes is None else oom.torch_bytes + (oom.unallocated_bytes or 0)
    above = [size for size in oom.others_bytes if held is not None and size >= held - _ROUNDING_BYTES]
    return min(above) if above else max(oom.others_bytes)


def expected_ledgers(layout: Layout) -> dict[str, Ledger]:
    """The card's planned memory at the end of loading (`load`), the profile run's peak (`profile`) and in `serving`."""
    weights, peak = layout.weights.bytes, layout.activation.bytes
    after_kv = weights + peak + max(layout.kv_cache.bytes, 0) + layout.cuda_graph.bytes
    others, own = layout.held_by_others_bytes, layout.non_torch.bytes + layout.outside.bytes
    held = {"load": max(weights, layout.loading_peak_bytes), "profile": weights + peak, "serving": after_kv}
    return {
        moment: Ledger(layout.total_bytes, others, own, size, 0, layout.total_bytes - others - own - size)
        for moment, size in held.items()
    }


def possible_moments(seen: Ledger, layout: Layout) -> frozenset[str]:
    """Planned moments (`load`, `profile`, `serving`) that match the bytes torch held in `seen`; all if not printed."""
    expected = expected_ledgers(layout)
    allocated = seen.allocated_bytes
    if allocated is None and seen.total_bytes is not None and seen.free_bytes is not None:
        own = layout.non_torch.high + layout.outside.high + _DRIVER_BYTES
        used = seen.total_bytes - seen.free_bytes - (seen.other_processes_bytes or 0) - own
        at_load = (expected["load"].allocated_bytes or 0) + layout.weights.high - layout.weights.bytes
        return frozenset(expected) - ({"load"} if used > at_load else frozenset())
    if allocated is None:
        return frozenset(expected)
    pool = max(layout.kv_cache.low, 0)
    least = {"load": 0, "profile": layout.weights.low, "serving": layout.weights.low + pool}
    doubt = {
        "load": layout.weights.high - layout.weights.bytes,
        "profile": layout.weights.high - layout.weights.bytes + layout.activation.high - layout.activation.bytes,
        "serving": layout.total_bytes,
    }
    if layout.kv_cache.high <= 0:
        del expected["serving"]
    return frozenset(
        moment
        for moment, planned in expected.items()
        if least[moment] - _ROUNDING_BYTES
        <= allocated
        <= (planned.allocated_bytes or 0) + doubt[moment] + _ROUNDING_BYTES
    )
