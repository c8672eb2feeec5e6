"""A client's connection: requests are read whole, bounded in size and time, and answered one after the other."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import httptools

from legroom.guard import answers
from legroom.guard.answers import INVALID, SERVER, Refusal
from legroom.guard.paths import DRAIN, METRICS, STATUS, kind_of
from legroom.guard.proxy.exchange import Exchange
from legroom.guard.proxy.request import Request
from legroom.guard.proxy.wire import REASONS, Headers, origin_form, path_of, request_head, unsent_bytes
from legroom.guard.visit import Visit

if TYPE_CHECKING:
    from legroom.guard.proxy.server import Proxy

MOST_HEADER_BYTES = 64 << 10
HEADER_S = 10.0
"""From the first byte of a request to the end of its head."""
IDLE_S = 75.0
LINGER_S = 3.0
STALLED_S = 60.0
"""A client that takes nothing of its answer for so long is cut off: it holds a place in the pool."""
MOST_PIPELINED = 256
"""Requests that may wait on one connection; their bodies together may be as large as one body."""


class ClientConnection(asyncio.Protocol):
    """One client."""

    __slots__ = ("_discarding", "_exchange", "_head_bytes", "_head_only", "_parser", "_proxy", "_queue", "_reading",
                 "_task", "_unsent_bytes", "deadline_s", "keep_alive", "peer", "serving", "speaks_chunked",
                 "stalled_since_s", "transport")  # fmt: skip

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._parser = httptools.HttpRequestParser(self)
        self._reading: Request | None = None
        self._queue: deque[Request] | None = None
        self._exchange: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        self._head_bytes = 0
        self.serving = False
        self._discarding = False
        self._head_only = False
        self._unsent_bytes = 0
        self.keep_alive = True
        self.speaks_chunked = True
        self.stalled_since_s = 0.0
        self.peer = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client came."""
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        name = transport.get_extra_info("peername")
        self.peer = str(name[0]) if name else ""
        self._proxy.clients.add(self)
        self.deadline_s = self._proxy.now_s + HEADER_S

    def connection_lost(self, error: Exception | None) -> None:
        """It left; what it asked for is given up."""
        del error
        self._proxy.clients.discard(self)
        self._drop_reading()
        if self._task is not None:
            self._task.cancel()
        if self._exchange is not None:
            self._exchange.abandon()
            self._exchange = None

    def data_received(self, data: bytes) -> None:
        """Bytes of one or more requests."""
        if self._discarding:
            return
        if self._reading is None and not self.serving:
            self.deadline_s = self._proxy.now_s + HEADER_S
        try:
            while data:
                data = self._feed(data)
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, _Stop):
                self._proxy.log_bug(error)
                self.abort()
        except httptools.HttpParserError as error:
            self._turn_away(Refusal(400, "bad_request", f"The request is not HTTP: {error}.", INVALID))

    def _feed(self, data: bytes) -> bytes:
        """What is left to feed: the parser leaves the body of a request that offers an upgrade unread."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            assert self._reading is not None
            self._parser = httptools.HttpRequestParser(self)
            return self._reading.head_without_offer() + data[offer.args[0] :]
        return b""

    # The parser's calls.

    def on_message_begin(self) -> None:
        """A request starts."""
        self._reading = Request()
        self._head_bytes = 0

    def on_url(self, piece: bytes) -> None:
        """A piece of the target."""
        assert self._reading is not None
        self._reading.target += piece
        self._grown(len(piece))

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        assert self._reading is not None
        if not self._reading.method:  # what comes after the head are trailers: no server of ours reads them
            self._reading.headers.append((name.lower(), value))
        self._grown(len(name) + len(value) + 4)

    def _grown(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MOST_HEADER_BYTES:
            text = f"The head of the request is larger than {MOST_HEADER_BYTES:,} bytes."
            self._turn_away(Refusal(431, "bad_request", text, INVALID))
            raise _Stop

    def on_headers_complete(self) -> None:
        """The head is whole."""
        request = self._reading
        assert request is not None
        request.method = self._parser.get_method()
        request.target = origin_form(request.target)
        request.old = self._parser.get_http_version() == "1.0"
        if self._parser.should_upgrade():
            if not request.wants_tunnel():
                return  # it is read again without the offer
            text = "The guard passes no upgraded connections (WebSocket); connect to the server itself."
            self._turn_away(Refusal(501, "bad_request", text, INVALID))
            raise _Stop
        self.deadline_s = self._proxy.now_s + self._proxy.door.policy.queue.body_timeout_s
        most = self._proxy.door.policy.requests.body_bytes
        for name, value in request.headers:
            if name == b"content-length" and value.isdigit() and int(value) > most:
                self._turn_away(answers.too_large(most))
                raise _Stop
            if name == b"expect" and value.lower() == b"100-continue":
                request.expects = not request.old
        if request.expects and not self._is_busy():
            self._call_for_body(request)

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        request, proxy = self._reading, self._proxy
        assert request is not None
        request.body += data
        proxy.buffered_bytes += len(data)
        most = proxy.door.policy.requests.body_bytes
        if len(request.body) > most:
            self._turn_away(answers.too_large(most))
            raise _Stop
        if proxy.buffered_bytes > proxy.most_buffered_bytes:
            text = "The guard holds as many request bodies as it may; retry soon."
            self._turn_away(Refusal(503, "queue_full", text, SERVER, None, 1))
            raise _Stop

    def on_message_complete(self) -> None:
        """A request is whole."""
        request = self._reading
        assert request is not None
        if self._parser.should_upgrade():
            return
        request.keep_alive = self._parser.should_keep_alive()
        self._reading = None
        if not self._is_busy():
            self._serve(request)
            return
        # Reading goes on, as else it would not be seen that the client left; so what may gather is bounded.
        queue = self._queue = self._queue or deque()
        queue.append(request)
        most = self._proxy.door.policy.requests.body_bytes
        if len(queue) > MOST_PIPELINED or sum(len(one.body) for one in queue) > most:
            self.abort()
            raise _Stop

    def _is_busy(self) -> bool:
        """Whether a request has to wait for those before it, or for the client to take their answers."""
        return self.serving or bool(self._queue) or self.stalled_since_s > 0

    def _call_for_body(self, request: Request) -> None:
        request.expects = False
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _drop_reading(self) -> None:
        waiting = [self._reading] if self._reading is not None else []
        for request in (*waiting, *(self._queue or ())):
            self._proxy.buffered_bytes -= len(request.body)
        self._reading = self._queue = None

    # Serving.

    def _serve(self, request: Request) -> None:
        """Start on a request; an ordinary one is on its way to the server when this returns."""
        self.serving = True
        self.deadline_s = 0.0
        self.keep_alive = request.keep_alive and not self._proxy.closing
        self.speaks_chunked = not request.old
        self._head_only = request.method == b"HEAD"
        body = request.take_body()
        self._proxy.buffered_bytes -= len(body)
        method, path, door = request.method.decode("latin-1"), path_of(request.target), self._proxy.door
        kind = kind_of(method, path)
        if kind is None:
            if (path == METRICS and method == "GET") or path in (DRAIN, STATUS):
                self._later(self._proxy.own_page(self, method, path, request.headers, body))
                return
            door.meters.passed += 1
            self._forward(request, None, body)
            return
        door.reload()
        visit = door.look(kind, body)
        if isinstance(visit, Refusal):
            self.refuse(visit)
        elif door.weigh(visit):
            self._later(self._admit(request, visit))
        else:
            self._ask(request, visit)

    def _ask(self, request: Request, visit: Visit) -> None:
        door = self._proxy.door
        refusal = door.ask(visit)
        if refusal is not None:
            self.refuse(refusal)
        elif door.is_waiting(visit):
            self._later(self._wait(request, visit))
        else:
            self._forward(request, visit, visit.body)

    async def _admit(self, request: Request, visit: Visit) -> None:
        refusal = await self._proxy.door.count(visit)
        if refusal is not None:
            self.refuse(refusal)
        else:
            self._ask(request, visit)

    async def _wait(self, request: Request, visit: Visit) -> None:
        refusal = await self._proxy.door.wait(visit)  # a client that leaves cancels this
        if refusal is not None:
            self.refuse(refusal)
        else:
            self._forward(request, visit, visit.body)

    def _forward(self, request: Request, visit: Visit | None, body: bytes) -> None:
        proxy = self._proxy
        with_body = bool(body) or request.method in (b"POST", b"PUT", b"PATCH")
        head = request_head(
            request.method, request.target, request.headers, proxy.upstream,
            len(body) if with_body else None, self.peer,
        )  # fmt: skip
        exchange = Exchange(self, proxy.door, visit, request.method, head, body)
        if visit is not None:
            visit.body = b""
        if proxy.answer_s:
            exchange.deadline_s = proxy.now_s + proxy.answer_s
        self._exchange = exchange
        connection = proxy.servers.take()
        if connection is not None:
            connection.send(exchange)
        else:
            self.connect_and_send(exchange)

    def connect_and_send(self, exchange: Exchange) -> None:
        """Send over a new connection."""
        self._later(self._connect(exchange))

    async def _connect(self, exchange: Exchange) -> None:
        try:
            connection = await self._proxy.servers.connect()
        except (OSError, TimeoutError) as error:
            why = "no connection in time" if isinstance(error, TimeoutError) else (error.strerror or str(error))
            exchange.failed(why)
            return
        if exchange.over:
            self._proxy.servers.give_back(connection)
        else:
            connection.send(exchange)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._task = task
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if self._task is task:
            self._task = None
        if not task.cancelled() and task.exception() is not None:
            self._proxy.log_bug(task.exception())
            self.abort()

    # Answering.

    def stays_open(self) -> bool:
        """Whether the connection outlives this answer."""
        self.keep_alive = self.keep_alive and not self._proxy.closing
        return self.keep_alive

    def write(self, data: bytes) -> None:
        """Bytes of an answer."""
        self.transport.write(data)

    def refuse(self, refusal: Refusal) -> None:
        """Answer in the server's place."""
        if refusal.status in (408, 413, 431):
            self.keep_alive = False
        body = refusal.body()
        self.respond(refusal.status, refusal.headers(body), body)

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer of the guard's own."""
        head = b"".join(b"%b: %b\r\n" % pair for pair in headers if pair[0] != b"connection")
        closing = b"" if self.keep_alive else b"connection: close\r\n"
        if not self.transport.is_closing():
            start = b"HTTP/1.1 %d %b\r\n" % (status, REASONS.get(status, b""))
            self.transport.write(b"%b%b%b\r\n%b" % (start, head, closing, b"" if self._head_only else body))
        self.answered()

    def answered(self) -> None:
        """An answer ended; on to the next request."""
        self._exchange = None
        self.serving = False
        if self._discarding and self.transport.can_write_eof() and not self.transport.is_closing():
            # Closed now, bytes still on their way would make the system reset the connection, and the answer be lost.
            self.transport.write_eof()
            self.deadline_s = self._proxy.now_s + LINGER_S
            return
        if not self.keep_alive or self._proxy.closing:
            self.transport.close()
            return
        self.deadline_s = self._proxy.now_s + IDLE_S
        self._go_on()

    def _go_on(self) -> None:
        """On to what waits on this connection, unless the client has yet to take what it was given."""
        if self.serving or self.stalled_since_s:
            return
        if self._queue:
            self.serving = True
            # Not from within this call: a client that pipelines much must not deepen the stack.
            asyncio.get_running_loop().call_soon(self._serve_next)
        elif self._reading is not None and self._reading.expects:
            self._call_for_body(self._reading)

    def _serve_next(self) -> None:
        if self._queue and not self.transport.is_closing():
            self._serve(self._queue.popleft())

    def log_bug(self, error: BaseException) -> None:
        """Something escaped."""
        self._proxy.log_bug(error)

    def abort(self) -> None:
        """Cut the connection: the client must see that its answer is not whole."""
        self.transport.abort()

    def _turn_away(self, refusal: Refusal) -> None:
        """A request that is not even read to its end."""
        behind_others = self.serving or bool(self._queue)
        self._drop_reading()
        if behind_others:  # amidst another answer nothing can be said
            self.abort()
            return
        self.keep_alive = False
        self._discarding = True
        self._head_only = self._parser.get_method() == b"HEAD"
        self.refuse(self._proxy.door.refused(refusal))

    def pause_writing(self) -> None:
        """The client reads slower than the server writes: let the server wait."""
        self.stalled_since_s = self._proxy.now_s
        self._unsent_bytes = unsent_bytes(self.transport)
        if self._exchange is not None and self._exchange.server is not None:
            self._exchange.server.transport.pause_reading()

    def resume_writing(self) -> None:
        """It caught up."""
        self.stalled_since_s = 0.0
        if self._exchange is not None and self._exchange.server is not None:
            self._exchange.server.transport.resume_reading()
        self._go_on()

    def sweep(self, now_s: float) -> None:
        """Once a second: is this client, or the server for it, too slow?"""
        exchange = self._exchange
        if self.stalled_since_s:
            before_bytes, self._unsent_bytes = self._unsent_bytes, unsent_bytes(self.transport)
            if self._unsent_bytes < before_bytes:
                self.stalled_since_s = now_s  # slow, but it reads
        if self.stalled_since_s and now_s - self.stalled_since_s > STALLED_S:
            self.abort()
        elif exchange is not None and exchange.deadline_s and not exchange.status and now_s > exchange.deadline_s:
            exchange.timed_out()
        elif self.deadline_s and now_s > self.deadline_s and not self._is_busy():
            if self._reading is None:
                self.transport.close()
            else:
                self._turn_away(answers.body_timeout(self._proxy.door.policy.queue.body_timeout_s))

    def stop(self) -> None:
        """The proxy stops: let an idle client go, and tell one that has sent half a request to come back."""
        if self.serving or self._discarding or self.transport.is_closing():
            return
        if self._reading is not None:
            self._turn_away(answers.draining(self._proxy.door.policy.queue.drain_retry_s))
        else:
            self.transport.close()


class _Stop(Exception):
    """Ends the parser's reading of a request that was already answered."""
