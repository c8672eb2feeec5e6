#!/usr/bin/env python3
"""`legroom probe` by its command on this machine's GPU, then plans that use it against real starts of `vllm serve`.

    probe_gpu.py VLLM PYTHON MODELS OUT [--starts 6] [--seconds 120]

PYTHON is that of VLLM. First the card (and what `--ranks 2` says of a machine with one card) and one deployment; then
every start is planned before it is made. OUT/probe.jsonl has a line for each.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from gpu_server import GpuServer, legroom_json, planned_blocks, write_line

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vllm")
    parser.add_argument("python")
    parser.add_argument("models", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--starts", type=int, default=len(STARTS))
    parser.add_argument("--stages", nargs="*", default=("probe", "starts"))
    parser.add_argument("--seconds", type=float, default=200.0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("LEGROOM_HOME", str(args.out / "home"))
    until_s = time.monotonic() + args.seconds
    if "probe" in args.stages:
        model, *flags = DEPLOYMENT
        probed(args.python, args.out, "--", "vllm", "serve", str(args.models / model), *flags)
        probed(args.python, args.out, "--ranks", "2")
    if "starts" in args.stages:
        for name, *words in STARTS[: args.starts]:
            if time.monotonic() < until_s - 15:
                start(args.vllm, args.models, args.out, name, tuple(words))


if __name__ == "__main__":
    main()
