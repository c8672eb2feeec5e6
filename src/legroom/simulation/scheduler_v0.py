"""vLLM's V0 scheduler (0.4 to 0.7, its defaults): prompts first and whole, then decodes; swap or recompute."""

from __future__ import annotations

from collections import deque

from legroom.errors import LegroomError
from legroom.simulation.request import Request, Status
from legroom.simulation.scheduler import Batch, Scheduler
from legroom.simulation.settings import SchedulerSettings
from legroom.units import cdiv


class SchedulerV0(Scheduler):
    """A step holds prompts or decodes, never both. With CPU blocks, victims are swapped out instead of recomputed."""

    def __init__(self, settings: SchedulerSettings) -> None:
        if settings.enable_chunked_prefill and settings.max_num_batched_tokens < settings.max_model_len:
            raise LegroomError(
                f"the V0 engine prefills whole prompts: max-num-batched-tokens ({settings.max_num_batched_tokens}) "
                f"must reach max-model-len ({settings.max_model_len})",
                "raise --max-num-batched-tokens, or lower --max-model-len",
            )
        super().__init__(settings)
        self.swapped: deque[Request] = deque()
        self.free_cpu_blocks = settings.swap_blocks

    @property
    def has_requests(self) -> bool:
        """Whether anything is left to do."""
        return super().has_requests or bool(self.swapped)

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
        budget = self.settings.max_num_batched_tokens
        while len(self.waiting) and len(self.running) < self.settings.max_num_seqs:
            request = self.waiting.first()
            tokens = request.num_tokens
            needed = cdiv(tokens, self.settings.block_size)
            # The watermark holds even when nothing runs.
            if tokens > budget or self.kv.pool.num_free - needed < self.settings.watermark_blocks:
                return
            self.waiting.pop()
            request.status = Status.RUNNING
            self.kv.allocate(request, tokens)
            self.running.append(request)
            batch.scheduled[request] = tokens
            budget -= tokens

    def _decode(self, batch: Batch) -> None:
        queue = deque(self.running)
        self.running = []
        swapped_out = False
        while queue:
            request = queue.popleft()
            # V0 wants a free block for every sequence, whether its last block is full or not.
            while self.kv.pool.num_free < 1:
                victim = queue.pop() if queue else request
                swapped_out |= self._throw_out(victim, batch)
                if victim is request:
                    break
            else:
                self.kv.allocate(request, 1)
                self.running.append(request)
                batch.scheduled[request] = 1
        if not batch.preempted and not swapped_out:
            self._swap_in(batch)

    def _throw_out(self, request: Request, batch: Batch) -> bool:
        """Swap out where there are CPU blocks for it, else preempt. True if swapped."""
        held = len(request.blocks[0])
        if held > self.free_cpu_blocks:
            self._preempt(request, batch)
            return False
        self.free_cpu_blocks -= held
        computed = request.num_computed_tokens
        self.kv.free(request)
        request.num_computed_tokens = computed
        request.num_preemptions += 1
        batch.preempted.append(request)
        self.swapped.append(request)
        return True

    def _swap_in(self, batch: Batch) -> None:
        while self.swapped and len(self.running) < self.settings.max_num_seqs:
            request = self.swapped[0]
            needed = cdiv(request.num_computed_tokens + 1, self.settings.block_size)
            if self.kv.pool.num_free - needed < self.settings.watermark_blocks:
                return
            self.swapped.popleft()
            self.free_cpu_blocks += cdiv(request.num_computed_tokens, self.settings.block_size)
            self.kv.allocate(request, 1)
            self.running.append(request)
            batch.scheduled[request] = 1
