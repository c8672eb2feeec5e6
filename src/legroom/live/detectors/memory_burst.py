"""A step needed more GPU memory than was free: PyTorch released its cache and retried, or failed."""

from legroom.live.detectors.base import AT_ONCE, GOOD, Condition, Detector, counted
from legroom.live.metrics.sample import Sample
from legroom.live.metrics.window import Window
from legroom.units import human_bytes


class MemoryBurst(Detector):
    """Allocator retries that neither fragmentation, nor another process, nor growth explains."""

    kind = "memory_burst"
    title = "A step needs nearly all that is left of the GPU"
    cause = "runtime_activation_burst"
    entry = "LR401"
    situation = "burst"
    begins_after = AT_ONCE
    """The next step of that size may fail."""

    _first: Sample | None = None
    _last: Sample | None = None
    _retried_s: float | None = None
    _retries: float = 0.0

    def measure(self, window: Window, now_s: float) -> Condition | None:
        """Bad for a minute after a PyTorch allocator retry that nothing else explains; None without telemetry."""
        sample, last = window.latest, self._last
        if not window.is_answering or sample is None or sample.alloc_retries is None or not sample.reserved_bytes:
            return None
        if last is None or last.alloc_retries is None or sample.alloc_retries < last.alloc_retries:
            self._first = self._last = sample
            return GOOD
        grown, self._last = sample.alloc_retries - last.alloc_retries, sample
        if grown > 0 and not self._is_explained(sample):
            self._retried_s, self._retries = now_s, grown
        if self._retried_s is None or now_s - self._retried_s > self.levels.memory_burst_over_s:
            return GOOD
        reason = f"PyTorch gave its cache back to the card to serve a step ({counted(self._retries, 'time')}), with "
        reason += f"{human_bytes(sample.allocated_bytes or 0)} in use between steps"
        return Condition(True, reason, {"retries": self._retries, "reserved_bytes": float(sample.reserved_bytes)})

    def _is_explained(self, sample: Sample) -> bool:
        """Whether fragmentation, another process or growth since the first scrape explains the allocator's retry."""
        levels, first = self.levels, self._first or sample
        allocated, reserved = sample.allocated_bytes or 0, sample.reserved_bytes or 0
        if reserved - allocated >= max(levels.fragmentation_bytes, levels.fragmentation_ratio * reserved):
            return True
        others, others_before = sample.others_bytes or 0, first.others_bytes or 0
        grown = allocated - (first.allocated_bytes or 0)
        return others - others_before >= levels.neighbour_bytes or grown >= levels.memory_burst_growth_bytes
