"""Files behind the host tier: vLLM 0.32's `TieringOffloadingSpec` with one secondary tier `fs`.

Every chunk that reaches the host is written to a file, and none is ever removed. A prompt whose chunks have left the
host first looks up which of them are files (answered in the next step), then has them read into the host tier, and
loads them from there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from legroom.simulation.tiers import host_tier as host


@dataclass(eq=False, slots=True)
class FileJob:
    """Chunks of one request on their way to or from files."""

    keys: list[host.ChunkKey]
    is_store: bool
    access: host.ChunkAccess


class FileLookups:
    """Lookups are collected during a step and answered together in the next one."""

    def __init__(self) -> None:
        self._answers: dict[host.ChunkKey, bool | None] = {}
        """Whether a file holds a chunk, None before the answer; dropped when the last request that asked ends."""
        self._askers: dict[host.ChunkKey, set[host.ChunkAccess]] = {}
        self._of_request: dict[host.ChunkAccess, set[host.ChunkKey]] = {}
        self._open: list[host.ChunkKey] = []
        self.has_new_answers = False
        """Whether answers have come since the last lookup."""

    def lookup(self, key: host.ChunkKey, access: host.ChunkAccess) -> bool | None:
        """Whether a file holds the chunk; None until the next step, in which the answer is known."""
        self.has_new_answers = False
        if key not in self._answers:
            self._answers[key] = None
            self._open.append(key)
        self._askers.setdefault(key, set()).add(access)
        self._of_request.setdefault(access, set()).add(key)
        return self._answers[key]

    def answer_pending(self, file_at_s: dict[host.ChunkKey, float], now_s: float) -> None:
        """Answers the lookups since the last call: whether a chunk's file was written (`file_at_s`) by `now_s`."""
        for key in self._open:
            if key in self._answers and self._answers[key] is None:
                self._answers[key] = file_at_s.get(key, now_s + 1) <= now_s
        self.has_new_answers = bool(self._open)
        self._open = []

    def drop_answers(self, access: host.ChunkAccess) -> None:
        """Forgets a request's lookups, and the answers that no other request asked for."""
        for key in self._of_request.pop(access, ()):
            self._askers[key].discard(access)
            if not self._askers[key]:
                del self._answers[key], self._askers[key]


class DiskBackedTier(host.HostTier):
    """The host tier with files behind it; the replay sets `now_s`."""

    def __init__(self, settings: host.TierSettings) -> None:
        super().__init__(settings)
        s_per_chunk = settings.disk_s_per_chunk or 0.0
        self.store_link = host.Link[FileJob](s_per_chunk)
        self.load_link = host.Link[FileJob](s_per_chunk)
        self.jobs: dict[FileJob, None] = {}
        self.stored_chunks = self.loaded_chunks = 0
        self.submitted_loads: list[FileJob] = []
        """In the last step."""
        self._file_at_s: dict[host.ChunkKey, float] = {}
        self._lookups = FileLookups()
        self._promotions: dict[host.ChunkAccess, list[host.ChunkKey]] = {}
        self._is_polled = False

    @property
    def has_work(self) -> bool:
        """Whether chunks are being copied to or from files."""
        return bool(self.jobs)

    @property
    def next_event_s(self) -> float | None:
        """When the next file copy ends, in seconds; 0.0 if lookups were just answered, None if nothing is under way."""
        if self._lookups.has_new_answers:
            return 0.0
        ends = [end for link in (self.store_link, self.load_link) if (end := link.next_end_s) is not None]
        return min(ends, default=None)

    def lookup(self, key: host.ChunkKey, access: host.ChunkAccess) -> host.LookupResult:
        """HIT, MISS, RETRY (the disk answers in the next step), or PENDING while the chunk is written or read."""
        self._poll()
        answer = super().lookup(key, access)
        if answer is not host.LookupResult.MISS:
            return answer
        is_file = self._lookups.lookup(key, access)
        if is_file is None:
            return host.LookupResult.RETRY
        if not is_file:
            return host.LookupResult.MISS
        prepared = super().prepare_store([key], access)
        if prepared is None:
            # Every chunk on the host is pinned: the prompt is recomputed.
            return host.LookupResult.MISS
        to_read, evicted = prepared
        self.evicted_by_lookups += evicted
        self._promotions.setdefault(access, []).extend(to_read)
        return host.LookupResult.PENDING

    def prepare_store(
        self, keys: Sequence[host.ChunkKey], access: host.ChunkAccess
    ) -> tuple[list[host.ChunkKey], list[host.ChunkKey]] | None:
        """Completes ended file copies, makes room for missing `keys`: (chunks to write, those evicted); or None."""
        self._poll()
        prepared = super().prepare_store(keys, access)
        if prepared is not None and prepared[0]:
            access.stores_in_progress += 1
        return prepared

    def complete_store(self, keys: Sequence[host.ChunkKey], access: host.ChunkAccess) -> None:
        """Mark written chunks as readable and evictable, and start writing them to files."""
        super().complete_store(keys, access)
        self._pin(keys)
        self._submit(FileJob(list(keys), True, access))
        access.stores_in_progress -= 1
        self._drop_answers(access)

    def end_schedule(self) -> None:
        """Starts the file reads that the step's lookups asked for, and answers the lookups themselves."""
        self._poll()
        self._is_polled = False
        self.submitted_loads = [FileJob(keys, False, access) for access, keys in self._promotions.items()]
        self._promotions = {}
        for job in self.submitted_loads:
            self._submit(job)
        self._lookups.answer_pending(self._file_at_s, self.now_s)

    def end_request(self, access: host.ChunkAccess) -> None:
        """Report the chunks that the request used to the eviction policy, and forget its file lookups."""
        super().end_request(access)
        access.is_finished = True
        self._drop_answers(access)

    def file_tally(self) -> host.FileTally:
        """Chunks written to and read from files so far, and the seconds that took."""
        return host.FileTally(self.stored_chunks, self.loaded_chunks, self.store_link.busy_s, self.load_link.busy_s)

    def _submit(self, job: FileJob) -> None:
        """Queues a job that writes or reads the files of chunks; a file exists once its writing has ended."""
        self.jobs[job] = None
        end_s = (self.store_link if job.is_store else self.load_link).submit(job, len(job.keys), self.now_s)
        if job.is_store:
            self.stored_chunks += len(job.keys)
            for key in job.keys:
                self._file_at_s.setdefault(key, end_s)
        else:
            self.loaded_chunks += len(job.keys)

    def _poll(self) -> None:
        """Complete the file copies that have ended; once per step."""
        # A step ends before its stores are prepared, so a step that stores has polled for the next one already.
        if self._is_polled:
            return
        self._is_polled = True
        for job in self.store_link.completed(self.now_s):
            self.complete_load(job.keys)
            del self.jobs[job]
        for job in self.load_link.completed(self.now_s):
            super().complete_store(job.keys, job.access)
            del self.jobs[job]

    def _drop_answers(self, access: host.ChunkAccess) -> None:
        """Forgets a request's lookups once it has finished and its last store, which may still write files, is done."""
        if access.is_finished and not access.stores_in_progress:
            self._lookups.drop_answers(access)
