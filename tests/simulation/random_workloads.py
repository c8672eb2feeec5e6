"""Random settings and requests that press on the block pool."""

from __future__ import annotations

import random
from typing import Any


def workload(rng: random.Random, kind: str = "plain") -> dict[str, Any]:
    """Settings and requests that press on the pool in one way or another."""
    block_size = rng.choice([8, 16, 16, 16, 32, 64])
    max_model_len = rng.choice([256, 512, 1024, 2048, 4096])
    count = rng.choice([5, 20, 40, 60, 80, 120])
    policy = rng.choice(["fcfs", "fcfs", "priority"])
    caching = rng.random() < 0.6
    chunked = rng.random() < 0.8
    max_num_seqs = rng.choice([1, 2, 4, 8, 16, 32, 64, 128])
    tokens = rng.choice([64, 128, 256, 512, 1024, 2048, 4096])
    tokens = max(tokens, max_num_seqs, 0 if chunked else max_model_len)
    need = -(-max_model_len // block_size)
    blocks = 1 + need + rng.choice([0, 0, 1, 2, 5, need // 2, need, 2 * need])
    windows: list[int | None] = [None]
    if kind == "hybrid":
        window = rng.choice([16, 33, 64, 128, 300])
        windows = rng.choice([[None, window], [None, window, window], [window], [window, None], [None, None, window]])
        blocks = 1 + (blocks - 1) * len(windows)
    lengths = rng.choice(["short", "mixed", "long", "chat"])
    prefixes = rng.sample("abcdef", rng.randint(1, 4)) if rng.random() < 0.7 else []
    exact_prefix = rng.random() < 0.3
    spacing = rng.choice([[0], [0, 0, 1], [0, 1, 3, 10], [0, 0, 0, 0, 60], [5, 20, 50]])
    requests = []
    step = 0
    for i in range(count):
        step += rng.choice(spacing)
        requests.append(
            request(rng, i, step, max_model_len, lengths=lengths, prefixes=prefixes, policy=policy, exact=exact_prefix)
        )
    return {
        "settings": {
            "num_blocks": blocks,
            "block_size": block_size,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": tokens,
            "max_model_len": max_model_len,
            "enable_prefix_caching": caching,
            "enable_chunked_prefill": chunked,
            "scheduling_policy": policy,
            "long_prefill_token_threshold": min(rng.choice([0, 0, 0, 16, 64, 100]), max_model_len),
            "watermark": rng.choice([0.0, 0.0, 0.0, 0.01, 0.1]),
            "reserve_full_isl": rng.random() < 0.8,
            **({"windows": windows} if kind == "hybrid" else {}),
            **({"async_scheduling": True} if kind == "async" else {}),
        },
        "requests": requests,
    }


def request(
    rng: random.Random, i: int, step: int, longest: int, *, lengths: str, prefixes: list[str], policy: str, exact: bool
) -> dict[str, Any]:
    """One request that fits the longest length."""
    ranges = {"short": (1, 40), "mixed": (1, longest // 2), "long": (longest // 4, longest - 2), "chat": (20, 300)}
    low, high = ranges[lengths]
    prompt_len = min(max(1, rng.randint(low, max(low, high))), longest - 1)
    output_len = min(max(1, int(rng.expovariate(1 / rng.choice([8, 60, 200])))), longest - prompt_len)
    row: dict[str, Any] = {"id": f"r{i}", "arrival_step": step, "prompt_len": prompt_len, "output_len": output_len}
    if prefixes and rng.random() < 0.7:
        row["prefix_id"] = rng.choice(prefixes)
        row["prefix_len"] = prompt_len if exact else rng.choice([prompt_len, rng.randint(1, prompt_len), 64, 100])
    if policy == "priority":
        row["priority"] = rng.choice([0, 0, 1, 2])
    return row
