"""HTTP scrapes of one server, or of a fleet spread evenly over the interval."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from legroom.errors import UNREACHABLE, LegroomError
from legroom.live.metrics.endpoint import Endpoint, masked_url
from legroom.live.metrics.exposition import NotMetrics, parse_sample
from legroom.live.metrics.sample import FailureKind, Sample, ScrapeFailure, ScrapeResult

if TYPE_CHECKING:
    import ssl

    import aiohttp

TIMEOUT_S = 4.0
"""Below the default interval of 5 s."""
MAX_BYTES = 16 * 1024 * 1024
"""A vLLM engine answers with 60 kB, so this is hundreds of engines."""
MAX_QUERY_BYTES = 512 * 1024 * 1024
"""Of a Prometheus query: a thousand servers with all latency buckets take a tenth of it."""
_ACCEPT = {"Accept": "text/plain;version=0.0.4;q=1,*/*;q=0.1"}


class ScrapeFailed(LegroomError):
    """A scrape failed."""

    def __init__(self, kind: FailureKind, message: str, hint: str = "", under_way: str = "") -> None:
        super().__init__(message, hint, UNREACHABLE)
        self.kind: FailureKind = kind
        self.under_way = under_way


def open_session() -> aiohttp.ClientSession:
    """A session that keeps connections alive between scrapes; the caller closes it."""
    import aiohttp  # slow to import

    connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=300, keepalive_timeout=60)
    # Without trust_env, credentials of ~/.netrc are not sent to watched hosts.
    jar = aiohttp.DummyCookieJar()
    return aiohttp.ClientSession(connector=connector, headers=_ACCEPT, cookie_jar=jar, trust_env=False)


async def scrape(session: aiohttp.ClientSession, target: Endpoint, timeout_s: float = TIMEOUT_S) -> Sample:
    """The sample in a server's /metrics, taken now; raises ScrapeFailed."""
    body = await fetch(session, target, timeout_s)
    try:
        return parse_sample(body, time.time(), target.server)
    except NotMetrics as error:
        if b"\nlegroom_guard_upstream_up 0" in body:
            what = "`legroom run` behind the guard starts or stops the server"
            under_way = what if b"\nlegroom_guard_upstream_under_way 1" in body else ""
            message = f"{target.server}: the guard answers, vLLM behind it does not"
            raise ScrapeFailed("unreachable", message, under_way=under_way) from error
        raise ScrapeFailed("not_metrics", f"{target.server}: {error.message}", error.hint) from error


async def scrape_result(session: aiohttp.ClientSession, target: Endpoint, timeout_s: float = TIMEOUT_S) -> ScrapeResult:
    """The sample in a server's /metrics, taken now, or the ScrapeFailure where there is none."""
    try:
        return await scrape(session, target, timeout_s)
    except ScrapeFailed as error:
        return ScrapeFailure(time.time(), target.server, error.kind, error.message, error.under_way)


async def fetch(
    session: aiohttp.ClientSession, target: Endpoint, timeout_s: float, form: Mapping[str, str] | None = None
) -> bytes:
    """The body of a GET, or of a POST where a `form` is given. Raises ScrapeFailed."""
    import aiohttp  # slow to import

    server = target.server
    try:
        async with session.request(
            "GET" if form is None else "POST",
            target.full_url,
            data=form,
            headers=target.headers,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            ssl=ssl_argument(target.verify_tls, target.ca_file),
            # A redirect could send the credentials elsewhere.
            allow_redirects=False,
        ) as response:
            _check_status(server, response.status, response.headers.get("Location"))
            max_bytes = MAX_BYTES if form is None else MAX_QUERY_BYTES
            chunks: list[bytes] = []
            size = 0
            async for chunk in response.content.iter_any():
                size += len(chunk)
                if size > max_bytes:
                    raise ScrapeFailed("too_big", f"{server} answered with more than {max_bytes >> 20} MiB")
                chunks.append(chunk)
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)
    except TimeoutError as error:
        raise ScrapeFailed("timeout", f"{server} did not answer within {timeout_s:g} s") from error
    except aiohttp.ClientConnectorDNSError as error:
        raise ScrapeFailed("dns", f"{server}: the host name is not known") from error
    except (aiohttp.ClientSSLError, aiohttp.ServerFingerprintMismatch) as error:
        raise ScrapeFailed("tls", f"{server}: TLS failed: {_tls_reason(error)}", _TLS_HINT) from error
    except aiohttp.ClientConnectorError as error:
        refused = isinstance(error.os_error, ConnectionRefusedError)
        reason = "nothing listens there" if refused else (error.os_error.strerror or "no connection")
        raise ScrapeFailed("refused" if refused else "unreachable", f"{server}: {reason}") from error
    except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError) as error:
        raise ScrapeFailed("cut_short", f"{server} closed the connection in mid-answer") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise ScrapeFailed("unreachable", f"{server}: {type(error).__name__}") from error


_TLS_HINT = "name the authority's certificate with --ca-file, or --insecure for a certificate nobody signed"
_AUTH_HINT = "give a token with --token-file (or LEGROOM_TOKEN), or user and password in the address"


def _check_status(server: str, status: int, location: str | None) -> None:
    """Raises ScrapeFailed, of the kind that fits the HTTP status, for any status but 200."""
    if status in {401, 403}:
        raise ScrapeFailed("auth", f"{server} refuses: HTTP {status}", _AUTH_HINT)
    if status == 404:
        raise ScrapeFailed("not_found", f"{server} has no /metrics (HTTP 404)", "is it vLLM's API server?")
    if 300 <= status < 400:
        where = f" to {masked_url(location)}" if location else ""
        raise ScrapeFailed("redirect", f"{server} redirects{where} (HTTP {status})", "give the final address")
    if status != 200:
        raise ScrapeFailed("http_error", f"{server} answered HTTP {status}")


def _tls_reason(error: Exception) -> str:
    """Why TLS failed: in OpenSSL's words if there are any, else the exception's class name."""
    cause = getattr(error, "certificate_error", None) or getattr(error, "os_error", None) or error
    return str(getattr(cause, "verify_message", "") or getattr(cause, "reason", "") or type(cause).__name__)


def ssl_argument(verify_tls: bool, ca_file: str | None) -> ssl.SSLContext | bool:
    """aiohttp's `ssl` argument: whether to verify, or the context of a CA file."""
    return _ssl_context(ca_file) if verify_tls and ca_file is not None else verify_tls


@lru_cache(64)
def _ssl_context(ca_file: str) -> ssl.SSLContext:
    """A TLS context that trusts the CAs of a PEM file; LegroomError where unreadable. Cached, as it is slow."""
    import ssl  # only for https

    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise LegroomError(f"{ca_file} holds no certificates that could be read", "give a PEM file") from error


async def scrape_fleet(
    targets: Sequence[Endpoint],
    interval_s: float,
    take: Callable[[ScrapeResult], Awaitable[None] | None],
    *,
    rounds: int | None = None,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Scrapes every server once per interval, spread evenly, and passes each result to `take`; `rounds` times, or
    forever (None). A server that has not answered by its next turn is skipped once."""
    if not targets:
        return
    gate = asyncio.Semaphore(64)
    async with open_session() as session:

        async def scrape_one(target: Endpoint) -> None:
            """Scrapes one server when the gate has room, and passes the result to `take`."""
            async with gate:
                result = await scrape_result(session, target, timeout_s)
            done = take(result)
            if done is not None:
                await done

        async with asyncio.TaskGroup() as group:
            busy: dict[int, asyncio.Task[None]] = {}
            start = asyncio.get_running_loop().time()
            turn = 0
            while rounds is None or turn < rounds * len(targets):
                due = start + turn * interval_s / len(targets)
                await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
                number = turn % len(targets)
                if number not in busy or busy[number].done():
                    busy[number] = group.create_task(scrape_one(targets[number]))
                turn += 1
