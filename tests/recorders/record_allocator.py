"""Records what PyTorch's caching allocator does on a GPU, request by request, for legroom's model of it.

    python tests/recorders/record_allocator.py OUT       # needs torch with a GPU and nothing of legroom

OUT/patterns.jsonl has a line a case: the settings, the limit, and each request with what was allocated and reserved
after it. OUT/snapshots.tar.xz has torch's own memory snapshots of small programs with a known fault: a leak, pieces
that pin segments, a pool of CUDA graphs. Each case runs in a process of its own, forked before CUDA starts.
"""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import random
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MIB, GIB = 1 << 20, 1 << 30
LIMIT = 4 * GIB
SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:64",
    "max_split_size_mb:20",
    "roundup_power2_divisions:4",
    "expandable_segments:True,roundup_power2_divisions:8",
)
SEEDS = (1, 2)
FAULT_SEEDS = (11, 12, 13, 14, 15)


def apply(settings: str) -> None:
    if settings:
        torch.cuda.memory._set_allocator_settings(settings)


def limit_to(limit: int) -> int:
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(limit / total)
    return int(limit / total * total)


def request_sizes(seed: int) -> list[tuple[str, int, int]]:
    """("allocate" or "free", number, bytes); sizes of every pool, and phases that leave holes."""
    dice = random.Random(seed)
    live: dict[int, int] = {}
    requests: list[tuple[str, int, int]] = []
    for number in range(700):
        if live and (dice.random() < 0.45 or sum(live.values()) > 3.4 * GIB):
            victim = dice.choice(list(live))
            requests.append(("free", victim, live.pop(victim)))
            continue
        kind = dice.random()
        if kind < 0.35:
            size = dice.randint(1, MIB)
        elif kind < 0.6:
            size = dice.randint(MIB + 1, 10 * MIB)
        elif kind < 0.9:
            size = dice.randint(10 * MIB, 120 * MIB)
        else:
            size = dice.randint(120 * MIB, 900 * MIB)
        live[number] = size
        requests.append(("allocate", number, size))
    return requests


def pattern(settings: str, seed: int) -> dict[str, Any]:
    apply(settings)
    torch.cuda.init()
    limit = limit_to(LIMIT)
    tensors: dict[int, Any] = {}
    rows = []
    for what, number, size in request_sizes(seed):
        outcome = what
        if what == "free":
            tensors.pop(number, None)
        else:
            try:
                tensors[number] = torch.empty(size, dtype=torch.uint8, device="cuda")
            except torch.cuda.OutOfMemoryError:
                outcome = "oom"
        counts = torch.cuda.memory_stats()
        rows.append(
            [
                outcome,
                number,
                size,
                counts["allocated_bytes.all.current"],
                counts["reserved_bytes.all.current"],
                counts["num_alloc_retries"],
            ]
        )
    return {"case": f"{settings or 'default'}/{seed}", "settings": settings, "limit_bytes": limit, "requests": rows}


def leak_here(kept: list[Any], size: int) -> None:
    kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))


def serve_here(size: int) -> None:
    del_later = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(3)]
    del del_later


def leak(seed: int) -> dict[str, Any]:
    dice, kept, snapshots = random.Random(seed), [], []
    weights = [torch.empty(dice.randint(50, 90) * MIB, dtype=torch.uint8, device="cuda") for _ in range(6)]
    for _ in range(2):
        for _ in range(30):
            leak_here(kept, dice.randint(2, 9) * MIB)
            serve_here(dice.randint(10, 60) * MIB)
        snapshots.append(torch.cuda.memory._snapshot())
    return {f"leak-{seed}-before": snapshots[0], f"leak-{seed}-after": snapshots[1], "weights": len(weights)}


def pinned_segments(seed: int) -> dict[str, Any]:
    dice = random.Random(seed)
    limit_to(LIMIT)
    segment = dice.choice((384, 448, 512)) * MIB
    count = LIMIT // segment - 1
    whole = [torch.empty(segment, dtype=torch.uint8, device="cuda") for _ in range(count)]
    del whole
    gc.collect()
    large, pins = [], []
    for _ in range(count):
        large.append(torch.empty(segment * 6 // 10, dtype=torch.uint8, device="cuda"))
        pins.append(torch.empty(segment * 3 // 10, dtype=torch.uint8, device="cuda"))
    large.clear()
    outcome = "served"
    try:
        torch.empty(GIB, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        outcome = "oom"
    return {f"pinned-{seed}": torch.cuda.memory._snapshot(), "outcome": outcome, "pins": len(pins)}


def burst(seed: int) -> dict[str, Any]:
    """Too much at once, and no fragmentation: nothing but more memory would have served it."""
    dice = random.Random(seed)
    limit_to(LIMIT)
    kept = [torch.empty(dice.randint(300, 420) * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
    outcome = "served"
    try:
        kept.append(torch.empty(dice.randint(2, 3) * GIB, dtype=torch.uint8, device="cuda"))
    except torch.cuda.OutOfMemoryError:
        outcome = "oom"
    return {f"burst-{seed}": torch.cuda.memory._snapshot(), "outcome": outcome, "kept": len(kept)}


def graph_pool(seed: int) -> dict[str, Any]:
    weights = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    static = torch.randn(256, 2048, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            static @ weights
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = static
        for _ in range(4):
            out = torch.relu(out @ weights)
    graph.replay()
    torch.cuda.synchronize()
    return {f"graphs-{seed}": torch.cuda.memory._snapshot(), "replayed": True, "rows": out.shape[0]}


def fault(what: Callable[[int], dict[str, Any]], seed: int, settings: str = "") -> dict[str, Any]:
    apply(settings)
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(max_entries=20000, stacks="python")
    return what(seed)


def in_a_child(task: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            result = task()
        except BaseException as error:
            result = {"error": f"{type(error).__name__}: {error}"[:2000]}
        with os.fdopen(write, "wb") as pipe:
            pipe.write(pickle.dumps(result))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        content = pipe.read()
    os.waitpid(child, 0)
    return dict(pickle.loads(content)) if content else {"error": "the process died"}


def main() -> None:
    out = Path(sys.argv[1])
    started = time.monotonic()
    with (out / "patterns.jsonl").open("w") as file:
        for settings in SETTINGS:
            for seed in SEEDS:
                file.write(json.dumps(in_a_child(lambda s=settings, n=seed: pattern(s, n))) + "\n")
                file.flush()
    print(f"patterns: {time.monotonic() - started:.1f} s", flush=True)
    tasks: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    for seed in FAULT_SEEDS:
        tasks += [(f"{f.__name__}", lambda f=f, n=seed: fault(f, n)) for f in (leak, pinned_segments, burst)]
    tasks.append(("pinned_segments expandable", lambda: fault(pinned_segments, 21, "expandable_segments:True")))
    tasks.append(("graph_pool", lambda: fault(graph_pool, 31)))
    with tarfile.open(out / "snapshots.tar.xz", "w:xz") as archive, (out / "snapshots.jsonl").open("w") as index:
        for name, task in tasks:
            result = in_a_child(task)
            index.write(
                json.dumps({"task": name, **{k: v for k, v in result.items() if not isinstance(v, dict)}}) + "\n"
            )
            for key, snapshot in result.items():
                if isinstance(snapshot, dict):
                    content = pickle.dumps(snapshot)
                    entry = tarfile.TarInfo(f"{key}{'-expandable' if 'expandable' in name else ''}.pickle")
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
    print(f"all: {time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
