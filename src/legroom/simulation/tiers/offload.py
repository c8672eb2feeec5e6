"""Which chunks are stored and loaded when: the scheduler of vLLM's `OffloadingConnector` (0.32), full attention."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from legroom.simulation.request import Request
from legroom.simulation.tiers.disk_tier import DiskBackedTier
from legroom.simulation.tiers.host_tier import ChunkAccess, ChunkKey, HostTier, Link, LookupResult, TierSettings
from legroom.units import cdiv


@dataclass(eq=False, slots=True)
class TransferJob:
    """Chunks of one request being copied."""

    request: Request
    keys: list[ChunkKey]
    is_store: bool
    num_blocks: int
    source_blocks: list[int] = field(default_factory=list)
    """GPU blocks that a store reads."""


@dataclass(slots=True)
class TransferPlan:
    """The copies that one step requests."""

    loads: list[TransferJob] = field(default_factory=list)
    stores: list[TransferJob] = field(default_factory=list)
    flushes: dict[TransferJob, None] = field(default_factory=dict)
    """Stores that must be done before the step runs: their blocks are reused."""


class TransferWorker:
    """The worker side of vLLM's offloading connector. Stores wait for the next step, not to delay sampled tokens."""

    def __init__(self, settings: TierSettings) -> None:
        self.store_link = Link[TransferJob](settings.store_s_per_block)
        self.load_link = Link[TransferJob](settings.load_s_per_block)
        self._deferred: list[TransferJob] = []
        self.waited_s = 0.0
        """Time that steps waited for flushes."""

    def begin_step(self, plan: TransferPlan, now_s: float) -> float:
        """Starts the step's copies and waits for those it depends on; returns when it can run, in replay seconds."""
        self._deferred += [job for job in plan.stores if job in plan.flushes]
        for job in self._deferred:
            self.store_link.submit(job, job.num_blocks, now_s)
        self._deferred = []
        if plan.flushes:
            ready_s = max(now_s, self.store_link.end_of(plan.flushes, now_s))
            self.waited_s += ready_s - now_s
            now_s = ready_s
        for job in plan.loads:
            self.load_link.submit(job, job.num_blocks, now_s)
        return now_s

    def end_step(self, plan: TransferPlan, now_s: float) -> list[TransferJob]:
        """The copies that have ended by `now_s`; this step's stores are submitted only when the next step begins."""
        self._deferred += [job for job in plan.stores if job not in plan.flushes]
        return self.store_link.completed(now_s) + self.load_link.completed(now_s)

    @property
    def next_event_s(self) -> float | None:
        """When the next copy ends, in seconds of the replay; 0 if one waits to be submitted, None without copies."""
        if self._deferred:
            return 0.0
        ends = [end for link in (self.store_link, self.load_link) if (end := link.next_end_s) is not None]
        return min(ends, default=None)


class OffloadState:
    """The connector's state of one request."""

    def __init__(self) -> None:
        self.keys: list[ChunkKey] = []
        self.block_ids: list[int] = []
        self.next_chunk = 0
        """The first chunk that was not offered yet."""
        self.jobs: dict[TransferJob, None] = {}
        self.access = ChunkAccess()
        self.is_finished = False


@dataclass
class TierTally:
    """Totals of a replay."""

    hit_tokens: int = 0
    """Prompt tokens of newly admitted requests that were loaded."""
    loaded_tokens: int = 0
    """Those of resumed requests included."""
    loaded_pairs: float = 0.0
    """Loaded tokens times the tokens before each: the attention that loading saved."""
    loaded_blocks: int = 0
    stored_blocks: int = 0
    evicted_chunks: int = 0
    failed_stores: int = 0
    """Offers that found every chunk of the tier pinned."""
    loads: int = 0
    stores: int = 0
    flushes: int = 0
    """Stores that a step waited for."""
    peak_chunks: int = 0


class KvOffload:
    """Decides stores and loads, and tracks those in progress."""

    def __init__(self, settings: TierSettings, block_size: int, *, prefix_caching: bool) -> None:
        self.settings = settings
        self.block_size = block_size
        self.chunk_tokens = block_size * settings.blocks_per_chunk
        self.tier = HostTier(settings) if settings.disk_s_per_chunk is None else DiskBackedTier(settings)
        self.tally = TierTally()
        self.jobs: dict[TransferJob, None] = {}
        self.evicted: list[ChunkKey] = []
        """In the last step."""
        self._states: dict[Request, OffloadState] = {}
        # With a GPU prefix cache a request waits for another request's load of the same chunks.
        self._being_loaded: set[ChunkKey] | None = set() if prefix_caching else None
        self._plan = TransferPlan()
        self._reused_blocks: set[int] = set()
        self._fences: dict[int, dict[TransferJob, None]] = {}
        """Freed blocks that a store still reads."""

    @property
    def has_work(self) -> bool:
        """Whether any copy is in progress."""
        return bool(self.jobs) or self.tier.has_work

    def add(self, request: Request) -> None:
        """Start tracking the chunks of a new request."""
        self._states[request] = OffloadState()

    def find_hit(self, request: Request, num_computed: int) -> int | None:
        """How many tokens after the first `num_computed` the tier can load; None: not known before the next step."""
        state = self._states[request]
        state.block_ids = []
        if state.jobs:
            return None
        self._add_chunk_keys(request, state)
        longest = min(request.num_tokens, len(state.keys) * self.chunk_tokens)
        if longest - num_computed < self.chunk_tokens:
            return 0
        first = num_computed // self.chunk_tokens
        num_hits, is_pending = self._lookup(state, state.keys[first : cdiv(longest, self.chunk_tokens)])
        if is_pending:
            return None
        tokens = min(longest, (first + num_hits) * self.chunk_tokens) - num_computed
        if tokens < self.chunk_tokens:
            return 0
        if self._being_loaded and not self._being_loaded.isdisjoint(state.keys[first : first + num_hits]):
            return None
        return tokens

    def _lookup(self, state: OffloadState, keys: Iterable[ChunkKey]) -> tuple[int, bool]:
        """(how many leading chunks of `keys` the tier has, whether one of them cannot be read yet)."""
        num_hits, is_pending = 0, False
        for key in keys:
            answer = self.tier.lookup(key, state.access)
            if answer is LookupResult.MISS:
                break
            is_pending |= answer is not LookupResult.HIT
            num_hits += answer is not LookupResult.RETRY
        return num_hits, is_pending

    def _add_chunk_keys(self, request: Request, state: OffloadState) -> None:
        """Adds the keys of chunks that became full since the last call; a key is the hash of a chunk's last block."""
        per_chunk = self.settings.blocks_per_chunk
        for last in range((len(state.keys) + 1) * per_chunk - 1, len(request.block_hashes), per_chunk):
            state.access.positions[request.block_hashes[last]] = len(state.keys)
            state.keys.append(request.block_hashes[last])

    def load(self, request: Request, num_computed: int, num_loaded: int) -> None:
        """Starts to copy `num_loaded` tokens, after the first `num_computed`, into the request's new blocks."""
        state = self._states[request]
        self._reused_blocks.update(block.block_id for block in request.blocks[0])
        first_block, end_block = num_computed // self.block_size, cdiv(num_computed + num_loaded, self.block_size)
        end_chunk = cdiv(num_computed + num_loaded, self.chunk_tokens)
        keys = state.keys[first_block // self.settings.blocks_per_chunk : end_chunk]
        state.next_chunk = end_chunk
        self.tier.prepare_load(keys, state.access)
        job = TransferJob(request, keys, False, end_block - first_block)
        state.jobs[job] = None
        self.jobs[job] = None
        self._plan.loads.append(job)
        if self._being_loaded is not None:
            self._being_loaded.update(keys)
        self.tally.loads += 1
        self.tally.loaded_blocks += job.num_blocks
        self.tally.loaded_tokens += num_loaded
        self.tally.loaded_pairs += num_loaded * (num_computed + num_loaded / 2)
        if request.num_preemptions == 0:
            self.tally.hit_tokens += num_loaded

    def end_schedule(
        self, scheduled: Iterable[Request], preempted: Iterable[Request], finished: Iterable[Request]
    ) -> TransferPlan:
        """The copies that a step starts, for requests that it schedules or preempts or that finished before it."""
        plan = self._plan
        self.evicted, self.tier.evicted_by_lookups = self.tier.evicted_by_lookups, []
        self.tally.evicted_chunks += len(self.evicted)
        for request in scheduled:
            known = self._states[request].block_ids
            new = [block.block_id for block in request.blocks[0][len(known) :]]
            known += new
            self._reused_blocks.update(new)
        self.tier.end_schedule()
        for request in preempted:
            plan.flushes.update(self._states[request].jobs)
        if self._fences:
            for block_id in self._reused_blocks & self._fences.keys():
                plan.flushes.update(self._fences[block_id])
        for request in scheduled:
            self._offer(request, request.num_computed_tokens)
        for request in finished:
            # The slot of the last sampled token was never written.
            self._offer(request, max(request.num_prompt_tokens, request.num_tokens - 1), is_finished=True)
        for request in finished:
            state = self._states[request]
            state.is_finished = True
            self.tier.end_request(state.access)
            if not state.jobs:
                del self._states[request]
        self.tally.flushes += len(plan.flushes)
        self.tally.peak_chunks = max(self.tally.peak_chunks, len(self.tier.readers))
        self._plan = TransferPlan()
        self._reused_blocks = set()
        return plan

    def _offer(self, request: Request, num_computed: int, *, is_finished: bool = False) -> None:
        """Offers the tier the request's chunks that `num_computed` tokens fill, and plans to store those it takes."""
        state, tokens = self._states[request], min(num_computed, request.num_tokens)
        if self.settings.prompt_only:
            tokens = min(tokens, request.num_prompt_tokens)
        if tokens // self.chunk_tokens <= state.next_chunk:
            return
        self._add_chunk_keys(request, state)
        per_chunk = self.settings.blocks_per_chunk
        end = min(tokens // self.chunk_tokens, len(state.block_ids) // per_chunk, len(state.keys))
        keys = state.keys[state.next_chunk : end]
        if not keys:
            return
        prepared = self.tier.prepare_store(keys, state.access)
        if prepared is None:
            self.tally.failed_stores += 1
            return
        state.next_chunk = end
        to_store, evicted = prepared
        self.evicted += evicted
        self.tally.evicted_chunks += len(evicted)
        if to_store:
            self._store(request, state, to_store, is_finished=is_finished)

    def _store(self, request: Request, state: OffloadState, keys: list[ChunkKey], *, is_finished: bool) -> None:
        """Plans the copy of these chunks to the tier; a finished request's GPU blocks are protected until its end."""
        per_chunk = self.settings.blocks_per_chunk
        starts = [state.access.positions[key] * per_chunk for key in keys]
        sources = [block_id for start in starts for block_id in state.block_ids[start : start + per_chunk]]
        job = TransferJob(request, keys, True, len(sources), sources)
        state.jobs[job] = None
        self.jobs[job] = None
        self._plan.stores.append(job)
        self.tally.stores += 1
        self.tally.stored_blocks += len(sources)
        if is_finished:
            self._protect_source_blocks(job)
            if not self._reused_blocks.isdisjoint(sources):
                self._plan.flushes[job] = None

    def _protect_source_blocks(self, job: TransferJob) -> None:
        """Marks the GPU blocks that a copy reads, so that the copy is completed first if one is to be reused."""
        for block_id in job.source_blocks:
            self._fences.setdefault(block_id, {})[job] = None

    def finish(self, request: Request) -> None:
        """Protects those blocks of an ending request that a store still reads: reusing one waits for its store."""
        state = self._states[request]
        self._add_chunk_keys(request, state)
        for job in state.jobs:
            self._protect_source_blocks(job)

    def complete(self, job: TransferJob) -> None:
        """Books a copy that has ended: its chunks become usable, and its source blocks are no longer protected."""
        state = self._states[job.request]
        if job.is_store:
            self.tier.complete_store(job.keys, state.access)
        else:
            self.tier.complete_load(job.keys)
            if self._being_loaded:
                self._being_loaded.difference_update(job.keys)
        for block_id in job.source_blocks:
            fenced = self._fences.get(block_id)
            if fenced is not None and fenced.pop(job, 0) is None and not fenced:
                del self._fences[block_id]
        del self.jobs[job]
        del state.jobs[job]
        if state.is_finished and not state.jobs:
            del self._states[job.request]
