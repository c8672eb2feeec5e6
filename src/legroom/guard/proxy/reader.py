"""Requests off the bytes of a client's connection: each whole, bounded in its head and its body."""

from __future__ import annotations

from typing import Protocol

import httptools

from legroom.guard.log import log_bug
from legroom.guard.pool.admission import Admission
from legroom.guard.proxy.wire import Headers, origin_form
from legroom.guard.request import refusals
from legroom.guard.request.refusals import INVALID, SERVER, Refusal


class HttpRequest:
    """What has arrived of it so far. `method` stays empty until the head is whole."""

    __slots__ = ("body", "expects", "headers", "keep_alive", "method", "old", "target")

    def __init__(self) -> None:
        self.method = b""
        self.target = b""
        self.headers: Headers = []
        self.body = bytearray()  # pieces in a list would each take many times the two bytes that a chunk may have
        self.expects = False
        """The client waits for `100 Continue` before it sends the body."""
        self.keep_alive = True
        self.old = False

    def take_body(self) -> bytes:
        """The whole body, which from now on is the caller's alone to hold."""
        whole = bytes(self.body)
        self.body.clear()
        return whole

    def wants_tunnel(self) -> bool:
        """A connection for something other than HTTP; an offer of a newer HTTP (h2c) need not be taken up."""
        if self.method == b"CONNECT":
            return True
        return any(name == b"upgrade" and b"websocket" in value.lower() for name, value in self.headers)

    def head_without_offer(self) -> bytes:
        """The head once more, to be read as if the client had not offered another protocol."""
        version = b"1.0" if self.old else b"1.1"
        kept = b"".join(b"%b: %b\r\n" % pair for pair in self.headers if pair[0] != b"upgrade")
        return b"%b %b HTTP/%b\r\n%b\r\n" % (self.method, self.target, version, kept)


MOST_HEADER_BYTES = 64 << 10


class Stop(Exception):
    """Ends the reading of a connection that was answered, or cut, already."""


class BufferedBodies:
    """The bytes of request bodies that all connections together hold in memory."""

    __slots__ = ("most_bytes", "total_bytes")

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.total_bytes = 0


class RequestHandler(Protocol):
    """Who is told what was read. Any of these may raise `Stop`."""

    def head_read(self, request: HttpRequest) -> None:
        """The head of a request is whole; its body is to come."""

    def request_read(self, request: HttpRequest) -> None:
        """A request is whole."""

    def refuse_unread(self, refusal: Refusal) -> None:
        """A request that is not even read to its end."""

    def abort(self) -> None:
        """Cut the connection."""


class RequestReader:
    """The HTTP parser's calls become calls of the handler."""

    __slots__ = ("_admission", "_buffered", "_handler", "_head_bytes", "_parser", "request")

    def __init__(self, handler: RequestHandler, admission: Admission, buffered: BufferedBodies) -> None:
        self._handler, self._admission, self._buffered = handler, admission, buffered
        self._parser = httptools.HttpRequestParser(self)
        self._head_bytes = 0
        self.request: HttpRequest | None = None
        """What is being read; None between requests."""

    @property
    def method(self) -> bytes:
        """Of the request that is being read, as far as it is known."""
        method: bytes = self._parser.get_method()
        return method

    def feed(self, data: bytes) -> None:
        try:
            while data:
                data = self._feed(data)
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, Stop):
                log_bug(error)
                self._handler.abort()
        except httptools.HttpParserError as error:
            self._handler.refuse_unread(Refusal(400, "bad_request", f"The request is not HTTP: {error}.", INVALID))

    def _feed(self, data: bytes) -> bytes:
        """What is left to feed: the parser leaves the body of a request that offers an upgrade unread."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            assert self.request is not None
            self._parser = httptools.HttpRequestParser(self)
            return self.request.head_without_offer() + data[offer.args[0] :]
        return b""

    def drop(self) -> None:
        """What was read of a request is not needed any more."""
        if self.request is not None:
            self._buffered.total_bytes -= len(self.request.body)
            self.request = None

    def _refuse(self, refusal: Refusal) -> None:
        self._handler.refuse_unread(refusal)
        raise Stop

    # The parser's calls.

    def on_message_begin(self) -> None:
        self.request = HttpRequest()
        self._head_bytes = 0

    def on_url(self, piece: bytes) -> None:
        assert self.request is not None
        self.request.target += piece
        self._grown(len(piece))

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self.request is not None
        if not self.request.method:  # what comes after the head are trailers: no server of ours reads them
            self.request.headers.append((name.lower(), value))
        self._grown(len(name) + len(value) + 4)

    def _grown(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MOST_HEADER_BYTES:
            text = f"The head of the request is larger than {MOST_HEADER_BYTES:,} bytes."
            self._refuse(Refusal(431, "bad_request", text, INVALID))

    def on_headers_complete(self) -> None:
        request = self.request
        assert request is not None
        request.method = self._parser.get_method()
        request.target = origin_form(request.target)
        request.old = self._parser.get_http_version() == "1.0"
        if self._parser.should_upgrade():
            if not request.wants_tunnel():
                return  # it is read again without the offer
            text = "The guard passes no upgraded connections (WebSocket); connect to the server itself."
            self._refuse(Refusal(501, "bad_request", text, INVALID))
        most = self._admission.policy.requests.body_bytes
        for name, value in request.headers:
            if name == b"content-length" and value.isdigit() and int(value) > most:
                self._refuse(refusals.too_large(most))
            if name == b"expect" and value.lower() == b"100-continue":
                request.expects = not request.old
        self._handler.head_read(request)

    def on_body(self, data: bytes) -> None:
        request, buffered = self.request, self._buffered
        assert request is not None
        request.body += data
        buffered.total_bytes += len(data)
        most = self._admission.policy.requests.body_bytes
        if len(request.body) > most:
            self._refuse(refusals.too_large(most))
        if buffered.total_bytes > buffered.most_bytes:
            text = "The guard holds as many request bodies as it may; retry soon."
            self._refuse(Refusal(503, "queue_full", text, SERVER, None, 1))

    def on_message_complete(self) -> None:
        """A request is whole."""
        request = self.request
        assert request is not None
        if self._parser.should_upgrade():
            return
        # As uvicorn does: a client of HTTP/1.0 may take the end of the connection for the end of the answer.
        request.keep_alive = self._parser.should_keep_alive() and not request.old
        self.request = None
        self._handler.request_read(request)
