"""A client and a server at the two ends of an ASGI middleware, without sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from types import SimpleNamespace


def vllm_state(blocks=11, block_size=16, max_model_len=128, max_num_seqs=4, **args):
    """What Starlette's `scope["app"]` holds inside vLLM."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(num_gpu_blocks=blocks, block_size=block_size),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )
    return SimpleNamespace(state=SimpleNamespace(vllm_config=config, args=SimpleNamespace(**args)))


class Server:
    """Answers 200 with the body it got; holds answers back while `hold` is set."""

    def __init__(self, status=200, answer=b'{"ok": true}', kind=b"application/json", chunks=None):
        self.status, self.answer, self.kind, self.chunks = status, answer, kind, chunks
        self.open = asyncio.Event()
        self.open.set()
        self.bodies, self.scopes, self.inside, self.most_inside, self.left = [], [], 0, 0, 0

    async def __call__(self, scope, receive, send):
        self.scopes.append(scope)
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.bodies.append(body)
        self.inside += 1
        self.most_inside = max(self.inside, self.most_inside)
        try:
            await self._wait_or_leave(receive)
            headers = [(b"content-type", self.kind), (b"content-length", str(len(self.answer)).encode())]
            await send({"type": "http.response.start", "status": self.status, "headers": headers})
            for chunk in self.chunks or []:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"" if self.chunks else self.answer})
        finally:
            self.inside -= 1

    async def _wait_or_leave(self, receive):
        if self.open.is_set():
            return
        opened, gone = asyncio.ensure_future(self.open.wait()), asyncio.ensure_future(receive())
        await asyncio.wait({opened, gone}, return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        if gone.done():
            self.left += 1
            raise ConnectionError("the client left")
        gone.cancel()


class Call:
    """One request through the middleware, as a task."""

    def __init__(
        self, guard, path="/v1/completions", body=None, method="POST", headers=(), app=None, raw=None, more_body=False
    ):
        self.status, self.headers, self.messages = None, {}, []
        self._gone = asyncio.Event()
        self._sent = False
        self._more_body = more_body
        self._raw = json.dumps(body).encode() if raw is None else raw
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), *headers],
            "app": app or vllm_state(),
        }
        self.task = asyncio.ensure_future(self._run(guard, scope))

    async def _run(self, guard, scope):
        with contextlib.suppress(ConnectionError):
            await guard(scope, self._receive, self._send)

    async def _receive(self):
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._raw, "more_body": self._more_body}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        self.messages.append(message)
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}

    def leave(self):
        self._gone.set()

    @property
    def body_was_read(self):
        return self._sent

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def error(self):
        return json.loads(self.body)["error"]

    def __await__(self):
        yield from self.task.__await__()
        return self


async def settle():
    """Let everything that can run, run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def until(true, seconds=60.0):
    """Wait for something to become true."""
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.005)
