"""How fast the search weighs settings: one command, a table and JSON.

    python bench/search.py

The limit is one second for 50,000 candidate settings on one core. Times are CPU seconds of this process, so that
other work on the machine does not count.
"""

from __future__ import annotations

import json
import time

from bench_harness import print_table

from legroom.facts.gpus import gpu
from legroom.facts.model_sources import load
from legroom.facts.releases import release
from legroom.planning.capacity_search import search_flags
from legroom.planning.plan import Target
from legroom.planning.search_space import CapacityGoal
from legroom.vllm.args import ServeArgs

LIMIT_S = 1.0
PER = 50_000
WISHES = [
    ("llama-3.1-8b", "rtx 4090", CapacityGoal(32768, 8, (1, 2))),
    ("llama-3.1-70b", "h100", CapacityGoal(32768, 16, (1, 2, 4, 8))),
    ("gemma-3-27b", "a100-80gb", CapacityGoal(131072, 4, (1, 2, 4))),
    ("qwen3-30b-a3b", "l40s", CapacityGoal(16384, 32, (1, 2, 4))),
]


def main() -> None:
    rows = []
    for name, card, goal in WISHES:
        target = Target(load(name), gpu(card), max(goal.gpus), release("0.32.0"))
        start = time.process_time()
        found = search_flags([target], ServeArgs(), goal)
        spent = time.process_time() - start
        rows.append(
            {
                "model": name,
                "gpu": card,
                "considered": found.considered,
                "cpu_s": round(spent, 3),
                "s_per_50k": round(spent / found.considered * PER, 3),
                "granted": found.best is not None,
            }
        )
    shown = [(*list(row.values())[:5], f"{row['s_per_50k'] / LIMIT_S:.0%}") for row in rows]
    print_table([("model", "gpu", "settings", "CPU s", "s / 50,000", "of limit"), *shown])
    print(json.dumps({"limit_s_per_50k": LIMIT_S, "worst": max(row["s_per_50k"] for row in rows), "rows": rows}))


if __name__ == "__main__":
    main()
