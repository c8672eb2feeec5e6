"""Writes a black box when memory runs out: the state of the process, and its last memory readings. Nothing here raises
into vLLM. Memory has just run out, so the record is small. The disk may be full too: several folders are tried, then a
short form is logged."""

import contextlib
import json
import logging
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from legroom import black_box
from legroom.files import home, replace_file
from legroom.masking import masked
from legroom.worker import stack, worker_memory

LOG = logging.getLogger("legroom.worker")
FOLDER = "LEGROOM_BLACKBOX_DIR"
_RECENT = 60  # Readings kept as they come: five minutes at five seconds each.
_EARLIER = 240  # Readings of a minute each before those: four hours.
_MOST_RECORDS = 5  # Of one process: a server that survives each failure would fill the disk.
_MOST_FILES = 50  # In one folder, of all servers; the oldest are removed.
_SAME_FAILURE_S = 120.0  # A log entry within this time after a failed allocation is about the same failure.
_MESSAGE_CHARS = 2000
_WANTED = re.compile(r"tried to allocate (\d{1,18}) bytes")  # In the message of PyTorch's CPU allocator.
_SHORT_FRAMES = 5


class BlackBoxRecorder:
    """Writes the black boxes of one process."""

    def __init__(self) -> None:
        self._settings: dict[str, Any] = {}
        self.begin()

    def begin(self) -> None:
        """Forgets readings and records (in a forked process, its parent's); the engine's settings stay."""
        self._recent: deque[black_box.MemoryReading] = deque(maxlen=_RECENT)
        self._earlier: deque[black_box.MemoryReading] = deque(maxlen=_EARLIER)
        self._lock = threading.Lock()
        self._written = 0
        self._last: tuple[float, black_box.BlackBox, Path | None] | None = None

    def add_reading(self, memory: tuple[worker_memory.WorkerMemory, ...]) -> None:
        """Keeps the first device's memory as a reading for a later black box."""
        if not memory:
            return
        device, now_s = memory[0], time.time()
        if len(self._recent) == _RECENT:
            oldest = self._recent[0]
            if not self._earlier or oldest.time_s - self._earlier[-1].time_s >= 60:
                self._earlier.append(oldest)
        shared = {
            name: getattr(device, name)
            for name in black_box.MemoryReading.__dataclass_fields__
            if hasattr(device, name)
        }
        host = {"rss_bytes": device.host_rss_bytes, "pinned_bytes": device.host_pinned_bytes}
        self._recent.append(black_box.MemoryReading(round(now_s, 1), **shared, **host))

    def out_of_memory(self, device: int, wanted_bytes: int, limit_bytes: int, free_bytes: int) -> None:
        """Called by PyTorch's allocator: records a failed allocation, bytes wanted and free, and PyTorch's limit."""
        try:
            frames = list(stack.with_callers(sys._getframe(1)))
            request = black_box.FailedRequest(int(wanted_bytes), frames=stack.stack_frames(frames))
            self._record("out_of_memory", request, frames, device, int(free_bytes), int(limit_bytes))
        except BaseException as error:  # vLLM must see its own error, not this one
            _log_failure(error)

    def exception(self, error: BaseException) -> None:
        """Adds the text of an out-of-memory error that vLLM logged to the record of it, or writes a new record."""
        try:
            if worker_memory.worker_rank() is None:
                return  # the engine core logs its workers' errors again
            wanted = _WANTED.search(str(error)[:_MESSAGE_CHARS])
            wanted_bytes, text = int(wanted[1]) if wanted else None, masked(str(error))[:_MESSAGE_CHARS]
            request = black_box.FailedRequest(wanted_bytes, type(error).__name__, text)
            if self._add_to_last_record(request):
                return
            raised = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            frames = [*reversed(raised), *stack.with_callers(raised[0].f_back)] if raised else []
            self._record("out_of_memory", replace(request, frames=stack.stack_frames(frames)), frames)
        except BaseException as problem:
            _log_failure(problem)

    def _add_to_last_record(self, request: black_box.FailedRequest) -> bool:
        """Adds the error's text to the last record if that is of the same failure; returns whether it is."""
        if self._last is None or time.time() - self._last[0] >= _SAME_FAILURE_S:
            return False
        written_s, record, path = self._last
        if record.request is None or record.trigger != "out_of_memory":
            return False
        if record.request.message is None and path is not None:
            record = replace(record, request=replace(record.request, error=request.error, message=request.message))
            replace_file(path, _bounded_json(record), 0o600)
            self._last = written_s, record, path
        return True

    def record_now(self) -> None:
        """Writes a black box on request: the current state, and the main thread's stack."""
        try:
            frames = list(stack.with_callers(sys._current_frames().get(threading.main_thread().ident or 0)))
            self._record("asked", black_box.FailedRequest(frames=stack.stack_frames(frames)), frames)
        except BaseException as error:
            _log_failure(error)

    def _record(
        self,
        trigger: black_box.Trigger,
        request: black_box.FailedRequest,
        frames: list[FrameType],
        device: int | None = None,
        free_bytes: int | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        """Writes a black box of memory, settings and the engine step in `frames`; after five only `asked` ones."""
        with self._lock:
            if self._written >= _MOST_RECORDS and trigger != "asked":
                return
            self._written += 1
            self._settings = _result_or_none(stack.engine_settings, frames) or self._settings
            available = _result_or_none(lambda: int(psutil.virtual_memory().available))
            host = _result_or_none(
                lambda: replace(
                    worker_memory.read_host_memory(worker_memory.initialized_cuda()), available_bytes=available
                )
            )
            record = black_box.BlackBox(
                round(time.time(), 3),
                trigger,
                _process_versions(),
                request,
                host=host,
                step=_result_or_none(stack.engine_step, frames),
                settings=masked(self._settings),
                history=(*self._earlier, *self._recent),
            )
            cuda = worker_memory.initialized_cuda()
            if cuda is not None:
                number = cuda.current_device() if device is None else device
                allocator = _result_or_none(lambda: worker_memory.allocator_state(cuda, number, with_blocks=True))
                card = _card_memory(cuda, number, free_bytes, limit_bytes)
                record = replace(record, allocator=allocator, card=card)
            path = self._write_record(record)
            self._last = time.time(), record, path

    def _write_record(self, record: black_box.BlackBox) -> Path | None:
        """The path of the written file, in the first folder that takes it; None if none did and it was only logged."""
        text = _bounded_json(record)
        at = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(record.time_s))
        name = f"{black_box.PREFIX}{at}-{os.getpid()}-{self._written}.json"
        for folder in _record_folders():
            try:
                replace_file(folder / name, text, 0o600)
            except OSError:
                continue  # full, read-only or not ours: the next
            LOG.error("legroom black box written to %s", folder / name)
            for old in sorted(folder.glob(f"{black_box.PREFIX}*.json"))[:-_MOST_FILES]:
                _result_or_none(lambda path=old: path.unlink(missing_ok=True))
            return folder / name
        request = record.request
        if request is not None:
            request = replace(request, message=None, frames=request.frames[-_SHORT_FRAMES:])
        step = replace(record.step, largest=record.step.largest[:1]) if record.step else None
        allocator = _without_segments(record.allocator)
        short = replace(record, request=request, step=step, allocator=allocator, history=(), settings={})
        LOG.error("legroom black box: %s", json.dumps(_without_none(short.to_json()), separators=(",", ":")))
        return None


def _result_or_none(make: Any, *arguments: Any) -> Any:
    """The result of `make(*arguments)`; None where it fails, as the other parts of a record are still useful."""
    try:
        return make(*arguments)
    except Exception:
        return None


def _process_versions() -> black_box.WorkerProcess:
    """The worker's pid and rank, vLLM's and PyTorch's versions, and cuda, rocm or cpu."""
    vllm, torch = sys.modules.get("vllm"), sys.modules.get("torch")
    built_for = getattr(torch, "version", None)
    platform = "rocm" if getattr(built_for, "hip", None) else "cuda" if getattr(built_for, "cuda", None) else "cpu"
    versions = (getattr(module, "__version__", None) for module in (vllm, torch))
    of_vllm, of_torch = (None if version is None else str(version) for version in versions)
    return black_box.WorkerProcess(os.getpid(), worker_memory.worker_rank(), of_vllm, of_torch, platform)


def _card_memory(cuda: Any, device: int, free_bytes: int | None, limit_bytes: int | None) -> black_box.CardMemory:
    """The GPU's total and free memory, this process's and others' part, and PyTorch's limit if below the total.
    `free_bytes` and `limit_bytes` are those that the allocator reported, or None."""
    use = _result_or_none(worker_memory.card_use, cuda, device)
    total = _result_or_none(lambda: int(cuda.get_device_properties(device).total_memory))
    limit = limit_bytes if limit_bytes and total and limit_bytes < total else None
    if use is None:
        return black_box.CardMemory(str(device), None, total, free_bytes, limit_bytes=limit)
    if free_bytes is None and total is not None and use.used_bytes is not None:
        free_bytes = max(use.total_bytes - use.used_bytes, 0)
    own, others = use.own_bytes, use.others_bytes
    if own is not None and total is not None and free_bytes is not None:
        others = max(total - free_bytes - own, 0)  # CUDA's figures, without the driver's reserve
    return black_box.CardMemory(use.gpu, use.name, total, free_bytes, own, others, limit)


def _record_folders() -> Iterator[Path]:
    """Folders to try for records, the configured one first; the last is in memory, for when disks are full."""
    given = os.environ.get(FOLDER)
    if given:
        yield Path(given)
    yield home() / "black-boxes"
    yield Path(tempfile.gettempdir())
    yield Path("/dev/shm")


def _bounded_json(record: black_box.BlackBox) -> str:
    """The record as JSON below the size limit: blocks are left out first, then the smallest segments."""
    text = json.dumps(record.to_json(), separators=(",", ":"))
    if len(text) <= black_box.MAX_BYTES or record.allocator is None:
        return text
    allocator = record.allocator
    segments = tuple(replace(segment, blocks=()) for segment in allocator.segments)
    largest_first = sorted(segments, key=lambda segment: -segment.size_bytes)
    room = black_box.MAX_BYTES - len(json.dumps(replace(record, allocator=_without_segments(allocator)).to_json()))
    each = max(len(json.dumps(asdict(largest_first[0]))), 1) if largest_first else 1
    kept = largest_first[: max(room // (each + 20), 0)]
    short = replace(allocator, segments=tuple(kept), segments_left_out=len(segments) - len(kept))
    return json.dumps(replace(record, allocator=short).to_json(), separators=(",", ":"))


def _without_none(value: Any) -> Any:
    """The value with None and empty containers left out of its dicts, at any depth."""
    if isinstance(value, dict):
        return {name: _without_none(inner) for name, inner in value.items() if inner not in (None, {}, (), [])}
    return [_without_none(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _without_segments(allocator: black_box.AllocatorState | None) -> black_box.AllocatorState | None:
    """The allocator's state with its segments counted but left out; None for None."""
    if allocator is None:
        return None
    return replace(allocator, segments=(), segments_left_out=len(allocator.segments))


def _log_failure(error: BaseException) -> None:
    """Warns that no record was written, and why; never raises."""
    with contextlib.suppress(BaseException):  # logging may fail too
        LOG.warning("legroom wrote no black box: %r", error)
