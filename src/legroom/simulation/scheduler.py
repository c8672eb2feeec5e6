"""vLLM's V1 scheduler (0.32): who gets how many tokens in the next step, and who is thrown out for it."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field, replace

from legroom.errors import LegroomError
from legroom.simulation.kv_cache_manager import Hit, KvCache
from legroom.simulation.request import Request, Status
from legroom.simulation.scheduler_settings import SchedulerSettings
from legroom.simulation.trace import SAMPLED_TOKEN, BlockHasher
from legroom.units import cdiv


class WaitingQueue:
    """First come, first served; a preempted request goes back to the front."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: Request) -> None:
        self._queue.append(request)

    def put_back(self, request: Request) -> None:
        self._queue.appendleft(request)

    def first(self) -> Request:
        return self._queue[0]

    def pop(self) -> Request:
        return self._queue.popleft()

    def remove(self, request: Request) -> None:
        self._queue.remove(request)


class PriorityWaitingQueue(WaitingQueue):
    """The most urgent first, whether it has run before or not."""

    def __init__(self) -> None:
        self._heap: list[Request] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, request)

    put_back = add

    def first(self) -> Request:
        return self._heap[0]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)

    def remove(self, request: Request) -> None:
        self._heap.remove(request)
        heapq.heapify(self._heap)


@dataclass
class Batch:
    """One step's decisions."""

    scheduled: dict[Request, int] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)
    samples: set[Request] = field(default_factory=set)
    """Requests whose known tokens are all computed with this step: they sample a token."""
    drafts: dict[Request, int] = field(default_factory=dict)
    """Draft tokens that this step verifies."""
    cached_tokens: int = 0
    """Prompt tokens of newly admitted requests that the prefix cache already held."""
    recomputed_tokens: int = 0
    ignored: list[tuple[Request, str]] = field(default_factory=list)
    """V0: requests that ended without being served to the end, and why."""


class Scheduler:
    """The running list, the waiting queue and the token budget."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.kv = KvCache(settings)
        self.hasher = BlockHasher(settings.block_size) if settings.enable_prefix_caching else None
        self.running: list[Request] = []
        self.waiting = PriorityWaitingQueue() if settings.scheduling_policy == "priority" else WaitingQueue()

    def add(self, request: Request) -> None:
        self.kv.admit(request)
        if self.hasher:
            self.hasher.extend(request.block_hashes, request.token_ids)
        self.waiting.add(request)

    @property
    def has_requests(self) -> bool:
        return bool(self.running) or bool(len(self.waiting))

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def take_stuck(self) -> Request | None:
        """Take the first in line out if nothing runs: a step that could not start it then never will."""
        return self.waiting.pop() if len(self.waiting) and not self.running else None

    def schedule(self) -> Batch:
        """Decide one step: running requests first, then admissions if nobody had to be preempted."""
        batch = Batch()
        threshold = self._long_prefill_threshold()
        budget = self._schedule_running(batch, self.settings.max_num_batched_tokens, threshold)
        if not batch.preempted:
            self._admit_waiting(batch, budget, threshold)
        for request, tokens in batch.scheduled.items():
            self._advance(request, tokens, batch)
        return batch

    def _advance(self, request: Request, tokens: int, batch: Batch) -> None:
        """Count the tokens as computed at once, so that the next step can be decided before this one has run."""
        drafts = max(0, request.num_computed_tokens + tokens - request.num_tokens - request.num_placeholders)
        batch.recomputed_tokens += max(0, min(tokens, request.peak_computed_tokens - request.num_computed_tokens))
        request.num_computed_tokens += tokens
        request.in_flight_tokens += tokens
        request.peak_computed_tokens = max(request.peak_computed_tokens, request.num_computed_tokens - drafts)
        if request.num_computed_tokens >= request.num_tokens + request.num_placeholders:
            batch.samples.add(request)
            if drafts:
                batch.drafts[request] = drafts
            if self.settings.async_scheduling:
                request.num_placeholders += 1 + drafts
        request.num_draft_tokens = 0

    def _schedule_running(self, batch: Batch, budget: int, threshold: int) -> int:
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            wanted = self._tokens_wanted(request, threshold, budget)
            if wanted <= 0 or self._will_be_done(request):
                index += 1
                continue
            while not self.kv.allocate(request, wanted):
                victim = self._victim()
                if not self._can_free(victim):
                    return budget
                place = self.running.index(victim)
                del self.running[place]
                index -= place < index
                budget += batch.scheduled.pop(victim, 0)
                self._preempt(victim, batch)
                if victim is request:
                    return budget
            batch.scheduled[request] = wanted
            budget -= wanted
            index += 1
        return budget

    def _tokens_wanted(self, request: Request, threshold: int, budget: int) -> int:
        known = request.num_tokens + request.num_draft_tokens + request.num_placeholders
        wanted = known - request.num_computed_tokens
        if 0 < threshold < wanted:
            wanted = threshold
        # The sampled token needs a position too.
        room = self.settings.max_model_len - request.num_computed_tokens - 1
        return min(wanted, budget, room)

    def _will_be_done(self, request: Request) -> bool:
        """Whether a step in flight samples the last token, even if all its drafts are rejected."""
        ahead = request.num_placeholders
        return ahead > 0 and request.num_computed_tokens + 2 - ahead >= request.most_tokens

    def _admit_waiting(self, batch: Batch, budget: int, threshold: int) -> None:
        skipped: list[Request] = []
        while budget > 0 and len(self.waiting) and len(self.running) < self.settings.max_num_seqs:
            request = self.waiting.first()
            if request.stale_tokens:
                # A token of the time before its preemption is still to come.
                skipped.append(self.waiting.pop())
                continue
            used = self._admit(request, batch, budget, threshold, *self.kv.find_hit(request))
            if not used:
                break
            self.waiting.pop()
            budget -= used
        for request in reversed(skipped):
            self.waiting.put_back(request)

    def _admit(
        self, request: Request, batch: Batch, budget: int, threshold: int, hit: Hit | None, num_hit_tokens: int
    ) -> int:
        """Let a waiting request run; the tokens it gets, 0 if it does not fit."""
        settings = self.settings
        num_computed = request.num_computed_tokens + num_hit_tokens
        wanted = request.num_tokens - num_computed
        if 0 < threshold < wanted:
            wanted = threshold
        if wanted > budget and not settings.enable_chunked_prefill:
            return 0
        wanted = min(wanted, budget)
        fits = self.kv.allocate(
            request,
            wanted,
            hit,
            num_hit_tokens,
            whole_must_fit=settings.reserve_full_isl,
            others_run=bool(self.running),
        )
        if not fits:
            return 0
        self.running.append(request)
        if request.num_preemptions == 0:
            batch.cached_tokens += num_hit_tokens
        request.status = Status.RUNNING
        request.num_computed_tokens = num_computed
        batch.scheduled[request] = wanted
        return wanted

    def _long_prefill_threshold(self) -> int:
        # Since 0.31 a prompt that is alone may use the whole budget.
        alone = len(self.running) + len(self.waiting) <= 1
        return 0 if alone else self.settings.long_prefill_token_threshold

    def _victim(self) -> Request:
        if self.settings.scheduling_policy == "priority":
            return max(self.running, key=lambda request: request.urgency)
        return self.running[-1]

    def _can_free(self, request: Request) -> bool:
        """Whether its blocks could be given to others at once."""
        return True

    def _free(self, request: Request) -> None:
        self.kv.free(request)

    def _preempt(self, request: Request, batch: Batch) -> None:
        self._free(request)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = 0
        request.num_draft_tokens = 0
        request.num_placeholders = 0
        request.stale_tokens = request.in_flight_tokens
        request.num_preemptions += 1
        self.waiting.put_back(request)
        batch.preempted.append(request)

    def update(self, batch: Batch) -> tuple[list[Request], list[Request]]:
        """The step has run: who sampled a token, and who finished with it."""
        sampled: list[Request] = []
        finished: list[Request] = []
        for request, tokens in batch.scheduled.items():
            request.in_flight_tokens -= tokens
            is_stale = request.stale_tokens > 0
            if is_stale:
                request.stale_tokens -= tokens
            if request in batch.samples and request.status is not Status.FINISHED:
                sampled.append(request)
                self._take_tokens(request, batch.drafts.get(request, 0), is_stale)
                if request.is_done:
                    self._finish(request)
                    finished.append(request)
        if finished:
            self.running = [request for request in self.running if request.status is Status.RUNNING]
        return sampled, finished

    def _take_tokens(self, request: Request, drafts: int, is_stale: bool) -> None:
        accepted = self._accepted(request, drafts)
        if not is_stale:
            request.num_computed_tokens -= drafts - accepted
        for _ in range(min(1 + accepted, request.most_tokens - request.num_tokens)):
            self._append_token(request)
        if self.settings.async_scheduling and not is_stale:
            request.num_placeholders -= 1 + drafts
        if request.status is Status.RUNNING:
            request.num_draft_tokens = self.settings.num_speculative_tokens
            if self.settings.async_scheduling and self.settings.enable_prefix_caching:
                self.kv.cache(request, request.num_computed_tokens - request.num_placeholders)

    def _accepted(self, request: Request, drafts: int) -> int:
        """How many drafts the target model accepts: the given share on average, spread evenly."""
        request.draft_credit += drafts * self.settings.speculative_acceptance
        accepted = min(drafts, int(request.draft_credit))
        request.draft_credit -= accepted
        return accepted

    def _finish(self, request: Request) -> None:
        if request.status is Status.RUNNING:
            self._free(request)
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED

    def _append_token(self, request: Request) -> None:
        request.num_output_tokens += 1
        if self.hasher:
            request.token_ids.append(SAMPLED_TOKEN)
            self.hasher.extend(request.block_hashes, request.token_ids)


class SchedulerV0(Scheduler):
    """A step holds prompts or decodes, never both. With CPU blocks, victims are swapped out instead of recomputed."""

    def __init__(self, settings: SchedulerSettings) -> None:
        super().__init__(settings)
        # V0 has no null block: all of num_gpu_blocks serve.
        self.kv = KvCache(replace(settings, num_blocks=settings.num_blocks + 1))
        self.swapped: deque[Request] = deque()
        self.free_cpu_blocks = settings.swap_blocks

    @property
    def has_requests(self) -> bool:
        return super().has_requests or bool(self.swapped)

    def take_stuck(self) -> Request | None:
        """A request swapped out that can never come back holds all others up: vLLM would hang here."""
        if self.swapped and not self.running:
            return self.swapped.popleft()
        return super().take_stuck()

    def schedule(self) -> Batch:
        """Prompts if any can start and nobody is swapped out; else one token for everybody who runs."""
        batch = Batch()
        if not self.swapped:
            self._start_prompts(batch)
        if not batch.scheduled:
            self._decode(batch)
        for request, tokens in batch.scheduled.items():
            self._advance(request, tokens, batch)
        return batch

    def _start_prompts(self, batch: Batch) -> None:
        settings = self.settings
        longest = min(settings.max_model_len, settings.max_num_batched_tokens)
        budget = settings.max_num_batched_tokens
        while len(self.waiting):
            request = self.waiting.first()
            # What was generated before a preemption is prompt now.
            tokens = request.num_tokens
            needed = cdiv(tokens, settings.block_size)
            if tokens > longest:
                self._ignore(self.waiting.pop(), f"{tokens} tokens exceed the longest prompt of {longest}", batch)
                continue
            # The watermark holds even when nothing runs.
            if settings.num_blocks - needed < settings.watermark_blocks:
                why = f"{tokens} tokens need {needed} blocks; the pool has {settings.num_blocks}"
                self._ignore(self.waiting.pop(), f"{why} and keeps {settings.watermark_blocks} free", batch)
                continue
            if self.kv.pool.num_free - needed < settings.watermark_blocks:
                return
            if tokens > budget or len(self.running) >= settings.max_num_seqs:
                return
            self.waiting.pop()
            request.status = Status.RUNNING
            self.kv.allocate(request, tokens)
            self.running.append(request)
            batch.scheduled[request] = tokens
            budget -= tokens

    def _ignore(self, request: Request, why: str, batch: Batch) -> None:
        request.status = Status.FINISHED
        batch.ignored.append((request, why))

    def _decode(self, batch: Batch) -> None:
        queue = deque(self.running)
        self.running = []
        while queue:
            request = queue.popleft()
            # V0 wants a free block for every sequence, whether its last block is full or not.
            while self.kv.pool.num_free < 1:
                victim = queue.pop() if queue else request
                self._throw_out(victim, batch)
                if victim is request:
                    break
            else:
                self.kv.allocate(request, 1)
                self.running.append(request)
                batch.scheduled[request] = 1
        if not batch.preempted:
            self._swap_in(batch)

    def _throw_out(self, request: Request, batch: Batch) -> None:
        if not self.settings.swap_blocks:
            self._preempt(request, batch)
            return
        num_blocks = len(request.blocks[0])
        needed = self._blocks_touched(request) if self.settings.block_manager_v2 else num_blocks
        if needed > self.free_cpu_blocks:
            raise LegroomError(
                f"the engine would stop here: {needed} CPU blocks are needed to swap {request.id} out, "
                f"{self.free_cpu_blocks} are free",
                "raise swap_blocks (vLLM's --swap-space), or leave it out to recompute",
            )
        self.free_cpu_blocks -= num_blocks
        computed = request.num_computed_tokens
        self.kv.free(request)
        request.num_computed_tokens = computed
        request.num_preemptions += 1
        batch.preempted.append(request)
        self.swapped.append(request)

    def _swap_in(self, batch: Batch) -> None:
        settings = self.settings
        while self.swapped:
            request = self.swapped[0]
            num_blocks = cdiv(request.num_computed_tokens, settings.block_size)
            needed = self._blocks_touched(request) if settings.block_manager_v2 else num_blocks + 1
            if needed > settings.num_blocks:
                # Its CPU blocks are never given back: 0.6.3 forgets them.
                self._ignore(self.swapped.popleft(), f"needs {needed} blocks to come back from the CPU", batch)
                continue
            if self.kv.pool.num_free - needed < settings.watermark_blocks:
                return
            if len(self.running) >= settings.max_num_seqs:
                return
            self.swapped.popleft()
            self.free_cpu_blocks += num_blocks
            self.kv.allocate(request, 1)
            self.running.append(request)
            batch.scheduled[request] = 1

    def _blocks_touched(self, request: Request) -> int:
        """As the second block manager counts a swap: the full blocks, and one for the next token."""
        return request.num_computed_tokens // self.settings.block_size + 1
