"""The HTTP client of the proxy: the server's address, request heads, and kept connections to it."""

import asyncio
import base64
import re
import ssl
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

import httptools

from legroom.errors import LegroomError
from legroom.guard.log import log_bug
from legroom.guard.request.refusals import SERVER, Refusal
from legroom.records import dataclass

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
"""Headers that apply to one connection only (RFC 9110, 7.6.1)."""
_REPLACED = frozenset({b"host", b"content-length", b"expect"})
WRITE_BYTES = 65536
"""Large bodies are written in pieces of the transport's high-water mark, so that it does not copy a whole body."""
IDLE_TIMEOUT_S = 4.0
"""uvicorn closes idle connections after 5 s; the proxy closes them first."""
STALE_S = 0.25
"""A kept connection lost this soon after a request was closed before the server read the request."""
IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})


@dataclass(frozen=True, slots=True)
class Upstream:
    """The address of the server behind the proxy."""

    host: str
    port: int
    tls: bool
    base_path: str
    authorization: bytes | None
    """From the user and password in the URL; used where a client sends no Authorization header."""
    shown: str
    """The address without its password, for messages."""

    @property
    def host_header(self) -> bytes:
        """The Host header's value; the port is left out where it is the scheme's default."""
        default_port = 443 if self.tls else 80
        name = f"[{self.host}]" if ":" in self.host else self.host
        return (name if self.port == default_port else f"{name}:{self.port}").encode()


def upstream_of(url: str) -> Upstream:
    """The server's address from the URL of `--upstream`; LegroomError where it is no http(s) address."""
    hint = "write it like http://127.0.0.1:8000"
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise LegroomError(f"--upstream is not an address: {error}", hint) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"\s", parts.hostname):
        address = f"{parts.scheme}://{parts.hostname or ''}"
        raise LegroomError(f"--upstream needs an http or https address, not {address}", hint)
    if "://" not in url and port is None:  # as likely a mistyped word as a host name
        raise LegroomError(f"--upstream {parts.hostname} has neither http:// nor a port, so it is not an address", hint)
    if port == 0:
        raise LegroomError("--upstream names port 0, where nothing can listen", hint)
    tls = parts.scheme == "https"
    authorization = None
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = b"Basic " + base64.b64encode(pair.encode())
    base_path = parts.path.rstrip("/").removesuffix("/v1")  # clients' own paths start with /v1
    port = port or (443 if tls else 80)
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    shown = f"{parts.scheme}://{'***@' if authorization else ''}{name}:{port}{base_path}"
    return Upstream(parts.hostname, port, tls, base_path, authorization, shown)


_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ALL_INTERFACES = ("0.0.0.0", "::", "")


def is_itself(upstream: Upstream, host: str, port: int) -> bool:
    """Whether the upstream is the address that the proxy listens on."""
    loops = upstream.host in _LOOPBACK and host in (*_LOOPBACK, *_ALL_INTERFACES)
    return upstream.port == port and (loops or upstream.host == host)


def request_head(
    method: str, target: bytes, headers: Headers, upstream: Upstream, length: int | None, peer: str
) -> bytes:
    """The request line and headers for the server; `length`: the body's, None without one; `peer`: client address."""
    parts = (method.encode(), upstream.base_path.encode(), target, upstream.host_header)
    lines = [b"%b %b%b HTTP/1.1\r\nhost: %b\r\n" % parts]
    dropped = connection_headers(headers)
    is_authorized = False
    forwarded_for = peer.encode()
    for name, value in headers:
        if name in dropped or name in _REPLACED:
            continue
        if name == b"x-forwarded-for":
            forwarded_for = b"%b, %b" % (value, forwarded_for)
            continue
        is_authorized = is_authorized or name == b"authorization"
        lines.append(b"%b: %b\r\n" % (name, value))
    if forwarded_for:
        lines.append(b"x-forwarded-for: %b\r\n" % forwarded_for)
    if upstream.authorization is not None and not is_authorized:
        lines.append(b"authorization: %b\r\n" % upstream.authorization)
    if length is not None:
        lines.append(b"content-length: %d\r\n" % length)
    lines.append(b"\r\n")
    return b"".join(lines)


def connection_headers(headers: Headers) -> frozenset[bytes]:
    """Names of the headers that must not be forwarded: hop-by-hop ones and those that a Connection header lists."""
    named = [word.strip().lower() for name, value in headers if name == b"connection" for word in value.split(b",")]
    return HOP_BY_HOP.union(named) if named else HOP_BY_HOP


class UpstreamError(Exception):
    """The server did not answer; `refusal` is the response to the client."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def down(why: str) -> Refusal:
    """A 502 response for a server that does not answer, with `why` in its message and a Retry-After of 5 s."""
    return Refusal(502, "upstream_down", f"The server behind the guard does not answer: {why}.", SERVER, None, 5)


class UpstreamConnection(asyncio.Protocol):
    """A kept connection that carries one exchange at a time; `changed()` wakes its single reader."""

    def __init__(self, pool: "UpstreamPool") -> None:
        self._pool = pool
        self.idle_since_s = 0.0
        self.is_used = self.is_lost = False
        self._can_write = True
        self._begin_exchange("", 0.0)

    def _begin_exchange(self, method: str, now_s: float) -> None:
        """Reset the connection's state for a new request and its response."""
        self.method, self.sent_s = method, now_s
        self.unsent: memoryview[int] | None = None
        self.unsent_since_s = now_s
        self.status = 0
        self.headers: Headers = []
        self._has_length = self._is_chunked = False
        self.chunks: list[bytes] = []
        self._buffered_bytes = 0
        self.is_complete = self._is_reusable = False
        self.failure: Refusal | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.on_chunks: Callable[[], bool] | None = None
        """Called with chunks while the reader waits; False: the reader must be woken."""
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio for the new connection: keep its transport."""
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    async def exchange(self, method: str, head: bytes, body: bytes) -> None:
        """Send a request and wait for the status; then `status` or `failure` is set."""
        self._begin_exchange(method, self._pool.clock())
        if len(body) < WRITE_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.unsent = memoryview(body)
        while not self.status and self.failure is None:
            while self.unsent and self._can_write:
                self.transport.write(self.unsent[:WRITE_BYTES])
                self.unsent, self.unsent_since_s = self.unsent[WRITE_BYTES:], self._pool.now_s
            await self.changed()

    def changed(self) -> asyncio.Future[None]:
        """A future that is done at the next status, chunk, end, failure, or room to write."""
        self._waiter = self._pool.loop.create_future()
        return self._waiter

    def _wake_reader(self) -> None:
        """Let the reader that awaits `changed()` go on."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take_chunks(self) -> bytes:
        """Returns and drops the body received since the last call, and lets a paused connection read on."""
        data = b"".join(self.chunks)
        self.chunks = []
        if self._buffered_bytes > WRITE_BYTES:
            self.transport.resume_reading()
        self._buffered_bytes = 0
        return data

    def fail(self, refusal: Refusal) -> None:
        """Abort the connection; `refusal` becomes the exchange's `failure`, unless it has one."""
        self.failure = self.failure or refusal
        self.transport.abort()
        self._wake_reader()

    def finish(self) -> None:
        """Return the connection to the idle pool if the response is complete, else close it."""
        self.on_chunks = None
        if self.is_complete and self._is_reusable and not self.unsent and not self.transport.is_closing():
            self.is_used = True
            self._pool.keep_idle(self)
        else:
            self._pool.busy.discard(self)
            self.transport.abort()

    def pause_writing(self) -> None:
        """Called when the server takes the body more slowly than it is written: stop writing until it has caught up."""
        self._can_write = False

    def resume_writing(self) -> None:
        """Called when the server has caught up with the body: wake the writer."""
        self._can_write = True
        self._wake_reader()

    def data_received(self, data: bytes) -> None:
        """Parse the response; wake the reader unless `on_chunks` has written all of it."""
        if not self.method:  # a response without a request
            self.transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if isinstance(error, httptools.HttpParserCallbackError):
                log_bug(error)
            self.fail(down(f"the server's answer is not HTTP ({error})"))
        is_waiting = self._waiter is not None and not self._waiter.done()
        if not (is_waiting and self.chunks and self.on_chunks is not None and self.on_chunks()):
            self._wake_reader()

    def connection_lost(self, error: Exception | None) -> None:
        """Called when the server closed: ends a body without a length, fails any other incomplete response."""
        self.is_lost = True
        self._pool.remove_idle(self)
        if self.status and not self._has_length and not self._is_chunked and error is None:
            self.is_complete = True  # the end of the connection is the end of such a body
        elif self.failure is None:
            self.failure = down("the server closed the connection" if error is None else str(error))
        self._wake_reader()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser: keep the header, and note how the end of the body will show."""
        name = name.lower()
        self.headers.append((name, value))
        self._has_length = self._has_length or name == b"content-length"
        self._is_chunked = self._is_chunked or name == b"transfer-encoding"

    def on_headers_complete(self) -> None:
        """Called by the parser: set `status`, except for 1xx responses, whose headers are dropped."""
        status = self._parser.get_status_code()
        if status < 200:
            self.headers, self._has_length, self._is_chunked = [], False, False
            return
        self.status = status
        if self.method == "HEAD":  # the parser would wait for a body
            self.is_complete = True

    def on_body(self, data: bytes) -> None:
        """Keep a part of the body; past WRITE_BYTES nothing more is read until `take_chunks`."""
        self.chunks.append(data)
        before_bytes, self._buffered_bytes = self._buffered_bytes, self._buffered_bytes + len(data)
        if before_bytes <= WRITE_BYTES < self._buffered_bytes:
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        """Called by the parser at the end of a response; a 1xx one is not the end of the exchange."""
        if self.status and not self.is_complete:
            self.is_complete = True
            self._is_reusable = self._parser.should_keep_alive()


class UpstreamPool:
    """The proxy's connections to the server."""

    def __init__(self, upstream: Upstream, clock: Callable[[], float]) -> None:
        self.upstream, self.clock = upstream, clock
        self.now_s = clock()
        """The time of the last `sweep`."""
        self.busy: set[UpstreamConnection] = set()
        self.loop: asyncio.AbstractEventLoop
        self._idle: list[UpstreamConnection] = []
        self._tls = ssl.create_default_context() if upstream.tls else None

    async def exchange(
        self, method: str, head: bytes, body: bytes, on_start: Callable[[UpstreamConnection], None] | None = None
    ) -> UpstreamConnection:
        """Send a request and return its connection, which has the response's status by then; raises UpstreamError.
        `on_start` is called with each connection on which the request is tried."""
        # A kept connection that the server closed at the same moment is replaced by a new one, once.
        connection = self._take_idle()
        while True:
            connection = connection or await self._connect()
            self.busy.add(connection)
            if on_start is not None:
                on_start(connection)
            try:
                await connection.exchange(method, head, body)
            except BaseException:
                connection.finish()
                raise
            if connection.status:
                return connection
            self.busy.discard(connection)
            is_stale = method in IDEMPOTENT or self.clock() - connection.sent_s < STALE_S
            if not (connection.is_used and connection.is_lost and is_stale):
                assert connection.failure is not None
                raise UpstreamError(connection.failure)
            connection = None

    async def request(self, method: str, path: str, authorization: bytes, body: bytes = b"") -> tuple[int, bytes]:
        """(Status, whole body) of a request of the guard's own; raises UpstreamError."""
        headers = [(b"user-agent", b"legroom-guard"), (b"content-type", b"application/json")]
        if authorization:
            headers.append((b"authorization", authorization))
        head = request_head(method, path.encode(), headers, self.upstream, len(body), "")
        connection = await self.exchange(method, head, body)
        try:
            while not connection.is_complete and connection.failure is None:
                await connection.changed()
            if not connection.is_complete and connection.failure is not None:
                raise UpstreamError(connection.failure)
            return connection.status, b"".join(connection.chunks)
        finally:
            connection.finish()

    def _take_idle(self) -> UpstreamConnection | None:
        """The idle connection used last, now no longer idle; None where none is open and recent enough."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                if self.clock() - connection.idle_since_s <= IDLE_TIMEOUT_S:
                    return connection
                connection.transport.close()
        return None

    async def _connect(self) -> UpstreamConnection:
        """A new connection to the server; UpstreamError where it cannot be reached in time."""
        upstream, self.loop = self.upstream, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(5.0):
                _, connection = await self.loop.create_connection(
                    lambda: UpstreamConnection(self), upstream.host, upstream.port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            raise UpstreamError(down(_connect_error(error))) from error
        return connection

    def keep_idle(self, connection: UpstreamConnection) -> None:
        """Return a connection to the pool for the next request."""
        self.busy.discard(connection)
        connection.method = ""
        connection.idle_since_s = self.clock()
        self._idle.append(connection)

    def remove_idle(self, connection: UpstreamConnection) -> None:
        """Forget an idle connection that the server closed."""
        if connection in self._idle:
            self._idle.remove(connection)

    def sweep(self, now_s: float, answer_timeout_s: float, body_timeout_s: float, retry_after_s: int) -> None:
        """Close stale idle connections; end exchanges past a timeout with a Retry-After. To be called once a second."""
        self.now_s = now_s
        for connection in list(self._idle):
            if now_s - connection.idle_since_s > IDLE_TIMEOUT_S:
                connection.transport.close()
                self._idle.remove(connection)
        for connection in list(self.busy):
            if connection.status:
                continue
            if connection.unsent and now_s - connection.unsent_since_s > body_timeout_s:
                text = "The server behind the guard does not take the request's body."
                connection.fail(Refusal(503, "upstream_timeout", text, SERVER, None, retry_after_s))
            elif answer_timeout_s and now_s - connection.sent_s > answer_timeout_s:
                text = "The server did not begin to answer in time."
                connection.fail(Refusal(504, "upstream_timeout", text, SERVER))

    def close(self) -> None:
        """Abort all connections to the server, idle and busy ones."""
        for connection in (*self._idle, *self.busy):
            connection.transport.abort()
        self._idle.clear()


def _connect_error(error: OSError) -> str:
    """Why the server cannot be reached, in words for the user."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}); SSL_CERT_FILE names one that is"
    return "no connection in time" if isinstance(error, TimeoutError) else (error.strerror or str(error))
