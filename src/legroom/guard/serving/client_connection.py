"""A client's connection to the proxy: uvicorn's HTTP/1.1 protocol with bounds on size and time."""

import asyncio
import contextlib
import fcntl
import struct
import termios
from collections.abc import Callable

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from legroom.guard.log import log_bug
from legroom.guard.request import refusals
from legroom.guard.request.refusals import INVALID, SERVER, Refusal
from legroom.guard.serving.admission_app import AdmissionApp

HEADER_TIMEOUT_S = 10.0
"""From the first byte of a request to the end of its headers, as in nginx's order of magnitude (60 s) but shorter."""
LINGER_S = 3.0
"""Bytes still in flight after a refusal are read this long: closing at once would reset the connection."""
STALLED_S = 60.0
"""A client that reads nothing of its response for this long is disconnected, because it holds KV blocks."""
MOST_HEADER_BYTES = 64 << 10
SCOPE_KEY = "legroom.connection"


class StopParsing(Exception):
    """Ends the parsing of a connection that was refused."""


class ClientServer(AdmissionApp):
    """The admission application, with the state that the connections of all clients share."""

    config: Config
    server_state: ServerState
    now_s: float
    """The time of the last sweep, which is precise enough for deadlines."""
    buffered_bytes: int
    """Of request bodies in memory."""
    most_buffered_bytes: int


class ClientConnection(HttpToolsProtocol):
    """One client's connection. A cycle is uvicorn's object for one request and its response."""

    def __init__(self, proxy: ClientServer) -> None:
        super().__init__(proxy.config, proxy.server_state, {})
        self._proxy = proxy
        self._head_bytes = self._body_bytes = self._buffered_bytes = 0
        self._is_reading = self._has_cycle = self._is_discarding = False
        self.deadline_s = self.stalled_since_s = 0.0
        self._unsent_bytes = 0
        self.on_lost: Callable[[], None] | None = None
        """Called when the client disconnects during a response."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called for a new connection: start the timeout for the head (line and headers) of its first request."""
        super().connection_made(transport)
        self.deadline_s = self._proxy.now_s + HEADER_TIMEOUT_S

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the client has disconnected: release the request's body, and notify the response in progress."""
        super().connection_lost(exc)
        self.release_body()
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        """Parse what the client sent; what is not HTTP is refused, and after a refusal all is ignored."""
        if self._is_discarding:
            return
        if not self._is_reading:
            self.deadline_s = self._proxy.now_s + HEADER_TIMEOUT_S
        self._unset_keepalive_if_required()
        try:
            while data:
                data = self._feed(data)
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, StopParsing):
                log_bug(error)
                self.abort()
        except httptools.HttpParserError as error:
            self.refuse_unread(Refusal(400, "bad_request", f"The request is not HTTP: {error}.", INVALID))

    def _feed(self, data: bytes) -> bytes:
        """Parse received bytes; returns those to parse again after an ignored offer to upgrade to h2c."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            kept = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade")
            line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
            self.parser = httptools.HttpRequestParser(self)
            return line + kept + b"\r\n" + data[offer.args[0] :]
        return b""

    def on_message_begin(self) -> None:
        """Called by the parser at a new request: reset the counts of its bytes."""
        super().on_message_begin()
        self.scope[SCOPE_KEY] = self  # type: ignore[literal-required]
        self._head_bytes = self._body_bytes = 0
        self._is_reading, self._has_cycle = True, False

    def on_url(self, url: bytes) -> None:
        """Called by the parser: count the bytes of the target, which are part of the head's limit."""
        self._count_header_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser: count a header's or trailer's bytes towards the head's limit; only headers are kept."""
        self._count_header_bytes(len(name) + len(value) + 4)
        if not self._has_cycle:  # after the head these are trailers, which must not become headers
            super().on_header(name, value)

    def _count_header_bytes(self, size: int) -> None:
        """Add to the size of the request's head; past the maximum refuse it with 431 and raise StopParsing."""
        self._head_bytes += size
        if self._head_bytes > MOST_HEADER_BYTES:
            text = f"The head of the request is larger than {MOST_HEADER_BYTES:,} bytes."
            self._refuse_and_stop(Refusal(431, "bad_request", text, INVALID))

    def on_headers_complete(self) -> None:
        """Called by the parser: refuse an upgrade or too large a body, otherwise let uvicorn begin the request."""
        self.url = origin_form(self.url)
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT" or b"websocket" in (self._get_upgrade() or b""):
                text = "The guard passes no upgraded connections (WebSocket); connect to the server itself."
                self._refuse_and_stop(Refusal(501, "bad_request", text, INVALID))
            return
        most_bytes = self._proxy.admission.policy.requests.body_bytes
        for name, value in self.headers:
            if name == b"content-length" and int(value) > most_bytes:
                self._refuse_and_stop(refusals.too_large(most_bytes))
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False
        self.deadline_s = self._proxy.now_s + self._proxy.admission.policy.queue.body_timeout_s
        super().on_headers_complete()
        self._has_cycle = True

    def on_body(self, body: bytes) -> None:
        """Called by the parser: refuse a body that is too large, or too many bytes in memory over all connections."""
        proxy, most_bytes = self._proxy, self._proxy.admission.policy.requests.body_bytes
        self._body_bytes += len(body)
        self._buffered_bytes += len(body)
        proxy.buffered_bytes += len(body)
        if self._body_bytes > most_bytes:
            self._refuse_and_stop(refusals.too_large(most_bytes))
        if proxy.buffered_bytes > proxy.most_buffered_bytes:
            text = "The guard holds as many request bodies as it may; retry soon."
            self._refuse_and_stop(Refusal(503, "queue_full", text, SERVER, None, 1))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Called by the parser at the end of a request: stop its deadline, but not for an offer to upgrade to h2c."""
        if not self.parser.should_upgrade():
            self._is_reading = False
            self.deadline_s = 0.0
            super().on_message_complete()

    @property
    def can_write_chunk(self) -> bool:
        """Whether a part of the response may be written directly: it is chunked, and the client keeps up."""
        return bool(self.cycle.chunked_encoding) and not self.cycle.disconnected and not self.flow.write_paused

    def write_chunk(self, chunk: bytes) -> None:
        """Write a part of a chunked response, past uvicorn, as one chunk."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))

    def on_response_complete(self) -> None:
        """Called when the response was sent: release the body and let uvicorn go on with the connection."""
        self.release_body()
        self.on_lost = None
        super().on_response_complete()

    def release_body(self) -> None:
        """Subtract the request body from the bytes that all connections hold in memory."""
        self._proxy.buffered_bytes -= self._buffered_bytes
        self._buffered_bytes = 0

    def _refuse_and_stop(self, refusal: Refusal) -> None:
        """Refuse the request before it is read to its end, and raise StopParsing."""
        self.refuse_unread(refusal)
        raise StopParsing

    def refuse_unread(self, refusal: Refusal) -> None:
        """Refuse a request not read to its end and close the connection; behind another response only abort it."""
        if self._is_behind_response():
            self.abort()
            return
        if self._has_cycle:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._is_discarding = True
        self.release_body()
        body = self._proxy.admission.refuse(refusal).body()
        headers = {**dict(refusal.headers()), b"content-length": b"%d" % len(body), b"connection": b"close"}
        head = b"".join(b"%b: %b\r\n" % header for header in headers.items())
        is_head = self.parser.get_method() == b"HEAD"
        self.transport.write(b"%b%b\r\n%b" % (STATUS_LINE[refusal.status], head, b"" if is_head else body))
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.deadline_s = self._proxy.now_s + LINGER_S
        else:
            self.transport.close()

    def _is_behind_response(self) -> bool:
        """Whether the request being read waits behind a response, or is already being answered."""
        if self._has_cycle:
            return bool(self.pipeline) or self.cycle.response_started
        return self.cycle is not None and not self.cycle.response_complete

    def abort(self) -> None:
        """Close the connection at once, so that the client sees an incomplete response."""
        if self.cycle is not None:
            self.cycle.disconnected = True
        self.transport.abort()

    def pause_writing(self) -> None:
        """Called when the client reads more slowly than the response is written: remember since when."""
        super().pause_writing()
        self.stalled_since_s = self._proxy.now_s
        self._unsent_bytes = unsent_bytes(self.transport)

    def resume_writing(self) -> None:
        """Called when the client has caught up with the response: it no longer counts as stalled."""
        super().resume_writing()
        self.stalled_since_s = 0.0

    def sweep(self, now_s: float) -> None:
        """Close the connection, or refuse a request not read to its end, past a deadline; called once a second."""
        if self.stalled_since_s:
            before_bytes, self._unsent_bytes = self._unsent_bytes, unsent_bytes(self.transport)
            if self._unsent_bytes < before_bytes:
                self.stalled_since_s = now_s
            elif now_s - self.stalled_since_s > STALLED_S:
                self.abort()
        elif self.deadline_s and now_s > self.deadline_s and not self._is_behind_response():
            if self._is_reading and not self._is_discarding:
                self.refuse_unread(refusals.body_timeout(self._proxy.admission.policy.queue.body_timeout_s))
            else:
                self.transport.close()

    def shutdown(self) -> None:
        """Called while the proxy drains: close an idle connection, refuse a request that was not read to its end."""
        if self._is_discarding or self.transport.is_closing():
            return
        if self._is_reading:
            self.refuse_unread(refusals.draining(self._proxy.admission.policy.queue.drain_retry_s))
        else:
            super().shutdown()


def unsent_bytes(transport: asyncio.Transport) -> int:
    """Bytes that the client has not acknowledged: in the transport's buffer and in the socket's."""
    queued = bytes(4)
    with contextlib.suppress(OSError, ValueError):
        queued = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
    return transport.get_write_buffer_size() + int(struct.unpack("i", queued)[0])


def origin_form(target: bytes) -> bytes:
    """Path and query of a request target that may be a whole URL, so that the path admitted is the one forwarded."""
    target = target.partition(b"#")[0]
    if target.startswith(b"/") or target == b"*":
        return target
    after = target.partition(b"://")[2]
    starts = [at for at in (after.find(b"/"), after.find(b"?")) if at >= 0]
    rest = after[min(starts) :] if starts else b""
    return rest if rest.startswith(b"/") else b"/" + rest
