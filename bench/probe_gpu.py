#!/usr/bin/env python3
"""`legroom probe` by its command on this machine's GPU, then plans that use it against real starts of `vllm serve`.

    probe_gpu.py VLLM PYTHON MODELS OUT [--starts 6] [--seconds 120]

PYTHON is that of VLLM. First the card (and what `--ranks 2` says of a machine with one card) and one deployment; then
every start is planned before it is made. OUT/probe.jsonl has a line for each.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from bench_harness import arguments, write_line
from gpu_server import GpuServer, legroom_json, planned_blocks

EAGER = ("--enforce-eager",)
DEPLOYMENT = ("llama-3.2-3b", "--max-model-len", "8192", "--gpu-memory-utilization", "0.8", *EAGER)
STARTS: tuple[tuple[str, ...], ...] = (
    DEPLOYMENT,
    ("qwen3-8b", "--max-model-len", "32768", *EAGER),
    ("llama-3.1-8b", "--max-num-batched-tokens", "16384", "--gpu-memory-utilization", "0.5", *EAGER),
    ("mistral-7b-v0.3", "--max-model-len", "16384", "--kv-cache-dtype", "fp8", *EAGER),
    ("gemma-3-4b-text", "--max-num-seqs", "512", *EAGER),
    ("qwen2.5-7b", "--max-model-len", "8192", "--gpu-memory-utilization", "0.95", *EAGER),
    ("phi-3.5-mini", "--max-model-len", "4096", *EAGER),
    ("qwen3-14b", "--max-model-len", "16384", "--max-num-seqs", "128", *EAGER),
)


def probed(python: str, out: Path, *words: str) -> None:
    began_s = time.monotonic()
    answer = legroom_json("probe", "--python", python, *words, timeout_s=200.0)
    row: dict[str, Any] = {"probe": list(words), "took_s": round(time.monotonic() - began_s, 1), "answer": answer}
    write_line(out / "probe.jsonl", row)
    print(json.dumps(row)[:1500], flush=True)


def start(vllm: str, models: Path, out: Path, name: str, flags: tuple[str, ...]) -> None:
    """Planned by the facts, planned after the probe, and then started."""
    row: dict[str, Any] = {"model": name, "flags": list(flags)}
    home = os.environ["LEGROOM_HOME"]
    row["planned_after_probe"] = planned_blocks(models / name, flags, "h200")
    os.environ["LEGROOM_HOME"] = str(out / "empty-home")
    row["planned_by_facts"] = planned_blocks(models / name, flags, "h200")
    os.environ["LEGROOM_HOME"] = home
    server = GpuServer(vllm, models / name, out / name, *flags)
    try:
        row["started"] = server.start()
        row["start_s"] = round(time.monotonic() - server.began_s, 1)
        row["blocks"] = server.num_blocks() if row["started"] else None
    finally:
        server.stop()
    for source in ("planned_after_probe", "planned_by_facts"):
        if row["blocks"] and row[source]:
            row[f"{source}_error"] = row[source] / row["blocks"] - 1
    write_line(out / "probe.jsonl", row)
    print(json.dumps(row), flush=True)


def main() -> None:
    args = arguments(__doc__, "vllm", "python", "models:path", "out:path", starts=len(STARTS), seconds=200.0)
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("LEGROOM_HOME", str(args.out / "home"))
    until_s = time.monotonic() + args.seconds
    model, *flags = DEPLOYMENT
    probed(args.python, args.out, "--", "vllm", "serve", str(args.models / model), *flags)
    probed(args.python, args.out, "--ranks", "2")
    for name, *words in STARTS[: args.starts]:
        if time.monotonic() < until_s - 15:
            start(args.vllm, args.models, args.out, name, tuple(words))


if __name__ == "__main__":
    main()
