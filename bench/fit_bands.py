"""Fit the error bands to real start-ups, and say how well they hold on kinds of start-ups that did not make them.

    python bench/fit_bands.py TRUTH_DIR GPU_DIR [--first-sight DIR ...] [--write]

TRUTH_DIR holds `startups.jsonl` and `models.json`, GPU_DIR `measured*.jsonl` and `kit/configs*`; legroom's own
recording (`tests/fixtures`) is read as well. The half of a band is the root of two squares: the errors that the rules
of its parts make where all is known (`own` x their estimate), and a share of the card x `growth ** distance`. The share
is one where the release was measured on this card family, and one for each other kind (`legroom.facts.fit.KINDS`). The
distance is the number of properties (card family, release line, architecture, encoder ...) that fewer than FEW known
starts have. The law is the narrowest that holds COVERAGE of the starts, also if each is judged as if all that share its
card (its release, its architecture ...) were missing. It holds COVERAGE of them with the errors made before a start was
read, too: `predicted` of legroom's recording, and `predicted.json` (KV bytes by id) of a DIR in the form of TRUTH_DIR.
Of few starts a larger share is held, as one more may be worse than all. The table leaves every class out in turn.
With --write the bands go to `src/legroom/facts/data/bands.json`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
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

from legroom.facts.fit import KINDS, MACHINE, BandRow, bands, kind_unmeasured, weights_band
from legroom.facts.fit import ROOT as WHOLE
from legroom.figures import Figure
from legroom.memory.activation.profile_run import activation, activation_cold, first_start_leftover_bytes
from legroom.memory.bands import (
    COUNTED,
    BandClass,
    band_class,
    error_scale,
    possible_extra,
    possible_saving,
    possible_spare,
    total_spread,
    weights_class,
)
from legroom.memory.cudagraph_memory import graph_estimate
from legroom.memory.overhead import non_torch, outside
from legroom.memory.weights.loaded import weights
from legroom.planning.plan import Plan
from legroom.units import GIB, MIB

BANDS = ROOT / "src/legroom/facts/data/bands.json"
OWN_RECORDING = ROOT / "tests/fixtures/h200_0.32.jsonl"
COVERAGE = 0.9
LARGEST_SHARE = 0.98
"""A class with few starts does not take over the worst start of all classes above it."""
PRIOR = 12
FEW = 10
"""Below this many starts a class says nothing of its worst."""
BEYOND = 1.5
"""How much farther off than the worst seen a class of weights may be."""
GROWTH = 1.7
"""What a hardly known property multiplies the share by. Of 1, 1.4, 1.7 and 2 it gave the narrowest bands that held
88 % of 79 published and 72 measured starts at first sight."""
FARTHEST = 3
"""Starts with more hardly known properties were not farther off."""
SMALLEST_KV = GIB // 2
ANOTHER_START = 0.2
"""Off by more of the card than this, a record (or a first prediction) is of another start, card or checkpoint."""
EXACT_BYTES = 4 * MIB
EXACT_SHARE = 0.98
"""Weights of a class are exact where this share of its start-ups is, to EXACT_BYTES or the log's rounding."""
LEAST_OF_FEW = 0.005
"""Of weights stored by a method of which only a few starts are known: half of what a method without any gets."""
PATCHED = ("Sandermage/", "zjpzhao/vllm-qwen3vl-cu118-t4")
"""Sources that run a vLLM of their own making: a plan is of the release."""
STARTED_BY_ANOTHER = ("unslothai/",)
"""Sources whose vLLM another program starts: it sets sequences, adapters and a sampler that their records lack."""
Property = tuple[str, str]


@dataclass(frozen=True)
class Miss:
    """How far off one figure of one start-up was."""

    error: int
    rounding: int
    scale: float
    """What its own rule expected; of the KV cache 0."""
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
    instrumented: bool
    of: BandClass
    total: int
    misses: Mapping[str, Miss]
    weights_bytes: int
    weights_class: tuple[str, ...]
    scales: tuple[float, ...]
    """What the rules of the counted parts expect of themselves."""
    at_first_sight: Miss | None = None
    """Of the KV cache, as predicted before the start was read."""

    def own_error(self, figure: str, own: Mapping[str, float]) -> float:
        if figure != "kv_cache":
            return own[figure] * self.misses[figure].scale
        return math.hypot(*(own[name] * scale for name, scale in zip(COUNTED, self.scales, strict=True)))


def read_cases(truth: Path, gpu: Path, first_sight: Sequence[Path]) -> tuple[list[ScoredStart], dict[str, int]]:
    """Every known start, and the KV bytes that were predicted of some before they were read."""
    starts = [case for folder in (truth, *first_sight) for case in published_cases(folder).cases]
    configs = sorted((gpu / "kit").glob("configs*"))
    for path in sorted(gpu.glob("measured*.jsonl")):
        starts += gpu_run_cases(read_records(path), *configs).cases
    predicted: dict[str, int] = {}
    for folder in first_sight:
        predicted |= json.loads((folder / "predicted.json").read_text("utf-8"))
    with gpu_runs(OWN_RECORDING) as (records, loaded):
        predicted |= {key: run["predicted"]["kv_cache_bytes"] for key, run in records if "predicted" in run}
        return [*starts, *loaded.cases], predicted


def start_of(result: Result, predicted_bytes: int | None) -> Start | None:
    case, planned = result.case, result.plan
    if planned is None:
        return None
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
    first_start = activation_cold(*what, layout.rank).bytes - rules["activation"].bytes
    for name, value in truths.items():
        if value is not None and rules[name].kind == "estimated":
            misses[name] = Miss(
                rules[name].bytes - value,
                printed.rounding_bytes,
                error_scale(rules[name]),
                possible_saving(rules[name]),
                first_start if name == "activation" else 0,
            )
    rule = weights(*what, layout.rank)
    if printed.weights_bytes:
        misses["weights"] = Miss(rule.bytes - printed.weights_bytes, printed.rounding_bytes, rule.bytes)
    if kv and planned.settings.kv_cache_memory_bytes is None:
        parts: Sequence[Figure] = (rules["activation"], rules["cuda_graph"], rules["non_torch"])
        first_start += first_start_leftover_bytes(*what, layout.rank)
        misses["kv_cache"] = Miss(
            layout.kv_cache.bytes - kv,
            printed.rounding_bytes,
            0.0,
            allowed_below=first_start + sum(possible_extra(part) for part in parts),
            allowed_above=possible_spare(parts, planned.settings, target.gpu),
            of_total=total_spread(planned.settings, target.gpu),
        )
    of = band_class(*what)
    near = predicted_bytes is not None and abs(predicted_bytes - (kv or 0)) <= ANOTHER_START * total
    seen = misses.get("kv_cache") if near else None
    return Start(
        case.id,
        case.source,
        not printed.rounding_bytes,
        of,
        total,
        misses,
        rule.bytes,
        weights_class(of, rule),
        tuple(error_scale(rules[name]) for name in COUNTED),
        replace(seen, error=(predicted_bytes or 0) - (kv or 0)) if seen else None,
    )


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


def _outside(planned: Plan, peak_used_bytes: int | None) -> int | None:
    """What the card held beside the budget's parts, as the plan counts them."""
    if peak_used_bytes is None:
        return None
    return planned.layout.outside.bytes + peak_used_bytes - planned.layout.peak_used_bytes


class Evidence:
    """How many known starts have a property, and how far a start is from them."""

    def __init__(self, starts: Sequence[Start]) -> None:
        self.starts = len(starts)
        self.measured = Counter(each for start in starts if start.instrumented for each in start.of.properties)
        self.known = Counter(each for start in starts for each in start.of.properties)
        self.pairs = Counter(pair for start in starts for pair in combinations(sorted(start.of.properties), 2))
        self.earlier: dict[str, int] = {}  # the distance from what was known when a start was predicted
        before = Counter[Property]()
        for start in starts:
            self.earlier[start.id] = sum(before[each] < FEW for each in start.of.properties)
            before.update(start.of.properties)

    def distance(self, start: Start, without: Property | None = None) -> int:
        """Properties that few known starts have, where all that have the property `without` are missing."""
        others = [each for each in start.of.properties if each != without]
        left = (self.known[each] - (self._with_both(each, without) if without else 0) for each in others)
        return sum(count < FEW for count in left) + (without is not None)

    def kind(self, start: Start) -> str:
        machine = (self.measured[each] for each in start.of.properties if each[0] in MACHINE)
        return "measured" if all(count >= FEW for count in machine) else kind_unmeasured(start.of.properties)

    def _with_both(self, one: Property, other: Property) -> int:
        return self.pairs[one, other] + self.pairs[other, one]

    def can_do_without(self, each: Property) -> bool:
        return self.starts - self.known[each] >= self.starts / 4


@dataclass(frozen=True)
class Judged:
    """An error of one start at a distance."""

    start: Start
    error: float
    """Beyond what the weights' band and the card's total explain."""
    distance: int


@dataclass(frozen=True)
class Law:
    """The half of a band: root of the own error squared and (of_card x growth ** distance x card) squared."""

    own: Mapping[str, float]
    of_card: Mapping[str, float]

    def half(self, start: Start, figure: str, kind: str, distance: int) -> float:
        share = self.of_card[kind] * GROWTH ** min(distance, FARTHEST)
        return math.hypot(start.own_error(figure, self.own), share * start.total)


def fit_own(starts: Sequence[Start]) -> dict[str, float]:
    """How far the rules of the counted parts are off where all is known, in units of what they expect."""
    seen = Evidence(starts)
    near = [s for s in starts if s.instrumented and not seen.distance(s)]
    errors = {f: [Judged(s, abs(s.misses[f].truth_above), 0) for s in near if f in s.misses] for f in COUNTED}
    off = {f: quantile(some, lambda j, f=f: j.error / j.start.misses[f].scale, COVERAGE) for f, some in errors.items()}
    return {f: _digits(off[f]) for f in COUNTED}


def fit_law(starts: Sequence[Start], figure: str, weights_rows: Mapping[str, BandRow]) -> Law:
    """The law of one figure; of the parts of a budget, which few logs show, all unmeasured kinds have one share."""
    own, seen = fit_own(starts), Evidence(starts)
    groups: dict[tuple[str, str], list[Judged]] = defaultdict(list)
    for start in starts:
        if figure not in start.misses:
            continue
        kind, distance = seen.kind(start), seen.distance(start)
        kind = kind if figure == "kv_cache" or kind == "measured" else KINDS[-1]
        error = abs(beyond(figure, start, weights_rows))
        groups["as it is", kind].append(Judged(start, error, distance))
        if figure == "kv_cache" and (start.at_first_sight or kind != "measured"):
            first = abs(beyond(figure, start, weights_rows, at_first_sight=True))
            then = seen.earlier[start.id] if kind == "measured" else distance
            groups["first sight", kind].append(Judged(start, first, then))
        for each in start.of.properties:
            if seen.can_do_without(each) and (each[0] not in MACHINE or kind != "measured"):
                groups[each[0], kind].append(Judged(start, error, seen.distance(start, each)))

    def needed(j: Judged) -> float:
        rest = math.sqrt(max(0.0, j.error**2 - j.start.own_error(figure, own) ** 2))
        return rest / j.start.total / GROWTH ** min(j.distance, FARTHEST)

    of_card: dict[str, float] = {}
    for (_, kind), some in groups.items():
        if len(some) >= FEW:
            share = min(LARGEST_SHARE, COVERAGE * (1 + 1 / len(some)))
            of_card[kind] = max(of_card.get(kind, 0.0), _digits(quantile(some, needed, share)))
    return Law(own, {kind: of_card.get(kind, max(of_card.values(), default=0.0)) for kind in KINDS})


def quantile(some: Sequence[Judged], value: Callable[[Judged], float], share: float) -> float:
    if not some:
        return 1.0  # no start of the class is left: the rule's own estimate
    count = Counter(each.start.source for each in some)
    # Many starts of one source are not as many opinions, and not only one.
    pairs = [(value(each), count[each.start.source] ** -0.5) for each in some]
    return weighted_quantile(pairs, share)


def known_spread(figure: str, start: Start, weights_rows: Mapping[str, BandRow]) -> tuple[float, float]:
    """What the KV band has below and above from the weights' band and the card's total alone."""
    if figure != "kv_cache":
        return 0.0, 0.0
    of_weights = sum(weights_band(weights_rows, start.weights_class, start.weights_bytes, start.total)) / 2
    smaller, larger = start.misses[figure].of_total
    return math.hypot(smaller, of_weights), math.hypot(larger, of_weights)


def beyond(figure: str, start: Start, weights_rows: Mapping[str, BandRow], *, at_first_sight: bool = False) -> float:
    """What of an error the law has to explain: a band is the root of both squares."""
    miss = start.at_first_sight if at_first_sight and start.at_first_sight else start.misses[figure]
    away = miss.truth_above
    explained = known_spread(figure, start, weights_rows)[1 if away > 0 else 0]
    return math.copysign(math.sqrt(max(0.0, away**2 - explained**2)), away)


def fit_outside(starts: Sequence[Start]) -> dict[str, float]:
    """Multiples of the own error estimate of memory beside the budget, which mostly errs to one side: the card holds
    less than the sum of what every part may take."""
    some = [
        Judged(s, s.misses["outside"].truth_above / s.misses["outside"].scale, 0)
        for s in starts
        if "outside" in s.misses
    ]
    tail = 1 - (1 - COVERAGE) / 2
    below = quantile(some, lambda j: max(0.0, -j.error), tail)
    return {"below": _digits(below), "above": _digits(quantile(some, lambda j: max(0.0, j.error), tail))}


def fit_weights(starts: Sequence[Start]) -> dict[str, BandRow]:
    """Shares of the weights' bytes for every class that has a start, from the whole down; 0 where it is exact. A class
    with few starts borrows from the class above it, as if it had seen PRIOR more starts like that one's."""
    kept = [(start, start.misses["weights"].truth_above) for start in starts if "weights" in start.misses]
    nodes = {start.weights_class[:steps] for start, _ in kept for steps in range(len(start.weights_class) + 1)}
    pooled: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    most: dict[tuple[str, ...], float] = {}
    rows = {}
    for node in sorted(nodes, key=lambda node: (len(node), node)):
        mine = [(start, away) for start, away in kept if start.weights_class[: len(node)] == node]
        count = Counter(start.source for start, _ in mine)
        pairs = [(abs(away) / start.weights_bytes, count[start.source] ** -0.5) for start, away in mine]
        above = pooled[node[:-1]] if node else []
        borrowed = PRIOR / sum(weight for _, weight in above) if above else 0.0
        pooled[node] = pairs + [(value, weight * borrowed) for value, weight in above]
        few = node and len(mine) < FEW
        most[node] = most[node[:-1]] if few else BEYOND * max(abs(away) / start.total for start, away in mine)
        share = min(LARGEST_SHARE, COVERAGE * (1 + 1 / (len(mine) + (PRIOR if node else 0))))
        side = _digits(weighted_quantile(pooled[node], share))
        exactly = [abs(away) <= EXACT_BYTES for start, away in mine if start.weights_class == node]
        if node[:1] == ("quantized",) and len(node) > 1 and len(mine) < FEW // 2:
            side = max(side, LEAST_OF_FEW)
        if len(exactly) >= FEW // 2 and sum(exactly) / len(exactly) >= EXACT_SHARE:
            side = 0.0
        rows["/".join(node) or WHOLE] = BandRow(side, side, _digits(most[node]), len(mine), len(count))
    return rows


def _digits(value: float) -> float:
    """Three digits, rounded up: a start that the band was made to hold stays inside."""
    if value <= 0:
        return 0.0
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.ceil(value / step) * step:.3g}")


@dataclass(frozen=True)
class Held:
    """Whether the KV cache of one start-up lies inside a band that its class had no part in."""

    start: Start
    inside: bool
    width_of_card: float


def leave_out(
    starts: Sequence[Start], key: Callable[[Start], str], *, at_first_sight: bool = False
) -> dict[str, list[Held]]:
    """Every start, judged by a law that no start with the same key had a part in."""
    starts = [start for start in starts if "kv_cache" in start.misses]
    held: dict[str, list[Held]] = defaultdict(list)
    for left_out in sorted({key(start) for start in starts}):
        rest = [start for start in starts if key(start) != left_out]
        if len(rest) < len(starts) / 4:
            continue
        rows = fit_weights(rest)
        law, seen = fit_law(rest, "kv_cache", rows), Evidence(rest)
        for start in (each for each in starts if key(each) == left_out and (each.at_first_sight or not at_first_sight)):
            half = law.half(start, "kv_cache", seen.kind(start), seen.distance(start))
            miss = start.misses["kv_cache"]
            width = sum(math.hypot(half, side) for side in known_spread("kv_cache", start, rows))
            inside = abs(beyond("kv_cache", start, rows, at_first_sight=at_first_sight)) <= half
            held[left_out].append(Held(start, inside, (width + miss.allowed_below + miss.allowed_above) / start.total))
    return held


def coverage_row(name: str, held: Sequence[Held]) -> list[float]:
    widths = sorted(each.width_of_card for each in held)
    row = [len(held), sum(h.inside for h in held) / len(held), widths[len(widths) // 2], widths[int(0.9 * len(widths))]]
    print(f"  {name:42s} {row[0]:6.0f}  {row[1]:6.1%}  {row[2]:7.2%}  {row[3]:7.2%}")
    return [round(each, 5) for each in row]


def print_coverage(starts: Sequence[Start], least: int = 8) -> dict[str, list[float]]:
    """Coverage and width on classes left out of the fit: by property, and by class of `least` starts."""
    summary = {}
    kinds = ["source", "first sight", *dict.fromkeys(kind for start in starts for kind, _ in start.of.properties)]
    for kind in kinds:
        held = leave_out(
            starts, lambda s, k=kind: dict(s.of.properties).get(k, s.source), at_first_sight=kind == "first sight"
        )
        print(f"\n{'every ' + kind + ' left out in turn':44s} starts  inside    width  p90 of the card")
        every = [each for some in held.values() for each in some]
        for name, instrumented in (("measured", True), ("published", False)):
            if some := [each for each in every if each.start.instrumented == instrumented]:
                summary[f"{kind}/{name}"] = coverage_row(name, some)
        for value, some in held.items() if kind not in kinds[:2] else ():
            if len(some) >= least:
                summary[f"{kind}/{value}"] = coverage_row(value, some)
    return summary


def document(starts: Sequence[Start]) -> dict[str, Any]:
    before, rows = bands(), fit_weights(starts)
    kv = fit_law(starts, "kv_cache", rows)
    laws = {figure: fit_law(starts, figure, rows) for figure in COUNTED} | {"kv_cache": kv}
    fitted = {figure: {"own": kv.own.get(figure, 1.0), **law.of_card} for figure, law in laws.items()}
    seen, properties = Evidence(starts), defaultdict[str, dict[str, list[int]]](dict)
    for (kind, value), count in sorted(seen.known.items()):
        properties[kind][value] = [seen.measured[kind, value], count]
    at = Counter((seen.kind(start), min(FARTHEST, seen.distance(start))) for start in starts)
    sources = len({start.source for start in starts})
    return {
        "about": before["about"],
        "source": f"bench/fit_bands.py: {len(starts)} starts of {sources} sources",
        "coverage": COVERAGE,
        "few": FEW,
        "growth": GROWTH,
        "farthest": FARTHEST,
        "starts": {kind: [at[kind, distance] for distance in range(FARTHEST + 1)] for kind in KINDS},
        "laws": fitted,
        "outside": before["outside"] | fit_outside(starts),
        "unseen": before["unseen"],
        "properties": properties,
        "weights": {name: asdict(row) for name, row in rows.items()},
    }


def main() -> None:
    args = arguments(__doc__, "truth:path", "gpu:path", first_sight=("",), write=False)
    cases, predicted = read_cases(args.truth, args.gpu, [Path(folder) for folder in args.first_sight if folder])
    starts = [start for case in cases if (start := start_of(predict(case), predicted.get(case.id)))]
    fitted = document(starts)
    print(f"\n{len(starts)} starts, by distance {fitted['starts']}; growth {fitted['growth']}")
    for figure, law in fitted["laws"].items():
        shares = " or ".join(f"{law[kind]:.3%} ({kind})" for kind in KINDS)
        print(f"  {figure:12s} {law['own']} of its own estimate, {shares} of the card x growth ** distance")
    if args.write:
        text = re.sub(r"\[\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2]", json.dumps(fitted, indent=1))
        BANDS.write_text(text + "\n")
        print(f"wrote {BANDS}")
    print(json.dumps(print_coverage(starts)))


if __name__ == "__main__":
    main()
