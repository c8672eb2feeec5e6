"""Fit the error bands to real start-ups, and say how well they hold on start-ups that did not make them.

    python bench/fit_bands.py TRUTH_DIR GPU_DIR [--write]

TRUTH_DIR holds `startups.jsonl` and `models.json`, GPU_DIR `measured*.jsonl` and `kit/configs*`. Every rule of the
memory model says how sure it is of its figure; here each class of deployments gets the factor on that at which nine
starts in ten lie inside. A class with few starts borrows from the class above it, as if it had seen PRIOR more starts
like that one's. The coverage in the table is of starts whose source (the repository that published them; of measured
runs, the model) was left out of the fit. With --write the bands go to `src/legroom/facts/data/bands.json`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from legroom.facts.fit import ROOT, BandRow, band, bands, sum_band
from legroom.figures import Figure, exact
from legroom.memory.activation.peak import activation, activation_cold
from legroom.memory.bands import BandClass, band_class, kv_scale, scale
from legroom.memory.graphs import graph_estimate
from legroom.memory.overhead import non_torch, outside
from legroom.memory.weights.loaded import weights
from legroom.planning import scoring_data
from legroom.planning.plan import Plan, cold_start
from legroom.planning.scoring import Result, ScoredStart, predict, weighted_quantile
from legroom.units import GIB, MIB

BANDS = Path(__file__).parent.parent / "src/legroom/facts/data/bands.json"
COVERAGE = 0.9
PRIOR = 12
FEW = 10
"""Below this many starts a class says nothing of its worst."""
BEYOND = 1.5
"""How much farther off than the worst seen a class may be."""
SMALLEST_KV = GIB // 2
ANOTHER_START = 0.2
"""Off by more of the card than this, a record tells of another start: two cards of one name, unstated TP sizes."""
EXACT_BYTES = 4 * MIB
EXACT_SHARE = 0.95
"""Weights of a class are exact where this share of its start-ups is, to EXACT_BYTES or the log's rounding."""
CHANGED_WEIGHTS = ("unslothai/", "Sandermage/")
"""Sources whose servers hold LoRA buffers or patches that their records do not state: their weights prove nothing."""
FIGURES = ("activation", "cuda_graph", "non_torch", "outside", "kv_cache")
SKEWED = ("outside",)
"""Figures that mostly err to one side: the card holds less than the sum of what every part may take."""
Tables = Mapping[str, Mapping[str, BandRow]]


@dataclass(frozen=True)
class Miss:
    """How far off one figure of one start-up was."""

    error: int
    rounding: int
    scale: float
    """What its own rule expected; of the KV cache without the weights' part."""

    @property
    def truth_above(self) -> int:
        """How far the truth lies above the figure (below: negative), less what the log rounds off."""
        return int(math.copysign(max(0, abs(self.error) - self.rounding), -self.error))


@dataclass(frozen=True)
class Start:
    """One real start-up and its errors."""

    id: str
    source: str
    of: BandClass
    total: int
    misses: Mapping[str, Miss]
    weights_bytes: int


@dataclass(frozen=True)
class Seen:
    """One error of one figure, ready for its class."""

    path: tuple[str, ...]
    source: str
    size: float
    """In units of the scale of its figure."""
    of_card: float


def cases(truth: Path, gpu: Path) -> list[ScoredStart]:
    records = scoring_data.read_records(truth / "startups.jsonl")
    found = list(scoring_data.published_cases(records, scoring_data.read_models(truth / "models.json")).cases)
    configs = sorted((gpu / "kit").glob("configs*"))
    for path in sorted(gpu.glob("measured*.jsonl")):
        found += scoring_data.gpu_run_cases(scoring_data.read_records(path), *configs).cases
    return found


def start_of(result: Result) -> Start | None:
    case, planned = result.case, result.plan
    if planned is None:
        return None
    planned = _in_the_state_it_was(case, planned)
    layout, printed, target = planned.layout, case.printed, planned.target
    total = layout.total_bytes
    kv = printed.kv_bytes if printed.kv_bytes and printed.kv_bytes > SMALLEST_KV else None
    if kv and abs(layout.kv_cache.bytes - kv) > ANOTHER_START * total:
        print(f"left out: {case.id}, off by {(layout.kv_cache.bytes - kv) / total:+.0%} of the card")
        return None
    what = (target.model, planned.settings, target.gpu)
    profile = activation_cold if layout.activation.terms[0].label == "first start" else activation
    rules = {
        "activation": profile(*what, layout.rank), "cuda_graph": graph_estimate(*what),
        "non_torch": non_torch(*what, layout.rank), "outside": outside(*what, layout.rank),
    }  # fmt: skip
    truths = {
        "activation": printed.activation_bytes, "cuda_graph": printed.graph_estimate_bytes,
        "non_torch": printed.non_torch_bytes, "outside": _outside(planned, printed.peak_used_bytes),
    }  # fmt: skip
    misses: dict[str, Miss] = {}
    for name, value in truths.items():
        if value is not None and rules[name].kind == "estimated":
            misses[name] = Miss(rules[name].bytes - value, printed.rounding_bytes, scale(rules[name], planned.settings))
    rule = weights(*what, layout.rank)
    if printed.weights_bytes and not any(name in case.source for name in CHANGED_WEIGHTS):
        misses["weights"] = Miss(rule.bytes - printed.weights_bytes, printed.rounding_bytes, rule.bytes)
    if kv and planned.settings.kv_cache_memory_bytes is None:
        parts: Sequence[Figure] = (exact(0), rules["activation"], rules["cuda_graph"], rules["non_torch"])
        misses["kv_cache"] = Miss(
            layout.kv_cache.bytes - kv, printed.rounding_bytes, kv_scale(parts, planned.settings, target.gpu)
        )
    return Start(case.id, case.source, band_class(*what), total, misses, rule.bytes)


def _in_the_state_it_was(case: ScoredStart, planned: Plan) -> Plan:
    """A published log does not say whether its compile cache was cold: it is taken for what it fits better."""
    if case.cold or not case.printed.rounding_bytes or not case.printed.kv_bytes:
        return planned
    first = cold_start(planned)
    away = [abs(each.layout.kv_cache.bytes - case.printed.kv_bytes) for each in (planned, first)]
    return first if away[1] < away[0] else planned


def _outside(planned: Plan, peak_used_bytes: int | None) -> int | None:
    """What the card held beside the budget's parts, as the plan counts them."""
    if peak_used_bytes is None:
        return None
    return planned.layout.outside.bytes + peak_used_bytes - planned.layout.peak_used_bytes


def fit(starts: Sequence[Start]) -> dict[str, dict[str, BandRow]]:
    tables = {"weights": fit_weights(starts)}
    for figure in FIGURES:
        seen = [
            Seen(
                start.of.path,
                start.source,
                miss.truth_above / unit(figure, start, tables["weights"]),
                abs(miss.truth_above) / start.total,
            )
            for start in starts
            if (miss := start.misses.get(figure))
        ]
        tables[figure] = fit_figure(seen, skewed=figure in SKEWED)
    return tables


def unit(figure: str, start: Start, weights_table: Mapping[str, BandRow]) -> float:
    of_rule = start.misses[figure].scale
    if figure != "kv_cache":
        return max(of_rule, 1.0)
    of_weights = sum(band(weights_table, start.of.weights_path, start.weights_bytes, start.total)) / 2
    return max(math.hypot(of_rule, of_weights), 1.0)


def fit_figure(seen: Sequence[Seen], skewed: bool = False) -> dict[str, BandRow]:
    """A row for every class that has a start, from the whole down."""
    nodes = {each.path[:steps] for each in seen for steps in range(len(each.path) + 1)}
    pooled: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    most: dict[tuple[str, ...], float] = {}
    rows = {}
    for node in sorted(nodes, key=len):
        mine = [each for each in seen if each.path[: len(node)] == node]
        count = Counter(each.source for each in mine)
        # Many starts of one source are not as many opinions, and not only one.
        pairs = [(each.size, count[each.source] ** -0.5) for each in mine]
        above = pooled[node[:-1]] if node else []
        borrowed = PRIOR / sum(weight for _, weight in above) if above else 0.0
        pooled[node] = pairs + [(value, weight * borrowed) for value, weight in above]
        few = node and len(mine) < FEW
        most[node] = most[node[:-1]] if few else BEYOND * max(each.of_card for each in mine)
        below, above = _sides(pooled[node], len(mine) + (PRIOR if node else 0), skewed)
        rows["/".join(node) or ROOT] = BandRow(
            _digits(below), _digits(above), _digits(most[node]), len(mine), len(count)
        )
    return rows


def _sides(errors: Sequence[tuple[float, float]], starts: int, skewed: bool) -> tuple[float, float]:
    """How far a band reaches to each side: as far to both, unless the figure is known to err to one side."""
    # The next start is one more beside those seen, as split-conformal prediction counts it.
    share = min(1.0, COVERAGE * (1 + 1 / starts))
    if not skewed:
        both = weighted_quantile([(abs(value), weight) for value, weight in errors], share)
        return both, both
    tail = 1 - (1 - share) / 2
    below, above = ([(max(0.0, sign * value), weight) for value, weight in errors] for sign in (-1, 1))
    return weighted_quantile(below, tail), weighted_quantile(above, tail)


def fit_weights(starts: Sequence[Start]) -> dict[str, BandRow]:
    """Shares of the weights' bytes; 0 where the class is exact."""
    kept = [(start, start.misses["weights"]) for start in starts if "weights" in start.misses]
    rows = fit_figure(
        [
            Seen(s.of.weights_path, s.source, miss.truth_above / s.weights_bytes, abs(miss.truth_above) / s.total)
            for s, miss in kept
        ]
    )
    right: dict[str, list[bool]] = defaultdict(list)
    for start, miss in kept:
        right["/".join(start.of.weights_path)].append(abs(miss.truth_above) <= EXACT_BYTES)
    for name, exactly in right.items():
        if len(exactly) >= FEW // 2 and sum(exactly) / len(exactly) >= EXACT_SHARE:
            rows[name] = replace(rows[name], below=0.0, above=0.0)
    return rows


def _digits(value: float) -> float:
    return float(f"{value:.3g}")


@dataclass(frozen=True)
class Held:
    """Whether one start-up lies inside a band that it did not make."""

    start: Start
    inside: bool
    width_of_card: float


def leave_sources_out(starts: Sequence[Start]) -> dict[str, list[Held]]:
    """Every figure of every start, judged by bands that its source had no part in."""
    held: dict[str, list[Held]] = defaultdict(list)
    for source in sorted({start.source for start in starts}):
        tables = fit([start for start in starts if start.source != source])
        for start in (start for start in starts if start.source == source):
            for figure in FIGURES:
                if figure in start.misses:
                    of_rule = unit(figure, start, tables["weights"])
                    rule = sum_band if figure == "kv_cache" else band
                    below, above = rule(tables[figure], start.of.path, of_rule, start.total)
                    inside = -below <= start.misses[figure].truth_above <= above
                    held[figure].append(Held(start, inside, (below + above) / start.total))
    return held


def groups_of(start: Start) -> Iterable[str]:
    path = start.of.path
    yield "all"
    yield from ("/".join(path[:steps]) for steps in range(1, len(path) + 1))
    yield f"card {start.of.card}"
    yield "weights plain" if start.of.weights == "plain" else "weights quantized"
    if start.of.several_gpus:
        yield "several GPUs"
    if start.of.multimodal:
        yield "multimodal"


def coverage_table(held: Sequence[Held], least: int = 10) -> dict[str, tuple[int, float, float]]:
    by_class: dict[str, list[Held]] = defaultdict(list)
    for each in held:
        for name in groups_of(each.start):
            by_class[name].append(each)
    return {
        name: (len(some), sum(h.inside for h in some) / len(some), statistics.median(h.width_of_card for h in some))
        for name, some in sorted(by_class.items())
        if len(some) >= least
    }


def document(tables: Tables, starts: Sequence[Start]) -> dict[str, Any]:
    before = bands()
    kept = {name: before[name] for name in ("about", "measured", "doubts", "unseen")}
    source = f"bench/fit_bands.py: {len(starts)} starts of {len({start.source for start in starts})} sources"
    rows = {
        figure: {name: {key: getattr(row, key) for key in row.__dataclass_fields__} for name, row in table.items()}
        for figure, table in tables.items()
    }
    return {**kept, "coverage": COVERAGE, "source": source, "figures": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("truth", type=Path)
    parser.add_argument("gpu", type=Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    starts = [start for case in cases(args.truth, args.gpu) if (start := start_of(predict(case)))]
    print(f"{len(starts)} starts; coverage on sources left out of the fit")
    summary = {}
    held = leave_sources_out(starts)
    for figure in reversed(FIGURES):
        table = coverage_table(held[figure])
        print(f"\n{figure:34s} starts  inside  median width of the card")
        for name, (count, inside, width) in table.items():
            print(f"  {name:32s} {count:6d}  {inside:6.1%}  {width:6.2%}")
        summary[figure] = {
            name: [count, round(inside, 3), round(width, 5)] for name, (count, inside, width) in table.items()
        }
    tables = fit(starts)
    print("\nweights: band as a share of their bytes (0: exact)")
    for name, row in tables["weights"].items():
        print(f"  {name or 'all':32s} {row.records:6d}  -{row.below:.4%} +{row.above:.4%}")
    if args.write:
        BANDS.write_text(json.dumps(document(tables, starts), indent=1) + "\n")
        print(f"\nwrote {BANDS}")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
