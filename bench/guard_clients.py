#!/usr/bin/env python3
"""What clients see of the guard inside a real vLLM with a tiny model.

    guard_clients.py small VLLM_PYTHON [--tries 12]        a small request now and then beside 60 large ones of another
    guard_clients.py herd VLLM_PYTHON [--requests 240]     many that are refused and come back when they are told to
    guard_clients.py burst VLLM_PYTHON                     20 times the pool at once: no guard, strict, overcommit

Each prints what it measured as a line of JSON. small: seconds of each try, against twice its time alone and one prefill
of a large request. herd: of the samples of the engine while any client still waits, how many found it without work.
burst: preemptions, and who was served or refused, on one server whose policy file changes between the runs.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_harness import arguments, free_port
from guard_real import CPU_FLAGS, PREEMPTIONS
from guard_toggle import Connection, RealServer, read_metrics

FLAGS = CPU_FLAGS.split()


def body(rnd: random.Random, prompt: int, output: int) -> dict[str, Any]:
    ids = [rnd.randrange(10, 200) for _ in range(prompt)]
    return {"model": "tiny", "prompt": ids, "max_tokens": output, "temperature": 1.0, "ignore_eos": True}


async def ask(port: int, request: dict[str, Any], key: str) -> float:
    """Seconds to the end of its answer, with as many returns as the server asks for."""
    began = time.perf_counter()
    while True:
        connection = await Connection(port).open()
        try:
            status, headers, answer = await connection.post("/v1/completions", request, True, key)
        finally:
            connection.close()
        if status == 200:
            return time.perf_counter() - began
        if status not in (429, 503):
            raise RuntimeError(f"{status}: {answer[:300]!r}")
        await asyncio.sleep(float(headers["retry-after"]))


async def beside_large(port: int, tries: int, every_s: float) -> dict[str, Any]:
    rnd = random.Random(1)
    await ask(port, body(rnd, 20, 5), "small")
    alone = [await ask(port, body(rnd, 20, 5), "small") for _ in range(9)]
    prefill = [await ask(port, body(rnd, 400, 1), "large") for _ in range(5)]
    large = [asyncio.ensure_future(ask(port, body(rnd, 400, 500), "large")) for _ in range(60)]
    await asyncio.sleep(3)
    tried = []
    for _ in range(tries):
        began = time.perf_counter()
        tried.append(await ask(port, body(rnd, 20, 5), "small"))
        await asyncio.sleep(max(0.0, every_s - (time.perf_counter() - began)))
    unfinished = sum(not task.done() for task in large)
    for task in large:
        task.cancel()
    await asyncio.gather(*large, return_exceptions=True)
    bound = 2 * statistics.median(alone) + statistics.median(prefill)
    return {
        "alone_s": round(statistics.median(alone), 3),
        "large_prefill_s": round(statistics.median(prefill), 3),
        "bound_s": round(bound, 3),
        "tries_s": sorted(round(took, 3) for took in tried),
        "within": sum(took <= bound for took in tried),
        "tries": tries,
        "large_unfinished": unfinished,
    }


async def returning(port: int, url: str, requests: int) -> dict[str, Any]:
    """Requests that the queue has no place for, all sent at once; each comes back after its Retry-After."""
    rnd = random.Random(2)
    began = time.perf_counter()
    clients = [asyncio.ensure_future(ask(port, body(rnd, 60, rnd.choice([30, 150])), "")) for _ in range(requests)]
    running: list[tuple[float, float]] = []
    while True:
        await asyncio.wait(clients, timeout=0.05)
        if all(client.done() for client in clients):
            break
        page = await asyncio.to_thread(read_metrics, url)
        inside = page["vllm:num_requests_running"] + page["vllm:num_requests_waiting"]
        running.append((round(time.perf_counter() - began, 2), inside))
    took = [client.result() for client in clients]
    idle = [at_s for at_s, inside in running if not inside]
    page = read_metrics(url)
    return {
        "requests": requests,
        "seconds": round(time.perf_counter() - began, 1),
        "samples": len(running),
        "idle_at_s": idle,
        "idle_share": round(len(idle) / max(1, len(running)), 4),
        "refused": page["legroom_guard_rejected_total"],
        "p50_s": round(statistics.median(took), 1),
        "worst_s": round(max(took), 1),
    }


async def burst(port: int, guard: bool, count: int = 160) -> dict[str, Any]:
    """Requests of 500 tokens, all sent at once."""
    rnd = random.Random(3)

    async def one() -> tuple[int, dict[str, str], dict[str, Any]]:
        client = await Connection(port).open()
        status, headers, answer = await client.post("/v1/completions", body(rnd, 200, 300), guard)
        client.close()
        return status, headers, json.loads(answer)

    began = time.perf_counter()
    answers = await asyncio.gather(*(one() for _ in range(count)))
    refused = [headers for status, headers, _ in answers if status == 429]
    return {
        "served_whole": sum(status == 200 and a["usage"]["completion_tokens"] == 300 for status, _, a in answers),
        "refused": len(refused),
        "refused_with_retry_after": sum(int(headers.get("retry-after", 0)) >= 1 for headers in refused),
        "failed": sum(status not in (200, 429) for status, _, _ in answers),
        "seconds": round(time.perf_counter() - began, 1),
    }


def bursts(server: RealServer, policy: Path) -> dict[str, Any]:
    found = {}
    for name, overcommit in (("without", None), ("strict", 1.0), ("overcommit 1.25", 1.25)):
        policy.write_text(f'[pool]\nadmit = "strict"\novercommit = {overcommit or 1.0}\n')
        time.sleep(1.5)  # the guard checks the file once a second
        before = server.metrics()[PREEMPTIONS]
        found[name] = asyncio.run(burst(server.port, overcommit is not None))
        found[name]["preemptions"] = server.metrics()[PREEMPTIONS] - before
    return found


def main() -> None:
    args = arguments(__doc__, "what", "python:path", tries=12, every_s=2.0, requests=240, policy="")
    policy = args.policy or ("[queue]\nrequests = 24\nwait_s = 3\n" if args.what == "herd" else "")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "policy.toml"
        file.write_text(policy)
        with RealServer(args.python, free_port(), *FLAGS, env={"LEGROOM_GUARD_POLICY": str(file)}) as server:
            figures = {
                "burst": lambda: bursts(server, file),
                "small": lambda: asyncio.run(beside_large(server.port, args.tries, args.every_s)),
                "herd": lambda: asyncio.run(returning(server.port, server.url, args.requests)),
            }[args.what]()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
