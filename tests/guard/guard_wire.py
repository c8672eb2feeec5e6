"""Both ends of the proxy over real sockets: a server whose answers a test chooses, a client that sends raw bytes."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

from legroom.guard.serving.proxy import Proxy, ProxyOptions
from legroom.guard.serving.upstream import upstream_of
from legroom.guard.weight.engine_limits import EngineLimits

PLAN = EngineLimits(11, 16, 8, 128, 4, source="a test")
WHOLE_POOL = json.dumps({"prompt": [1] * 120, "max_tokens": 8}).encode()
"""Of the pool's ten blocks, eight from its first step on."""
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


class Upstream:
    """Reads requests with a length, records them, and answers with `answer` once `open` is set."""

    def __init__(self, answer=OK, close=False):
        self.answer, self.close_after = answer, close
        self.requests, self.connections, self.inside, self.most_inside, self.left = [], 0, 0, 0, 0
        self.drop_next = False
        self.open = asyncio.Event()
        self.open.set()

    async def __call__(self, reader, writer):
        first = True
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0
                )
                body = await reader.readexactly(length)
                if b"legroom-guard" in head:  # the guard asks on its own account what the server can hold
                    await self._answer(writer, head)
                    continue
                if self.drop_next:
                    self.drop_next = False
                    return
                self.connections += first
                first = False
                self.requests.append((head, body))
                self.inside += 1
                self.most_inside = max(self.most_inside, self.inside)
                try:
                    if not await self._stays(reader):
                        self.left += 1
                        return
                finally:
                    self.inside -= 1
                await self._answer(writer, head)
                if self.close_after:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _stays(self, reader):
        opened, gone = asyncio.ensure_future(self.open.wait()), asyncio.ensure_future(reader.read(1))
        await asyncio.wait({opened, gone}, return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        stays = not gone.done()
        gone.cancel()
        await asyncio.gather(opened, gone, return_exceptions=True)
        return stays

    async def _answer(self, writer, head):
        pieces = self.answer(head) if callable(self.answer) else [self.answer]
        for piece in pieces:
            if isinstance(piece, asyncio.Event):
                await piece.wait()
                continue
            writer.write(piece)
            await writer.drain()


@asynccontextmanager
async def proxied(upstream=None, policy=None, plan=PLAN, token=None, tls=None, **options):
    """A proxy in front of a server; gives the proxy and its port."""
    upstream = upstream or Upstream()
    server = await asyncio.start_server(upstream, "127.0.0.1", 0, ssl=tls)
    address = f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    proxy = Proxy(ProxyOptions(upstream_of(address), policy, plan, port=0, token=token, **options))
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    running = asyncio.ensure_future(proxy.run(stop, ready.set_result))
    try:
        await asyncio.wait({ready, running}, return_when=asyncio.FIRST_COMPLETED)
        proxy.stop = stop
        yield proxy, ready.result()
    finally:
        upstream.open.set()
        stop.set()
        for client in list(proxy.clients):
            client.abort()
        await running
        server.close()


@asynccontextmanager
async def connected(*args, **options):
    """The same, with a client; gives the proxy and the client."""
    async with proxied(*args, **options) as (proxy, port):
        client = await Client.connect(port)
        try:
            yield proxy, client
        finally:
            client.close()


def error(body):
    return json.loads(body)["error"]


def answer_of(body, status=b"200 OK"):
    """A server's answer with a length."""
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


def request(body=b'{"prompt": [1], "max_tokens": 4}', path="/v1/completions", method="POST", headers=""):
    return f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body


class Client:
    """One connection."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, port):
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def send(self, data):
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self):
        """Status, headers and body of one answer."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        status = int(head[0].split()[1])
        if status == 100:
            return await self.answer()
        if "content-length" in headers:
            return status, headers, await self.reader.readexactly(int(headers["content-length"]))
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(await self.reader.readline(), 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readline()
            return status, headers, body
        return status, headers, await self.reader.read()

    async def ask(self, *args, **kwargs):
        await self.send(request(*args, **kwargs))
        return await self.answer()

    def close(self):
        self.writer.close()


async def ask(port, *args, **kwargs):
    client = await Client.connect(port)
    try:
        return await client.ask(*args, **kwargs)
    finally:
        client.close()
