"""A sweep on a Ray cluster. The nodes need Ray and the same Python, not legroom: this very package travels with the
job, so every node computes what this machine would."""

import hashlib
import os
import pickle
import re
import socket
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any

from legroom.errors import UNREACHABLE, LegroomError
from legroom.records import dataclass
from legroom.sweeps import Item, Result, Shared

AUTO = "auto"
"""As Ray means it: the cluster that this machine is a node of."""
_MOST_RETRIES = 20
"""Of one item whose worker or node was lost. Machines that are taken back at any time are, several times in a row;
an item that kills its worker each time must end."""
_NOT_SHIPPED = ["**/__pycache__", "**/*.pyc"]


@dataclass(frozen=True)
class RayExecutor:
    address: str | None = None
    """As `ray.init` takes it; None leaves it to Ray: RAY_ADDRESS, a cluster that runs here, or one started for this."""
    workers: int | None = None
    """The most items at work at once; None: as many as the cluster takes."""
    announce: Callable[[str], None] | None = None
    """Is told once where the sweep runs."""

    def run(
        self, work: Callable[[Shared, Item], Result], shared: Shared, items: Sequence[Item]
    ) -> Generator[tuple[int, Result], None, None]:
        """Yields (item's index, work(shared, item)) in the order of completion, from the nodes of a Ray cluster."""
        # Set before the import. A cluster that legroom starts for itself reports to nobody.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError:
            raise LegroomError("a sweep on Ray needs the package ray", "pip install 'legroom[ray]'") from None
        with _stdout_as_stderr(), _ray_session(ray, self.address):
            if self.announce:
                counts = {"node": sum(node["Alive"] for node in ray.nodes())}
                counts["core"] = int(ray.cluster_resources().get("CPU", 0))
                words = [f"{count} {noun}{'' if count == 1 else 's'}" for noun, count in counts.items()]
                self.announce(f"on Ray: {' with '.join(words)}")
            yield from _results(ray, work, shared, items, self.workers or len(items))


@contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """Context manager: what Ray prints to stdout goes to stderr, as stdout is for the answer."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


@contextmanager
def _ray_session(ray: Any, address: str | None) -> Iterator[None]:
    """Context manager: connected to Ray, or LegroomError; a session of the caller's own is used and left open."""
    if ray.is_initialized():
        yield
        return
    try:
        # Connect once to an address that is given: Ray itself takes minutes to say that nobody is there.
        host, _, port = (address or "").rpartition("://")[2].rpartition(":")
        if host and port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), 10.0).close()
        ray.init(
            address,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"py_modules": [str(Path(__file__).parents[1])], "excludes": _NOT_SHIPPED},
        )
    except (ConnectionError, RuntimeError, ValueError, OSError, ImportError) as error:
        where = f"the Ray cluster at {address}" if address and address != AUTO else "a Ray cluster"
        reason = re.split(r"\n|\. ", str(error).strip())[0].rstrip(".")  # its advice is about other programs' options
        raise LegroomError(
            f"could not join {where}: {reason}",
            "`ray status` shows whether one runs here; ADDRESS is host:port of its head (this machine being one of "
            "its nodes), ray://host:10001 from elsewhere (pip install 'ray[client]'), or auto",
            UNREACHABLE,
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _results(
    ray: Any, work: Callable[[Any, Any], Any], shared: Any, items: Sequence[Any], max_in_flight: int
) -> Iterator[tuple[int, Any]]:
    """(Index of the item, result) in the order of completion; at most `max_in_flight` items are submitted at a time."""
    pickled = pickle.dumps(shared)
    stored, digest = ray.put(pickled), hashlib.sha256(pickled).hexdigest()
    # Spread: a node that is lost takes few items with it, and those are done again elsewhere.
    remote = ray.remote(_run_in_worker).options(num_cpus=1, max_retries=_MOST_RETRIES, scheduling_strategy="SPREAD")
    waiting = iter(enumerate(items))
    numbers: dict[Any, int] = {}

    def submit(most: int) -> None:
        """Submits up to `most` further items to Ray."""
        for number, item in islice(waiting, most):
            numbers[remote.remote(work, digest, stored, item)] = number

    try:
        submit(max_in_flight)
        while numbers:
            finished, _ = ray.wait(list(numbers), num_returns=1)
            number = numbers.pop(finished[0])  # no longer cancelled: Ray aborts on a task that just failed
            result = _result_or_error(ray, finished[0])
            submit(1)
            yield number, result
    finally:
        for pending in numbers:
            ray.cancel(pending, force=True)


def _result_or_error(ray: Any, reference: Any) -> Any:
    """The result of the remote call `reference`; its own exception, or LegroomError where the cluster failed."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        # The error as it was raised there, so that a sweep ends alike wherever it runs.
        raise error.cause from None
    except ray.exceptions.RuntimeEnvSetupError as error:
        reason = str(error).strip().rpartition("\n")[2]
        raise LegroomError(f"the Ray cluster could not load legroom: {reason}", exit_code=UNREACHABLE) from error
    except ray.exceptions.RayError as error:
        raise LegroomError(
            f"the Ray cluster lost the same part of the sweep {_MOST_RETRIES + 1} times ({type(error).__name__})",
            "see `ray status` and the nodes' memory, or run it without --ray",
            UNREACHABLE,
        ) from error


_shared: dict[str, Any] = {}


def _run_in_worker(work: Callable[[Any, Any], Any], digest: str, pickled: bytes, item: Any) -> Any:
    """On a Ray worker: the result for one item. The shared argument is unpickled once, and kept by its `digest`."""
    if digest not in _shared:
        _shared.clear()
        _shared[digest] = pickle.loads(pickled)
    return work(_shared[digest], item)
