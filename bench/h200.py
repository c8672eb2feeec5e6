"""`legroom plan` against instrumented runs of a real vLLM on one GPU.

    python bench/h200.py measured.jsonl [--configs DIR]

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path

from legroom.planning import scoring_data
from legroom.planning.scoring import score, summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--configs", type=Path, help="default: kit/configs beside the file")
    args = parser.parse_args()
    configs = args.configs or args.file.parent / "kit" / "configs"
    loaded = scoring_data.gpu_run_cases(scoring_data.read_records(args.file), configs)
    results = score(loaded.cases)
    for result in results:
        errors = ", ".join(f"{name} {error:+.3%}" for name, error in result.errors.items() if name != "kv_of_card")
        print(f"{result.case.id:36s} {result.why_unanswered or errors}")
    for bad in loaded.bad:
        print(f"{bad.id:36s} {bad.why}")
    whole = summary(results)
    kv = [abs(result.errors["kv"]) for result in results if "kv" in result.errors]
    median, worst = (statistics.median(kv), max(kv)) if kv else (math.nan, math.nan)
    peak = whole.peak_within_1_percent_of_card or 0.0
    rows = [("KV bytes, median error", median, 0.003, True), ("KV bytes, worst error", worst, 0.015, True)]
    rows.append(("peak use within 1 % of the card", peak, 0.90, False))
    for what, value, target, smaller in rows:
        met = value <= target if smaller else value >= target
        sign = "<=" if smaller else ">="
        print(f"  {what:34s} {value:8.3%}   target {sign} {target:.1%}   {'met' if met else 'MISSED'}")
    document = {"n": len(kv), "unanswered": whole.unanswered + len(loaded.bad), "kv_median": median, "kv_worst": worst}
    document |= {"peak_within_1_percent": peak}
    document |= {f"{name}_median": spread.median for name, spread in whole.spreads.items()}
    print(json.dumps({name: round(value, 5) for name, value in document.items()}))


if __name__ == "__main__":
    main()
