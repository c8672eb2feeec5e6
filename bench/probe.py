"""`legroom plan` after `legroom probe`: the KV bytes of measured starts, before and after a record is used.

    python bench/probe.py tests/fixtures/probe_h200.json tests/fixtures/h200_0.32.jsonl [FILE ... --configs DIR ...]

Three plans of each start: by the facts, after a probe of the card, and after a probe of that very deployment
(`legroom probe -- vllm serve ...`), whose profile is what the recorded start itself reported. Says how many are within
0.1 % and, of those that a probe of the card leaves outside, which term is off. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

from h200 import unpacked
from scoring import ScoredStart, gpu_run_cases, read_records, score

from legroom.memory.deployment_memory import Measurements
from legroom.planning.card_store import CardRecord, card_record, measured_card

LIMIT = 0.001


def with_record(case: ScoredStart, record: CardRecord) -> ScoredStart:
    target = case.target
    return replace(case, target=replace(target, gpu=measured_card(target.gpu, [record], target.release, 1)))


def with_profile(case: ScoredStart, record: CardRecord) -> ScoredStart:
    printed = case.printed
    profile = Measurements(
        weights_bytes=printed.weights_bytes,
        activation_bytes=printed.activation_bytes,
        graph_estimate_bytes=printed.graph_estimate_bytes,
        profiled_non_torch_bytes=printed.non_torch_bytes,
        source="probe",
    )
    probed = with_record(case, record)
    return replace(probed, target=replace(probed.target, seen=profile))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--configs", type=Path, nargs="*", default=[])
    args = parser.parse_args()
    record = card_record(json.loads(args.record.read_text()))
    steps = ("facts", "card", "deployment")
    counts = {"n": 0} | {f"within_{name}": 0 for name in steps}
    worst = {f"worst_{name}": 0.0 for name in steps}
    for file in args.files:
        records = read_records(file)
        with tempfile.TemporaryDirectory() as models:
            own = unpacked(records, Path(models))
            configs = [Path(models)] if own else args.configs
            cases = gpu_run_cases(own or records, *configs).cases
            before, after = score(cases), score([with_record(case, record) for case in cases])
            own_start = score([with_profile(case, record) for case in cases])
        for old, new, exact in zip(before, after, own_start, strict=True):
            if "kv" not in old.errors:
                continue
            counts["n"] += 1
            for name, result in zip(steps, (old, new, exact), strict=True):
                error = abs(result.errors["kv"])
                counts[f"within_{name}"] += error <= LIMIT
                worst[f"worst_{name}"] = max(worst[f"worst_{name}"], error)
            if abs(new.errors["kv"]) > LIMIT:
                others = {
                    name: f"{error:+.2%}" for name, error in new.errors.items() if name in ("weights", "activation")
                }
                print(f"{old.case.id:36s} kv {old.errors['kv']:+.3%} -> {new.errors['kv']:+.3%}   {others}")
    print(json.dumps(counts | {name: round(value, 5) for name, value in worst.items()}))


if __name__ == "__main__":
    main()
