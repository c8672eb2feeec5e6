"""Sweeps: one function over many inputs, in processes of this machine or on a Ray cluster."""

import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any, Protocol, TypeVar

from legroom.records import dataclass

Shared = TypeVar("Shared")
Item = TypeVar("Item")
Result = TypeVar("Result")


class SweepExecutor(Protocol):
    """Calls `work(shared, item)` for every item, and yields each result with its item's number as soon as it is there.
    `work` is a function of a module and its arguments can be pickled. Closing the iterator, or an exception in it
    (Ctrl-C), stops what still runs. An error of `work` ends the sweep with that error."""

    def run(
        self, work: Callable[[Shared, Item], Result], shared: Shared, items: Sequence[Item]
    ) -> Generator[tuple[int, Result], None, None]:
        """Yields (item's index, work(shared, item)) in the order of completion."""


_shared: dict[str, Any] = {}
_INTERRUPT_CHECK_S = 0.1


@dataclass(frozen=True)
class ProcessExecutor:
    """A sweep on this machine."""

    workers: int | None = None
    """None: one a core. With one, this process does the work itself, item after item."""

    def run(
        self, work: Callable[[Shared, Item], Result], shared: Shared, items: Sequence[Item]
    ) -> Generator[tuple[int, Result], None, None]:
        """Yields (item's index, work(shared, item)) in the order of completion, from a process pool or this process."""
        workers = min(self.workers or os.cpu_count() or 1, len(items))
        if workers <= 1:
            for number, item in enumerate(items):
                yield number, work(shared, item)
            return
        from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
        from multiprocessing import active_children

        interrupts: list[int] = []
        pool = ProcessPoolExecutor(workers, initializer=_keep_work, initargs=(work, shared))
        # KeyboardInterrupt inside the pool may leave one of its locks taken, and then its shutdown never ends.
        handler = signal.getsignal(signal.SIGINT)
        is_raised = callable(handler) and threading.current_thread() is threading.main_thread()
        if is_raised:
            signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
        try:
            numbers = {pool.submit(_run_kept_work, item): number for number, item in enumerate(items)}
            left = set(numbers)
            while left and not interrupts:
                finished, left = wait(left, _INTERRUPT_CHECK_S, FIRST_COMPLETED)
                yield from ((numbers[each], each.result()) for each in finished)
        finally:
            if is_raised:
                signal.signal(signal.SIGINT, handler)
            for process in active_children() if interrupts else ():
                process.kill()
            pool.shutdown(cancel_futures=True)
        if interrupts:
            raise KeyboardInterrupt


def _keep_work(work: Callable[[Any, Any], Any], shared: Any) -> None:
    """Initializer of a pool process: keeps the function and the shared argument for all items."""
    # Ctrl-C reaches every process of the terminal: the one that collects the results decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _shared.update(work=work, shared=shared)


def _run_kept_work(item: Any) -> Any:
    """In a pool process: the result of the kept function for one item."""
    return _shared["work"](_shared["shared"], item)


def sweep(
    work: Callable[[Shared, Item], Result],
    shared: Shared,
    items: Sequence[Item],
    executor: SweepExecutor,
    progress: Callable[[float], None] | None,
) -> list[Result]:
    """`work(shared, item)` of each item, in the order of `items`; `progress` gets the finished share, 0 to 1."""
    by_number: dict[int, Result] = {}
    with closing(executor.run(work, shared, items)) as results:
        for number, result in results:
            by_number[number] = result
            if progress:
                progress(len(by_number) / len(items))
    return [by_number[number] for number in sorted(by_number)]
