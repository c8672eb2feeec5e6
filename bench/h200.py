"""`legroom plan` against instrumented runs of a real vLLM on one GPU.

    python bench/h200.py measured.jsonl [--configs DIR]
    python bench/h200.py tests/fixtures/h200_0.32.jsonl

The second form is legroom's own recording: the file holds the models' files too, and what legroom predicted before the
runs, whose coverage is printed beside today's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path

from scoring import Records, gpu_run_cases, read_records, score, share_within, spreads


def unpacked(records: Records, folder: Path) -> Records:
    """The runs of legroom's own recording, with its models' files written out below `folder`."""
    runs: Records = []
    for name, record in records:
        if record.get("kind") == "model":
            home = folder / record["name"]
            home.mkdir()
            for file, content in record["files"].items():
                (home / file).write_text(json.dumps(content))
        elif record.get("kind") == "run":
            runs.append((name, json.loads(json.dumps(record).replace("{models}", str(folder)))))
    return runs


def earlier_coverage(runs: Records) -> None:
    """How often the truth lay in the band that legroom gave before the run."""
    predicted = [run for _, run in runs if "predicted" in run]
    inside = [run["predicted"]["low"] <= run["available_kv_bytes"] <= run["predicted"]["high"] for run in predicted]
    if inside:
        print(f"  in the band predicted before the run: {sum(inside)} of {len(inside)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--configs", type=Path, help="default: kit/configs beside the file")
    args = parser.parse_args()
    records = read_records(args.file)
    with tempfile.TemporaryDirectory() as models:
        configs = args.configs or args.file.parent / "kit" / "configs"
        if own := unpacked(records, Path(models)):
            records, configs = own, Path(models)
        loaded = gpu_run_cases(records, configs)
        results = score(loaded.cases)
    earlier_coverage(records)
    covered = [result.kv_in_band for result in results if result.kv_in_band is not None]
    print(f"  in the band predicted now: {sum(covered)} of {len(covered)}")
    for result in results:
        errors = ", ".join(f"{name} {error:+.3%}" for name, error in result.errors.items() if name != "kv_of_card")
        print(f"{result.case.id:36s} {result.why_unanswered or errors}")
    for name, why in loaded.bad:
        print(f"{name:36s} {why}")
    kv = [abs(result.errors["kv"]) for result in results if "kv" in result.errors]
    median, worst = (statistics.median(kv), max(kv)) if kv else (math.nan, math.nan)
    peak = share_within(results, "peak_of_card", 0.01)
    rows = [("KV bytes, median error", median, 0.003, True), ("KV bytes, worst error", worst, 0.015, True)]
    rows.append(("peak use within 1 % of the card", peak, 0.90, False))
    for what, value, target, smaller in rows:
        met = value <= target if smaller else value >= target
        sign = "<=" if smaller else ">="
        print(f"  {what:34s} {value:8.3%}   target {sign} {target:.1%}   {'met' if met else 'MISSED'}")
    unanswered = sum(bool(result.why_unanswered) for result in results) + len(loaded.bad)
    document = {"n": len(kv), "unanswered": unanswered, "kv_median": median, "kv_worst": worst}
    document |= {"peak_within_1_percent": peak}
    document |= {f"{name}_median": spread.median for name, spread in spreads(results).items()}
    print(json.dumps({name: round(value, 5) for name, value in document.items()}))


if __name__ == "__main__":
    main()
