"""Fit the error bands to real start-ups, and say how well they hold on start-ups that did not make them.

    python bench/fit_bands.py TRUTH_DIR GPU_DIR [--write]

TRUTH_DIR holds `startups.jsonl` and `models.json`, GPU_DIR `measured*.jsonl` and `kit/configs*`; legroom's own
recording (`tests/fixtures`) is read as well. Every rule of the memory model says how sure it is of its figure; here
each class of deployments gets the factor on that at which nine starts in ten lie inside. A class with few starts
borrows from the class above it, as if it had seen PRIOR more starts like that one's. The coverage in the table is of
starts whose source (the repository that published them; of measured runs, the model) was left out of the fit. With
--write the bands go to `src/legroom/facts/data/bands.json`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench_harness import ROOT, arguments
from scoring import (
    Result,
    ScoredStart,
    gpu_run_cases,
    gpu_runs,
    predict,
    published_cases,
    read_records,
    weighted_quantile,
)

from legroom.facts.fit import ROOT as WHOLE
from legroom.facts.fit import BandRow, band, bands, sum_band
from legroom.figures import Figure
from legroom.memory.activation.profile_run import activation, activation_cold
from legroom.memory.bands import (
    BandClass,
    band_class,
    kv_scale,
    possible_saving,
    possible_spare,
    scale,
    total_spread,
    weights_path,
)
from legroom.memory.cudagraph_memory import graph_estimate
from legroom.memory.overhead import non_torch, outside
from legroom.memory.weights.loaded import weights
from legroom.planning.plan import Plan, cold_start
from legroom.units import GIB, MIB

BANDS = ROOT / "src/legroom/facts/data/bands.json"
OWN_RECORDING = ROOT / "tests/fixtures/h200_0.32.jsonl"
COVERAGE = 0.9
OF_TOLD = 0.95
"""Where starts were published, of those whose record tells all that mattered. About one in twenty does not, and no one
can tell which: a cold compile cache, another process on the card, a flag left out. Nine in ten are of all of them."""
LARGEST_SHARE = 0.98
"""A class with few starts does not take over the worst start of all classes above it."""
PRIOR = 12
FEW = 10
"""Below this many starts a class says nothing of its worst."""
BEYOND = 1.5
"""How much farther off than the worst seen a class may be."""
SMALLEST_KV = GIB // 2
ANOTHER_START = 0.2
"""Off by more of the card than this, a record tells of another start: two cards of one name, unstated TP sizes."""
EXACT_BYTES = 4 * MIB
EXACT_SHARE = 0.99
"""Weights of a class are exact where this share of its start-ups is, to EXACT_BYTES or the log's rounding. One of them
is not for a reason of this bench's: a rope table made longer by a flag, which it does not hand to the model."""
LEAST_OF_FEW = 0.005
"""Of weights stored by a method of which only a few starts are known: half of what a method without any gets."""
PATCHED = ("Sandermage/", "zjpzhao/vllm-qwen3vl-cu118-t4")
"""Sources that run a vLLM of their own making: a plan is of the release."""
STARTED_BY_ANOTHER = ("unslothai/",)
"""Sources whose vLLM another program starts: it sets sequences, adapters and a sampler that their records lack."""
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
    allowed_below: int = 0
    allowed_above: int = 0
    """How far the truth may lie to a side for a reason that the plan names: no error is made there."""
    of_total: tuple[float, float] = (0.0, 0.0)
    """Of the KV cache: what the card's unknown total may take from it, and what it may add."""

    @property
    def truth_above(self) -> int:
        """How far the truth lies above the figure (below: negative), less what is allowed and what the log rounds."""
        allowed = self.allowed_above if self.error < 0 else self.allowed_below
        return int(math.copysign(max(0, abs(self.error) - allowed - self.rounding), -self.error))


@dataclass(frozen=True)
class Start:
    """One real start-up and its errors."""

    id: str
    source: str
    of: BandClass
    total: int
    misses: Mapping[str, Miss]
    weights_bytes: int
    weights_path: tuple[str, ...]


@dataclass(frozen=True)
class Seen:
    """One error of one figure, ready for its class."""

    path: tuple[str, ...]
    source: str
    size: float
    """In units of the scale of its figure."""
    of_card: float


def cases(truth: Path, gpu: Path) -> list[ScoredStart]:
    starts = list(published_cases(truth).cases)
    configs = sorted((gpu / "kit").glob("configs*"))
    for path in sorted(gpu.glob("measured*.jsonl")):
        starts += gpu_run_cases(read_records(path), *configs).cases
    with gpu_runs(OWN_RECORDING) as (_, loaded):
        return [*starts, *loaded.cases]


def start_of(result: Result) -> Start | None:
    case, planned = result.case, result.plan
    if planned is None:
        return None
    planned = _in_the_state_it_was(case, planned)
    layout, printed, target = planned.layout, case.printed, planned.target
    total = layout.total_bytes
    kv = printed.kv_bytes if printed.kv_bytes and printed.kv_bytes > SMALLEST_KV else None
    if why := _another_start(result, planned):
        print(f"left out: {case.id}, {why}")
        return None
    what = (target.model, planned.settings, target.gpu)
    profile = activation_cold if layout.activation.terms[0].label == "first start" else activation
    rules = {
        "activation": profile(*what, layout.rank),
        "cuda_graph": graph_estimate(*what),
        "non_torch": non_torch(*what, layout.rank),
        "outside": outside(*what, layout.rank),
    }
    truths = {
        "activation": printed.activation_bytes,
        "cuda_graph": printed.graph_estimate_bytes,
        "non_torch": printed.non_torch_bytes,
        "outside": _outside(planned, printed.peak_used_bytes),
    }
    misses: dict[str, Miss] = {}
    for name, value in truths.items():
        if value is not None and rules[name].kind == "estimated":
            misses[name] = Miss(
                rules[name].bytes - value, printed.rounding_bytes, scale(rules[name]), possible_saving(rules[name])
            )
    rule = weights(*what, layout.rank)
    if printed.weights_bytes:
        misses["weights"] = Miss(rule.bytes - printed.weights_bytes, printed.rounding_bytes, rule.bytes)
    if kv and planned.settings.kv_cache_memory_bytes is None:
        parts: Sequence[Figure] = (rules["activation"], rules["cuda_graph"], rules["non_torch"])
        misses["kv_cache"] = Miss(
            layout.kv_cache.bytes - kv,
            printed.rounding_bytes,
            kv_scale(parts),
            allowed_above=possible_spare(parts, planned.settings, target.gpu),
            of_total=total_spread(planned.settings, target.gpu),
        )
    of = band_class(*what)
    return Start(case.id, case.source, of, total, misses, rule.bytes, weights_path(of, rule))


def _another_start(result: Result, planned: Plan) -> str:
    """Why a record does not tell of the start that it describes, by what it says itself; empty: it does."""
    case, layout, printed = result.case, planned.layout, result.case.printed
    if any(name in case.source for name in PATCHED):
        return "a patched vLLM"
    if any(name in case.source for name in STARTED_BY_ANOTHER):
        return "another program started it, with flags that the record does not have"
    if (printed.non_torch_bytes or 0) < 0:
        return "another process gave memory back while vLLM profiled"
    largest = planned.target.gpu.total_high_bytes * planned.settings.gpu_memory_utilization
    if (printed.kv_bytes or 0) + (printed.weights_bytes or 0) > largest + 2 * printed.rounding_bytes:
        return "weights and KV cache exceed the budget on a card of that name"
    error = (layout.kv_cache.bytes - (printed.kv_bytes or layout.kv_cache.bytes)) / layout.total_bytes
    return f"off by {error:+.0%} of the card" if abs(error) > ANOTHER_START else ""


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
                beyond(miss, known_spread(figure, start, tables["weights"])) / max(miss.scale, 1.0),
                abs(miss.truth_above) / start.total,
            )
            for start in starts
            if (miss := start.misses.get(figure))
        ]
        tables[figure] = fit_figure(seen, skewed=figure in SKEWED)
    return tables


def known_spread(figure: str, start: Start, weights_table: Mapping[str, BandRow]) -> tuple[float, float]:
    """What the KV band has below and above from the weights' band and the card's total, before its class says
    anything."""
    if figure != "kv_cache":
        return 0.0, 0.0
    least = bands()["unseen"]["least_of_weights"]
    of_weights = sum(band(weights_table, start.weights_path, start.weights_bytes, start.total, least)) / 2
    smaller, larger = start.misses[figure].of_total
    return math.hypot(smaller, of_weights), math.hypot(larger, of_weights)


def beyond(miss: Miss, known: tuple[float, float]) -> float:
    """What of an error the class has to explain: a band is the root of both squares."""
    explained = known[1 if miss.truth_above > 0 else 0]
    return math.copysign(math.sqrt(max(0.0, miss.truth_above**2 - explained**2)), miss.truth_above)


def fit_figure(seen: Sequence[Seen], skewed: bool = False) -> dict[str, BandRow]:
    """A row for every class that has a start, from the whole down."""
    nodes = {each.path[:steps] for each in seen for steps in range(len(each.path) + 1)}
    pooled: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    most: dict[tuple[str, ...], float] = {}
    rows = {}
    for node in sorted(nodes, key=lambda node: (len(node), node)):
        mine = [each for each in seen if each.path[: len(node)] == node]
        count = Counter(each.source for each in mine)
        # Many starts of one source are not as many opinions, and not only one.
        pairs = [(each.size, count[each.source] ** -0.5) for each in mine]
        above = pooled[node[:-1]] if node else []
        borrowed = PRIOR / sum(weight for _, weight in above) if above else 0.0
        pooled[node] = pairs + [(value, weight * borrowed) for value, weight in above]
        few = node and len(mine) < FEW
        most[node] = most[node[:-1]] if few else BEYOND * max(each.of_card for each in mine)
        coverage = OF_TOLD if node and node[0] == "read" else COVERAGE
        below, above = _sides(pooled[node], coverage, len(mine) + (PRIOR if node else 0), skewed)
        rows["/".join(node) or WHOLE] = BandRow(
            _digits(below), _digits(above), _digits(most[node]), len(mine), len(count)
        )
    return rows


def _sides(errors: Sequence[tuple[float, float]], coverage: float, starts: int, skewed: bool) -> tuple[float, float]:
    """How far a band reaches to each side: as far to both, unless the figure is known to err to one side."""
    # The next start is one more beside those seen, as split-conformal prediction counts it.
    share = min(LARGEST_SHARE, coverage * (1 + 1 / starts))
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
            Seen(s.weights_path, s.source, miss.truth_above / s.weights_bytes, abs(miss.truth_above) / s.total)
            for s, miss in kept
        ]
    )
    right: dict[str, list[bool]] = defaultdict(list)
    for start, miss in kept:
        right["/".join(start.weights_path)].append(abs(miss.truth_above) <= EXACT_BYTES)
    for name, row in rows.items():
        if name.startswith("quantized/") and row.records < FEW // 2:
            rows[name] = replace(row, below=max(row.below, LEAST_OF_FEW), above=max(row.above, LEAST_OF_FEW))
    for name, exactly in right.items():
        if len(exactly) >= FEW // 2 and sum(exactly) / len(exactly) >= EXACT_SHARE:
            rows[name] = replace(rows[name], below=0.0, above=0.0)
    return rows


def _digits(value: float) -> float:
    """Three digits, rounded up: a start that the band was made to hold stays inside."""
    if value <= 0:
        return 0.0
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.ceil(value / step) * step:.3g}")


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
                    miss, known = start.misses[figure], known_spread(figure, start, tables["weights"])
                    rule = sum_band if figure == "kv_cache" else band
                    sides = rule(tables[figure], start.of.path, max(miss.scale, 1.0), start.total)
                    below, above = (math.hypot(side, already) for side, already in zip(sides, known, strict=True))
                    inside = -below <= miss.truth_above <= above
                    width = below + above + miss.allowed_below + miss.allowed_above
                    held[figure].append(Held(start, inside, width / start.total))
    return held


def groups_of(start: Start) -> Iterable[str]:
    path = start.of.path
    yield "all"
    yield from ("/".join(path[:steps]) for steps in range(1, len(path) + 1))
    yield f"card {start.of.card}"
    yield f"weights {start.weights_path[0]}"
    yield f"engine {start.of.engine}"
    yield f"release {'.'.join(start.of.release.split('.')[:2])}"
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
    kept = {name: before[name] for name in ("about", "measured", "unseen", "seen")}
    source = f"bench/fit_bands.py: {len(starts)} starts of {len({start.source for start in starts})} sources"
    rows = {
        figure: {name: {key: getattr(row, key) for key in row.__dataclass_fields__} for name, row in table.items()}
        for figure, table in tables.items()
    }
    return {**kept, "coverage": COVERAGE, "source": source, "figures": rows}


def main() -> None:
    args = arguments(__doc__, "truth:path", "gpu:path", write=False)
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
