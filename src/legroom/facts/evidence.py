"""What a log can say about memory, or in words that sound like it: messages of vLLM, torch, CUDA, NCCL and the host.

Data in `data/evidence.json`. Patterns are RE2, which matches in linear time whatever the line holds.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

from legroom.facts.data_files import read_data
from legroom.records import dataclass

Role = Literal[
    "failure", "symptom", "host", "hint", "milestone", "setting", "platform", "frame", "stats", "once", "banner",
    "exception",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Message:
    """One thing a line can say. A group's ending tells its unit: `_gib`, `_size`, `_count`, `_ratio`; else text."""

    id: str
    role: Role
    marks: tuple[str, ...]
    """Plain texts, one of which every matching line holds."""
    pattern: str | None
    """RE2; None: holding a mark is enough."""
    phase: str | None


@dataclass(frozen=True, slots=True)
class OomParts:
    """How the numbers of torch's out-of-memory text are written, old and new wordings."""

    numbers: tuple[str, ...]
    process: str


@cache
def messages() -> tuple[Message, ...]:
    """Every known message, in the order of the data file."""
    return tuple(
        Message(entry["id"], entry["role"], tuple(entry["marks"]), entry.get("pattern"), entry.get("phase") or None)
        for entry in _data()["messages"]
    )


@cache
def oom_parts() -> OomParts:
    """The patterns of torch's out-of-memory numbers."""
    return OomParts(tuple(_data()["oom_parts"]), _data()["oom_process"])


@cache
def _data() -> dict:  # type: ignore[type-arg]
    return read_data("evidence.json")  # type: ignore[no-any-return]
