"""Hits over the size of a tier in host memory, on the trace that Mooncake published with its paper (FAST '25).

    python bench/tier_curve.py conversation_trace.jsonl [--limit 1000] [--model qwen3-8b] [--gpu h200]

The trace is `FAST25-release/traces/conversation_trace.jsonl` of github.com/kvcache-ai/Mooncake. Prints what
`legroom simulate TRACE --tier ... --tier-curve --json` answers, one line a size, and the room for 95 % of the hits.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

GIB = 1 << 30


def curve(trace: str, limit: int, model: str, gpu: str, tier: str) -> dict[str, object]:
    words = [
        "simulate",
        trace,
        "--limit",
        str(limit),
        "--model",
        model,
        "--gpu",
        gpu,
        "--max-model-len",
        "40960",
        "--tier",
        tier,
        "--tier-curve",
        "--json",
    ]
    command = [sys.executable, "-m", "legroom", *words]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(answer)["tier"]  # type: ignore[no-any-return]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--gpu", default="h200")
    # Room for everything, so that one replay is both the answer and the top of the curve.
    parser.add_argument("--tier", default="cpu=20000GiB@50GB/s")
    args = parser.parse_args()
    began = time.monotonic()
    tier: dict = curve(args.trace, args.limit, args.model, args.gpu, args.tier)
    for point in tier["curve"]:
        print(f"{point['bytes'] / GIB:10,.1f} GiB  {point['hit_ratio']:6.1%} of prompt tokens loaded")
    most = tier["most_hits"]
    print(f"{most['share_of_hits']:.0%} of the hits: {most['bytes'] / GIB:,.0f} GiB")
    print(f"found on the GPU: {tier['gpu_hit_ratio']:.1%}; {args.limit} requests, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
