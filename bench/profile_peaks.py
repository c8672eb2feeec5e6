#!/usr/bin/env python3
"""What is allocated at the peak of vLLM's profile run, and what stays reserved after it, on a GPU.

    profile_peaks.py VLLM MODELS OUT MODEL [flags of vllm serve ...] [-- MODEL flags ...]

Each server is started once with torch's history of its profile run (gpu_faults.py), and stopped. OUT/peaks.jsonl has a
line for each: the largest bytes by call site at the peak, and segments that only a small block keeps from going back.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_server import GpuServer, write_line

MIB = 1 << 20
MOST_SITES = 40


def place(frames: list[dict[str, Any]], depth: int = 3) -> str:
    """The innermost lines that are not torch's own."""
    own = [frame for frame in frames if frame["filename"].endswith(".py") and "/torch/" not in frame["filename"]]
    return " < ".join(f"{'/'.join(f['filename'].split('/')[-2:])}:{f['line']} {f['name']}" for f in own[:depth])


def at_peak(trace: list[dict[str, Any]]) -> tuple[int, Counter[str]]:
    """Bytes above the beginning at the peak, and whose they are."""
    live: dict[int, dict[str, Any]] = {}
    now = peak = index = 0
    for number, event in enumerate(trace):
        if event["action"] == "alloc":
            now += event["size"]
            if now > peak:
                peak, index = now, number
        elif event["action"] == "free_completed":
            now -= event["size"]
    for event in trace[: index + 1]:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
    sites: Counter[str] = Counter()
    for event in live.values():
        sites[place(event["frames"])] += event["size"]
    return peak, sites


def pinned(segments: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Segments with much free and something in use, that came with the profile run."""
    for segment in segments:
        free = segment["total_size"] - segment["allocated_size"]
        if segment["allocated_size"] and free > 8 * MIB:
            blocks = [
                [block["size"], place(block.get("frames", []), 2)]
                for block in segment["blocks"]
                if block["state"] == "active_allocated"
            ]
            yield {"size": segment["total_size"], "free": free, "blocks": sorted(blocks, reverse=True)[:4]}


def main() -> None:
    vllm, models, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    commands: list[list[str]] = [[]]
    for word in sys.argv[4:]:
        if word == "--":
            commands.append([])
        else:
            commands[-1].append(word)
    for number, (model, *flags) in enumerate(commands):
        server = GpuServer(
            vllm,
            models / model,
            out / f"{number}-{model}",
            *flags,
            legroom=False,
            limit_s=45.0,
            env={"LEGROOM_FAULTS_PROFILE": "1"},
        )
        row: dict[str, Any] = {"model": model, "flags": flags}
        try:
            server.start()
            path = server.folder / "profile.pickle"
            until_s = time.monotonic() + 5
            while not path.exists() and time.monotonic() < until_s:
                time.sleep(0.2)
            if path.exists():
                snapshot = pickle.loads(path.read_bytes())
                peak, sites = at_peak(snapshot["device_traces"][0])
                row |= {
                    "peak_bytes": peak,
                    "sites": sites.most_common(MOST_SITES),
                    "pinned": list(pinned(snapshot["segments"])),
                }
        finally:
            server.stop(4.0)
        write_line(out / "peaks.jsonl", row)
        print(model, row.get("peak_bytes"), flush=True)


if __name__ == "__main__":
    main()
