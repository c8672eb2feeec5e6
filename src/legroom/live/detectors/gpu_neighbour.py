"""Another process takes GPU memory while vLLM serves, so that the next large step may not fit."""

from legroom.live.detectors.base import GOOD, Condition, Detector
from legroom.live.metrics.window import Window
from legroom.units import human_bytes


class GpuNeighbour(Detector):
    """Bytes of other processes against their minimum; growth that ended 15 minutes ago becomes the new minimum."""

    kind = "gpu_neighbour"
    title = "Another process takes memory of the GPU"
    cause = "gpu_shared_or_not_free"
    entry = "LR103"
    situation = "burst"

    _least_bytes: int | None = None
    _most_bytes: int = 0
    _grown_s: float = 0.0
    _start_s: float = 0.0

    def measure(self, window: Window, now_s: float) -> Condition | None:
        """Bad where other processes hold `neighbour_bytes` above their minimum; None where workers report none."""
        levels, sample = self.levels, window.latest
        if not window.is_answering or sample is None or sample.others_bytes is None:
            return None
        start_s = window.restarts[-1] if window.restarts else 0.0
        if self._least_bytes is None or start_s != self._start_s:
            self._least_bytes, self._start_s = sample.others_bytes, start_s
            self._most_bytes, self._grown_s = sample.others_bytes, now_s
        if sample.others_bytes > self._most_bytes:
            self._most_bytes, self._grown_s = sample.others_bytes, now_s
        if now_s - self._grown_s > levels.neighbour_settled_s:  # growth that stopped is the new normal
            self._least_bytes = self._most_bytes = sample.others_bytes
            self._grown_s = now_s
        self._least_bytes = min(self._least_bytes, sample.others_bytes)
        taken_bytes = sample.others_bytes - self._least_bytes
        if taken_bytes < levels.neighbour_bytes:
            return GOOD
        reason = f"other processes hold {human_bytes(sample.others_bytes)} of the GPUs that the workers run on, "
        reason += f"{human_bytes(taken_bytes)} more than before"
        numbers = {"others_bytes": float(sample.others_bytes), "taken_bytes": float(taken_bytes)}
        return Condition(True, reason, numbers)
