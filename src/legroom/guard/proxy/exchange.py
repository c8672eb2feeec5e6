"""One request on its way to the server and its answer on the way back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.guard.admission import Door
from legroom.guard.proxy.wire import Headers
from legroom.guard.refusals import SERVER, Refusal
from legroom.guard.request import Visit

if TYPE_CHECKING:
    from legroom.guard.proxy.client import ClientConnection
    from legroom.guard.proxy.upstream import ServerConnection


class Exchange:
    """Ties a client's connection to a server's until the answer ended, and gives the place in the pool back."""

    __slots__ = (
        "body",
        "client",
        "deadline_s",
        "door",
        "head",
        "method",
        "over",
        "retried",
        "sent",
        "server",
        "status",
        "visit",
    )

    def __init__(
        self, client: ClientConnection, door: Door, visit: Visit | None, method: bytes, head: bytes, body: bytes
    ) -> None:
        self.client, self.door, self.visit = client, door, visit
        self.method, self.head, self.body = method, head, body
        self.server: ServerConnection | None = None
        self.status = 0
        self.deadline_s = 0.0
        self.retried = self.sent = self.over = False

    def answering(self, status: int, headers: Headers) -> Headers:
        """The head of the answer came; refusals of the server's own get a Retry-After."""
        self.status = status
        self.body = self.head = b""  # not needed any more, and a stream may last for minutes
        if status in (429, 503) and not any(name == b"retry-after" for name, _ in headers):
            return [*headers, (b"retry-after", b"1")]
        return headers

    def passing(self, data: bytes) -> None:
        """A piece of the answer passes."""
        if self.visit is not None and self.status == 200:
            self.door.passing(self.visit, data)

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
            self.client.refuse(self.door.refused(down(why)))

    def again(self) -> None:
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

    def timed_out(self) -> None:
        """The server did not begin to answer in time."""
        server, self.server = self.server, None
        if server is not None:
            server.exchange = None
            server.transport.abort()
        self._end(finished=False)
        text = "The server did not begin to answer in time."
        self.client.refuse(self.door.refused(Refusal(504, "upstream_timeout", text, SERVER)))

    def _end(self, finished: bool) -> None:
        self.over = True
        self.server = None
        if self.visit is not None:
            self.door.leave(self.visit, finished, self.sent)


def down(why: str) -> Refusal:
    """The server cannot be reached."""
    return Refusal(502, "upstream_down", f"The server behind the guard does not answer: {why}.", SERVER)
