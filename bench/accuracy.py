"""How right `legroom plan` is on published start-ups: every figure beside its target and what peers reach.

    python bench/accuracy.py DATA_DIR          (startups.jsonl and models.json)

The last line is JSON. The peers' figures are means over twelve starts of 0.19.0 on H100s, so legroom's mean beside them
is over the starts of that release on H100s in the data.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from scoring import Result, published_cases, score, share_within, spreads, verdicts_right

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    data = parser.parse_args().data
    loaded = published_cases(data)
    began = time.perf_counter()
    results = score(loaded.cases)
    took = time.perf_counter() - began
    unanswered = sum(bool(result.why_unanswered) for result in results)
    print(f"{len(results)} start-ups, {unanswered + len(loaded.bad)} unanswered, each source weighs the same")
    for what, value, target, smaller in figures(results):
        met = value <= target if smaller else value >= target
        sign = "<=" if smaller else ">="
        print(f"  {what:44s} {value:8.2%}   target {sign} {target:.1%}   {'met' if met else 'MISSED'}")
    ours_by = peers_share(results)
    for what, peers in PEERS.items():
        ours = ours_by[what]
        ratios = ", ".join(f"{name} {theirs:.1%} ({theirs / ours:.0f}x)" for name, theirs in peers.items())
        print(f"  {what} error on H100s with 0.19.0: ours {ours:.3%}; {ratios}")
    print(f"  one prediction: {1000 * took / max(1, len(results)):.1f} ms")
    document = {what: round(value, 5) for what, value, _, _ in figures(results)}
    document |= {f"{what}, H100 0.19.0": round(value, 6) for what, value in ours_by.items()}
    document |= {"records": len(results), "unanswered": unanswered, "seconds": round(took, 3)}
    document |= {
        "flat": {name: {"median": round(s.median, 5), "p90": round(s.p90, 5)} for name, s in spreads(results).items()}
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
