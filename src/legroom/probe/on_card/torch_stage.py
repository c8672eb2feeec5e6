"""Measures a card with PyTorch alone. Runs with the Python of the user's vLLM, which has no legroom.

    python torch_stage.py RESULTS.jsonl [--ranks N] [--pin-limit-gib N]

Each finding is one line of RESULTS.jsonl, written at once, so that an aborted run keeps the earlier ones.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any

MIB = 1 << 20
GIB = 1 << 30
_COPY_BYTES = 512 * MIB
_COPIES = 5
_GRAPHS = 8
_GRAPH_NODES = (256, 1024)
"""Kernels per graph; the difference gives the cost of a node, the rest is the cost of a graph."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("results")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--pin-limit-gib", type=float, default=8.0)
    args = parser.parse_args()
    used_before = _used_by_others()
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        _write(args.results, "no_gpu", {"torch": torch.__version__})
        return
    steps: dict[str, Callable[[], Any]] = {
        "card": lambda: _card(torch, used_before),
        "allocator": lambda: _allocator(torch),
        "copies": lambda: _copies(torch),
        "graphs": lambda: _graphs(torch),
        "host": lambda: _host(torch, args.pin_limit_gib),
    }
    if args.ranks > 1:
        steps["communication"] = lambda: _communication(torch, args.ranks)
    for name, step in steps.items():
        started = time.monotonic()
        try:
            finding = step()
        except Exception as error:  # a failed measurement does not stop the others
            finding = {"error": f"{type(error).__name__}: {error}"[:500]}
        _write(args.results, name, {**finding, "took_s": round(time.monotonic() - started, 2)})


def _write(path: str, name: str, finding: dict[str, Any]) -> None:
    with open(path, "a", encoding="utf-8") as file:  # noqa: PTH123 - plain Python that runs anywhere
        file.write(json.dumps({"finding": name, **finding}) + "\n")


def _smi(fields: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", f"--id={_first_visible()}"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [field.strip() for field in output.strip().splitlines()[0].split(",")] if output.strip() else []


def _first_visible() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"


def _used_by_others() -> int | None:
    """Memory in use before this process has a CUDA context."""
    used = _smi("memory.used")
    return int(used[0]) * MIB if used and used[0].isdigit() else None


def _card(torch: Any, used_before: int | None) -> dict[str, Any]:
    torch.cuda.init()
    free, total = torch.cuda.mem_get_info()
    driver = _smi("driver_version")
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "compute_capability": [properties.major, properties.minor],
        "count": torch.cuda.device_count(),
        "driver": driver[0] if driver else "",
        "cuda": torch.version.cuda or "",
        "torch": torch.__version__,
        "total_bytes": total,
        "free_bytes": free,
        "others_bytes": used_before,
        "context_bytes": total - free - (used_before or 0),
    }


def _allocator(torch: Any) -> dict[str, Any]:
    """Allocated and reserved bytes for sizes around the allocator's thresholds."""
    readings = {}
    for name, size in {
        "one_byte": 1,
        "small": MIB,
        "large": MIB + 1,
        "ten_mib": 10 * MIB,
        "eleven_mib": 11 * MIB + 1,
    }.items():
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        free = torch.cuda.mem_get_info()[0]
        tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
        readings[name] = {
            "asked_bytes": size,
            "allocated_bytes": torch.cuda.memory_allocated(),
            "reserved_bytes": torch.cuda.memory_reserved() - before,
            "taken_bytes": free - torch.cuda.mem_get_info()[0],
        }
        del tensor
    torch.cuda.empty_cache()
    return {
        "settings": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        **readings,
    }


def _copies(torch: Any) -> dict[str, Any]:
    pinned = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    pageable = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    device = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    other = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    pairs = {
        "host_to_device": (device, pinned),
        "device_to_host": (pinned, device),
        "device_to_device": (other, device),
        "pageable_to_device": (device, pageable),
    }
    rates = {f"{name}_bytes_s": _bytes_a_second(torch, *pair) for name, pair in pairs.items()}
    del pinned, pageable, device, other, pairs
    torch.cuda.empty_cache()
    return rates


def _bytes_a_second(torch: Any, target: Any, origin: Any) -> int:
    target.copy_(origin, non_blocking=True)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(_COPIES):
        target.copy_(origin, non_blocking=True)
    torch.cuda.synchronize()
    return int(_COPIES * _COPY_BYTES / (time.perf_counter() - started))


def _graphs(torch: Any) -> dict[str, Any]:
    """Driver memory of captured graphs, without the pool that PyTorch counts."""
    tensor = torch.zeros(1024, device="cuda")
    rows = []
    for nodes in _GRAPH_NODES:
        _capture(torch, tensor, 8)  # the first capture also loads modules
        torch.cuda.synchronize()
        free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
        graphs = [_capture(torch, tensor, nodes) for _ in range(_GRAPHS)]
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
        taken = free - torch.cuda.mem_get_info()[0]
        pool = torch.cuda.memory_reserved() - reserved
        rows.append({"graphs": _GRAPHS, "nodes": nodes, "taken_bytes": taken - pool, "pool_bytes": pool})
        del graphs
        torch.cuda.empty_cache()
    (few, many) = rows
    each = (many["taken_bytes"] - few["taken_bytes"]) / (_GRAPHS * (many["nodes"] - few["nodes"]))
    return {"shapes": rows, "node_bytes": int(max(0.0, each))}


def _capture(torch: Any, tensor: Any, nodes: int) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(nodes):
            tensor.add_(1)
    return graph


def _host(torch: Any, limit_gib: float) -> dict[str, Any]:
    """How much of the host's memory can be pinned, tried in pieces of 1 GiB up to a limit."""
    resource = importlib.import_module("resource")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    available = _available_bytes()
    limit = min(int(limit_gib * GIB), (available or int(limit_gib * GIB)) // 2)
    pieces: list[Any] = []
    stopped = ""
    started = time.perf_counter()
    while (len(pieces) + 1) * GIB <= limit:
        try:
            pieces.append(torch.empty(GIB, dtype=torch.uint8, pin_memory=True))
        except RuntimeError as error:
            stopped = str(error).splitlines()[0][:200]
            break
    took = time.perf_counter() - started
    pinned = len(pieces) * GIB
    del pieces
    return {
        "available_bytes": available,
        "memlock_limit_bytes": None if soft == resource.RLIM_INFINITY else soft,
        "pinned_bytes": pinned,
        "tried_bytes": limit,
        "refused": stopped or None,
        "pin_bytes_s": int(pinned / took) if pinned and took else None,
    }


def _available_bytes() -> int | None:
    """The machine's available memory, or what the container's limit leaves of it."""
    values: list[int] = []
    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # noqa: PTH123
            values += [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable")]
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit:  # noqa: PTH123
            most = limit.read().strip()
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as current:  # noqa: PTH123
            values += [int(most) - int(current.read())] if most.isdigit() else []
    except (OSError, ValueError):
        pass
    return min(values) if values else None


def _communication(torch: Any, ranks: int) -> dict[str, Any]:
    if torch.cuda.device_count() < ranks:
        return {"error": f"{ranks} ranks need {ranks} cards, and there are {torch.cuda.device_count()}"}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    spawn = importlib.import_module("torch.multiprocessing")
    queue = spawn.get_context("spawn").SimpleQueue()
    spawn.spawn(_rank, args=(ranks, port, queue), nprocs=ranks)
    rows = [queue.get() for _ in range(ranks)]
    return {
        "ranks": ranks,
        "nccl_bytes": max(taken for _, taken in rows),
        "by_rank_bytes": [t for _, t in sorted(rows)],
    }


def _rank(rank: int, ranks: int, port: int, queue: Any) -> None:
    torch = importlib.import_module("torch")
    distributed = importlib.import_module("torch.distributed")
    torch.cuda.set_device(rank)
    tensor = torch.ones(MIB, device="cuda")
    torch.cuda.synchronize()
    free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("nccl", init_method=address, rank=rank, world_size=ranks)
    distributed.all_reduce(tensor)
    torch.cuda.synchronize()
    taken = free - torch.cuda.mem_get_info()[0] - (torch.cuda.memory_reserved() - reserved)
    queue.put((rank, taken))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
