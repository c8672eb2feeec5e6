"""The seam between what is swept and where it runs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeVar

Shared = TypeVar("Shared")
Item = TypeVar("Item")
Result = TypeVar("Result")


class SweepExecutor(Protocol):
    """Calls `work(shared, item)` for every item, and yields each result with its item's number as soon as it is there.

    `work` is a function of a module and its arguments can be pickled. Closing the iterator, or an exception in it
    (Ctrl-C), stops what still runs. An error of `work` ends the sweep with that error.
    """

    def run(
        self, work: Callable[[Shared, Item], Result], shared: Shared, items: Sequence[Item]
    ) -> Generator[tuple[int, Result], None, None]: ...
