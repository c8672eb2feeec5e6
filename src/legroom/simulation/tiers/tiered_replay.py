"""The replay with a host tier behind the GPU's prefix cache (vLLM 0.32, native CPU offloading)."""

from collections import deque
from dataclasses import dataclass
from typing import Any

from legroom.errors import LegroomError
from legroom.simulation.block_pool import Block
from legroom.simulation.fast.accounting import step_seconds
from legroom.simulation.fast.fast_replay import Progress
from legroom.simulation.fast.rows import StepCost
from legroom.simulation.kv_cache_manager import Hit
from legroom.simulation.request import Request
from legroom.simulation.scheduler import Scheduler, SchedulerOutput, WaitingQueue
from legroom.simulation.scheduler_settings import LayerGroup, SchedulerSettings
from legroom.simulation.tiers.host_tier import FileTally, TierSettings
from legroom.simulation.tiers.offload import KvOffload, TierTally, TransferJob, TransferPlan, TransferWorker
from legroom.simulation.timeline import Rejection, Timeline
from legroom.simulation.trace import BlockHasher, Trace
from legroom.simulation.trace_replay import StepByStepReplay, StepSink, check_cost
from legroom.units import cdiv


class TieredScheduler(Scheduler):
    """The scheduler with a host tier: a waiting request may first load cached chunks of its prompt. While it loads it
    holds its blocks and does not run. Loaded requests are admitted before all others."""

    def __init__(self, settings: SchedulerSettings, tier: TierSettings) -> None:
        for is_set, what, remedy in (
            (settings.engine == "V0", "the V0 engine", "plan a release with the V1 engine"),
            (settings.num_speculative_tokens > 0, "speculative tokens", "leave them out"),
            (settings.groups != (LayerGroup(),), "several groups of layers", "leave out --tier"),
        ):
            if is_set:
                raise LegroomError(f"a tier together with {what} is not simulated", remedy)
        super().__init__(settings)
        # The tier needs block hashes even without a prefix cache on the GPU.
        self.hasher = BlockHasher(settings.block_size)
        self.offload = KvOffload(tier, settings.block_size, prefix_caching=settings.enable_prefix_caching)
        self.holding = WaitingQueue(settings.scheduling_policy == "priority")
        """Waiting requests with blocks: loading or loaded."""
        self.plan = TransferPlan()
        self._loading: set[Request] = set()
        self._loaded: set[Request] = set()
        """Requests whose loaded blocks are not yet in the prefix cache."""
        self._prefilling: dict[Request, None] = {}
        """Requests with tokens left to prefill: a load must leave them the blocks they still need."""
        self._finished: list[Request] = []
        self._steps = self._steps_done = 0
        """Non-empty steps scheduled, and completed."""
        self._last_step: dict[Request, int] = {}
        self._deferred_frees: deque[tuple[int, list[Block]]] = deque()
        """Blocks that a step in flight may still write, with the number of that step."""

    def add_request(self, request: Request) -> None:
        """Queue a request and track its chunks for the tier."""
        super().add_request(request)
        self.offload.add(request)

    @property
    def has_requests(self) -> bool:
        """Whether a request is running, waiting or loading from the tier."""
        return super().has_requests or bool(len(self.holding)) or bool(self._finished) or self.offload.has_work

    @property
    def num_waiting(self) -> int:
        """Requests that wait, those loading from the tier included."""
        return len(self.waiting) + len(self.holding)

    def pop_unschedulable(self) -> Request | None:
        """Removes and returns the first loaded, else waiting, request if nothing runs or is being copied; else None."""
        if self.running or self.offload.has_work:
            return None
        return self.holding.pop() if len(self.holding) else super().pop_unschedulable()

    def schedule(self) -> SchedulerOutput:
        """The decisions of one step, and its planned copies to and from the tier."""
        output = super().schedule()
        for request in output.sampling:
            self._prefilling.pop(request, None)
        if self.settings.async_scheduling and output.scheduled:
            self._steps += 1
            self._last_step.update(dict.fromkeys(output.scheduled, self._steps))
        self.plan = self.offload.end_schedule(output.scheduled, output.preempted, self._finished)
        self._finished = []
        return output

    def update_from_output(self, output: SchedulerOutput) -> tuple[list[Request], list[Request]]:
        """Appends a step's sampled tokens and frees blocks kept for it: (requests that sampled, those finished)."""
        if self.settings.async_scheduling and output.scheduled:
            self._steps_done += 1
            while self._deferred_frees and self._deferred_frees[0][0] <= self._steps_done:
                self.kv_cache_manager.block_pool.free_blocks(reversed(self._deferred_frees.popleft()[1]))
        return super().update_from_output(output)

    def _can_free(self, request: Request) -> bool:
        """Whether the last step that reads the request's blocks has run."""
        return self._last_step.get(request, 0) <= self._steps_done

    def _free(self, request: Request) -> None:
        """Frees the request's blocks, or keeps them until the steps in flight that read them have run."""
        if not self._can_free(request) and request.blocks[0]:
            self._deferred_frees.append((self._steps, request.blocks[0]))
            request.blocks[0] = []
        super()._free(request)

    def _schedule_waiting(self, output: SchedulerOutput, budget: int, threshold: int) -> None:
        """As in `Scheduler`, but admits loaded requests first, and loads a waiting one whose chunks the tier has."""
        kept: list[Request] = []
        deferred: list[Request] = []
        while budget > 0 and len(self.running) < self.settings.max_num_seqs:
            queue = self.holding if len(self.holding) else self.waiting
            if not len(queue):
                break
            request = queue.peek()
            if request in self._loading:
                kept.append(queue.pop())
                continue
            if request.stale_tokens:
                # A step from before its preemption is still in flight.
                deferred.append(queue.pop())
                continue
            if request in self._loaded:
                self._finish_load(request)
            if request.num_computed_tokens:
                used = self._admit(request, output, budget, threshold, None, 0)
            else:
                hit, num_hit_tokens = self.kv_cache_manager.get_computed_blocks(request)
                num_loadable = self.offload.find_hit(request, num_hit_tokens)
                if num_loadable is None:
                    deferred.append(queue.pop())
                    continue
                if num_loadable:
                    if not self._begin_load(request, output, hit, num_hit_tokens, num_loadable):
                        break
                    kept.append(queue.pop())
                    continue
                used = self._admit(request, output, budget, threshold, hit, num_hit_tokens)
            if not used:
                break
            if request.num_computed_tokens + used < request.num_tokens:
                self._prefilling[request] = None
            queue.pop()
            budget -= used
        for queue, skipped in ((self.holding, kept), (self.waiting, deferred)):
            for request in reversed(skipped):
                queue.add(request, first=True)

    def _begin_load(
        self, request: Request, output: SchedulerOutput, hit: Hit, num_hit_tokens: int, num_loadable: int
    ) -> bool:
        """Allocates blocks for `num_loadable` tokens in the tier and starts to load them; False if they do not fit."""
        fits = self.kv_cache_manager.allocate_slots(
            request,
            0,
            hit,
            num_hit_tokens,
            num_loaded_tokens=num_loadable,
            reserved_blocks=sum(map(self._num_blocks_to_come, self._prefilling)),
            full_prompt_must_fit=self.settings.reserve_full_isl,
            has_running=bool(self.running),
        )
        if not fits:
            return False
        self.offload.load(request, num_hit_tokens, num_loadable)
        if request.num_preemptions == 0:
            output.cached_tokens += num_hit_tokens
        request.num_computed_tokens = num_hit_tokens + num_loadable
        self._loading.add(request)
        self._prefilling[request] = None
        return True

    def _num_blocks_to_come(self, request: Request) -> int:
        """How many GPU blocks the request still needs to hold all of its present tokens."""
        tokens = min(request.num_tokens, self.settings.max_model_len)
        return max(0, cdiv(tokens, self.settings.block_size) - len(request.blocks[0]))

    def complete(self, job: TransferJob) -> None:
        """Books a copy that has ended; if it was a load, its request can be admitted from now on."""
        self.offload.complete(job)
        if not job.is_store:
            self._loading.discard(job.request)
            self._loaded.add(job.request)

    def _finish_load(self, request: Request) -> None:
        """Puts the loaded blocks into the prefix cache; the last token stays to be computed, for its logits."""
        self._loaded.discard(request)
        if self.settings.enable_prefix_caching:
            self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)

    def _preempt(self, request: Request, output: SchedulerOutput) -> None:
        """Frees a request's blocks and queues it again; its missing blocks are no longer reserved."""
        super()._preempt(request, output)
        self._prefilling.pop(request, None)

    def _finish_request(self, request: Request) -> None:
        """Free a finished request's blocks; the next step offers its last chunks to the tier."""
        self.offload.finish(request)
        super()._finish_request(request)
        self._prefilling.pop(request, None)
        self._last_step.pop(request, None)
        self._finished.append(request)


_MAX_IDLE_STEPS = 8
"""More idle steps in a row without a copy than vLLM's connector ever has: the first request can never run."""
_MAX_TIER_READS = 50
"""Times that the whole tier is read back from files while nothing runs, before it counts as a livelock."""
_LIVELOCK = "waits forever: the host's tier is too small to hold what is read back from files for its prompt"


@dataclass(frozen=True)
class TieredTimeline:
    """The result of a replay with a tier."""

    timeline: Timeline
    tier: TierSettings
    tally: TierTally
    load_busy_s: float
    store_busy_s: float
    flush_wait_s: float
    files: FileTally | None = None
    """Of a tier of files behind it."""

    @property
    def hit_ratio(self) -> float:
        """The fraction of prompt tokens that were loaded from the tier."""
        prompt_tokens = self.timeline.tally.prompt_tokens
        return self.tally.hit_tokens / prompt_tokens if prompt_tokens else 0.0


class TierReplay(StepByStepReplay):
    """The step-by-step replay with copies to and from the host."""

    scheduler: TieredScheduler

    def __init__(self, tier: TierSettings, trace: Trace, settings: SchedulerSettings, *replay: Any) -> None:
        """`replay` are the further arguments of `StepByStepReplay`."""
        super().__init__(trace, settings, *replay, scheduler=TieredScheduler(settings, tier))
        self.tier = tier
        self.worker = TransferWorker(tier)
        self.ended: deque[list[TransferJob]] = deque()
        """Copies that had ended by the end of each step in flight."""
        self.has_requests = False
        self.idle_steps = 0
        self.chunks_read_before = 0
        """Chunks read back from files when a request last ran."""

    def _step(self) -> None:
        """Run one step as `StepByStepReplay` does, with the tier; rejects requests that the tier can never serve."""
        self.has_requests = self.scheduler.has_requests
        self.scheduler.offload.tier.now_s = self.now_s
        super()._step()
        self.idle_steps = 0 if self.scheduler.running or self.scheduler.offload.has_work else self.idle_steps + 1
        if self.idle_steps > _MAX_IDLE_STEPS:
            self._reject_unschedulable()
        if self.scheduler.running:
            self.chunks_read_before = self._chunks_read()
        elif self._chunks_read() - self.chunks_read_before > _MAX_TIER_READS * self.tier.num_chunks:
            # The prompt needs more chunks than the host holds: vLLM would read and evict them without end.
            self.chunks_read_before = self._chunks_read()
            if len(self.scheduler.waiting):
                self.rejections.append(Rejection(self.scheduler.waiting.pop().id, _LIVELOCK))

    def _chunks_read(self) -> int:
        """Chunks read from files so far; 0 for a tier without files."""
        files = self.scheduler.offload.tier.file_tally()
        return files.loaded_chunks if files else 0

    def _advance_clock(self, output: SchedulerOutput) -> None:
        """Advances the clock by the step's seconds and the copies it waits for; without step times by 1 a step."""
        if not self.has_requests:
            return
        plan = self.scheduler.plan
        self.now_s = self.worker.begin_step(plan, self.now_s)
        if self.cost is None:
            self.now_s += 1.0
        elif output.scheduled:
            super()._advance_clock(output)
        elif not self.trace.in_seconds:
            self.now_s += step_seconds(self.cost, 0, 0, 0)
        else:  # an idle engine waits until a copy ends or a request arrives
            events = (self.worker.next_event_s, self.scheduler.offload.tier.next_event_s, self.next_arrival)
            self.now_s = max(self.now_s, min((event for event in events if event is not None), default=self.now_s))
        self.ended.append(self.worker.end_step(plan, self.now_s))
        self.scheduler.offload.tier.now_s = self.now_s

    def _complete_oldest(self, output: SchedulerOutput) -> tuple[list[Request], list[Request], float]:
        """Queues `output`, completes the oldest batch if due and ended copies: (sampled, finished, end in s)."""
        if self.has_requests:
            self.in_flight.append((output, self.now_s))
            if len(self.in_flight) < self.batches_in_flight and (output.scheduled or self.scheduler.has_requests):
                return [], [], self.now_s
        if not self.in_flight:
            return [], [], self.now_s
        oldest, ended_s = self.in_flight.popleft()
        sampled, finished = self.scheduler.update_from_output(oldest)
        for job in self.ended.popleft():
            self.scheduler.complete(job)
        return sampled, finished, ended_s

    def _reject_unschedulable(self) -> None:
        """Reject the first waiting request, but only after many steps without a running request or copy."""
        if self.idle_steps > _MAX_IDLE_STEPS:
            super()._reject_unschedulable()


def simulate_with_tier(
    trace: Trace,
    settings: SchedulerSettings,
    tier: TierSettings,
    on_step: StepSink | None = None,
    *,
    cost: StepCost | None = None,
    progress: Progress | None = None,
) -> TieredTimeline:
    """Replay `trace` through vLLM's scheduling and offloading decisions."""
    trace = trace.checked()
    check_cost(trace, cost)
    replay = TierReplay(tier, trace, settings, on_step, cost, progress)
    timeline = replay.run()
    worker, offload = replay.worker, replay.scheduler.offload
    copying_s = (worker.load_link.busy_s, worker.store_link.busy_s, worker.waited_s)
    return TieredTimeline(timeline, tier, offload.tally, *copying_s, offload.tier.file_tally())
