"""Drains: new requests are refused before a restart, and running ones finish. While vLLM drains after SIGTERM, its
/health stays 200 and new requests get 500 (0.32), so new requests must be kept away first."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import ClassVar, Protocol

from legroom.actions.platform import QUERY_TIMEOUT_S, ActionFailed, write_atomically
from legroom.actions.programs import run_checked
from legroom.live.metrics.scrape import ssl_argument
from legroom.records import dataclass, field


class DrainMethod(Protocol):
    """A way to keep new requests from a server. `begin` and `end` may be called twice."""

    @property
    def name(self) -> str:
        """What drains, in words, such as `the guard`."""

    async def begin(self) -> None:
        """Makes new requests be refused or routed elsewhere; raises `ActionFailed`."""

    async def end(self) -> None:
        """Lets new requests in again; raises `ActionFailed`."""

    async def in_flight(self) -> float | None:
        """Admitted requests that are not answered yet; None where they are not counted."""
        return None


@dataclass(frozen=True)
class GuardDrain:
    """A drain by legroom's guard: new requests get 503 with Retry-After."""

    name: ClassVar[str] = "the guard"
    url: str
    token: str = field(repr=False)
    verify_tls: bool = True
    ca_file: str | None = None

    async def begin(self) -> None:
        await self._call_guard("POST", "drain", {"on": True})

    async def end(self) -> None:
        await self._call_guard("POST", "drain", {"on": False})

    async def in_flight(self) -> float | None:
        """The guard's running plus waiting requests; None where it reports neither."""
        status = await self._call_guard("GET", "status", None)
        counts = [status.get("running"), status.get("waiting")]
        known = [float(count) for count in counts if isinstance(count, (int, float))]
        return sum(known) if known else None

    async def _call_guard(self, method: str, path: str, body: dict[str, bool] | None) -> dict[str, object]:
        """The guard's JSON answer at /-/legroom/`path`; ActionFailed if it refuses or does not answer."""
        import aiohttp

        url = f"{self.url.rstrip('/')}/-/legroom/{path}"
        headers, tls = {"Authorization": f"Bearer {self.token}"}, ssl_argument(self.verify_tls, self.ca_file)
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=QUERY_TIMEOUT_S)) as session,
                session.request(method, url, json=body, headers=headers, ssl=tls) as answer,
            ):
                if answer.status == 404:
                    raise ActionFailed("the guard has no drain endpoint", "start it with LEGROOM_GUARD_TOKEN set")
                if answer.status in (401, 403):
                    hint = "LEGROOM_GUARD_TOKEN must be the same on both sides"
                    raise ActionFailed("the guard refused the token", hint)
                if answer.status >= 400:
                    raise ActionFailed(f"the guard answered {answer.status} to {path}")
                document = await answer.json(content_type=None)
                return document if isinstance(document, dict) else {}
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            raise ActionFailed(f"the guard cannot be reached ({type(error).__name__})") from error


@dataclass(frozen=True)
class ReadinessFileDrain(DrainMethod):
    """A file whose presence makes a readiness probe or a load balancer's health check fail."""

    path: Path
    seen_after_s: float = 15.0

    @property
    def name(self) -> str:
        """`the readiness file` and its file name."""
        return f"the readiness file {self.path.name}"

    async def begin(self) -> None:
        """Creates the file and waits until the health checks have seen it."""
        write_atomically(self.path, "draining\n")
        await asyncio.sleep(self.seen_after_s)

    async def end(self) -> None:
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise ActionFailed(f"{self.path} cannot be taken away: {error.strerror}") from error


@dataclass(frozen=True)
class CommandDrain(DrainMethod):
    """Two shell commands of the user, such as those that remove a server from a load balancer and add it again."""

    name: ClassVar[str] = "the drain command"
    close_command: str
    open_command: str
    timeout_s: float = 60.0

    async def begin(self) -> None:
        await run_checked(["/bin/sh", "-c", self.close_command], "the drain command", timeout_s=self.timeout_s)

    async def end(self) -> None:
        words = ["/bin/sh", "-c", self.open_command]
        await run_checked(words, "the command that ends a drain", timeout_s=self.timeout_s)


@dataclass(frozen=True)
class NoDrain(DrainMethod):
    """No drain: a restart waits for a time without requests."""

    @property
    def name(self) -> str:
        """The word `nothing`, for messages."""
        return "nothing"

    async def begin(self) -> None:
        """Does nothing: no drain is possible."""

    async def end(self) -> None:
        """Does nothing: new requests were never refused."""


@dataclass(frozen=True)
class PlatformDrain(NoDrain):
    """A platform that drains by itself when it restarts (Kubernetes, `legroom run`)."""

    platform: str

    @property
    def name(self) -> str:
        """`PLATFORM, which drains by itself`."""
        return f"{self.platform}, which drains by itself"


@dataclass(frozen=True)
class Drained:
    """The result of a drain. `left` is the number of remaining requests; None: unknown."""

    empty: bool
    waited_s: float
    left: float | None

    def __str__(self) -> str:
        if self.empty:
            return f"drained in {self.waited_s:.1f} s"
        left = "an unknown number of" if self.left is None else f"{self.left:.0f}"
        return f"not drained after {self.waited_s:.0f} s: {left} requests are left"


async def wait_until_empty(
    drain_method: DrainMethod,
    server_count: Callable[[], Awaitable[float | None]] | None,
    deadline_s: float,
    poll_s: float = 0.25,
) -> Drained:
    """Waits until two polls in a row find no request, by the drain's count and `server_count()` (None: unknown, so some
    may be left), or until `deadline_s` seconds passed."""
    loop = asyncio.get_running_loop()
    start_s, zeros = loop.time(), 0
    while True:
        left = await count_in_flight(drain_method)
        if server_count is not None:
            running = await server_count()
            left = None if running is None else max(running, left or 0.0)
        zeros = zeros + 1 if left == 0 else 0
        waited_s = loop.time() - start_s
        if zeros == 2:  # one poll may fall between a request's end in the engine and its last bytes to the client
            return Drained(True, waited_s, 0.0)
        if waited_s >= deadline_s:
            return Drained(False, waited_s, left)
        await asyncio.sleep(min(poll_s, max(0.0, deadline_s - waited_s)))


async def count_in_flight(drain_method: DrainMethod) -> float | None:
    """The drain's own count of requests in flight; None where it has none or does not answer."""
    try:
        return await drain_method.in_flight()
    except ActionFailed:
        return None
