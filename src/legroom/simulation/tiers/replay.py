"""A replay with a second tier: steps take their time, and so do copies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from legroom.simulation.fast.columns import StepCost
from legroom.simulation.fast.engine import Progress
from legroom.simulation.replay import Reference, StepSink, check_cost
from legroom.simulation.request import Request
from legroom.simulation.scheduler import Batch, Scheduler
from legroom.simulation.settings import SchedulerSettings
from legroom.simulation.tiers.host import FileTally
from legroom.simulation.tiers.offload import KvOffload, TierTally
from legroom.simulation.tiers.scheduler import TieredScheduler
from legroom.simulation.tiers.settings import TierSettings
from legroom.simulation.tiers.transfers import TransferJob, TransferPlan, TransferWorker
from legroom.simulation.timeline import Rejection, Timeline
from legroom.simulation.trace import Trace

_IDLE_STEPS = 8
"""After so many steps in which nothing runs and nothing is copied, nothing ever will."""
_ENDLESS_READS = 50
"""The host's tier read back so many times over while nothing runs is a circle."""
_ENDLESS = "waits forever: the host's tier is too small to hold what is read back from files for its prompt"

TransferSink = Callable[[int, TransferPlan, KvOffload], None]


@dataclass(frozen=True)
class TieredTimeline:
    """What a replay with a tier found out."""

    timeline: Timeline
    tier: TierSettings
    tally: TierTally
    load_busy_s: float
    store_busy_s: float
    flush_wait_s: float
    files: FileTally | None = None
    """Of a tier of files behind it."""


class TierReplay(Reference):
    """The replay that reads like the scheduler, with copies to and from the host."""

    scheduler: TieredScheduler

    def __init__(
        self,
        trace: Trace,
        settings: SchedulerSettings,
        tier: TierSettings,
        on_step: StepSink | None = None,
        cost: StepCost | None = None,
        progress: Progress | None = None,
        on_transfers: TransferSink | None = None,
    ) -> None:
        self.tier = tier
        self.worker = TransferWorker(tier)
        self.on_transfers = on_transfers
        self.ended: deque[list[TransferJob]] = deque()
        """The copies that had ended when each step in flight had run."""
        self.is_live = False
        self.idle_steps = 0
        self.read_before = 0
        """Chunks that had been read back from files when something last ran."""
        super().__init__(trace, settings, on_step, cost, progress)

    def _make_scheduler(self) -> Scheduler:
        return TieredScheduler(self.settings, self.tier)

    def _one_step(self) -> None:
        self.is_live = self.scheduler.has_requests
        self.scheduler.offload.tier.now_s = self.now_s
        super()._one_step()
        self.idle_steps = 0 if self.scheduler.running or self.scheduler.offload.has_work else self.idle_steps + 1
        if self.idle_steps > _IDLE_STEPS:
            self._give_up_on_first()
        if self.scheduler.running:
            self.read_before = self._chunks_read()
        elif self._chunks_read() - self.read_before > _ENDLESS_READS * self.tier.num_chunks:
            self._give_up_on_reader()

    def _chunks_read(self) -> int:
        files = self.scheduler.offload.tier.file_tally()
        return files.loaded_chunks if files else 0

    def _give_up_on_reader(self) -> None:
        """A prompt that needs more chunks than the host holds: reading one back evicts another, in vLLM without end."""
        stuck = self.scheduler.take_reader()
        self.read_before = self._chunks_read()
        if stuck is not None:
            self.rejections.append(Rejection(stuck.id, _ENDLESS))

    def _run(self, batch: Batch) -> None:
        if not self.is_live:
            return
        plan = self.scheduler.plan
        if self.on_transfers:
            self.on_transfers(self.step, plan, self.scheduler.offload)
        self.now_s = self.worker.begin_step(plan, self.now_s)
        if self.cost is None:
            # Without a length of steps, each is one unit of time long.
            self.now_s += 1.0
        elif batch.scheduled or not self.clocks:
            super()._run(batch)
        else:
            self._wait()
        self.ended.append(self.worker.end_step(plan, self.now_s))
        self.scheduler.offload.tier.now_s = self.now_s

    def _wait(self) -> None:
        """Nothing can run: until a copy ends or a request arrives, the engine idles."""
        events = [
            self.worker.next_event_s,
            self.scheduler.offload.tier.next_event_s,
            self.next_arrival if self.clocks else None,
        ]
        self.now_s = max(self.now_s, min((event for event in events if event is not None), default=self.now_s))

    def _settle(self, batch: Batch) -> tuple[list[Request], list[Request]]:
        """The oldest step comes back, with the copies that had ended by then; steps in which nothing ran count too."""
        if self.is_live:
            self.in_flight.append(batch)
            if len(self.in_flight) < self.batches_in_flight and (batch.scheduled or self.scheduler.has_requests):
                return [], []
        if not self.in_flight:
            return [], []
        result = self.scheduler.update(self.in_flight.popleft())
        for job in self.ended.popleft():
            self.scheduler.complete(job)
        return result

    def _give_up_on_first(self) -> None:
        if self.idle_steps > _IDLE_STEPS:
            super()._give_up_on_first()


def simulate_with_tier(
    trace: Trace,
    settings: SchedulerSettings,
    tier: TierSettings,
    on_step: StepSink | None = None,
    *,
    cost: StepCost | None = None,
    progress: Progress | None = None,
    on_transfers: TransferSink | None = None,
) -> TieredTimeline:
    """Replay `trace` through vLLM's scheduling and offloading decisions."""
    trace = trace.checked()
    check_cost(trace, cost)
    replay = TierReplay(trace, settings, tier, on_step, cost, progress, on_transfers)
    timeline = replay.run()
    worker = replay.worker
    return TieredTimeline(
        timeline,
        tier,
        replay.scheduler.offload.tally,
        worker.load_link.busy_s,
        worker.store_link.busy_s,
        worker.waited_s,
        replay.scheduler.offload.tier.file_tally(),
    )
