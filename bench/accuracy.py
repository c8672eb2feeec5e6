"""How right `legroom plan` is on published start-ups: every figure beside its target and what peers reach.

    python bench/accuracy.py DATA_DIR                          published starts (startups.jsonl and models.json)
    python bench/accuracy.py measured.jsonl [--configs DIR]    instrumented runs of a real vLLM on one GPU
    python bench/accuracy.py tests/fixtures/h200_0.32.jsonl [--probe tests/fixtures/probe_h200.json]

The peers' figures are means over twelve starts of 0.19.0 on H100s, so legroom's mean beside them is over the starts of
that release on H100s in the data. The third form is legroom's own recording, which holds the models' files and what
legroom predicted before the runs. With --probe every start is planned by the facts, after a probe of the card, and
after a probe of that very deployment (what the recorded start itself reported); it counts those within 0.1 %.
The last line is JSON.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench_harness import arguments
from scoring import (
    Result,
    ScoredStart,
    gpu_runs,
    print_figures,
    published_cases,
    score,
    share_within,
    spreads,
    verdicts_right,
)

from legroom.memory.deployment_memory import Measurements
from legroom.planning.card_store import CardRecord, card_record, measured_card

PROBED_WITHIN = 0.001
PEERS = {
    "weights mean": {"KV-planner": 0.005, "llm-d-planner": 0.010, "vramscout": 0.010, "kvfit": 0.021},
    "KV mean": {
        "llm-d-planner (fitted)": 0.012,
        "aiconfigurator": 0.044,
        "vramscout": 0.050,
        "llm-d-planner": 0.078,
        "kvfit": 0.080,
        "hf-mem": 0.097,
    },
}


def figures(results: Sequence[Result]) -> list[tuple[str, float, float, bool]]:
    """(what, value, target, whether smaller is better)."""
    by_measure = spreads(results)
    weights, kv, card = (by_measure[name] for name in ("weights", "kv", "kv_of_card"))
    return [
        ("weights, median error", weights.median_by_source, 0.003, True),
        ("weights, 90th percentile", weights.p90_by_source, 0.02, True),
        ("KV bytes, median error", kv.median_by_source, 0.015, True),
        ("KV bytes off, 90th percentile of the card", card.p90_by_source, 0.02, True),
        ("tokens exact to rounding", share_within(results, "tokens_per_byte", 0.005), 0.97, False),
        ("starts called right", verdicts_right(results, started=True), 0.97, False),
        ("start-up failures called right", verdicts_right(results, started=False), 0.80, False),
    ]


def peers_share(results: Sequence[Result]) -> dict[str, float]:
    """Mean absolute errors on the kind of starts that the peers were measured on."""
    alike = [r for r in results if r.case.target.gpu.name.startswith("NVIDIA H100") and _release(r) == "0.19.0"]
    means = {}
    for what, measure in (("weights mean", "weights"), ("KV mean", "kv")):
        errors = [abs(r.errors[measure]) for r in alike if measure in r.errors]
        means[what] = sum(errors) / max(1, len(errors))
    return means


def _release(result: Result) -> str:
    return result.case.target.release.version


def published_starts(folder: Path) -> dict[str, object]:
    loaded = published_cases(folder)
    began = time.perf_counter()
    results = score(loaded.cases)
    took = time.perf_counter() - began
    unanswered = sum(bool(result.why_unanswered) for result in results)
    print(f"{len(results)} start-ups, {unanswered + len(loaded.bad)} unanswered, each source weighs the same")
    print_figures(figures(results))
    ours_by = peers_share(results)
    for what, peers in PEERS.items():
        ours = ours_by[what]
        ratios = ", ".join(f"{name} {theirs:.1%} ({theirs / ours:.0f}x)" for name, theirs in peers.items())
        print(f"  {what} error on H100s with 0.19.0: ours {ours:.3%}; {ratios}")
    print(f"  one prediction: {1000 * took / max(1, len(results)):.1f} ms")
    document: dict[str, object] = {what: round(value, 5) for what, value, _, _ in figures(results)}
    document |= {f"{what}, H100 0.19.0": round(value, 6) for what, value in ours_by.items()}
    document |= {"records": len(results), "unanswered": unanswered, "seconds": round(took, 3)}
    document |= {
        "flat": {name: {"median": round(s.median, 5), "p90": round(s.p90, 5)} for name, s in spreads(results).items()}
    }
    return document


def measured_starts(path: Path, configs: Path | None) -> dict[str, object]:
    """KV bytes and peak use of instrumented runs, and how often the truth lay in the band, now and before the run."""
    with gpu_runs(path, configs or path.parent / "kit" / "configs") as (records, loaded):
        results = score(loaded.cases)
    earlier = [
        run["predicted"]["low"] <= run["available_kv_bytes"] <= run["predicted"]["high"]
        for _, run in records
        if "predicted" in run
    ]
    if earlier:
        print(f"  in the band predicted before the run: {sum(earlier)} of {len(earlier)}")
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
    print_figures([*rows, ("peak use within 1 % of the card", peak, 0.90, False)])
    unanswered = sum(bool(result.why_unanswered) for result in results) + len(loaded.bad)
    document = {"n": len(kv), "unanswered": unanswered, "kv_median": median, "kv_worst": worst}
    document |= {"peak_within_1_percent": peak}
    document |= {f"{name}_median": spread.median for name, spread in spreads(results).items()}
    return {name: round(value, 5) for name, value in document.items()}


def probed_starts(path: Path, configs: Path | None, record: CardRecord) -> dict[str, object]:
    """How many starts are within PROBED_WITHIN of their KV bytes before and after a probe."""
    with gpu_runs(path, *([configs] if configs else [])) as (_, loaded):
        probed = [with_record(case, record) for case in loaded.cases]
        steps = {
            "facts": score(loaded.cases),
            "card": score(probed),
            "deployment": score(with_own_profile(case) for case in probed),
        }
    document: dict[str, object] = {}
    for name, results in steps.items():
        errors = [abs(result.errors["kv"]) for result in results if "kv" in result.errors]
        within = sum(error <= PROBED_WITHIN for error in errors)
        document |= {"n": len(errors), f"within_{name}": within, f"worst_{name}": round(max(errors, default=0.0), 5)}
    for result in steps["card"]:
        if abs(result.errors.get("kv", 0.0)) > PROBED_WITHIN:
            others = {name: f"{result.errors[name]:+.2%}" for name in ("kv", "weights", "activation")}
            print(f"{result.case.id:36s} {others}")
    return document


def with_record(case: ScoredStart, record: CardRecord) -> ScoredStart:
    target = case.target
    return replace(case, target=replace(target, gpu=measured_card(target.gpu, [record], target.release, 1)))


def with_own_profile(case: ScoredStart) -> ScoredStart:
    """Planned from what the start itself reported."""
    printed = case.printed
    profile = Measurements(
        weights_bytes=printed.weights_bytes,
        activation_bytes=printed.activation_bytes,
        graph_estimate_bytes=printed.graph_estimate_bytes,
        profiled_non_torch_bytes=printed.non_torch_bytes,
        source="probe",
    )
    return replace(case, target=replace(case.target, seen=profile))


def main() -> None:
    args = arguments(__doc__, "data:path", configs=Path, probe=Path)
    if args.probe:
        document = probed_starts(args.data, args.configs, card_record(json.loads(args.probe.read_text())))
    else:
        document = published_starts(args.data) if args.data.is_dir() else measured_starts(args.data, args.configs)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
