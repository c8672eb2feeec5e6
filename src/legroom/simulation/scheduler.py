"""vLLM's scheduler (V1 as of 0.32, V0 as of 0.6.3): the tokens each request gets in the next step, and preemptions."""

import heapq
from collections import deque
from dataclasses import dataclass, field, replace

from legroom.simulation.kv_cache_manager import Hit, KVCacheManager
from legroom.simulation.request import Request, Status
from legroom.simulation.scheduler_settings import SchedulerSettings
from legroom.simulation.trace import SAMPLED_TOKEN, BlockHasher
from legroom.units import cdiv


class WaitingQueue:
    """Waiting requests: first come, first served with preempted ones in front, or by priority."""

    def __init__(self, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request, *, first: bool = False) -> None:
        """Queues a request behind the others, or before them if `first`; under the priority policy where it belongs."""
        self._count += 1
        key = request.priority_key if self._by_priority else (0, -self._count if first else self._count)
        heapq.heappush(self._heap, (key, request))

    def peek(self) -> Request:
        """The request to admit next, left in the queue."""
        return self._heap[0][1]

    def pop(self) -> Request:
        """Remove and return the request to admit next."""
        return heapq.heappop(self._heap)[1]

    def remove(self, request: Request) -> None:
        """Remove this request, wherever it is in the queue."""
        self._heap = [entry for entry in self._heap if entry[1] is not request]
        heapq.heapify(self._heap)


@dataclass
class SchedulerOutput:
    """The decisions of one step."""

    scheduled: dict[Request, int] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)
    sampling: set[Request] = field(default_factory=set)
    """Requests whose known tokens are all computed in this step."""
    drafts: dict[Request, int] = field(default_factory=dict)
    """Draft tokens that this step verifies."""
    cached_tokens: int = 0
    """Prompt tokens of newly admitted requests that the prefix cache already held."""
    recomputed_tokens: int = 0
    ignored: list[tuple[Request, str]] = field(default_factory=list)
    """V0: requests that ended unserved, and why."""


class Scheduler:
    """The running list, the waiting queue and the token budget."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.kv_cache_manager = KVCacheManager(settings)
        self.hasher = BlockHasher(settings.block_size) if settings.enable_prefix_caching else None
        self.running: list[Request] = []
        self.waiting = WaitingQueue(settings.scheduling_policy == "priority")

    def add_request(self, request: Request) -> None:
        """Queue a request, with its prompt's block hashes where prefix caching is on."""
        self.kv_cache_manager.add_request(request)
        if self.hasher:
            self.hasher.extend(request.block_hashes, request.token_ids)
        self.waiting.add(request)

    @property
    def has_requests(self) -> bool:
        """Whether a request is running or waiting."""
        return bool(self.running) or bool(len(self.waiting))

    @property
    def num_waiting(self) -> int:
        """How many requests wait to be admitted."""
        return len(self.waiting)

    def pop_unschedulable(self) -> Request | None:
        """Removes and returns the first waiting request if nothing runs, as no later step can admit it; else None."""
        return self.waiting.pop() if len(self.waiting) and not self.running else None

    def schedule(self) -> SchedulerOutput:
        """What one step computes: running requests first, then waiting ones, unless a running one was preempted."""
        output = SchedulerOutput()
        # Since 0.31 a lone prompt may use the whole budget.
        is_alone = len(self.running) + self.num_waiting <= 1
        threshold = 0 if is_alone else self.settings.long_prefill_token_threshold
        budget = self._schedule_running(output, self.settings.max_num_batched_tokens, threshold)
        if not output.preempted:
            self._schedule_waiting(output, budget, threshold)
        for request, tokens in output.scheduled.items():
            self._update_after_schedule(request, tokens, output)
        return output

    def _update_after_schedule(self, request: Request, tokens: int, output: SchedulerOutput) -> None:
        """Counts the scheduled tokens as computed, so that the next step can be scheduled while this one runs."""
        drafts = max(0, request.num_computed_tokens + tokens - request.num_tokens - request.num_placeholders)
        output.recomputed_tokens += max(0, min(tokens, request.peak_computed_tokens - request.num_computed_tokens))
        request.num_computed_tokens += tokens
        request.in_flight_tokens += tokens
        request.peak_computed_tokens = max(request.peak_computed_tokens, request.num_computed_tokens - drafts)
        if request.num_computed_tokens >= request.num_tokens + request.num_placeholders:
            output.sampling.add(request)
            if drafts:
                output.drafts[request] = drafts
            if self.settings.async_scheduling:
                request.num_placeholders += 1 + drafts
        request.num_draft_tokens = 0

    def _schedule_running(self, output: SchedulerOutput, budget: int, threshold: int) -> int:
        """Schedules running requests (prefill chunks up to `threshold`), preempting if blocks run out; returns what is
        left of the token `budget`."""
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_new_tokens = self._num_new_tokens(request, threshold, budget)
            if num_new_tokens <= 0 or self.finishes_in_flight(request):
                index += 1
                continue
            while not self.kv_cache_manager.allocate_slots(request, num_new_tokens):
                victim = self.running[-1]
                if self.settings.scheduling_policy == "priority":
                    victim = max(self.running, key=lambda request: request.priority_key)
                if not self._can_free(victim):
                    return budget
                place = self.running.index(victim)
                del self.running[place]
                index -= place < index
                budget += output.scheduled.pop(victim, 0)
                self._preempt(victim, output)
                if victim is request:
                    return budget
            output.scheduled[request] = num_new_tokens
            budget -= num_new_tokens
            index += 1
        return budget

    def _num_new_tokens(self, request: Request, threshold: int, budget: int) -> int:
        """Tokens of a request to compute in this step, within `budget`, long-prefill `threshold` and max_model_len."""
        num_known = request.num_tokens + request.num_draft_tokens + request.num_placeholders
        num_new_tokens = num_known - request.num_computed_tokens
        if 0 < threshold < num_new_tokens:
            num_new_tokens = threshold
        # The sampled token needs a position too.
        return min(num_new_tokens, budget, self.settings.max_model_len - request.num_computed_tokens - 1)

    def finishes_in_flight(self, request: Request) -> bool:
        """Whether a scheduled step not yet run samples the request's last token, even if no draft is accepted."""
        ahead = request.num_placeholders
        return ahead > 0 and request.num_computed_tokens + 2 - ahead >= request.max_total_tokens

    def _schedule_waiting(self, output: SchedulerOutput, budget: int, threshold: int) -> None:
        """Admits waiting requests while token `budget`, max_num_seqs and blocks last; prefill chunks: `threshold`."""
        skipped: list[Request] = []
        while budget > 0 and len(self.waiting) and len(self.running) < self.settings.max_num_seqs:
            request = self.waiting.peek()
            if request.stale_tokens:
                # A step from before its preemption is still in flight.
                skipped.append(self.waiting.pop())
                continue
            used = self._admit(request, output, budget, threshold, *self.kv_cache_manager.get_computed_blocks(request))
            if not used:
                break
            self.waiting.pop()
            budget -= used
        for request in reversed(skipped):
            self.waiting.add(request, first=True)

    def _admit(
        self, request: Request, output: SchedulerOutput, budget: int, threshold: int, hit: Hit | None, hit_tokens: int
    ) -> int:
        """Starts a waiting request with its cache `hit`; returns its tokens in this step, 0 if it does not fit."""
        settings = self.settings
        num_computed = request.num_computed_tokens + hit_tokens
        if settings.remote_prefill and request.num_preemptions == 0:
            num_computed = request.num_tokens - 1
        num_new_tokens = request.num_tokens - num_computed
        if 0 < threshold < num_new_tokens:
            num_new_tokens = threshold
        if num_new_tokens > budget and not settings.enable_chunked_prefill:
            return 0
        num_new_tokens = min(num_new_tokens, budget)
        fits = self.kv_cache_manager.allocate_slots(
            request,
            num_new_tokens,
            hit,
            num_computed - request.num_computed_tokens,
            full_prompt_must_fit=settings.reserve_full_isl,
            has_running=bool(self.running),
        )
        if not fits:
            return 0
        self.running.append(request)
        if request.num_preemptions == 0:
            output.cached_tokens += hit_tokens
        request.status = Status.RUNNING
        request.num_computed_tokens = num_computed
        output.scheduled[request] = num_new_tokens
        return num_new_tokens

    def _can_free(self, request: Request) -> bool:
        """Whether the request's blocks can be freed now; always, unless a subclass still needs them."""
        return True

    def _free(self, request: Request) -> None:
        """Return the request's KV blocks to the pool."""
        self.kv_cache_manager.free(request)

    def _preempt(self, request: Request, output: SchedulerOutput) -> None:
        """Frees a request's blocks and queues it in front (or by priority), to recompute all of its tokens."""
        self._free(request)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = request.num_draft_tokens = request.num_placeholders = 0
        request.stale_tokens = request.in_flight_tokens
        request.num_preemptions += 1
        self.waiting.add(request, first=True)
        output.preempted.append(request)

    def update_from_output(self, output: SchedulerOutput) -> tuple[list[Request], list[Request]]:
        """Appends the tokens that a step sampled: (requests that sampled one, those of them that are finished)."""
        sampled: list[Request] = []
        finished: list[Request] = []
        for request, tokens in output.scheduled.items():
            request.in_flight_tokens -= tokens
            is_stale = request.stale_tokens > 0
            if is_stale:
                request.stale_tokens -= tokens
            if request in output.sampling and request.status is not Status.FINISHED:
                sampled.append(request)
                self._append_sampled_tokens(request, output.drafts.get(request, 0), is_stale)
                if request.is_complete:
                    self._finish_request(request)
                    finished.append(request)
        if finished:
            self.running = [request for request in self.running if request.status is Status.RUNNING]
        return sampled, finished

    def _append_sampled_tokens(self, request: Request, drafts: int, is_stale: bool) -> None:
        """Appends the sampled token and the accepted ones of `drafts`; takes rejected ones off the computed tokens,
        unless the request was preempted since (`is_stale`)."""
        # The given share of the drafts is accepted on average, spread evenly.
        request.draft_credit += drafts * self.settings.speculative_acceptance
        accepted = min(drafts, int(request.draft_credit))
        request.draft_credit -= accepted
        if not is_stale:
            request.num_computed_tokens -= drafts - accepted
        sampled = min(1 + accepted, request.max_total_tokens - request.num_tokens)
        request.num_output_tokens += sampled
        if self.hasher:
            request.token_ids += [SAMPLED_TOKEN] * sampled
            self.hasher.extend(request.block_hashes, request.token_ids)
        if self.settings.async_scheduling and not is_stale:
            request.num_placeholders -= 1 + drafts
        if request.status is Status.RUNNING:
            request.num_draft_tokens = self.settings.num_speculative_tokens
            if self.settings.async_scheduling and self.settings.enable_prefix_caching:
                self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens - request.num_placeholders)

    def _finish_request(self, request: Request) -> None:
        """Free the blocks of a running request, or take a preempted one out of the queue."""
        if request.status is Status.RUNNING:
            self._free(request)
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED


class SchedulerV0(Scheduler):
    """vLLM's V0 scheduler (0.4 to 0.7) at its defaults: a step holds whole prompts or decodes, never both. It mirrors
    `_schedule_default` of 0.6.3 without asynchronous output processing, LoRA, multi-step or beam search; preempted
    requests are recomputed."""

    def __init__(self, settings: SchedulerSettings) -> None:
        super().__init__(settings)
        # V0 has no null block: all of num_gpu_blocks can be allocated.
        self.kv_cache_manager = KVCacheManager(replace(settings, num_blocks=settings.num_blocks + 1))

    def schedule(self) -> SchedulerOutput:
        """Prompts if any can start, else one token for every running request."""
        output = SchedulerOutput()
        self._schedule_prompts(output)
        if not output.scheduled:
            self._schedule_decodes(output)
        for request, tokens in output.scheduled.items():
            self._update_after_schedule(request, tokens, output)
        return output

    def _schedule_prompts(self, output: SchedulerOutput) -> None:
        """Admit whole prompts in order, as V0 does; those that can never fit are rejected."""
        settings = self.settings
        longest = min(settings.max_model_len, settings.max_num_batched_tokens)
        budget = settings.max_num_batched_tokens
        while len(self.waiting):
            request = self.waiting.peek()
            # Tokens generated before a preemption are part of the prompt now.
            tokens = request.num_tokens
            needed = cdiv(tokens, settings.block_size)
            if tokens > longest:
                self._reject(self.waiting.pop(), f"{tokens} tokens exceed the longest prompt of {longest}", output)
                continue
            # The watermark holds even when nothing runs.
            if settings.num_blocks - needed < settings.watermark_blocks:
                why = f"{tokens} tokens need {needed} blocks; the pool has {settings.num_blocks}"
                self._reject(self.waiting.pop(), f"{why} and keeps {settings.watermark_blocks} free", output)
                continue
            if self.kv_cache_manager.block_pool.num_free_blocks - needed < settings.watermark_blocks:
                return
            if tokens > budget or len(self.running) >= settings.max_num_seqs:
                return
            self.waiting.pop()
            request.status = Status.RUNNING
            self.kv_cache_manager.allocate_slots(request, tokens)
            self.running.append(request)
            output.scheduled[request] = tokens
            budget -= tokens

    def _reject(self, request: Request, why: str, output: SchedulerOutput) -> None:
        """Ends a request, already off the queue, that can never be served; the step's output says `why`."""
        request.status = Status.FINISHED
        output.ignored.append((request, why))

    def _schedule_decodes(self, output: SchedulerOutput) -> None:
        """Schedule one token for each running request, preempting the last ones where no block is free."""
        queue = deque(self.running)
        self.running = []
        while queue:
            request = queue.popleft()
            # V0 needs a free block for every sequence, whether its last block is full or not.
            while self.kv_cache_manager.block_pool.num_free_blocks < 1:
                victim = queue.pop() if queue else request
                self._preempt(victim, output)
                if victim is request:
                    break
            else:
                self.kv_cache_manager.allocate_slots(request, 1)
                self.running.append(request)
                output.scheduled[request] = 1
