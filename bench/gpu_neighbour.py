"""Another process on the GPU, which takes and gives back memory as it is told; for benches on a GPU machine."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

GIB, MIB = 1 << 30, 1 << 20
SMALLEST_LEFT = 300 * MIB
"""What it leaves where it takes all it can."""


class Neighbour:
    def __init__(self) -> None:
        self.child = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def take(self, most_bytes: int | None = None) -> int:
        """So many bytes, or all but 300 MiB; what it took."""
        return self._tell(most_bytes or 1 << 60, SMALLEST_LEFT)

    def leave(self, left_bytes: int) -> int:
        """Take until no more than that is free."""
        return self._tell(1 << 60, left_bytes)

    def give_back(self) -> None:
        self._tell(0, 0)

    def _tell(self, most_bytes: int, left_bytes: int) -> int:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(f"{most_bytes} {left_bytes}\n")
        self.child.stdin.flush()
        return int(self.child.stdout.readline())

    def end(self) -> None:
        self.child.kill()
        self.child.wait()


def main() -> None:
    import torch

    kept: list[Any] = []
    for line in sys.stdin:
        most, left = map(int, line.split())
        taken = 0
        if not most:
            kept.clear()
            torch.cuda.empty_cache()
        for size in (GIB, 20 * MIB):
            while taken + size <= most and torch.cuda.mem_get_info()[0] > size + left:
                kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                taken += size
        print(taken, flush=True)


if __name__ == "__main__":
    main()
