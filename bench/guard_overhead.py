#!/usr/bin/env python3
"""What the guard costs inside a real vLLM: the same server with and without it, request by request in turn.

    guard_overhead.py VLLM_PYTHON [--pairs 1500] [--rounds 40] [--port 18210] [--json FILE]

Latency: one client, one request with and one without the guard in turn (which goes first alternates), of one token each
so that the guard's part is not lost in the model's. Both the difference of the medians and the median of the pairs'
differences are given, the second with its 95 % interval: on a busy machine only it holds still. Throughput: 32 clients,
answers of 16 tokens, short rounds with and without in turn; beside the clock's figure stands the processor time of
vLLM's API server a request, which other work on the machine changes little. The guard's own time without vLLM is last.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench_harness import arguments, cpu_s, median_interval, percentile, print_table, write_json
from guard_toggle import Connection, RealServer

BODY = {"model": "tiny", "prompt": list(range(5, 37)), "max_tokens": 16, "ignore_eos": True, "temperature": 0.0}

LONGER = BODY | {"prompt": list(range(5, 185)), "max_tokens": 200}
"""For a pool that holds some thirty of them while 270 wait."""


async def latency(port: int, pairs: int) -> dict[bool, list[float]]:
    client, times = await Connection(port).open(), {True: [], False: []}
    for number in range(pairs + 20):
        for guard in (True, False) if number % 2 else (False, True):
            began = time.perf_counter()
            status, _, _ = await client.post("/v1/completions", BODY | {"max_tokens": 1}, guard)
            assert status == 200
            if number >= 20:  # the first requests warm both paths
                times[guard].append(time.perf_counter() - began)
    client.close()
    return times


async def throughput(
    port: int, pid: int, rounds: int, clients: int = 32, each: int = 2
) -> tuple[dict[bool, list[float]], dict[bool, float]]:
    """Requests a second of each round, and the API server's processor time a request over all rounds."""
    connections = [await Connection(port).open() for _ in range(clients)]
    rates: dict[bool, list[float]] = {True: [], False: []}
    cpu = {True: 0.0, False: 0.0}

    async def work(client: Connection, guard: bool) -> None:
        for _ in range(each):
            status, _, _ = await client.post("/v1/completions", BODY, guard)
            assert status == 200

    for number in range(rounds + 1):
        for guard in (True, False) if number % 2 else (False, True):
            began, used = time.perf_counter(), cpu_s(pid)
            await asyncio.gather(*(work(client, guard) for client in connections))
            if number:
                rates[guard].append(clients * each / (time.perf_counter() - began))
                cpu[guard] += cpu_s(pid) - used
    for client in connections:
        client.close()
    return rates, {guard: total / (rounds * clients * each) for guard, total in cpu.items()}


async def own_time_us(
    count: int = 20_000, clients: int = 1, blocks: int = 1000, body: Any = BODY, token_s: float = 0.0
) -> float:
    """The guard around an application that does nothing, less that application. With many clients and a small pool most
    requests wait.
    """
    from legroom.guard import Guard

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if token_s:
            await asyncio.sleep(token_s * body["max_tokens"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"usage":{"prompt_tokens":32,"completion_tokens":16}}'})

    config = SimpleNamespace(
        cache_config=SimpleNamespace(num_gpu_blocks=blocks, block_size=16, enable_prefix_caching=True),
        model_config=SimpleNamespace(max_model_len=2048),
        scheduler_config=SimpleNamespace(max_num_seqs=128),
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )
    server = SimpleNamespace(state=SimpleNamespace(vllm_config=config, args=SimpleNamespace()))
    data = json.dumps(body).encode()

    async def send(_: Any) -> None:
        pass

    async def ask(target: Any) -> None:
        messages = iter([{"type": "http.request", "body": data, "more_body": False}])

        async def receive() -> dict[str, Any]:
            message = next(messages, None)
            return message or await asyncio.get_running_loop().create_future()

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "app": server}
        await target(scope, receive, send)

    async def timed(target: Any) -> float:
        began, numbers = time.process_time(), iter(range(count))

        async def client() -> None:
            for _ in numbers:
                await ask(target)

        await asyncio.gather(*(client() for _ in range(clients)))
        return (time.process_time() - began) / count * 1e6

    return await timed(Guard(app)) - await timed(app)


def main() -> None:
    args = arguments(__doc__, "python:path", pairs=1500, rounds=40, port=18210, json=Path)
    with RealServer(args.python, args.port, "--max-model-len", "2048", "--kv-cache-memory-bytes", "16M") as server:
        times = asyncio.run(latency(server.port, args.pairs))
        rates, cpu = asyncio.run(throughput(server.port, server.child.pid, args.rounds))
        seen = server.metrics()
    pairs = [with_ - without for with_, without in zip(times[True], times[False], strict=True)]
    ratios = [with_ / without for with_, without in zip(rates[True], rates[False], strict=True)]
    sides = {"with": True, "without": False}
    found: dict[str, Any] = {
        "latency_p50_ms": {side: statistics.median(times[guard]) * 1e3 for side, guard in sides.items()},
        "latency_p99_ms": {side: percentile(times[guard], 0.99) * 1e3 for side, guard in sides.items()},
        "added_p50_ms": (statistics.median(times[True]) - statistics.median(times[False])) * 1e3,
        "added_in_pairs_p50_ms": statistics.median(pairs) * 1e3,
        "added_in_pairs_p50_ms_95": [1e3 * edge for edge in median_interval(pairs)],
        "requests_per_s": {side: statistics.median(rates[guard]) for side, guard in sides.items()},
        "throughput_ratio": statistics.median(ratios),
        "throughput_ratio_of_sums": statistics.harmonic_mean(rates[True]) / statistics.harmonic_mean(rates[False]),
        "api_server_cpu_ms": {side: cpu[guard] * 1e3 for side, guard in sides.items()},
        "own_time_us": asyncio.run(own_time_us()),
        "own_time_queued_us": asyncio.run(own_time_us(4000, 300, 400, LONGER, 0.001)),
        "admitted": seen["legroom_guard_admitted_total"],
        "pairs": args.pairs,
        "rounds": args.rounds,
    }

    def row(name: str, key: str, digits: int, last: str) -> tuple[str, ...]:
        return (name, *(f"{found[key][side]:.{digits}f}" for side in sides), last)

    print_table(
        [
            ("same vLLM, in turn", "with guard", "without", "difference"),
            row("latency p50, ms", "latency_p50_ms", 2, f"{found['added_p50_ms']:+.2f}"),
            row("latency p99, ms", "latency_p99_ms", 2, ""),
            (
                "added, median of pairs, ms",
                f"{found['added_in_pairs_p50_ms']:+.2f}",
                "95 % within",
                "{:+.2f} to {:+.2f}".format(*found["added_in_pairs_p50_ms_95"]),
            ),
            row("requests/s, 32 clients", "requests_per_s", 1, f"{found['throughput_ratio']:.1%}"),
            row("API server, CPU ms a request", "api_server_cpu_ms", 2, f"{cpu[True] / cpu[False] - 1:+.1%}"),
            ("guard alone, CPU us a request", f"{found['own_time_us']:.0f}", "", ""),
            ("the same with a queue", f"{found['own_time_queued_us']:.0f}", "", ""),
        ]
    )
    write_json(args.json, found)


if __name__ == "__main__":
    main()
