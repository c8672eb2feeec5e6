#!/usr/bin/env python3
"""A burst of 20 times the KV pool on a real vLLM: without the guard, then with it, on the same server.

    guard_burst.py VLLM_PYTHON [--times 20] [--overcommit 1.25] [--port 18211] [--json FILE]

The pool is small (33 blocks of 128 tokens). All requests are sent at once; together they may grow to --times the pool.
A third run overcommits the pool (the policy file changes under the running server): what that gains and costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from guard_toggle import Connection, RealServer, print_table

BLOCKS, BLOCK_SIZE = 33, 128
PROMPT, OUTPUT = 200, 300
SERIES = {"preemptions": "vllm:num_preemptions_total", "admitted": "legroom_guard_admitted_total"}


async def burst(port: int, count: int, guard: bool) -> dict[str, Any]:
    clients = await asyncio.gather(*(Connection(port).open() for _ in range(count)))

    async def one(number: int, client: Connection) -> tuple[int, dict[str, str], dict[str, Any], float]:
        # Prompts of their own: nothing is shared between requests.
        body = {
            "model": "tiny",
            "prompt": [5 + (number * 7 + at) % 240 for at in range(PROMPT)],
            "max_tokens": OUTPUT,
            "ignore_eos": True,
        }
        began = time.perf_counter()
        status, headers, answer = await client.post("/v1/completions", body, guard)
        client.close()
        return status, headers, json.loads(answer), time.perf_counter() - began

    began = time.perf_counter()
    answers = await asyncio.gather(*(one(number, client) for number, client in enumerate(clients)))
    seconds = time.perf_counter() - began
    served = [answer for answer in answers if answer[0] == 200]
    refused = [answer for answer in answers if answer[0] == 429]
    whole = [answer for answer in served if answer[2]["usage"]["completion_tokens"] == OUTPUT]
    return {
        "sent": count,
        "served": len(served),
        "served_whole": len(whole),
        "refused": len(refused),
        "refused_with_retry_after": sum(int(answer[1].get("retry-after", 0)) >= 1 for answer in refused),
        "retry_after_s": sorted({int(answer[1]["retry-after"]) for answer in refused}),
        "failed": len(answers) - len(served) - len(refused),
        "seconds": seconds,
        "tokens_per_s": sum(answer[2]["usage"]["total_tokens"] for answer in served) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", type=Path)
    parser.add_argument("--times", type=float, default=20)
    parser.add_argument("--overcommit", type=float, default=1.25)
    parser.add_argument("--port", type=int, default=18211)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    blocks_each = -(-(PROMPT + OUTPUT) // BLOCK_SIZE)
    count = round(args.times * (BLOCKS - 1) / blocks_each)
    found: dict[str, Any] = {"pool_tokens": (BLOCKS - 1) * BLOCK_SIZE, "times_the_pool": args.times}
    flags = (
        "--max-model-len",
        "1024",
        "--kv-cache-memory-bytes",
        "16M",
        "--num-gpu-blocks-override",
        str(BLOCKS),
        "--block-size",
        str(BLOCK_SIZE),
    )
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy.toml"
        policy.write_text("")
        with RealServer(args.python, args.port, *flags, env={"LEGROOM_GUARD_POLICY": str(policy)}) as server:
            for name, overcommit in (("without", None), ("with", 1.0), ("overcommitted", args.overcommit)):
                policy.write_text(f'[pool]\nadmit = "strict"\novercommit = {overcommit or 1.0}\n')
                time.sleep(1.5)  # the file is looked at once a second
                before = server.metrics()
                found[name] = asyncio.run(burst(server.port, count, guard=overcommit is not None))
                after = server.metrics()
                for key, series in SERIES.items():
                    found[name][key] = after[series] - before[series]
                found[name]["left_reserved_tokens"] = after["legroom_guard_reserved_tokens"]
    rows = [("burst of the same requests", "with guard", "without", f"overcommit {args.overcommit:g}")]
    for key in (
        "sent",
        "preemptions",
        "served",
        "served_whole",
        "refused",
        "refused_with_retry_after",
        "failed",
        "seconds",
        "tokens_per_s",
    ):
        sides = ("with", "without", "overcommitted")
        rows.append((key.replace("_", " "), *(f"{found[side][key]:,.0f}" for side in sides)))
    print_table(rows)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
