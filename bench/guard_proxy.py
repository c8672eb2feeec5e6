#!/usr/bin/env python3
"""The guard as a proxy in front of a trivial ASGI server: CPU time of requests and chunks, and memory of open streams.

    guard_proxy.py [--requests 30000] [--clients 64] [--streams 10000] [--port 18220] [--src DIR ...] [--json FILE]

The proxy is pinned to one core; the ASGI server (uvicorn) and the clients share another. Every request is a chat with a
JSON body of about 700 bytes that goes through bounds and admission. CPU time is the proxy's own, which other work
changes less than the clock. Chunks are streamed by 32 connections, one each 20 ms. Streams stay open while more are
opened: the proxy's memory is read every thousand. Each --src is the source folder of another version, measured in turn
with this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from argparse import Namespace
from pathlib import Path
from typing import Any

from bench_harness import arguments, cpu_s, write_json

HERE = Path(__file__).parent
BODY = json.dumps(
    {
        "model": "tiny",
        "max_tokens": 64,
        "temperature": 0.7,
        "messages": [
            {"role": "system", "content": "You are a helpful assistant. " * 8},
            {"role": "user", "content": "Tell me a story about a fox and a hen. " * 8},
        ],
    }
).encode()
STREAM = BODY[:-1] + b', "stream": true}'
ANSWER = (
    b'{"id":"x","choices":[{"text":"hello"}],"usage":{"prompt_tokens":150,"completion_tokens":8,"total_tokens":158}}'
)
CHUNKED = BODY[:-1] + b', "stream": true, "chunks": true}'
CHUNK = b'data: {"id":"chatcmpl-1","model":"tiny","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
CHUNKS = 100


async def app(scope: Any, receive: Any, send: Any) -> None:
    """The trivial server: an answer at once, or a stream that says something every few seconds and never ends."""
    if scope["type"] != "http":
        return
    body = (await receive()).get("body", b"")
    if b'"stream": true' not in body:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(ANSWER)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": ANSWER})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for _ in range(CHUNKS if b'"chunks"' in body else 0):
        await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
        await asyncio.sleep(0.02)
    if b'"chunks"' in body:
        await send({"type": "http.response.body", "body": b""})
        return
    while True:
        await send({"type": "http.response.body", "body": b'data: {"choices":[{"text":"a"}]}\n\n', "more_body": True})
        try:
            async with asyncio.timeout(5):
                await receive()  # the client left
                return
        except TimeoutError:
            pass


class Load(asyncio.Protocol):
    """A kept connection that sends the next request when an answer ended."""

    def __init__(self, todo: list[int], latencies: list[float], done: asyncio.Future[None], count: int) -> None:
        self.todo, self.latencies, self.done, self.count = todo, latencies, done, count
        self.request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        self.request += b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
        self.got = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.next()

    def next(self) -> None:
        if self.todo[0] <= 0:
            self.transport.close()
            return
        self.todo[0] -= 1
        self.began = time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.got += data
        if self.got.endswith(ANSWER):
            assert self.got.startswith(b"HTTP/1.1 200"), self.got[:200]
            self.got = b""
            self.latencies.append(time.perf_counter() - self.began)
            if len(self.latencies) == self.count:
                self.done.set_result(None)
            self.next()
        elif not self.got.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(RuntimeError(self.got[:300].decode()))


async def load(port: int, count: int, clients: int) -> tuple[float, list[float]]:
    loop = asyncio.get_running_loop()
    todo, latencies, done = [count], [], loop.create_future()
    began = time.perf_counter()
    for _ in range(clients):
        await loop.create_connection(lambda: Load(todo, latencies, done, count), "127.0.0.1", port)
    await done
    return time.perf_counter() - began, sorted(latencies)


async def stream_chunks(port: int, connections: int = 32) -> int:
    """Chunks that were received."""

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(CHUNKED) + CHUNKED)
        received = (await reader.read()).count(b"data:")
        writer.close()
        return received

    return sum(await asyncio.gather(*(one() for _ in range(connections))))


class Stream(asyncio.Protocol):
    """An open stream; counts itself when its first bytes came."""

    def __init__(self, counts: dict[str, int]) -> None:
        self.counts, self.begun = counts, False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(STREAM), STREAM)
        )

    def data_received(self, data: bytes) -> None:
        self.counts["bytes"] += len(data)
        if not self.begun and b"data:" in data:
            self.begun = True
            self.counts["open"] += 1

    def connection_lost(self, error: Exception | None) -> None:
        self.counts["lost"] += 1


async def streams(port: int, pid: int, count: int) -> dict[str, Any]:
    loop, counts = asyncio.get_running_loop(), {"open": 0, "lost": 0, "bytes": 0}
    opened, memory = [], [(0, rss_mb(pid))]
    while len(opened) < count:
        for _ in range(min(50, count - len(opened))):
            opened.append((await loop.create_connection(lambda: Stream(counts), "127.0.0.1", port))[0])
        async with asyncio.timeout(120):
            while counts["open"] < len(opened):
                await asyncio.sleep(0.01)
        if len(opened) % 1000 == 0 or len(opened) == count:
            memory.append((len(opened), rss_mb(pid)))
            print(f"  {len(opened):,} streams: {memory[-1][1]:.1f} MB", file=sys.stderr)
    before = counts["bytes"]
    await asyncio.sleep(12)
    after = rss_mb(pid)
    passed = counts["bytes"] - before
    lost = counts["lost"]
    for transport in opened:
        transport.abort()
    await asyncio.sleep(3)
    return {
        "open": len(opened),
        "lost": lost,
        "memory_mb": memory,
        "memory_after_12_s_mb": after,
        "bytes_passed_in_12_s": passed,
        "memory_closed_mb": rss_mb(pid),
    }


def rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def start(words: list[str], core: int, port: int) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(["taskset", "-c", str(core), *words], stderr=subprocess.DEVNULL)
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/-/legroom/none", timeout=1)
            return child
        except urllib.error.HTTPError:
            return child
        except OSError:
            time.sleep(0.1)
    sys.exit(f"did not start: {words}")


def measure_cpu(port: int, pid: int, args: Namespace) -> dict[str, float]:
    before_s = cpu_s(pid)
    seconds, latencies = asyncio.run(load(port, args.requests, args.clients))
    used_s, before_s = cpu_s(pid) - before_s, cpu_s(pid)
    chunks = sum(asyncio.run(stream_chunks(port)) for _ in range(3))
    return {
        "requests_per_s": args.requests / seconds,
        "requests_per_cpu_s": args.requests / used_s,
        "chunk_us": (cpu_s(pid) - before_s) / chunks * 1e6,
        "p50_ms": latencies[len(latencies) // 2] * 1e3,
    }


def main() -> None:
    sizes = {"requests": 30_000, "clients": 64, "streams": 10_000, "rounds": 1}
    args = arguments(__doc__, **sizes, port=18220, src=(), json=Path)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if args.streams > (most - 100) // 2:  # a stream is two connections of the proxy
        args.streams = (most - 100) // 2
        print(f"this machine gives a process {most:,} files: {args.streams:,} streams", file=sys.stderr)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    sources, found = [HERE.parent / "src", *map(Path, args.src)], dict[str, Any]()
    with contextlib.ExitStack() as stack:
        words = [sys.executable, "-m", "uvicorn", "--app-dir", str(HERE), "guard_proxy:app", "--port", str(args.port)]
        server = start([*words, "--log-level", "critical", "--backlog", "4096"], cores[0], args.port)
        stack.callback(server.kill)
        seconds, _ = asyncio.run(load(args.port, args.requests, args.clients))
        print(f"straight at the server: {args.requests / seconds:,.0f} requests/s")
        policy = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".toml"))
        policy.write("[pool]\ntokens = 100_000_000\n")  # streams that never end hold their blocks
        policy.flush()
        proxies = []
        for port, source in enumerate(sources, args.port + 1):
            os.environ["PYTHONPATH"] = str(source)
            options = ["--upstream", f"http://127.0.0.1:{args.port}", "--policy", policy.name, "--port", str(port)]
            proxies.append(start([sys.executable, "-m", "legroom", "guard", *options], cores[-1], port))
            stack.callback(proxies[-1].kill)
            asyncio.run(load(port, 2000, args.clients))  # warm
        for _ in range(args.rounds):
            for port, (source, proxy) in enumerate(zip(sources, proxies, strict=True), args.port + 1):
                row = measure_cpu(port, proxy.pid, args)
                found.setdefault(str(source), []).append(row)
                print(f"{source}: " + ", ".join(f"{name} {value:,.1f}" for name, value in row.items()), flush=True)
        if args.streams:
            found["streams"] = asyncio.run(streams(args.port + 1, proxies[0].pid, args.streams))
            print(json.dumps(found["streams"]))
    write_json(args.json, found)


if __name__ == "__main__":
    main()
