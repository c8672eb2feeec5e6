"""A black box as a case of its own, or beside the log that names it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, get_args, get_type_hints

from legroom.black_box import PREFIX, BlackBox, is_record, parse_record, read_record
from legroom.diagnosis.case import Case
from legroom.errors import LegroomError
from legroom.facts.gpus import gpu as known_gpu
from legroom.units import GIB
from legroom.vllm.args import ServeArgs
from legroom.vllm_logs.evidence import Evidence
from legroom.vllm_logs.startup_log import Startup

_MOST_RECORD_PIECES = 4
_NEAR_S = 600.0
"""Between a record and the last line of a log beside it, where the log does not name its processes."""


def first_pieces(pieces: Iterable[bytes]) -> tuple[bool, Iterator[bytes]]:
    """Whether this is a record rather than a log, and the same pieces again."""
    rest = iter(pieces)
    head = next(rest, b"")
    return is_record(head[:200]), chain((head,) if head else (), rest)


def whole_record(pieces: Iterable[bytes], source: str) -> BlackBox:
    whole = b""
    for number, piece in enumerate(pieces):
        if number >= _MOST_RECORD_PIECES:
            raise LegroomError(f"{source} is larger than any black box")
        whole += piece
    return parse_record(whole, source)


def as_log(record: BlackBox) -> bytes:
    """The failure in the words that vLLM's log would have: a traceback and PyTorch's sentence."""
    request = record.request
    if request is None or record.trigger != "out_of_memory":
        return b""
    lines = ["Traceback (most recent call last):"]
    lines += [f'  File "{frame.file}", line {frame.line}, in {frame.function}' for frame in request.frames]
    lines.append(request.message or _sentence(record))
    return "\n".join(lines).encode()


def _sentence(record: BlackBox) -> str:
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
    """The start-up with what the record knows of it and the log does not."""
    kinds = get_type_hints(ServeArgs)
    settings = {name: value for name, value in record.settings.items() if _is_of(kinds.get(name), value)}
    args = startup.args
    if not startup.args_known and not args.model:
        args = ServeArgs(**settings)
    blocks = record.settings.get("num_gpu_blocks")
    card = record.card
    return replace(
        startup,
        vllm=startup.vllm or record.worker.vllm,
        args=args,
        gpu_name=startup.gpu_name or _card_name(card.name if card else None),
        gpu_total_bytes=startup.gpu_total_bytes or (card.total_bytes if card else None),
        blocks=startup.blocks if startup.blocks is not None else blocks if isinstance(blocks, int) else None,
    )


def _is_of(kind: Any, value: Any) -> bool:
    """Whether a flag has values of this kind: a record's settings are data from anywhere."""
    kinds = get_args(kind) or (kind,)
    return type(value) in kinds or (type(value) is int and float in kinds)


def _card_name(name: str | None) -> str | None:
    try:
        return known_gpu(name).name if name else None
    except LegroomError:
        return None


def named_records(evidence: Iterable[Evidence]) -> list[tuple[Evidence, BlackBox]]:
    """The records that lines of a log name and that are still there, and those that a full disk put into the log."""
    records = []
    for item in evidence:
        try:
            if item.id == "black_box_written":
                records.append((item, read_record(Path(str(item.facts.get("path", ""))))))
            elif item.id == "black_box_printed":
                start = item.window.find("{")
                records.append((item, parse_record(item.window[start:])))
        except LegroomError:
            continue  # gone, or of another machine: the log's own lines are what there is
    return records


def records_beside(log: Path, pids: frozenset[int]) -> list[BlackBox]:
    """Records in the log's own folder that are of its processes, or of its last minutes where it names none."""
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
        if record.worker.pid in pids or (not pids and abs(record.time_s - written_s) < _NEAR_S):
            records.append(record)
    return records


def with_record(case: Case, record: BlackBox, line: int = 1) -> Case:
    return replace(case, black_box=record, black_box_line=line, startup=recorded_startup(record, case.startup))
