"""Measures a card with PyTorch alone. Runs with the Python of the user's vLLM, which has no legroom.

    python torch_stage.py RESULTS.jsonl [--ranks N]

Each finding is one line of RESULTS.jsonl, written at once, so that an aborted run keeps the earlier ones.
"""

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
_PIN_LIMIT_BYTES = 8 * GIB
_GRAPHS = 8
_GRAPH_NODES = (256, 1024)
"""Kernels per graph; the difference gives the cost of a node, the rest is the cost of a graph."""


def main() -> None:
    """Measures the card with torch and appends each result, or its error, to the results file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("results")
    parser.add_argument("--ranks", type=int, default=1)
    args = parser.parse_args()
    used = _nvidia_smi("memory.used")  # before this process has a CUDA context
    used_before = int(used) * MIB if used.isdigit() else None
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        _append_result(args.results, "no_gpu", {"torch": torch.__version__})
        return
    steps: dict[str, Callable[[], Any]] = {
        "card": lambda: _card_facts(torch, used_before),
        "allocator": lambda: _allocator_sizes(torch),
        "copies": lambda: _copy_rates(torch),
        "graphs": lambda: _graph_memory(torch),
        "host": lambda: _pinnable_memory(torch),
    }
    if args.ranks > 1:
        steps["communication"] = lambda: _nccl_memory(torch, args.ranks)
    for name, step in steps.items():
        try:
            finding = step()
        except Exception as error:  # a failed measurement does not stop the others
            finding = {"error": f"{type(error).__name__}: {error}"[:500]}
        _append_result(args.results, name, finding)


def _append_result(path: str, name: str, figures: dict[str, Any]) -> None:
    """Appends the `figures` of the measurement `name` to the results file, as a line of JSON."""
    with open(path, "a", encoding="utf-8") as file:  # noqa: PTH123 - plain Python that runs anywhere
        file.write(json.dumps({"finding": name, **figures}) + "\n")


def _nvidia_smi(field: str) -> str:
    """A `--query-gpu` field of the first visible GPU, without its unit; empty where nvidia-smi fails."""
    # The first id of CUDA_VISIBLE_DEVICES; 0 where it is not set.
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", f"--id={device}"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return output.strip().partition("\n")[0].strip()


def _card_facts(torch: Any, used_before: int | None) -> dict[str, Any]:
    """Name, versions and memory of the GPU, and bytes of a CUDA context: those in use now beyond `used_before`."""
    torch.cuda.init()
    free, total = torch.cuda.mem_get_info()
    return {
        "name": torch.cuda.get_device_properties(0).name,
        "count": torch.cuda.device_count(),
        "driver": _nvidia_smi("driver_version"),
        "cuda": torch.version.cuda or "",
        "torch": torch.__version__,
        "total_bytes": total,
        "others_bytes": used_before,
        "context_bytes": total - free - (used_before or 0),
    }


def _allocator_sizes(torch: Any) -> dict[str, Any]:
    """Allocated and reserved bytes of a one-byte tensor (small segment), and of one above 1 MiB (large segment)."""
    readings = {}
    for name, size in (("one_byte", 1), ("large", MIB + 1)):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
        taken = torch.cuda.memory_reserved() - before
        readings[name] = {"allocated_bytes": torch.cuda.memory_allocated(), "reserved_bytes": taken}
        del tensor
    torch.cuda.empty_cache()
    return readings


def _copy_rates(torch: Any) -> dict[str, Any]:
    """Copy rates between host and device in bytes per second, by direction."""
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
    rates = {f"{name}_bytes_s": _copy_bytes_per_s(torch, *pair) for name, pair in pairs.items()}
    del pinned, pageable, device, other, pairs
    torch.cuda.empty_cache()
    return rates


def _copy_bytes_per_s(torch: Any, target: Any, origin: Any) -> int:
    """Bytes per second of copies from the tensor `origin` into `target`, after a first copy that is not timed."""
    target.copy_(origin, non_blocking=True)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(_COPIES):
        target.copy_(origin, non_blocking=True)
    torch.cuda.synchronize()
    return int(_COPIES * _COPY_BYTES / (time.perf_counter() - started))


def _graph_memory(torch: Any) -> dict[str, Any]:
    """`node_bytes`: driver memory per kernel node of a captured CUDA graph, without PyTorch's pool."""
    tensor = torch.zeros(1024, device="cuda")
    taken_bytes = []
    for nodes in _GRAPH_NODES:
        _capture_graph(torch, tensor, 8)  # the first capture also loads modules
        torch.cuda.synchronize()
        free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
        graphs = [_capture_graph(torch, tensor, nodes) for _ in range(_GRAPHS)]
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
        taken = free - torch.cuda.mem_get_info()[0]
        taken_bytes.append(taken - (torch.cuda.memory_reserved() - reserved))
        del graphs
        torch.cuda.empty_cache()
    each = (taken_bytes[1] - taken_bytes[0]) / (_GRAPHS * (_GRAPH_NODES[1] - _GRAPH_NODES[0]))
    return {"node_bytes": int(max(0.0, each))}


def _capture_graph(torch: Any, tensor: Any, nodes: int) -> Any:
    """A new CUDA graph of `nodes` kernels on the tensor."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(nodes):
            tensor.add_(1)
    return graph


def _pinnable_memory(torch: Any) -> dict[str, Any]:
    """`pinned_bytes`: how much of 8 GiB, or half of free memory if less, can be pinned; `refused`: why no more."""
    limit = min(_PIN_LIMIT_BYTES, (_available_bytes() or _PIN_LIMIT_BYTES) // 2)
    pieces: list[Any] = []
    stopped = None
    while (len(pieces) + 1) * GIB <= limit:
        try:
            pieces.append(torch.empty(GIB, dtype=torch.uint8, pin_memory=True))
        except RuntimeError as error:
            stopped = str(error).splitlines()[0][:200] or None
            break
    return {"pinned_bytes": len(pieces) * GIB, "refused": stopped}


def _available_bytes() -> int | None:
    """The machine's available memory, or what the container's limit leaves of it; None where unknown."""
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


def _nccl_memory(torch: Any, ranks: int) -> dict[str, Any]:
    """`nccl_bytes`: what NCCL takes on a GPU, the most of all ranks; `error` with fewer GPUs than `ranks`."""
    if torch.cuda.device_count() < ranks:
        return {"error": f"{ranks} ranks need {ranks} cards, and there are {torch.cuda.device_count()}"}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    spawn = importlib.import_module("torch.multiprocessing")
    queue = spawn.get_context("spawn").SimpleQueue()
    spawn.spawn(_run_rank, args=(ranks, port, queue), nprocs=ranks)
    return {"nccl_bytes": max(queue.get() for _ in range(ranks))}


def _run_rank(rank: int, ranks: int, port: int, queue: Any) -> None:
    """Process of one rank: puts the bytes that NCCL took on its GPU into the queue."""
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
    queue.put(taken)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
