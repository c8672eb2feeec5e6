"""A replay with a second tier: steps take their time, and so do copies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from legroom.errors import LegroomError
from legroom.simulation.fast.fast_replay import Progress
from legroom.simulation.fast.rows import StepCost
from legroom.simulation.kv_cache_manager import Hit
from legroom.simulation.request import Request
from legroom.simulation.scheduler import Batch, Scheduler
from legroom.simulation.scheduler_settings import LayerGroup, SchedulerSettings
from legroom.simulation.tiers.host_tier import FileTally, TierSettings
from legroom.simulation.tiers.offload import KvOffload, TierTally
from legroom.simulation.tiers.transfers import TransferJob, TransferPlan, TransferWorker
from legroom.simulation.timeline import Rejection, Timeline
from legroom.simulation.trace import BlockHasher, Trace
from legroom.simulation.trace_replay import Reference, StepSink, check_cost
from legroom.units import cdiv


class TieredScheduler(Scheduler):
    """As without a tier, but a waiting request may first load what the tier has of its prompt.

    While it loads it holds its blocks and does not run. Loaded requests are admitted before all others.
    """

    def __init__(self, settings: SchedulerSettings, tier: TierSettings) -> None:
        _check(settings)
        super().__init__(settings)
        # The tier knows chunks by their content, whether the GPU caches prefixes or not.
        self.hasher = BlockHasher(settings.block_size)
        self.offload = KvOffload(tier, settings.block_size, prefix_caching=settings.enable_prefix_caching)
        self.holding = type(self.waiting)()
        """Waiting requests that hold blocks: they load, or have loaded."""
        self.plan = TransferPlan()
        self._loading: set[Request] = set()
        self._loaded: set[Request] = set()
        """Nobody finds the loaded blocks before it is the request's turn again."""
        self._prefilling: dict[Request, None] = {}
        """Requests whose known tokens are not all computed: a load must leave them the blocks they still need."""
        self._finished: list[Request] = []
        self._steps = self._steps_done = 0
        """Steps decided and steps done in which something ran."""
        self._last_step: dict[Request, int] = {}
        self._given_back: deque[tuple[int, list[object]]] = deque()
        """Blocks that a step in flight may still write, and that step: a load must not be given them before."""

    def add(self, request: Request) -> None:
        super().add(request)
        self.offload.add(request)

    @property
    def has_requests(self) -> bool:
        return super().has_requests or bool(len(self.holding)) or bool(self._finished) or self.offload.has_work

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.holding)

    def take_stuck(self) -> Request | None:
        if self.running or self.offload.has_work:
            return None
        return self.holding.pop() if len(self.holding) else super().take_stuck()

    def take_reader(self) -> Request | None:
        """Take the first out that has not been given blocks and waits for files to be read."""
        return self.waiting.pop() if len(self.waiting) else None

    def schedule(self) -> Batch:
        batch = super().schedule()
        for request in batch.samples:
            self._prefilling.pop(request, None)
        if self.settings.async_scheduling and batch.scheduled:
            self._steps += 1
            self._last_step.update(dict.fromkeys(batch.scheduled, self._steps))
        self.plan = self.offload.end_schedule(batch.scheduled, batch.preempted, self._finished)
        self._finished = []
        return batch

    def update(self, batch: Batch) -> tuple[list[Request], list[Request]]:
        if self.settings.async_scheduling and batch.scheduled:
            self._steps_done += 1
            while self._given_back and self._given_back[0][0] <= self._steps_done:
                self.kv.pool.release(reversed(self._given_back.popleft()[1]))  # type: ignore[arg-type]
        return super().update(batch)

    def _can_free(self, request: Request) -> bool:
        return self._last_step.get(request, 0) <= self._steps_done

    def _free(self, request: Request) -> None:
        if not self._can_free(request) and request.blocks[0]:
            self._given_back.append((self._steps, request.blocks[0]))
            request.blocks[0] = []
        super()._free(request)

    def _long_prefill_threshold(self) -> int:
        alone = len(self.running) + self.num_waiting <= 1
        return 0 if alone else self.settings.long_prefill_token_threshold

    def _admit_waiting(self, batch: Batch, budget: int, threshold: int) -> None:
        kept: list[Request] = []
        deferred: list[Request] = []
        while budget > 0 and len(self.running) < self.settings.max_num_seqs:
            queue = self.holding if len(self.holding) else self.waiting
            if not len(queue):
                break
            request = queue.first()
            if request in self._loading:
                kept.append(queue.pop())
                continue
            if request.stale_tokens:
                # A token of the time before its preemption is still to come.
                deferred.append(queue.pop())
                continue
            if request in self._loaded:
                self._promote(request)
            if request.num_computed_tokens:
                used = self._admit(request, batch, budget, threshold, None, 0)
            else:
                hit, num_hit_tokens = self.kv.find_hit(request)
                num_loadable = self.offload.find_hit(request, num_hit_tokens)
                if num_loadable is None:
                    deferred.append(queue.pop())
                    continue
                if num_loadable:
                    if not self._begin_load(request, batch, hit, num_hit_tokens, num_loadable):
                        break
                    kept.append(queue.pop())
                    continue
                used = self._admit(request, batch, budget, threshold, hit, num_hit_tokens)
            if not used:
                break
            queue.pop()
            budget -= used
        for queue, skipped in ((self.holding, kept), (self.waiting, deferred)):
            for request in reversed(skipped):
                queue.put_back(request)

    def _admit(
        self, request: Request, batch: Batch, budget: int, threshold: int, hit: Hit | None, num_hit_tokens: int
    ) -> int:
        used = super()._admit(request, batch, budget, threshold, hit, num_hit_tokens)
        if used and request.num_computed_tokens + used < request.num_tokens:
            self._prefilling[request] = None
        return used

    def _begin_load(self, request: Request, batch: Batch, hit: Hit, num_hit_tokens: int, num_loadable: int) -> bool:
        """Give the request blocks for what the tier has; False if they do not fit."""
        fits = self.kv.allocate(
            request,
            0,
            hit,
            num_hit_tokens,
            num_loaded_tokens=num_loadable,
            reserved_blocks=sum(map(self._blocks_to_come, self._prefilling)),
            whole_must_fit=self.settings.reserve_full_isl,
            others_run=bool(self.running),
        )
        if not fits:
            return False
        self.offload.load(request, num_hit_tokens, num_loadable)
        if request.num_preemptions == 0:
            batch.cached_tokens += num_hit_tokens
        request.num_computed_tokens = num_hit_tokens + num_loadable
        self._loading.add(request)
        self._prefilling[request] = None
        return True

    def _blocks_to_come(self, request: Request) -> int:
        tokens = min(request.num_tokens, self.settings.max_model_len)
        return max(0, cdiv(tokens, self.settings.block_size) - len(request.blocks[0]))

    def complete(self, job: TransferJob) -> None:
        """A copy is done; a request that waited for it can run."""
        self.offload.complete(job)
        if not job.is_store:
            self._loading.discard(job.request)
            self._loaded.add(job.request)

    def _promote(self, request: Request) -> None:
        self._loaded.discard(request)
        if self.settings.enable_prefix_caching:
            self.kv.cache(request, request.num_computed_tokens)
        # The last token is always computed: its logits are wanted.
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)

    def _preempt(self, request: Request, batch: Batch) -> None:
        super()._preempt(request, batch)
        self._prefilling.pop(request, None)

    def _finish(self, request: Request) -> None:
        self.offload.finish(request)
        super()._finish(request)
        self._prefilling.pop(request, None)
        self._last_step.pop(request, None)
        self._finished.append(request)


def _check(settings: SchedulerSettings) -> None:
    for is_asked, what, remedy in (
        (settings.engine == "V0", "the V0 engine", "plan a release with the V1 engine"),
        (settings.num_speculative_tokens > 0, "speculative tokens", "leave them out"),
        (settings.groups != (LayerGroup(),), "several groups of layers", "leave out --tier"),
    ):
        if is_asked:
            raise LegroomError(f"a tier together with {what} is not simulated", remedy)


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
