"""The readings of a file or an address, whatever it is."""

from __future__ import annotations

from pathlib import Path

from legroom.black_box import BlackBox, is_record, parse_record
from legroom.errors import LegroomError
from legroom.fragments.plain_pickle import MOST_FILE_BYTES, MOST_MADE_BYTES, is_pickle
from legroom.fragments.reading import AllocatorReading
from legroom.fragments.summary_text import is_summary, read_summary
from legroom.memory.allocator_replay import RefusedRequest
from legroom.memory.caching_allocator import parse_allocator_settings
from legroom.units import human_bytes

_HINT = "give a torch memory snapshot, a black box, memory_summary() text or a server's address"


def read_source(source: str) -> tuple[AllocatorReading, ...]:
    """The fullest device first."""
    if source.startswith(("http://", "https://")):
        from legroom.fragments.worker_page import read_server  # a file needs no HTTP

        return read_server(source)
    return read_content(_content(Path(source)), source)


def read_content(content: bytes, name: str, most_made_bytes: int = MOST_MADE_BYTES) -> tuple[AllocatorReading, ...]:
    if is_pickle(content[:2]):
        from legroom.fragments.torch_snapshot import read_snapshot

        return read_snapshot(content, most_made_bytes)
    if is_record(content[:200]):
        return (black_box_reading(parse_record(content, name)),)
    text = content.decode("utf-8", "replace")
    if is_summary(text):
        return (read_summary(text),)
    if content[:2] == b"PK":
        raise LegroomError(f"{name} is a zip archive, not a memory snapshot", "torch.save was used: " + _HINT)
    raise LegroomError(f"{name} is nothing that tells of an allocator's memory", _HINT)


def _content(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > MOST_FILE_BYTES:
            raise LegroomError(
                f"{path} has {human_bytes(size)}; legroom reads snapshots of up to {human_bytes(MOST_FILE_BYTES)}",
                "record a shorter history: torch.cuda.memory._record_memory_history(max_entries=100000)",
            )
        with path.open("rb") as file:
            content = file.read(MOST_FILE_BYTES + 1)
    except OSError as error:
        raise LegroomError(f"could not read {path}: {error.strerror}", _HINT) from error
    if len(content) > MOST_FILE_BYTES:
        raise LegroomError(f"{path} goes on beyond {human_bytes(MOST_FILE_BYTES)}", _HINT)
    return content


def black_box_reading(record: BlackBox) -> AllocatorReading:
    """What a worker wrote down when memory ran out."""
    state = record.allocator
    if state is None:
        raise LegroomError("the black box has no allocator's state", "its worker ran without a GPU")
    free = record.card.free_bytes if record.card else None
    refused = None
    if record.request is not None and record.request.wanted_bytes:
        refused = RefusedRequest(record.request.wanted_bytes, state.reserved_bytes, free, state.reserved_bytes)
    looks = [look.non_torch_bytes for look in record.history if look.non_torch_bytes is not None]
    return AllocatorReading(
        "black box",
        record.card.gpu if record.card else "0",
        state,
        parse_allocator_settings(state.settings or ""),
        refused=refused,
        non_torch_bytes=record.non_torch_bytes,
        non_torch_growth_bytes=looks[-1] - looks[0] if len(looks) > 1 else None,
        card_free_bytes=free,
        others_bytes=record.card.others_bytes if record.card else None,
    )
