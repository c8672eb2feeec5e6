"""What an application inside vLLM gets to hear of a client: a body already read, or a file as it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from typing import Any

from legroom.guard.policy import Policy
from legroom.guard.request import refusals
from legroom.guard.request.refusals import Refusal

App = Callable[[Any, Any, Any], Awaitable[None]]


async def call(app: App, server: Any, method: str, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
    """Status and body of the answer. `server` is the application that Starlette's handlers ask for (`scope["app"]`)."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
        "state": {},
        "app": server,
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
    }
    status = 0
    pieces: list[bytes] = []
    asked = False

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if asked:
            await asyncio.Event().wait()  # the client of this call never leaves before the answer
        asked = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            pieces.append(message.get("body", b""))

    await asyncio.wait_for(app(scope, receive, send), timeout_s)
    return status, b"".join(pieces)


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


class Replay:
    """Hands the body on that was already read, then whatever the client still says (that it left)."""

    __slots__ = ("_body", "_pending", "_receive")

    def __init__(self, body: bytes, receive: Receive, pending: asyncio.Future[Message] | None) -> None:
        self._body: bytes | None = body
        self._receive = receive
        self._pending = pending

    async def __call__(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if self._pending is not None:
            # Shielded: a reader that gives up must not take the client's next word with it.
            message = await asyncio.shield(self._pending)
            self._pending = None
            return message
        return await self._receive()


class Upload:
    """Hands a file on as it comes. One that is too large or too slow, as it holds a place, ends as if the client had
    left; `refusal` says why.
    """

    __slots__ = ("_deadline_s", "_left_bytes", "_policy", "_receive", "_whole", "refusal")

    def __init__(self, receive: Receive, policy: Policy) -> None:
        self._receive, self._policy, self._whole = receive, policy, False
        self._left_bytes = policy.requests.body_bytes
        self._deadline_s = time.monotonic() + policy.queue.body_timeout_s
        self.refusal: Refusal | None = None

    async def __call__(self) -> Message:
        if self._whole:
            return await self._receive()
        message = None
        if self.refusal is None:
            message = await soon(self._receive, self._deadline_s - time.monotonic())
            if message is None:
                self.refusal = refusals.body_timeout(self._policy.queue.body_timeout_s)
            else:
                self._left_bytes -= len(message.get("body", b""))
                self._whole = not message.get("more_body", False)
                if self._left_bytes < 0:
                    self.refusal = refusals.too_large(self._policy.requests.body_bytes)
        return {"type": "http.disconnect"} if message is None or self.refusal is not None else message


async def soon(receive: Receive, seconds: float) -> Message | None:
    """The next message, or None after the time. One that is there already, as most bodies are, costs no timer."""
    step = receive().__await__()
    try:
        waiting = next(step)
    except StopIteration as done:
        message: Message = done.value
        return message
    try:
        async with asyncio.timeout(max(seconds, 0.0)):  # unlike wait_for it makes no task of its own
            return await _Resumed(step, waiting)
    except TimeoutError:
        return None


class _Resumed:
    """Goes on with an awaitable that was already stepped once and waits for something."""

    __slots__ = ("_step", "_waiting")

    def __init__(self, step: Any, waiting: Any) -> None:
        self._step, self._waiting = step, waiting

    def __await__(self) -> Generator[Any, Any, Message]:
        waiting = self._waiting
        while True:
            try:
                try:
                    sent = yield waiting
                except BaseException as error:
                    waiting = self._step.throw(error)
                else:
                    waiting = self._step.send(sent)
            except StopIteration as done:
                message: Message = done.value
                return message
