"""Start and stop times of a planned server, from which probes, unit timeouts and grace periods are set.

The parts are measured (vLLM 0.26 on one H200 with dummy weights: imports 25 s, engine start 3 to 71 s in 37 logs) or
arithmetic on an assumed speed that the user can name; several GPUs and other releases were not measured. The limit is
twice their sum, because a probe that is too short kills a healthy start, and one that is too long only delays the
report of a dead one.
"""

import math

from legroom.records import dataclass
from legroom.units import GIB

IMPORT_S = 25
"""Imports and processes up to the first byte of the model, measured."""
ENGINE_S = 75
"""Profile run, compilation with a cold cache, graph capture: the longest of 37 logged starts took 71 s."""
SHORTEST_ENGINE_S = 3
"""The shortest of them, a small model in eager mode."""
DISK_BYTES_S = 200e6
"""What a plain network volume reads; a local NVMe drive reads ten times as much."""
DOWNLOAD_BYTES_S = 100e6
"""About a gigabit line."""
SAFETY = 2.0
SHORTEST_LIMIT_S = 300
DRAIN_S = 60
TEARDOWN_S = 30
"""From the last answer to the end of the process."""
ENDPOINT_S = 10
"""How long routers may still send to a terminating pod."""
PROBE_PERIOD_S = 10


@dataclass(frozen=True, slots=True)
class StartTimes:
    checkpoint_bytes: int
    disk_bytes_s: float
    download_bytes_s: float
    """0: nothing is downloaded."""
    drain_s: int = DRAIN_S
    engine_s: int = ENGINE_S

    @property
    def checkpoint_read_s(self) -> float:
        """The seconds to read the checkpoint from disk once."""
        return self.checkpoint_bytes / self.disk_bytes_s

    @property
    def download_s(self) -> float:
        """Seconds of the first download; 0 for a local model."""
        return self.checkpoint_bytes / self.download_bytes_s if self.download_bytes_s else 0.0

    @property
    def expected_s(self) -> float:
        """Expected seconds of a first start: imports, download, reading the checkpoint, and starting the engine."""
        return IMPORT_S + self.download_s + self.checkpoint_read_s + self.engine_s

    @property
    def limit_s(self) -> int:
        """The startup limit in seconds: twice the expected time, at least 300, rounded up to probe periods of 30 s."""
        return math.ceil(max(SAFETY * self.expected_s, SHORTEST_LIMIT_S) / 30) * 30

    @property
    def stop_s(self) -> int:
        """Seconds of drain and teardown together."""
        return self.drain_s + TEARDOWN_S

    def parts(self) -> str:
        """The parts of the expected start time as text, each with its seconds."""
        size = f"{self.checkpoint_bytes / GIB:.1f} GiB of weights"
        parts = [f"imports {IMPORT_S} s"]
        if self.download_bytes_s:
            parts.append(f"downloading {size} at {_speed_text(self.download_bytes_s)} {self.download_s:.0f} s")
            size = "them"
        parts.append(f"reading {size} at {_speed_text(self.disk_bytes_s)} {self.checkpoint_read_s:.0f} s")
        is_eager = self.engine_s == SHORTEST_ENGINE_S
        parts.append(f"{'profiling' if is_eager else 'profiling, compiling and capturing graphs'} {self.engine_s} s")
        return ", ".join(parts)

    def sentence(self) -> str:
        """A comment with the parts of the expected start time and the startup limit."""
        return f"{self.parts()}: about {self.expected_s:.0f} s for a first start; the limit is {self.limit_s} s"

    def short_sentence(self) -> str:
        """A comment with the expected start time and the startup limit."""
        return f"a first start takes about {self.expected_s:.0f} s, the limit is {self.limit_s} s"


def _speed_text(bytes_s: float) -> str:
    """Bytes per second as text, such as `500 MB/s`."""
    return f"{bytes_s / 1e6:.0f} MB/s" if bytes_s < 1e9 else f"{bytes_s / 1e9:.1f} GB/s"
