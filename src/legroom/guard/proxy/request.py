"""One request as it is read off a client's connection."""

from __future__ import annotations

from legroom.guard.proxy.wire import Headers


class Request:
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
