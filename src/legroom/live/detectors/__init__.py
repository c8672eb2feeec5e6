"""Detectors of problems of a running vLLM, one per file. `DETECTORS` lists them."""

from legroom.live.detectors.base import Detector, DetectorFinding
from legroom.live.detectors.crash_loop import CrashLoop
from legroom.live.detectors.fragmentation import Fragmentation
from legroom.live.detectors.gpu_neighbour import GpuNeighbour
from legroom.live.detectors.host_memory_creep import HostMemoryCreep
from legroom.live.detectors.long_prompt_burst import LongPromptBurst
from legroom.live.detectors.memory_burst import MemoryBurst
from legroom.live.detectors.memory_creep import MemoryCreep
from legroom.live.detectors.no_traffic import NoTraffic
from legroom.live.detectors.plan_drift import PlanDrift
from legroom.live.detectors.pool_pressure import PoolPressure
from legroom.live.detectors.preemption_thrash import PreemptionThrash
from legroom.live.detectors.prefix_cache_waste import PrefixCacheWaste
from legroom.live.detectors.queue_backlog import QueueBacklog
from legroom.live.detectors.refused_load import RefusedLoad
from legroom.live.detectors.several_servers import SeveralServers
from legroom.live.detectors.stuck_engine import StuckEngine
from legroom.live.detectors.unreachable import Unreachable
from legroom.live.metrics.sample import ScrapeResult
from legroom.live.metrics.window import WINDOW_S, Window
from legroom.live.thresholds import DEFAULT, Thresholds
from legroom.planning.plan_document import PlanDocument

__all__ = ["DETECTORS", "Detector", "DetectorFinding", "Watcher"]

DETECTORS: tuple[type[Detector], ...] = (
    Unreachable,
    CrashLoop,
    StuckEngine,
    PreemptionThrash,
    RefusedLoad,
    PoolPressure,
    QueueBacklog,
    LongPromptBurst,
    GpuNeighbour,
    MemoryBurst,
    PrefixCacheWaste,
    MemoryCreep,
    HostMemoryCreep,
    Fragmentation,
    PlanDrift,
    SeveralServers,
    NoTraffic,
)
"""Most severe first: a server's state is named after its first finding."""


class Watcher:
    """The window and the detectors of one server, and its current findings."""

    def __init__(self, server: str, levels: Thresholds = DEFAULT, plan: PlanDocument | None = None) -> None:
        self.window = Window(server, window_s=max(WINDOW_S, levels.longest_over_s))
        self.detectors = tuple(kind(levels, plan) for kind in DETECTORS)
        self.findings: tuple[DetectorFinding, ...] = ()

    def take(self, result: ScrapeResult) -> tuple[DetectorFinding, ...]:
        """Adds a scrape to the server's window and returns the findings that now hold, most severe first."""
        self.window.add(result)
        updates = (detector.update(self.window, result.time_s) for detector in self.detectors)
        self.findings = tuple(finding for finding in updates if finding is not None)
        return self.findings

    def reset_pending_durations(self) -> None:
        """Starts the minimum duration of every problem that has not become a finding yet from zero again."""
        for detector in self.detectors:
            if not detector.is_active:
                detector.reset_durations()
