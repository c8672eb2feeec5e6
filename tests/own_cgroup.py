"""A real memory cgroup of a test's own, where this machine lets it make one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

LIMIT_BYTES = 96 << 20
_PLACES = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))


@contextlib.contextmanager
def limited_cgroup(limit_bytes: int = LIMIT_BYTES) -> Iterator[Path]:
    """Its folder; what is put into it may use so much memory. Skips where none can be made."""
    for top, limit_file in _PLACES:
        folder = top / f"legroom-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit_file).write_text(str(limit_bytes))
        except OSError:
            folder.rmdir()
            continue
        try:
            yield folder
        finally:
            _remove(folder)
        return
    pytest.skip("no memory cgroup can be made here: it takes root and a writable /sys/fs/cgroup")


def _remove(folder: Path) -> None:
    """As soon as the kernel has seen the last process in it go."""
    until = time.monotonic() + 90
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.05)
