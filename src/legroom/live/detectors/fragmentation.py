"""PyTorch's allocator reserves memory that it cannot hand out. The KV pool itself cannot fragment."""

from legroom.live.detectors.base import GOOD, Condition, Detector
from legroom.live.metrics.window import Window
from legroom.units import human_bytes


class Fragmentation(Detector):
    """Reserved minus allocated bytes, from the worker plugin's telemetry."""

    kind = "fragmentation"
    title = "PyTorch holds memory in pieces"
    cause = "allocator_fragmentation"
    entry = "LR406"
    situation = "chronic"
    restart_helps = True
    begins_after = "fragmentation_hold"

    def measure(self, window: Window, now_s: float) -> Condition | None:
        """Bad where PyTorch reserves much memory that is not allocated, in share and bytes; None if not reported."""
        levels, sample = self.levels, window.latest
        if not window.is_answering or sample is None or not sample.reserved_bytes or sample.allocated_bytes is None:
            return None
        unused_bytes = sample.reserved_bytes - sample.allocated_bytes
        share = unused_bytes / sample.reserved_bytes
        if share < levels.fragmentation_ratio or unused_bytes < levels.fragmentation_bytes:
            return GOOD
        reason = (
            f"PyTorch reserves {human_bytes(sample.reserved_bytes)} and uses {human_bytes(sample.allocated_bytes)}: "
            f"{human_bytes(unused_bytes)} ({share:.0%}) lies in pieces"
        )
        return Condition(True, reason, {"held_bytes": float(unused_bytes), "share": share})
