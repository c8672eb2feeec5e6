"""A request of our own to the application behind us, in this process: no socket, no second hop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

App = Callable[[Any, Any, Any], Awaitable[None]]


async def call(app: App, server: Any, method: str, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
    """Status and body of the answer. `server` is the application that Starlette's handlers ask for (`scope["app"]`)."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0), "state": {}, "app": server,
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
    }  # fmt: skip
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
