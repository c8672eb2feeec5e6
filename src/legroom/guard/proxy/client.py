"""A client's connection: its requests are answered one after the other, and it is given so much time for each."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Coroutine
from typing import Any, Protocol

from legroom.guard.log import log_bug
from legroom.guard.pool.admission import Admission
from legroom.guard.proxy.reader import BufferedBodies, HttpRequest, RequestReader, Stop
from legroom.guard.proxy.upstream import Exchange, ServerPool
from legroom.guard.proxy.wire import REASONS, Headers, Upstream, path_of, request_head, unsent_bytes
from legroom.guard.request import refusals
from legroom.guard.request.clients import client_of
from legroom.guard.request.endpoints import DRAIN, METRICS, STATUS, kind_of
from legroom.guard.request.refusals import Refusal
from legroom.guard.weight.guarded_request import GuardedRequest

HEADER_S = 10.0
"""From the first byte of a request to the end of its head."""
IDLE_S = 75.0
LINGER_S = 3.0
STALLED_S = 60.0
"""A client that takes nothing of its answer for so long is cut off: it holds a place in the pool."""
MOST_PIPELINED = 256
"""Requests that may wait on one connection; their bodies together may be as large as one body."""


class ProxyState(Protocol):
    """What a client's connection needs of the proxy, and all connections share."""

    admission: Admission
    upstream: Upstream
    servers: ServerPool
    clients: set[ClientConnection]
    buffered: BufferedBodies
    answer_s: float
    now_s: float
    closing: bool

    async def own_page(self, client: ClientConnection, method: str, path: str, headers: Headers, body: bytes) -> None:
        """Answer a page of the guard's own."""


class ClientConnection(asyncio.Protocol):
    __slots__ = (
        "_charged_bytes",
        "_discarding",
        "_exchange",
        "_head_only",
        "_proxy",
        "_queue",
        "_reader",
        "_task",
        "_unsent_bytes",
        "deadline_s",
        "keep_alive",
        "peer",
        "serving",
        "speaks_chunked",
        "stalled_since_s",
        "transport",
    )

    def __init__(self, proxy: ProxyState) -> None:
        self._proxy = proxy
        self._reader = RequestReader(self, proxy.admission, proxy.buffered)
        self._queue: deque[HttpRequest] | None = None
        self._exchange: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        self.serving = False
        self._discarding = False
        self._head_only = False
        self._charged_bytes = 0
        self._unsent_bytes = 0
        self.keep_alive = True
        self.speaks_chunked = True
        self.stalled_since_s = 0.0
        self.peer = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        name = transport.get_extra_info("peername")
        self.peer = str(name[0]) if name else ""
        self._proxy.clients.add(self)
        self.deadline_s = self._proxy.now_s + HEADER_S

    def connection_lost(self, error: Exception | None) -> None:
        """It left; what it asked for is given up."""
        del error
        self._proxy.clients.discard(self)
        self._drop_requests()
        self.body_gone()
        if self._task is not None:
            self._task.cancel()
        if self._exchange is not None:
            self._exchange.abandon()
            self._exchange = None

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            return
        if self._reader.request is None and not self.serving:
            self.deadline_s = self._proxy.now_s + HEADER_S
        self._reader.feed(data)

    # The reader's calls.

    def head_read(self, request: HttpRequest) -> None:
        """The head of a request is whole; its body is to come."""
        self.deadline_s = self._proxy.now_s + self._body_s
        if request.expects and not self._is_busy():
            self._call_for_body(request)

    def request_read(self, request: HttpRequest) -> None:
        if self.transport.is_closing():  # the answer before it was the last one
            self._proxy.buffered.total_bytes -= len(request.body)
            raise Stop
        if not self._is_busy():
            self._serve(request)
            return
        # Reading goes on, as else it would not be seen that the client left; so what may gather is bounded.
        queue = self._queue = self._queue or deque()
        queue.append(request)
        most = self._proxy.admission.policy.requests.body_bytes
        if len(queue) > MOST_PIPELINED or sum(len(queued.body) for queued in queue) > most:
            self.abort()
            raise Stop

    def _is_busy(self) -> bool:
        """Whether a request has to wait for those before it, or for the client to take their answers."""
        return self.serving or bool(self._queue) or self.stalled_since_s > 0

    def _call_for_body(self, request: HttpRequest) -> None:
        request.expects = False
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _drop_requests(self) -> None:
        """Forget what was read and not served."""
        self._reader.drop()
        self._proxy.buffered.total_bytes -= sum(len(request.body) for request in self._queue or ())
        self._queue = None

    # Serving.

    def _serve(self, request: HttpRequest) -> None:
        """Start on a request; an ordinary one is on its way to the server when this returns."""
        self.serving = True
        self.deadline_s = 0.0
        self.keep_alive = request.keep_alive and not self._proxy.closing
        self.speaks_chunked = not request.old
        self._head_only = request.method == b"HEAD"
        body = request.take_body()
        self._charged_bytes = len(body)
        method, path, admission = request.method.decode("latin-1"), path_of(request.target), self._proxy.admission
        kind = kind_of(method, path)
        if kind is None:
            if (path == METRICS and method == "GET") or path in (DRAIN, STATUS):
                self._later(self._proxy.own_page(self, method, path, request.headers, body))
                return
            admission.meters.passed += 1
            self._forward(request, None, body)
            return
        admission.reload()
        guarded = admission.read(kind, body, client_of(request.headers, self.peer, admission.policy.clients))
        if isinstance(guarded, Refusal):
            self.refuse(guarded)
        elif admission.weigh(guarded):
            self._later(self._admit(request, guarded))
        else:
            self._ask(request, guarded)

    def _ask(self, request: HttpRequest, guarded: GuardedRequest) -> None:
        admission = self._proxy.admission
        refusal = admission.admit(guarded)
        if refusal is not None:
            self.refuse(refusal)
        elif admission.is_waiting(guarded):
            # A task that is cancelled before its first step runs nothing of what it was to do.
            self._later(self._wait(request, guarded)).add_done_callback(
                lambda task: admission.abandon(guarded) if task.cancelled() else None
            )
        else:
            self._forward(request, guarded, guarded.body)

    async def _admit(self, request: HttpRequest, guarded: GuardedRequest) -> None:
        refusal = await self._proxy.admission.count(guarded)
        if refusal is not None:
            self.refuse(refusal)
        else:
            self._ask(request, guarded)

    async def _wait(self, request: HttpRequest, guarded: GuardedRequest) -> None:
        refusal = await self._proxy.admission.wait(guarded)  # a client that leaves cancels this
        if refusal is not None:
            self.refuse(refusal)
        else:
            self._forward(request, guarded, guarded.body)

    def _forward(self, request: HttpRequest, guarded: GuardedRequest | None, body: bytes) -> None:
        proxy = self._proxy
        with_body = bool(body) or request.method in (b"POST", b"PUT", b"PATCH")
        head = request_head(
            request.method, request.target, request.headers, proxy.upstream, len(body) if with_body else None, self.peer
        )
        exchange = Exchange(self, proxy.admission, guarded, request.method, head, body)
        if guarded is not None:
            guarded.body = b""
        if proxy.answer_s:
            exchange.deadline_s = proxy.now_s + proxy.answer_s
        self._exchange = exchange
        connection = proxy.servers.take()
        if connection is not None:
            connection.send(exchange)
        else:
            self.connect_and_send(exchange)

    def connect_and_send(self, exchange: Exchange) -> None:
        self._later(self._connect(exchange))

    async def _connect(self, exchange: Exchange) -> None:
        try:
            connection = await self._proxy.servers.connect()
        except (OSError, TimeoutError) as error:
            exchange.failed(_why_not_connected(error))
            return
        if exchange.over:
            self._proxy.servers.give_back(connection)
        else:
            connection.send(exchange)

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._task = task
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if self._task is task:
            self._task = None
        if not task.cancelled() and task.exception() is not None:
            log_bug(task.exception())
            self.abort()

    # Answering.

    def stays_open(self) -> bool:
        """Whether the connection outlives this answer."""
        self.keep_alive = self.keep_alive and not self._proxy.closing
        return self.keep_alive

    def write(self, data: bytes) -> None:
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

    def body_gone(self) -> None:
        """The body of the request in hand is held no longer."""
        self._proxy.buffered.total_bytes -= self._charged_bytes
        self._charged_bytes = 0

    def answered(self) -> None:
        """An answer ended; on to the next request."""
        self._exchange = None
        self.body_gone()
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
        elif self._reader.request is not None and self._reader.request.expects:
            self._call_for_body(self._reader.request)

    def _serve_next(self) -> None:
        if self._queue and not self.transport.is_closing():
            self._serve(self._queue.popleft())

    def abort(self) -> None:
        """Cut the connection: the client must see that its answer is not whole."""
        self.transport.abort()

    def refuse_unread(self, refusal: Refusal) -> None:
        """A request that is not even read to its end."""
        behind_others = self.serving or bool(self._queue)
        self._drop_requests()
        if behind_others:  # amidst another answer nothing can be said
            self.abort()
            return
        self.keep_alive = False
        self._discarding = True
        self._head_only = self._reader.method == b"HEAD"
        self.refuse(self._proxy.admission.refuse(refusal))

    def pause_writing(self) -> None:
        """The client reads slower than the server writes: let the server wait."""
        self.stalled_since_s = self._proxy.now_s
        self._unsent_bytes = unsent_bytes(self.transport)
        if self._exchange is not None and self._exchange.server is not None:
            self._exchange.server.transport.pause_reading()

    def resume_writing(self) -> None:
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
        elif exchange is not None and not exchange.status and exchange.is_stuck(now_s, self._body_s):
            exchange.stuck()
        elif self.deadline_s and now_s > self.deadline_s and not self._is_busy():
            if self._reader.request is None:
                self.transport.close()
            else:
                self.refuse_unread(refusals.body_timeout(self._body_s))

    @property
    def _body_s(self) -> float:
        """How long a body may take, from the client and to the server."""
        return self._proxy.admission.policy.queue.body_timeout_s

    def stop(self) -> None:
        """The proxy stops: let an idle client go, and tell one that has sent half a request to come back."""
        if self.serving or self._discarding or self.transport.is_closing():
            return
        if self._reader.request is not None:
            self.refuse_unread(refusals.draining(self._proxy.admission.policy.queue.drain_retry_s))
        else:
            self.transport.close()


def _why_not_connected(error: OSError) -> str:
    """For the client, and for whoever set the guard up."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}); SSL_CERT_FILE names one that is"
    return "no connection in time" if isinstance(error, TimeoutError) else (error.strerror or str(error))
