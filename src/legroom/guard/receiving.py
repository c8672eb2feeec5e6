"""What an application inside vLLM gets to hear of a client: a body already read, or a file as it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from typing import Any

from legroom.guard import answers
from legroom.guard.answers import Refusal
from legroom.guard.policy import Policy

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
        """The next message."""
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
        """The next message."""
        if self._whole:
            return await self._receive()
        message = None
        if self.refusal is None:
            message = await soon(self._receive, self._deadline_s - time.monotonic())
            if message is None:
                self.refusal = answers.body_timeout(self._policy.queue.body_timeout_s)
            else:
                self._left_bytes -= len(message.get("body", b""))
                self._whole = not message.get("more_body", False)
                if self._left_bytes < 0:
                    self.refusal = answers.too_large(self._policy.requests.body_bytes)
        return {"type": "http.disconnect"} if message is None or self.refusal is not None else message


async def soon(receive: Receive, seconds: float) -> Message | None:
    """The next message, or None after the time. One that is there already, as most bodies are, costs no timer."""
    step = receive().__await__()
    try:
        waiting = next(step)
    except StopIteration as done:
        found: Message = done.value
        return found
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
                found: Message = done.value
                return found
