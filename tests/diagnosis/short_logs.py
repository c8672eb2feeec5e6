"""What the tests of short texts share: a diagnosis, its first finding, and PyTorch's message."""

from __future__ import annotations

from legroom.diagnosis.finding import Finding
from legroom.diagnosis.log_diagnosis import read_log
from legroom.diagnosis.verdict import Diagnosis


def diagnosis(log: str) -> Diagnosis:
    return read_log([log.encode()], "log").runs[0]


def first(log: str) -> Finding:
    return diagnosis(log).findings[0]


def oom(
    total: float, free: float, allocated: float, unused: float, wanted: str = "60.00 MiB", device: str = "NPU"
) -> str:
    return (
        f"RuntimeError: {device} out of memory. Tried to allocate {wanted} ({device} 0; {total:.2f} GiB total "
        f"capacity; {allocated:.2f} GiB already allocated; {free:.2f} GiB free; {allocated + unused:.2f} GiB reserved "
        "in total by PyTorch)\n"
    )
