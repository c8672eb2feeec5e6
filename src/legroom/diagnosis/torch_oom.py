"""The out-of-memory text of torch, taken apart, and the shares that follow from its numbers."""

from __future__ import annotations

from legroom.diagnosis.evidence import Evidence, sizes_bytes
from legroom.diagnosis.patterns import compiled
from legroom.facts.evidence import oom_parts, typed
from legroom.records import dataclass
from legroom.units import GIB, MIB


@dataclass(frozen=True, slots=True)
class TorchOom:
    """One allocation that failed. None: the text does not say, or says zero bytes as containers make it do."""

    line: int
    wanted_bytes: int
    platform: str = "CUDA"
    gpu: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    own_bytes: int | None = None
    """What this process holds, torch's and other memory."""
    others_bytes: tuple[int, ...] = ()
    """What other processes hold; in a container the job itself may be listed as one."""
    torch_bytes: int | None = None
    pools_bytes: int = 0
    """In private pools: CUDA graphs, or the sleep-mode allocator."""
    unallocated_bytes: int | None = None
    """Reserved by torch but not allocated."""
    allowed_bytes: int | None = None

    @property
    def non_torch_bytes(self) -> int | None:
        """Used on the card but not by this process's torch: libraries, NCCL, kernels, other processes."""
        if self.total_bytes is None or self.free_bytes is None or self.torch_bytes is None:
            return None
        return self.total_bytes - self.free_bytes - self.torch_bytes - (self.unallocated_bytes or 0)

    @property
    def neighbours_bytes(self) -> int:
        """Held by processes that are not this one; a list of a single process is this one's own entry."""
        if self.own_bytes:
            return sum(self.others_bytes)
        return sum(sorted(self.others_bytes)[:-1])

    @property
    def covered_by_reserve(self) -> bool:
        """Free and reserved-but-unallocated memory together would have been enough: it is the pieces that are small."""
        if self.unallocated_bytes is None:
            return False
        return self.unallocated_bytes + (self.free_bytes or 0) >= self.wanted_bytes

    @property
    def free_was_enough(self) -> bool:
        """The card had clearly more free than was asked for: the limit is somewhere else."""
        if self.free_bytes is None:
            return False
        return self.free_bytes >= self.wanted_bytes + max(64 * MIB, self.wanted_bytes // 20)

    @property
    def larger_than_card(self) -> bool:
        """No GPU of this size could ever hold it: a shape is wrong, not the amount of memory."""
        return self.wanted_bytes > (self.total_bytes or 128 * GIB)


def parse_oom(evidence: Evidence) -> TorchOom | None:
    """Read a `torch_oom` evidence; old and new wordings, in one line or wrapped."""
    wanted = evidence.facts.get("wanted_bytes")
    if not isinstance(wanted, int):
        return None
    window = evidence.window[:1600]
    # A second OOM in the lines that follow brings its own numbers.
    again = window.find("Tried to allocate", window.find("Tried to allocate") + 1)
    window = window[:again] if again > 0 else window
    numbers: dict[str, int] = {}
    for pattern in oom_parts().numbers:
        match = compiled(pattern).search(window)
        if match:
            for name, value in typed(match.groupdict()).items():
                if isinstance(value, int):
                    numbers.setdefault(name, value)
    others = sizes_bytes(match["used_size"] for match in compiled(oom_parts().process).finditer(window))
    reserved, torch = numbers.get("reserved_bytes"), numbers.get("torch_bytes")
    unallocated = numbers.get("unallocated_bytes")
    if unallocated is None and reserved is not None and torch is not None:
        unallocated = max(reserved - torch, 0)
    return TorchOom(
        evidence.line, wanted, str(evidence.facts.get("platform", "CUDA")), numbers.get("gpu_count"),
        numbers.get("total_bytes"), numbers.get("free_bytes"), numbers.get("own_bytes") or None,
        tuple(value for value in others if value), torch, numbers.get("pools_bytes", 0), unallocated,
        numbers.get("allowed_bytes"),
    )  # fmt: skip
