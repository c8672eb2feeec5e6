"""Diagnosis from black boxes, what workers record when memory runs out: exact bytes, segments and readings."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

from legroom.black_box import MAX_READ_BYTES, PREFIX, BlackBox, MemoryReading, is_record, parse_record, read_record
from legroom.diagnosis.case import Case, recorded_oom
from legroom.diagnosis.finding import Assessment, Strength, reason
from legroom.errors import LegroomError
from legroom.facts.gpus import gpu as known_gpu
from legroom.records import dataclass
from legroom.units import GIB, MIB, gib, human_bytes
from legroom.vllm.args import ServeArgs
from legroom.vllm_logs.evidence import Evidence, TorchOom
from legroom.vllm_logs.startup_log import Startup

_MAX_LOG_AGE_DIFFERENCE_S = 600.0
"""Between a record and the last line of a log beside it, where the log does not name its processes."""


def detect_record(pieces: Iterable[bytes]) -> tuple[bool, Iterator[bytes]]:
    """(whether the bytes are a black box rather than a log, the same bytes again)."""
    rest = iter(pieces)
    head = next(rest, b"")
    return is_record(head[:200]), chain((head,) if head else (), rest)


def read_whole_record(pieces: Iterable[bytes], source: str) -> BlackBox:
    """The black box in these pieces; LegroomError, naming `source`, where they are not one."""
    whole = b""
    for piece in pieces:
        whole += piece
        if len(whole) > MAX_READ_BYTES:
            raise LegroomError(f"{source} is larger than any black box")
    return parse_record(whole, source)


def record_as_log(record: BlackBox) -> bytes:
    """The black box's failure as vLLM would have logged it: a traceback and PyTorch's message; empty without one."""
    request = record.request
    if request is None or record.trigger != "out_of_memory":
        return b""
    lines = ["Traceback (most recent call last):"]
    lines += [f'  File "{frame.file}", line {frame.line}, in {frame.function}' for frame in request.frames]
    lines.append(request.message or _oom_message(record))
    return "\n".join(lines).encode()


def _oom_message(record: BlackBox) -> str:
    """PyTorch's out-of-memory message with the record's figures."""
    request, card, torch = record.request, record.card, record.allocator
    wanted = (request.wanted_bytes or 0) / GIB if request else 0
    text = f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {wanted:.2f} GiB."
    if card is not None and card.total_bytes and card.free_bytes is not None:
        free = f"of which {card.free_bytes / GIB:.2f} GiB is free."
        text += f" GPU 0 has a total capacity of {card.total_bytes / GIB:.2f} GiB {free}"
    if torch is not None:
        text += (
            f" Of the allocated memory {torch.allocated_bytes / GIB:.2f} GiB is allocated by PyTorch, and "
            f"{torch.unallocated_bytes / GIB:.2f} GiB is reserved by PyTorch but unallocated."
        )
    return text


def recorded_startup(record: BlackBox, startup: Startup) -> Startup:
    """The start-up, its missing release, flags, card and KV blocks taken from the black box."""
    kinds = get_type_hints(ServeArgs)
    settings = {name: value for name, value in record.settings.items() if _has_type(kinds.get(name), value)}
    args = startup.args
    if not startup.args_known and not args.model:
        args = ServeArgs(**settings)
    blocks = record.settings.get("num_gpu_blocks")
    card = record.card
    return replace(
        startup,
        vllm=startup.vllm or record.worker.vllm,
        args=args,
        gpu_name=startup.gpu_name or _known_card_name(card.name if card else None),
        gpu_total_bytes=startup.gpu_total_bytes or (card.total_bytes if card else None),
        blocks=startup.blocks if startup.blocks is not None else blocks if isinstance(blocks, int) else None,
    )


def _has_type(kind: Any, value: Any) -> bool:
    """Whether a recorded value, which is untrusted, has the type that a flag of this `kind` takes."""
    kinds = get_args(kind) or (kind,)
    return type(value) in kinds or (type(value) is int and float in kinds)


def _known_card_name(name: str | None) -> str | None:
    """The card's name in legroom's table of GPUs; None where it is unknown."""
    try:
        return known_gpu(name).name if name else None
    except LegroomError:
        return None


def named_records(evidence: Iterable[Evidence]) -> list[tuple[Evidence, BlackBox]]:
    """(log line, black box) for each readable black box whose path or content a line of the log has."""
    records = []
    for item in evidence:
        try:
            if item.id == "black_box_written":
                records.append((item, read_record(Path(str(item.facts.get("path", ""))))))
            elif item.id == "black_box_printed":
                records.append((item, parse_record(item.window[item.window.find("{") :])))
        except LegroomError:
            continue  # deleted, or on another machine
    return records


def records_beside(log: Path, pids: frozenset[int]) -> list[BlackBox]:
    """Black boxes in the log's folder by its processes `pids`; without pids, those within ten minutes of the log."""
    records = []
    try:
        written_s = log.stat().st_mtime
        paths = sorted(log.parent.glob(f"{PREFIX}*.json"))[-20:]
    except OSError:
        return []
    for path in paths:
        try:
            record = read_record(path)
        except LegroomError:
            continue
        if record.worker.pid in pids or (not pids and abs(record.time_s - written_s) < _MAX_LOG_AGE_DIFFERENCE_S):
            records.append(record)
    return records


def with_record(case: Case, record: BlackBox, line: int = 1) -> Case:
    """The case with this black box attached, which the log names on line `line`."""
    return replace(case, black_box=record, black_box_line=line, startup=recorded_startup(record, case.startup))


_MIN_READINGS = 6
_MIN_GROWTH_BYTES = 256 * MIB  # Caches of graphs and libraries grow by less.
_RISING_RATIO = 0.8  # Share of readings that do not fall: a leak rarely releases memory.
_LARGEST_STEP_RATIO = 0.5  # Largest share of the growth between two readings: more is a burst or another process.
_MIN_OTHERS_BYTES = 512 * MIB  # The CUDA context of an idle process.


@dataclass(frozen=True)
class RecordedGrowth:
    """Memory that grew between the first and the last reading."""

    first_bytes: int
    last_bytes: int
    seconds: float

    @property
    def bytes(self) -> int:
        """Bytes gained between the first and the last reading."""
        return self.last_bytes - self.first_bytes

    @property
    def bytes_per_h(self) -> float:
        """The gain in bytes per hour."""
        return self.bytes / max(self.seconds, 1.0) * 3600


def _readings_after_startup(history: Sequence[MemoryReading]) -> Sequence[MemoryReading]:
    """The readings after the last jump by over a quarter, which is the allocation of weights or KV cache."""
    sizes = [reading.allocated_bytes or 0 for reading in history]
    leaps = [late for late in range(1, len(sizes)) if sizes[late] > 1.25 * sizes[late - 1]]
    return history[leaps[-1] :] if leaps else history


def _steady_growth(points: list[tuple[float, int]]) -> RecordedGrowth | None:
    """The growth of (time in s, bytes) points of 256 MiB or more, with four of five steps rising or level, and no step
    more than half of it; else None."""
    if len(points) < _MIN_READINGS:
        return None
    growth = RecordedGrowth(points[0][1], points[-1][1], points[-1][0] - points[0][0])
    steps = [late - early for (_, early), (_, late) in pairwise(points)]
    rising = sum(step >= 0 for step in steps) / len(steps)
    if growth.bytes < _MIN_GROWTH_BYTES or rising < _RISING_RATIO or max(steps) > _LARGEST_STEP_RATIO * growth.bytes:
        return None
    return growth


def outside_growth_bytes(record: BlackBox) -> int:
    """How much more of the card is used outside PyTorch than in the first reading after start-up; 0 if not recorded."""
    card, allocator = record.card, record.allocator
    if card is None or allocator is None or card.total_bytes is None or card.free_bytes is None:
        return 0
    now = card.total_bytes - card.free_bytes - allocator.reserved_bytes
    before = [
        reading.used_bytes - reading.reserved_bytes
        for reading in _readings_after_startup(record.history)
        if reading.used_bytes is not None and reading.reserved_bytes is not None
    ]
    return max(now - before[0], 0) if before else 0


def assess_fragmentation(record: BlackBox, line: int) -> Assessment | None:
    """Assesses a record, at this line, of enough free memory in no single piece; None otherwise."""
    oom, allocator = _failed_allocation(record), record.allocator
    size = _fragmented_bytes(record)
    if oom is None or allocator is None or not size:
        return None
    free = oom.free_bytes or 0
    sizes = {"size": size, "free": free, "both": size + free, "wanted": oom.wanted_bytes}
    facts = {name: gib(value) for name, value in sizes.items()}
    why = reason("recorded_pieces", {**facts, "largest": human_bytes(allocator.largest_free_bytes or 0)})
    return Assessment(_strength_among_causes(record, size), (record_evidence(record, line),), why)


def _fragmented_bytes(record: BlackBox) -> int:
    """Free bytes in PyTorch's segments where they and the card's cover the request but in no one piece; else 0."""
    oom, allocator = _failed_allocation(record), record.allocator
    if oom is None or allocator is None or allocator.largest_free_bytes is None:
        return 0
    free, size = oom.free_bytes or 0, allocator.usable_free_bytes
    # A step's own tensors split segments too, so the free pieces must be at least half of the request.
    enough = size + free >= oom.wanted_bytes and size >= oom.wanted_bytes // 2
    return size if enough and max(allocator.largest_free_bytes, free) < oom.wanted_bytes else 0


def assess_other_processes(record: BlackBox, line: int) -> Assessment | None:
    """Assesses a record, at this line, of other processes that hold or just allocated what was missing; else None."""
    oom, size = _failed_allocation(record), _other_process_bytes(record)
    if oom is None or not size:
        return None
    missing = _oom_missing_bytes(oom)
    is_known = record.card is not None and record.card.others_bytes is not None
    name = "recorded_others" if is_known else "recorded_growth_of_others"
    why = reason(name, {"size": gib(size), "missing": gib(missing), "wanted": gib(oom.wanted_bytes)})
    return Assessment(_strength_among_causes(record, size), (record_evidence(record, line),), why)


def _other_process_bytes(record: BlackBox) -> int:
    """Bytes of other processes where they explain the shortage; else 0."""
    oom = _failed_allocation(record)
    if oom is None:
        return 0
    others = record.card.others_bytes if record.card else None
    size = outside_growth_bytes(record) if others is None else min(others, _unexplained_bytes(record))
    return size if size >= max(_MIN_OTHERS_BYTES, _oom_missing_bytes(oom)) else 0


def _unexplained_bytes(record: BlackBox) -> int:
    """Used bytes of the card that this process does not hold; more than any card where that is not recorded."""
    card = record.card
    if card is None or card.total_bytes is None or card.free_bytes is None or card.own_bytes is None:
        return 1 << 62
    return max(card.total_bytes - card.free_bytes - card.own_bytes, 0)


def assess_leak(record: BlackBox, line: int) -> Assessment | None:
    """Assesses a record, at this line, of memory that grew from reading to reading until none was left; else None."""
    growth = leak_growth(record)
    if growth is None:
        return None
    what = "the memory that PyTorch has handed out" if record.allocator is not None else "the worker's host memory"
    sizes = {"first": gib(growth.first_bytes), "last": gib(growth.last_bytes)}
    why = reason("recorded_leak", {"time": duration_text(growth.seconds), "what": what, **sizes})
    return Assessment(_strength_among_causes(record, growth.bytes), (record_evidence(record, line),), why)


def leak_growth(record: BlackBox) -> RecordedGrowth | None:
    """The steady growth of PyTorch's, else the host's, memory that covers the shortage; None without one that does."""
    if record.trigger != "out_of_memory":
        return None
    points = [(reading.time_s, reading.rss_bytes) for reading in record.history]
    if record.allocator is not None:
        points = [(reading.time_s, reading.allocated_bytes) for reading in _readings_after_startup(record.history)]
    growth = _steady_growth([(time_s, size) for time_s, size in points if size is not None])
    oom = _failed_allocation(record)
    return None if growth is None or (oom is not None and growth.bytes < _oom_missing_bytes(oom)) else growth


def _strength_among_causes(record: BlackBox, size: int) -> Strength:
    """NAMED where the record's cause of `size` bytes is the largest of its causes, else POSSIBLE."""
    growth = leak_growth(record)
    largest = max(_fragmented_bytes(record), _other_process_bytes(record), growth.bytes if growth else 0)
    return Strength.NAMED if size >= largest else Strength.POSSIBLE


def _oom_missing_bytes(oom: TorchOom) -> int:
    """Bytes by which the failed allocation exceeded the card's free memory."""
    return oom.wanted_bytes - (oom.free_bytes or 0)


def assess_burst(record: BlackBox, line: int) -> Assessment | None:
    """Assesses a record, at this line, of one step that needed more than was free; None for another cause."""
    oom, step = _failed_allocation(record), record.step
    if oom is None or step is None or _fragmented_bytes(record) or _other_process_bytes(record) or leak_growth(record):
        return None
    largest = step.largest[0] if step.largest else None
    detail = f"; the largest, {largest.id}, had {largest.scheduled_tokens:,} of them" if largest else ""
    count = f"{step.requests:,} request{'s' if step.requests != 1 else ''}{detail}"
    piece = human_bytes(record.allocator.largest_free_bytes or 0) if record.allocator else "0 B"
    sizes = {"wanted": gib(oom.wanted_bytes), "free": gib(oom.free_bytes or 0), "piece": piece}
    why = reason("recorded_burst", {"tokens": f"{step.tokens:,}", "requests": count, **sizes})
    why += reason("recorded_logprobs", {"requests": step.prompt_logprobs}) if step.prompt_logprobs else ""
    return Assessment(Strength.NAMED, (record_evidence(record, line),), why)


def _failed_allocation(record: BlackBox) -> TorchOom | None:
    """The allocation that failed; None where the record was requested by a signal or has no sizes."""
    return recorded_oom(record, 1) if record.trigger == "out_of_memory" else None


def duration_text(seconds: float) -> str:
    """Seconds as `1.5 hours`, `12 minutes` or `40 seconds`."""
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"


def record_evidence(record: BlackBox, line: int) -> Evidence:
    """The black box as evidence, at the line that names it."""
    worker, torch, step = record.worker, record.allocator, record.step
    known = {
        "pid": worker.pid,
        "wanted_bytes": record.request.wanted_bytes if record.request else None,
        "free_bytes": record.card.free_bytes if record.card else None,
        "allocated_bytes": torch.allocated_bytes if torch else None,
        "reserved_bytes": torch.reserved_bytes if torch else None,
        "largest_free_bytes": torch.largest_free_bytes if torch else None,
        "non_torch_bytes": record.non_torch_bytes,
        "step_tokens": step.tokens if step else None,
        "step_requests": step.requests if step else None,
    }
    facts: dict[str, int | float | str] = {name: value for name, value in known.items() if value is not None}
    rank = "" if worker.rank is None else f"worker {worker.rank}, "
    shown = {n: human_bytes(int(v)) if n.endswith("_bytes") else v for n, v in facts.items() if n != "pid"}
    parts = ", ".join(f"{name.removesuffix('_bytes').replace('_', ' ')} {value}" for name, value in shown.items())
    text = f"black box of {rank}pid {worker.pid}: {parts}"
    return Evidence("black_box", "symptom", line, text, facts, rank=worker.rank, pid=worker.pid)
