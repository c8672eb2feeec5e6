"""vLLM's scheduler with a second tier behind the GPU's prefix cache (0.32, native CPU offloading)."""

from __future__ import annotations

from collections import deque

from legroom.errors import LegroomError
from legroom.simulation.kvcache import Hit
from legroom.simulation.request import Request
from legroom.simulation.scheduler import Batch, Scheduler
from legroom.simulation.settings import LayerGroup, SchedulerSettings
from legroom.simulation.tiers.offload import KvOffload
from legroom.simulation.tiers.settings import TierSettings
from legroom.simulation.tiers.transfers import TransferJob, TransferPlan
from legroom.simulation.trace import BlockHasher
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
        (settings.engine == "V0", "the V0 engine", "leave out --v0"),
        (settings.num_speculative_tokens > 0, "speculative tokens", "leave them out"),
        (settings.groups != (LayerGroup(),), "several groups of layers", "leave out --tier"),
    ):
        if is_asked:
            raise LegroomError(f"a tier together with {what} is not simulated", remedy)
