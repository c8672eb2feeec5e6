"""How right legroom is: predict real start-ups and measure the error.

A `ScoredStart` is one start-up that somebody ran: what it was (`Target`, `ServeArgs`) and what vLLM printed. `score`
plans each as a user would, and `summary` adds the errors up, overall and by group. Where the cases come from is the
business of `scoring_data`.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from legroom.errors import LegroomError
from legroom.memory.bands import band_class
from legroom.planning.plan import Plan, cold_start, plan_on_named_card
from legroom.records import dataclass, field
from legroom.units import GIB

if TYPE_CHECKING:
    from legroom.planning.plan import Target
    from legroom.vllm.args import ServeArgs

MEASURES = ("weights", "kv", "kv_of_card", "tokens_per_byte", "activation", "peak_of_card")
GROUPS = ("class", "family", "gpu", "release", "quantization")
BANDED = {
    "kv_cache": "kv_bytes",
    "weights": "weights_bytes",
    "activation": "activation_bytes",
    "non_torch": "non_torch_bytes",
}
"""Figures whose bands are checked, and where the truth of each stands."""
SMALLEST_KV_BYTES = GIB // 2
"""Below half a GiB the rounding of the log is a large share of the cache, so its error says little."""
EXACT_TOKENS = 0.005
"""Tokens a byte that agree to this are the same page arithmetic: logs round bytes to hundredths of a GiB."""


@dataclass(frozen=True, slots=True)
class Printed:
    """What vLLM showed of one start-up. None: not shown."""

    weights_bytes: int | None = None
    kv_bytes: int | None = None
    tokens: int | None = None
    total_bytes: int | None = None
    activation_bytes: int | None = None
    non_torch_bytes: int | None = None
    graph_estimate_bytes: int | None = None
    peak_used_bytes: int | None = None
    rounding_bytes: int = 0
    """How far a printed figure may lie from the true one."""
    started: bool | None = None
    """None: how it ended is not known, or does not depend on the plan."""
    failure: str = ""


@dataclass(frozen=True, slots=True)
class ScoredStart:
    """One real start-up, ready to be predicted."""

    id: str
    source: str
    """Where it was published; many cases of one source are one opinion."""
    target: Target
    args: ServeArgs
    printed: Printed
    cold: bool = False
    """Whether its compile cache was empty."""
    groups: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bad:
    """A record that could not be read or predicted."""

    id: str
    why: str


@dataclass(frozen=True, slots=True)
class BandCheck:
    """Whether the truth lay inside the band that was predicted for a figure."""

    inside: bool
    width_of_card: float


@dataclass(frozen=True, slots=True)
class Coverage:
    """How often it did, over some results. A band is meant to hold nine truths in ten."""

    count: int
    inside: float
    median_width_of_card: float


@dataclass(frozen=True, slots=True)
class Result:
    """One case and how far off the prediction was: relative errors, or shares of the card's total."""

    case: ScoredStart
    errors: Mapping[str, float] = field(default_factory=dict)
    bands: Mapping[str, BandCheck] = field(default_factory=dict)
    band_class: str = ""
    verdict_right: bool | None = None
    predicted_failure: str = ""
    plan: Plan | None = None
    why_unanswered: str = ""


@dataclass(frozen=True, slots=True)
class Spread:
    """The errors of one measure over some results."""

    count: int
    sources: int
    median: float
    p90: float
    worst: float
    mean: float
    mean_by_source: float
    """The mean of every source's own mean."""
    median_by_source: float
    p90_by_source: float
    """Quantiles in which every source weighs the same, however many records it has."""
    bias: float
    """The median with its sign: above zero, legroom says too much."""


@dataclass(frozen=True, slots=True)
class ScoreSummary:
    """The error table of some results."""

    records: int
    unanswered: int
    spreads: Mapping[str, Spread]
    coverage: Mapping[str, Coverage]
    """By figure: `kv_cache`, `weights` ..."""
    tokens_exact: float | None
    kv_within_2_percent_of_card: float | None
    peak_within_1_percent_of_card: float | None
    starts: int
    starts_right: float | None
    failures: int
    failures_right: float | None


def score(cases: Sequence[ScoredStart], progress: Callable[[int, int], None] | None = None) -> list[Result]:
    """Predict every case, in order."""
    results = []
    for number, case in enumerate(cases, 1):
        results.append(predict(case))
        if progress:
            progress(number, len(cases))
    return results


def predict(case: ScoredStart) -> Result:
    """Plan one case as its user would have, and compare."""
    try:
        planned = plan_on_named_card(case.target, case.args)
        planned = cold_start(planned) if case.cold else planned
    except LegroomError as error:
        return Result(case, why_unanswered=error.message)
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        # A defect in legroom must not hide the other records; it is named and counted.
        return Result(case, why_unanswered=f"{type(error).__name__}: {error}")
    right = None
    if case.printed.started is not None:
        right = case.printed.started == (planned.verdict != "does_not_fit")
    failure = planned.memory.failure.id if planned.memory.failure else ""
    of = band_class(planned.target.model, planned.settings, planned.target.gpu).name
    return Result(case, errors_of(case.printed, planned), bands_of(case.printed, planned), of, right, failure, planned)


def errors_of(printed: Printed, planned: Plan) -> dict[str, float]:
    """Every error that the printed figures allow to be measured."""
    layout, kv = planned.layout, planned.memory.kv
    errors: dict[str, float] = {}
    if printed.weights_bytes:
        errors["weights"] = layout.weights.bytes / printed.weights_bytes - 1
    if printed.kv_bytes and printed.kv_bytes > SMALLEST_KV_BYTES:
        errors["kv"] = layout.kv_cache.bytes / printed.kv_bytes - 1
        errors["kv_of_card"] = (layout.kv_cache.bytes - printed.kv_bytes) / (printed.total_bytes or layout.total_bytes)
    if printed.tokens and printed.kv_bytes and kv.tokens and layout.kv_cache.bytes:
        errors["tokens_per_byte"] = (kv.tokens / layout.kv_cache.bytes) / (printed.tokens / printed.kv_bytes) - 1
    if printed.activation_bytes:
        errors["activation"] = layout.activation.bytes / printed.activation_bytes - 1
    if printed.peak_used_bytes:
        total = printed.total_bytes or layout.total_bytes
        errors["peak_of_card"] = (layout.peak_used_bytes - printed.peak_used_bytes) / total
    return errors


def bands_of(printed: Printed, planned: Plan) -> dict[str, BandCheck]:
    """For every figure that was printed, whether its band holds it; what the printing rounds off counts as inside."""
    checks = {}
    for name, printed_as in BANDED.items():
        truth, figure = getattr(printed, printed_as), getattr(planned.layout, name)
        if truth is None or (name == "kv_cache" and truth <= SMALLEST_KV_BYTES):
            continue
        inside = figure.low - printed.rounding_bytes <= truth <= figure.high + printed.rounding_bytes
        checks[name] = BandCheck(inside, (figure.high - figure.low) / planned.layout.total_bytes)
    return checks


def _coverage(results: Sequence[Result]) -> dict[str, Coverage]:
    found = {}
    for name in BANDED:
        checks = [result.bands[name] for result in results if name in result.bands]
        if checks:
            width = statistics.median(check.width_of_card for check in checks)
            found[name] = Coverage(len(checks), sum(check.inside for check in checks) / len(checks), width)
    return found


def summary(results: Sequence[Result]) -> ScoreSummary:
    """The error table."""
    answered = [result for result in results if not result.why_unanswered]
    spreads = {}
    for measure in MEASURES:
        errors = [(result.case.source, result.errors[measure]) for result in answered if measure in result.errors]
        if errors:
            spreads[measure] = spread(errors)
    starts = [result.verdict_right for result in answered if result.case.printed.started is True]
    failures = [result.verdict_right for result in answered if result.case.printed.started is False]
    return ScoreSummary(
        records=len(results),
        unanswered=len(results) - len(answered),
        spreads=spreads,
        coverage=_coverage(answered),
        tokens_exact=_share(answered, "tokens_per_byte", EXACT_TOKENS),
        kv_within_2_percent_of_card=_share(answered, "kv_of_card", 0.02),
        peak_within_1_percent_of_card=_share(answered, "peak_of_card", 0.01),
        starts=len(starts),
        starts_right=_ratio(starts),
        failures=len(failures),
        failures_right=_ratio(failures),
    )


def summaries_by(results: Sequence[Result], group: str) -> dict[str, ScoreSummary]:
    """One error table for every value of a group, the one with most records first."""
    by_value: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        value = result.band_class if group == "class" else result.case.groups.get(group)
        by_value[value or "(not stated)"].append(result)
    return {value: summary(some) for value, some in sorted(by_value.items(), key=lambda item: -len(item[1]))}


def spread(errors: Sequence[tuple[str, float]]) -> Spread:
    """Median, 90th percentile and means of (source, error) pairs."""
    sizes = [abs(error) for _, error in errors]
    by_source: dict[str, list[float]] = defaultdict(list)
    for source, error in errors:
        by_source[source].append(abs(error))
    weighted = [(abs(error), 1 / len(by_source[source])) for source, error in errors]
    return Spread(
        count=len(errors),
        sources=len(by_source),
        median=quantile(sizes, 0.5),
        p90=quantile(sizes, 0.9),
        worst=max(sizes),
        mean=statistics.fmean(sizes),
        mean_by_source=statistics.fmean(statistics.fmean(some) for some in by_source.values()),
        median_by_source=weighted_quantile(weighted, 0.5),
        p90_by_source=weighted_quantile(weighted, 0.9),
        bias=quantile([error for _, error in errors], 0.5),
    )


def quantile(values: Iterable[float], share: float) -> float:
    """The value that `share` of the values lie below; never an average of two."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def weighted_quantile(pairs: Sequence[tuple[float, float]], share: float) -> float:
    """The smallest value at which the weights of it and all smaller ones reach `share` of the whole."""
    ordered = sorted(pairs)
    wanted = share * sum(weight for _, weight in ordered)
    reached = 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= wanted - 1e-12:
            return value
    return ordered[-1][0]


def _share(results: Sequence[Result], measure: str, bound: float) -> float | None:
    sizes = [abs(result.errors[measure]) for result in results if measure in result.errors]
    return sum(size < bound for size in sizes) / len(sizes) if sizes else None


def _ratio(right: Sequence[bool | None]) -> float | None:
    return sum(bool(answer) for answer in right) / len(right) if right else None


def result_json(result: Result) -> dict[str, Any]:
    """One record of the output file: enough to see which term was wrong."""
    case, planned = result.case, result.plan
    row: dict[str, Any] = {"id": case.id, "model": case.target.model.name, "release": case.target.release.version}
    row |= {"gpu": case.target.gpu.name, "groups": dict(case.groups)}
    if result.why_unanswered:
        return row | {"unanswered": result.why_unanswered}
    row |= {"errors": {name: round(error, 5) for name, error in result.errors.items()}}
    row |= {"class": result.band_class, "in_band": {name: check.inside for name, check in result.bands.items()}}
    row |= {"verdict_right": result.verdict_right, "predicted_failure": result.predicted_failure or None}
    if planned is not None:
        layout = planned.layout
        row["predicted"] = {
            "weights_bytes": layout.weights.bytes,
            "activation_bytes": layout.activation.bytes,
            "cuda_graph_bytes": layout.cuda_graph.bytes,
            "non_torch_bytes": layout.non_torch.bytes,
            "kv_cache_bytes": layout.kv_cache.bytes,
            "peak_used_bytes": layout.peak_used_bytes,
            "tokens": planned.memory.kv.tokens,
        }
    return row
