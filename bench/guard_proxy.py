#!/usr/bin/env python3
"""The guard as a proxy in front of a trivial ASGI server: requests a second on one core, and memory of open streams.

    guard_proxy.py [--requests 30000] [--clients 64] [--streams 10000] [--port 18220] [--json FILE]

The proxy is pinned to one core; the ASGI server (uvicorn) and the clients share another. Every request is a chat with a
JSON body of about 700 bytes that goes through bounds and admission. Requests a second are given by the clock and by the
proxy's own processor time, which other work on the machine does not change; the same load straight at the server is the
other side. Streams stay open while more are opened: the proxy's memory is read every thousand.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from guard_toggle import print_table

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
WITHOUT_UVLOOP = (
    "import sys; sys.modules['uvloop'] = None; from legroom.cli.main import main; sys.exit(main(sys.argv[1:]))"
)


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


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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


def measured(
    port: int, proxy_port: int, words: list[str], cores: list[int], args: argparse.Namespace
) -> dict[str, Any]:
    proxy = start(words, cores[-1], proxy_port)
    try:
        asyncio.run(load(proxy_port, 2000, args.clients))  # warm
        before = cpu_s(proxy.pid)
        seconds, latencies = asyncio.run(load(proxy_port, args.requests, args.clients))
        cpu = cpu_s(proxy.pid) - before
        found = {
            "requests_per_s": args.requests / seconds,
            "requests_per_cpu_s": args.requests / cpu,
            "core_used": cpu / seconds,
            "p50_ms": latencies[len(latencies) // 2] * 1e3,
            "p99_ms": latencies[int(len(latencies) * 0.99)] * 1e3,
        }
        if args.streams and "-c" not in words:
            found["streams"] = asyncio.run(streams(proxy_port, proxy.pid, args.streams))
            page = urllib.request.urlopen(f"http://127.0.0.1:{proxy_port}/metrics").read().decode()
            lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("legroom_guard_"))
            found["streams"]["reserved_tokens_after"] = float(lines["legroom_guard_reserved_tokens"])
        return found
    finally:
        proxy.send_signal(signal.SIGKILL)
        proxy.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--port", type=int, default=18220)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if args.streams > (most - 100) // 2:  # a stream is two connections of the proxy
        args.streams = (most - 100) // 2
        print(f"this machine gives a process {most:,} files: {args.streams:,} streams", file=sys.stderr)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    words = [sys.executable, "-m", "uvicorn", "--app-dir", str(HERE), "guard_proxy:app", "--port", str(args.port)]
    server = start([*words, "--log-level", "critical", "--backlog", "4096"], cores[0], args.port)
    found: dict[str, Any] = {}
    try:
        seconds, latencies = asyncio.run(load(args.port, args.requests, args.clients))
        found["direct"] = {"requests_per_s": args.requests / seconds, "p50_ms": latencies[len(latencies) // 2] * 1e3}
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as policy:
            # Streams that never end hold their place: the pool must be large enough for all of them.
            policy.write("[pool]\ntokens = 100_000_000\n")
            policy.flush()
            options = ["guard", "--upstream", f"http://127.0.0.1:{args.port}", "--policy", policy.name, "--port"]
            plain = [sys.executable, "-m", "legroom", *options, str(args.port + 1)]
            found["proxy"] = measured(args.port, args.port + 1, plain, cores, args)
            slower = [sys.executable, "-c", WITHOUT_UVLOOP, *options, str(args.port + 2)]
            found["proxy_without_uvloop"] = measured(args.port, args.port + 2, slower, cores, args)
    finally:
        server.kill()
        server.wait()
    report(found)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


def report(found: dict[str, Any]) -> None:
    rows = [("in front of a trivial ASGI server", "requests/s", "per CPU second", "core used", "p50, ms")]
    rows.append(
        (
            "straight at the server",
            f"{found['direct']['requests_per_s']:,.0f}",
            "",
            "",
            f"{found['direct']['p50_ms']:.2f}",
        )
    )
    for name, key in (("through the guard", "proxy"), ("through the guard, no uvloop", "proxy_without_uvloop")):
        one = found[key]
        rates = (f"{one['requests_per_s']:,.0f}", f"{one['requests_per_cpu_s']:,.0f}")
        rows.append((name, *rates, f"{one['core_used']:.0%}", f"{one['p50_ms']:.2f}"))
    print_table(rows)
    if "streams" not in found["proxy"]:
        return
    held = found["proxy"]["streams"]
    steps = list(zip(held["memory_mb"], held["memory_mb"][1:], strict=False))
    rows = [("open streams", "memory, MB", "MB per 1,000 more")]
    for (fewer, less), (count, memory) in steps:
        rows.append((f"{count:,}", f"{memory:.1f}", f"{(memory - less) / (count - fewer) * 1000:.2f}"))
    rows.append(("12 s later", f"{held['memory_after_12_s_mb']:.1f}", ""))
    rows.append((f"all closed ({held['lost']} lost before)", f"{held['memory_closed_mb']:.1f}", ""))
    print()
    print_table(rows)


if __name__ == "__main__":
    main()
