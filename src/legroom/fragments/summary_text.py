"""`torch.cuda.memory_summary()` text: totals alone, in the units that torch rounds them to."""

from __future__ import annotations

import re

from legroom.black_box import AllocatorState
from legroom.errors import LegroomError
from legroom.fragments.reading import AllocatorReading
from legroom.memory.caching_allocator import AllocatorSettings
from legroom.units import KIB

_HEADING = "memory summary, device ID"
_DEVICE = re.compile(r"memory summary, device ID ([0-9]{1,4})")
_COUNTS = re.compile(r"CUDA OOMs: ([0-9]{1,12}) *\| *cudaMalloc retries: ([0-9]{1,12})")
_ROW = re.compile(
    r"^\|\s*(Allocated memory|Active memory|Requested memory|GPU reserved memory|Non-releasable memory)\s*"
    r"\|\s*([0-9]{1,9})\s*([KMGTP]?i?B)\s*\|\s*([0-9]{1,9})\s*([KMGTP]?i?B)",
    re.MULTILINE,
)
_UNITS = {"B": 1, "KiB": KIB, "KB": KIB, "MiB": KIB**2, "MB": KIB**2, "GiB": KIB**3, "GB": KIB**3, "TiB": KIB**4}
"""Before 2.0 torch wrote MB and meant MiB."""


def is_summary(text: str) -> bool:
    return _HEADING in text


def read_summary(text: str) -> AllocatorReading:
    """The last summary of a text, which may be a log."""
    text = text[text.rfind(_HEADING) :]
    rows = {name: (_bytes(now, unit), _bytes(most, of)) for name, now, unit, most, of in _ROW.findall(text)}
    if "Allocated memory" not in rows or "GPU reserved memory" not in rows:
        raise LegroomError("the memory summary lacks its rows of allocated and reserved memory", "give the whole table")
    device, counts = _DEVICE.search(text), _COUNTS.search(text)
    allocated, reserved = rows["Allocated memory"], rows["GPU reserved memory"]
    state = AllocatorState(
        allocated[0],
        reserved[0],
        active_bytes=rows.get("Active memory", (None,))[0],
        inactive_split_bytes=rows.get("Non-releasable memory", (None,))[0],
        peak_allocated_bytes=allocated[1],
        ooms=int(counts.group(1)) if counts else None,
        alloc_retries=int(counts.group(2)) if counts else None,
    )
    requested = rows.get("Requested memory", (None,))[0]
    name = device.group(1) if device else "0"
    return AllocatorReading("memory_summary() text", name, state, AllocatorSettings(), requested_bytes=requested)


def _bytes(number: str, unit: str) -> int:
    return int(number) * _UNITS.get(unit, 1)
