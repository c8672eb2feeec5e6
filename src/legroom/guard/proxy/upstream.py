"""The way to the server and back: exchanges, and the connections that carry them one at a time.

Connections are kept alive and taken newest first.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Protocol

import httptools

from legroom.guard.log import log_bug
from legroom.guard.pool.admission import Admission
from legroom.guard.proxy.wire import LAST_CHUNK, WITHOUT_BODY, Headers, Upstream, chunk, response_head
from legroom.guard.request.refusals import SERVER, Refusal
from legroom.guard.weight.guarded_request import GuardedRequest

CONNECT_S = 5.0
PIECE_BYTES = 65536
IDLE_S = 4.0
"""Idle connections are dropped before the server does it: uvicorn closes them after five seconds."""
STALE_S = 0.25
"""A connection lost within this of a request was closed before the server saw it; later, it may have worked on it."""
REPEATABLE = frozenset({b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE"})
"""To send these twice does what sending them once does."""


class AnswerReceiver(Protocol):
    """What an exchange needs of the client's connection."""

    keep_alive: bool
    speaks_chunked: bool

    def stays_open(self) -> bool:
        """Whether the connection outlives this answer."""

    def write(self, data: bytes) -> None:
        """Bytes of the answer."""

    def refuse(self, refusal: Refusal) -> None:
        """Answer in the server's place."""

    def body_gone(self) -> None:
        """The body of the request is held no longer."""

    def answered(self) -> None:
        """The answer ended."""

    def abort(self) -> None:
        """Cut the connection: the client must see that its answer is not whole."""

    def connect_and_send(self, exchange: Exchange) -> None:
        """Send over a new connection."""


class Exchange:
    """Ties a client's connection to a server's until the answer ended, and gives the place in the pool back."""

    __slots__ = (
        "_took_s",
        "_untaken_bytes",
        "admission",
        "body",
        "client",
        "deadline_s",
        "guarded",
        "head",
        "method",
        "over",
        "retried",
        "sent",
        "server",
        "status",
    )

    def __init__(
        self,
        client: AnswerReceiver,
        admission: Admission,
        guarded: GuardedRequest | None,
        method: bytes,
        head: bytes,
        body: bytes,
    ) -> None:
        self.client, self.admission, self.guarded = client, admission, guarded
        self.method, self.head, self.body = method, head, body
        self.server: ServerConnection | None = None
        self.status = 0
        self.deadline_s = 0.0
        self._untaken_bytes, self._took_s = 0, 0.0
        self.retried = self.sent = self.over = False

    def on_head(self, status: int, headers: Headers) -> Headers:
        """The head of the answer came; refusals of the server's own get a Retry-After."""
        self.status = status
        self.body = self.head = b""  # not needed any more, and a stream may last for minutes
        if self.server is None or not self.server.has_unsent:
            self.client.body_gone()
        if status in (429, 503) and not any(name == b"retry-after" for name, _ in headers):
            return [*headers, (b"retry-after", b"1")]
        return headers

    def on_chunk(self, data: bytes) -> None:
        if self.guarded is not None and self.status == 200:
            self.admission.on_chunk(self.guarded, data)

    def finished(self) -> None:
        """The whole answer was passed on."""
        self._end(finished=True)
        self.client.answered()

    def failed(self, why: str) -> None:
        """The server is gone, before or amidst its answer."""
        if self.over:
            return
        started = self.status != 0
        self._end(finished=False)
        if started:
            # The client must see that the answer is not whole.
            self.client.abort()
        else:
            self.client.refuse(self.admission.refuse(down(why)))

    def retry(self) -> None:
        """A kept connection was closed just when it was used: try once on a new one."""
        if self.over:
            return
        if self.retried:
            self.failed("the server closed the connection")
            return
        self.retried = True
        self.client.connect_and_send(self)

    def abandon(self) -> None:
        """The client left: so does the request, and the server sees it."""
        if self.over:
            return
        server, self.server = self.server, None
        if server is not None:
            server.exchange = None
            server.transport.abort()
        self._end(finished=False)

    def is_stuck(self, now_s: float, most_s: float) -> bool:
        """Whether the server took nothing of the body for so long. Asked now and then."""
        untaken_bytes = self.server.unsent_bytes if self.server is not None else 0
        if not untaken_bytes or untaken_bytes != self._untaken_bytes:
            self._untaken_bytes, self._took_s = untaken_bytes, now_s
        return now_s - self._took_s > most_s

    def stuck(self) -> None:
        """The server does not take the request: it has not seen it, so the client may send it again."""
        text = "The server behind the guard does not take the request's body."
        self._give_up(Refusal(503, "upstream_timeout", text, SERVER, None, self.admission.policy.queue.drain_retry_s))

    def timed_out(self) -> None:
        """The server did not begin to answer in time."""
        self._give_up(Refusal(504, "upstream_timeout", "The server did not begin to answer in time.", SERVER))

    def _give_up(self, refusal: Refusal) -> None:
        server, self.server = self.server, None
        if server is not None:
            server.exchange = None
            server.transport.abort()
        self._end(finished=False)
        self.client.refuse(self.admission.refuse(refusal))

    def _end(self, finished: bool) -> None:
        self.over = True
        self.server = None
        if self.guarded is not None:
            self.admission.release(self.guarded, finished, self.sent)


def down(why: str) -> Refusal:
    return Refusal(502, "upstream_down", f"The server behind the guard does not answer: {why}.", SERVER)


class ServerConnection(asyncio.Protocol):
    __slots__ = (
        "_headers",
        "_parser",
        "_pool",
        "_reason",
        "_unsent",
        "_writing",
        "chunked",
        "exchange",
        "has_length",
        "idle_since_s",
        "out",
        "sent_s",
        "transport",
        "used",
    )

    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool
        self.exchange: Exchange | None = None
        self.idle_since_s = 0.0
        self.used = False
        self._writing = True
        self._unsent = memoryview(b"")
        """What the server has yet to take of a body. It is written in pieces: all at once, the transport would keep a
        second copy of what the server does not read."""
        self.out: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def send(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._parser = httptools.HttpResponseParser(self)
        self._headers: Headers = []
        self._reason = b""
        self.chunked = self.has_length = False
        exchange.server = self
        exchange.sent = True
        self.sent_s = self._pool.clock()
        if len(exchange.body) < PIECE_BYTES:
            self.transport.write(exchange.head + exchange.body)
            return
        self._unsent = memoryview(exchange.body)
        self._writing = True
        self.transport.write(exchange.head)
        self._write_on()

    def _write_on(self) -> None:
        while self._writing and self._unsent and not self.transport.is_closing():
            piece, self._unsent = self._unsent[:PIECE_BYTES], self._unsent[PIECE_BYTES:]
            self.transport.write(piece)

    @property
    def has_unsent(self) -> bool:
        """Whether the server has yet to take some of the body."""
        return bool(self._unsent)

    @property
    def unsent_bytes(self) -> int:
        return len(self._unsent)

    def pause_writing(self) -> None:
        """The server takes no more for now."""
        self._writing = False

    def resume_writing(self) -> None:
        self._writing = True
        self._write_on()

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer; all that they make goes to the client in one write."""
        exchange = self.exchange
        if exchange is None:  # an answer to nothing
            self.transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if isinstance(error, httptools.HttpParserCallbackError):
                log_bug(error)
            self.transport.abort()
            if self.exchange is not None:
                self.exchange.failed(f"the server's answer is not HTTP ({error})")
            return
        self.flush(exchange)

    def flush(self, exchange: Exchange) -> None:
        if self.out:
            gathered = self.out[0] if len(self.out) == 1 else b"".join(self.out)
            self.out.clear()
            exchange.client.write(gathered)

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._headers.append((name, value))
        if name == b"content-length":
            self.has_length = True

    def on_headers_complete(self) -> None:
        """The head is whole: choose how the body will be framed."""
        status = self._parser.get_status_code()
        exchange = self.exchange
        if exchange is None or status < 200:
            self._headers, self._reason, self.has_length = [], b"", False
            return
        without_body = status in WITHOUT_BODY or exchange.method == b"HEAD"
        self.chunked = not self.has_length and not without_body and exchange.client.speaks_chunked
        if not self.has_length and not self.chunked and not without_body:
            exchange.client.keep_alive = False
        headers = exchange.on_head(status, self._headers)
        head = response_head(
            status, self._reason, headers, chunked=self.chunked, keep_alive=exchange.client.stays_open()
        )
        self.out.append(head)
        if exchange.method == b"HEAD":  # the parser waits for a body that does not come
            self._finish(reusable=False)

    def on_body(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is not None and exchange.status:
            exchange.on_chunk(data)
            self.out.append(chunk(data) if self.chunked else data)

    def on_message_complete(self) -> None:
        if self.exchange is not None and self.exchange.status:
            self._finish(reusable=self._parser.should_keep_alive())

    def _finish(self, reusable: bool) -> None:
        exchange = self.exchange
        assert exchange is not None
        if self.chunked:
            self.out.append(LAST_CHUNK)
        self.flush(exchange)
        self.exchange = None
        self.used = True
        if self._unsent:  # it answered before it had read the request, and would take the rest for another one
            self._unsent = memoryview(b"")
            self.transport.abort()
        elif reusable and not self.transport.is_closing():
            self.transport.resume_reading()
            self._pool.give_back(self)
        else:
            self.transport.close()
        exchange.finished()

    def eof_received(self) -> None:
        """The server closed its side: the end of a body that had neither length nor chunks."""

    def connection_lost(self, error: Exception | None) -> None:
        """Gone, between answers or in the midst of one."""
        self._pool.forget(self)
        self._unsent = memoryview(b"")
        exchange, self.exchange = self.exchange, None
        if exchange is None:
            return
        if exchange.status and not self.has_length and error is None and not self._was_chunked():
            if self.chunked:
                self.out.append(LAST_CHUNK)
            self.flush(exchange)
            exchange.finished()
        elif not exchange.status and self.used and self._may_repeat(exchange):
            exchange.retry()
        else:
            exchange.failed("the server closed the connection" if error is None else str(error))

    def _may_repeat(self, exchange: Exchange) -> bool:
        return exchange.method in REPEATABLE or self._pool.clock() - self.sent_s < STALE_S

    def _was_chunked(self) -> bool:
        return any(name == b"transfer-encoding" for name, _ in self._headers)


class ServerPool:
    """Idle connections, and how to make one."""

    def __init__(self, upstream: Upstream, clock: Callable[[], float]) -> None:
        self._upstream, self.clock = upstream, clock
        self._idle: list[ServerConnection] = []
        self._tls = ssl.create_default_context() if upstream.tls else None

    def take(self) -> ServerConnection | None:
        """An idle connection, the one used last."""
        while self._idle:
            connection = self._idle.pop()
            if connection.transport.is_closing():
                continue
            if self.clock() - connection.idle_since_s <= IDLE_S:
                return connection
            connection.transport.close()  # a busy loop sweeps late, and the server may be closing it just now
        return None

    async def connect(self) -> ServerConnection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            _, connection = await loop.create_connection(
                lambda: ServerConnection(self), self._upstream.host, self._upstream.port, ssl=self._tls
            )
        return connection

    def give_back(self, connection: ServerConnection) -> None:
        """Done with one answer, ready for the next."""
        connection.idle_since_s = self.clock()
        self._idle.append(connection)

    def forget(self, connection: ServerConnection) -> None:
        if connection.exchange is None and connection in self._idle:
            self._idle.remove(connection)

    def sweep(self, now_s: float) -> None:
        keep = []
        for connection in self._idle:
            if now_s - connection.idle_since_s > IDLE_S:
                connection.transport.close()
            else:
                keep.append(connection)
        self._idle = keep

    def close(self) -> None:
        for connection in self._idle:
            connection.transport.close()
        self._idle.clear()
