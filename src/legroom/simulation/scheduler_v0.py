"""vLLM's V0 scheduler (0.4 to 0.7, its defaults): prompts first and whole, then decodes; recompute or swap.

Mirrors `_schedule_default` of 0.6.3 without asynchronous output processing, LoRA, multi-step or beam search.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from legroom.errors import LegroomError
from legroom.simulation.kvcache import KvCache
from legroom.simulation.request import Request, Status
from legroom.simulation.scheduler import Batch, Scheduler
from legroom.simulation.settings import SchedulerSettings
from legroom.units import cdiv


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
                "raise --swap-blocks (vLLM's --swap-space), or leave it out to recompute",
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
