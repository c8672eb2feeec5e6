"""Real start-ups, and how far `legroom plan` is off on each: what the benches of accuracy read and measure.

Published start-ups are `startups.jsonl` with `models.json` beside it; instrumented runs are a JSONL file with a folder
of config.json folders. A record that says too little to be predicted is passed over; one that cannot be read is listed.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench_harness import read_lines
from recorded_models import UNSCORED_SOURCES, config_of, recorded_words

from legroom.errors import LegroomError
from legroom.facts.config.model_config import model_from_config
from legroom.facts.flags import flag_name
from legroom.facts.gpus import Gpu, gpu, with_total
from legroom.facts.model import Model
from legroom.facts.model_sources import load, stored_as_named
from legroom.facts.releases import Release, release
from legroom.planning.plan import Plan, Target, cold_start, plan_on_named_card
from legroom.units import GIB, MIB
from legroom.vllm.args import ServeArgs
from legroom.vllm.parse import parse_flags
from legroom.vllm.resolve import with_draft

Records = list[tuple[str, Mapping[str, Any]]]
MEASURES = ("weights", "kv", "kv_of_card", "tokens_per_byte", "activation", "peak_of_card")
SMALLEST_KV_BYTES = GIB // 2
"""Below half a GiB the rounding of the log is a large share of the cache."""
LOG_ROUNDING_BYTES = 6 * MIB
"""Logs print hundredths of a GiB: a figure is known to half of that."""
OLDEST_RELEASE = (0, 4)
QUANTIZATION_FLAGS = frozenset(
    {"awq", "awq_marlin", "gptq", "gptq_marlin", "fp8", "bitsandbytes", "compressed-tensors", "mxfp4", "modelopt"}
)
"""Values of a record's `quantization` that are vLLM flag values; others describe the checkpoint in words."""
FLAG_FIELDS = ("gpu_memory_utilization", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size")
FLAG_FIELDS += ("dtype", "kv_cache_dtype", "quantization")


@dataclass(frozen=True)
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
    started: bool | None = None
    """None: how it ended is not known, or does not depend on the plan."""


@dataclass(frozen=True)
class ScoredStart:
    """One real start-up, ready to be predicted."""

    id: str
    source: str
    """Where it was published."""
    target: Target
    args: ServeArgs
    printed: Printed
    cold: bool = False
    """Whether its compile cache was empty."""


@dataclass(frozen=True)
class Loaded:
    """The cases of a file, (id, reason) of the records that could not be read, and how many say too little."""

    cases: tuple[ScoredStart, ...]
    bad: tuple[tuple[str, str], ...]
    passed_over: int


@dataclass(frozen=True)
class Result:
    """One case and how far off the prediction was: relative errors, or shares of the card's total."""

    case: ScoredStart
    plan: Plan | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    kv_in_band: bool | None = None
    verdict_right: bool | None = None
    why_unanswered: str = ""


@dataclass(frozen=True)
class Spread:
    """The size of one measure's errors. By source: every source weighs the same, however many records it has."""

    median: float
    p90: float
    median_by_source: float
    p90_by_source: float


def read_records(path: Path) -> Records:
    return [(str(record.get("id") or number), record) for number, record in enumerate(read_lines(path), 1)]


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


def published_cases(folder: Path) -> Loaded:
    """The start-ups of `folder` whose model, flags, release and card are known well enough."""
    facts = json.loads((folder / "models.json").read_text("utf-8"))
    models: dict[str, Model] = {}

    def model(name: str) -> Model:
        if name not in models:
            known = facts[name]
            config = None if known.get("bundled") else config_of(known)
            models[name] = stored_as_named(model_from_config(config, name=name)) if config else load(name)
        return models[name]

    return _collect(read_records(folder / "startups.jsonl"), lambda record: _published(record, facts, model))


def gpu_run_cases(records: Records, *configs: Path) -> Loaded:
    """Instrumented runs; `configs` hold a folder with a config.json for every model."""
    models: dict[str, Model] = {}

    def model(name: str) -> Model:
        if name not in models:
            models[name] = load(str(next(folder / name for folder in configs if (folder / name).is_dir())))
        return models[name]

    return _collect(records, lambda record: _gpu_run(record, model))


def _collect(records: Records, case_of: Callable[[Mapping[str, Any]], ScoredStart | None]) -> Loaded:
    cases, bad, passed_over = [], [], 0
    for name, record in records:
        try:
            case = case_of(record)
        except (LegroomError, LookupError, TypeError, ValueError, ArithmeticError, StopIteration) as error:
            bad.append((name, f"{type(error).__name__}: {error}"))
            continue
        passed_over += case is None
        cases += [case] if case else []
    return Loaded(tuple(cases), tuple(bad), passed_over)


def _published(
    record: Mapping[str, Any], facts: Mapping[str, Mapping[str, Any]], model: Callable[[str], Model]
) -> ScoredStart | None:
    version = re.match(r"(\d+)\.(\d+)(?:\.\d+)?", str(record.get("vllm_release") or record.get("vllm_version") or ""))
    known = facts.get(record.get("model") or "")
    says_enough = (
        version
        and (int(version[1]), int(version[2])) >= OLDEST_RELEASE
        and "+" not in (record.get("gpu") or "")
        and (record.get("gpu") or record.get("total_gpu_memory_gib"))
        and all(record.get(name) for name in ("good", "flags_known"))
        and not record.get("approximate")
        and record.get("scorable", True)
        and known
        and not str(known.get("source") or "").startswith(UNSCORED_SOURCES)
    )
    if not says_enough or not version:
        return None
    tp, pp = record.get("tp"), record.get("pp")
    flags = {flag_name(name): record[name] for name in FLAG_FIELDS if record.get(name) is not None}
    flags |= {"--tensor-parallel-size": tp} if tp is not None else {}
    flags |= {"--pipeline-parallel-size": pp} if pp is not None else {}
    if flags.get("--quantization") not in QUANTIZATION_FLAGS:
        flags.pop("--quantization", None)
    if record.get("enforce_eager"):
        flags["--enforce-eager"] = True
    written = release(version[0])
    try:
        args = _parsed(flags, written, recorded_words(str(record.get("other_flags") or "")))
    except LegroomError:
        args = _parsed(flags, written)
    total = _bytes(record, "total_gpu_memory_gib")
    gpus = max(record.get("gpu_count") or 1, (tp or 1) * (pp or 1))
    blocks = (record.get("gpu_blocks") or 0) * (record.get("block_size") or 16)
    started = {"started": True, "failed_startup": False}.get(str(record.get("outcome")))
    if record.get("error_type") == "free_memory_lt_requested":
        started = None  # other processes held the memory; no plan could know
    return ScoredStart(
        id=str(record.get("id")),
        source=re.sub(r"/(?:blob|issues|pull|tree)/.*", "", record.get("url") or ""),
        target=Target(model(record["model"]), _card(record.get("gpu"), total), gpus, written),
        args=replace(args, model=record["model"], env={k: str(v) for k, v in (record.get("env") or {}).items()}),
        printed=Printed(
            weights_bytes=_bytes(record, "weights_gib"),
            kv_bytes=_bytes(record, "available_kv_gib"),
            tokens=record.get("kv_tokens") or blocks or None,
            total_bytes=total,
            activation_bytes=_bytes(record, "peak_activation_gib"),
            non_torch_bytes=_bytes(record, "non_torch_gib"),
            graph_estimate_bytes=_bytes(record, "cudagraph_estimated_gib"),
            rounding_bytes=LOG_ROUNDING_BYTES,
            started=started,
        ),
        cold=bool(record.get("cold")),
    )


def _parsed(flags: Mapping[str, Any], written: Release, further: Sequence[str] = ()) -> ServeArgs:
    """The flags read as the release's own command line would; one that it refuses is an error."""
    words = list(further)
    for flag, value in flags.items():
        words += (
            [flag] if value is True else [flag, json.dumps(value) if isinstance(value, dict | list) else str(value)]
        )
    parsed = parse_flags(words, written)
    if refused := [problem.message for problem in parsed.problems if problem.stops_vllm]:
        raise LegroomError("; ".join(refused))
    return parsed.args


def _gpu_run(record: Mapping[str, Any], model: Callable[[str], Model]) -> ScoredStart | None:
    env = record.get("env") or {}
    if not record.get("ok") or env.get("VLLM_DISABLE_COMPILE_CACHE"):
        return None
    total = record["init_snapshot"]["total_memory"]
    written = release(str(record.get("vllm") or record.get("vllm_version") or "0.26.0"))
    given = {name: value for name, value in (record.get("args") or {}).items() if name != "skip_tokenizer_init"}
    flags = {
        flag_name(name).replace("--", "--no-", 1) if value is False else flag_name(name): value is False or value
        for name, value in given.items()
    }
    args = replace(_parsed(flags, written), model=record["model"], env={name: str(env[name]) for name in env})
    snapshots = [record[name]["mem"] for name in record if name.startswith("gen") and "mem" in record[name]]
    frees = [snapshot["free"] for snapshot in (*snapshots, record.get("mem_ready") or {}) if "free" in snapshot]
    graphs, beside = record.get("cudagraph_estimate") or 0, None
    if "requested_memory" in record and not given.get("kv_cache_memory_bytes"):
        counted = record["available_kv_bytes"] + record["weights_bytes"] + record["peak_activation"]
        beside = int(record["requested_memory"] - counted - graphs)
    card = _card(record.get("gpu") or "NVIDIA H200", total)
    return ScoredStart(
        id=str(record["id"]),
        source=str(record["model"]),
        target=Target(with_draft(model(record["model"]), args), card, 1, written),
        args=args,
        printed=Printed(
            weights_bytes=record["weights_bytes"],
            kv_bytes=record["available_kv_bytes"],
            tokens=record.get("kv_tokens"),
            total_bytes=total,
            activation_bytes=record["peak_activation"],
            non_torch_bytes=beside,
            graph_estimate_bytes=graphs,
            peak_used_bytes=total - min(frees) if frees else None,
            started=True,
        ),
        cold=record.get("compile") == "cold",
    )


def _card(name: str | None, total_bytes: int | None) -> Gpu:
    if name:
        return with_total(gpu(name), total_bytes) if total_bytes else gpu(name)
    assert total_bytes
    return replace(gpu(f"{total_bytes / GIB:.4f}GiB"), total_bytes=total_bytes)


def _bytes(record: Mapping[str, Any], name: str) -> int | None:
    return None if record.get(name) is None else round(float(record[name]) * GIB)


@contextmanager
def gpu_runs(path: Path, *configs: Path) -> Iterator[tuple[Records, Loaded]]:
    """The runs of a file, legroom's own recordings with their models' files included."""
    records = read_records(path)
    with tempfile.TemporaryDirectory() as models:
        if own := unpacked(records, Path(models)):
            records, configs = own, (Path(models),)
        yield records, gpu_run_cases(records, *configs)


def score(cases: Iterable[ScoredStart]) -> list[Result]:
    return [predict(case) for case in cases]


def print_figures(rows: Iterable[tuple[str, float, float, bool]]) -> None:
    """What, its value, its target, and whether smaller is better."""
    for what, value, target, smaller in rows:
        met = value <= target if smaller else value >= target
        sign = "<=" if smaller else ">="
        print(f"  {what:44s} {value:8.3%}   target {sign} {target:.1%}   {'met' if met else 'MISSED'}")


def predict(case: ScoredStart) -> Result:
    """Plan one case as its user would have, and compare."""
    try:
        planned = plan_on_named_card(case.target, case.args)
        planned = cold_start(planned) if case.cold else planned
    except (LegroomError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        return Result(case, why_unanswered=f"{type(error).__name__}: {error}")
    printed, kv = case.printed, planned.layout.kv_cache
    started = None if printed.started is None else printed.started == (planned.verdict != "does_not_fit")
    in_band = None
    if printed.kv_bytes is not None and printed.kv_bytes > SMALLEST_KV_BYTES:
        in_band = kv.low - printed.rounding_bytes <= printed.kv_bytes <= kv.high + printed.rounding_bytes
    return Result(case, planned, errors_of(printed, planned), in_band, started)


def errors_of(printed: Printed, planned: Plan) -> dict[str, float]:
    """Every error that the printed figures allow to be measured."""
    layout, tokens = planned.layout, planned.memory.kv.tokens
    total, kv_bytes = printed.total_bytes or layout.total_bytes, layout.kv_cache.bytes
    errors: dict[str, float] = {}
    if printed.weights_bytes:
        errors["weights"] = layout.weights.bytes / printed.weights_bytes - 1
    if printed.kv_bytes and printed.kv_bytes > SMALLEST_KV_BYTES:
        errors["kv"] = kv_bytes / printed.kv_bytes - 1
        errors["kv_of_card"] = (kv_bytes - printed.kv_bytes) / total
    if printed.tokens and printed.kv_bytes and tokens and kv_bytes:
        errors["tokens_per_byte"] = (tokens / kv_bytes) / (printed.tokens / printed.kv_bytes) - 1
    if printed.activation_bytes:
        errors["activation"] = layout.activation.bytes / printed.activation_bytes - 1
    if printed.peak_used_bytes:
        errors["peak_of_card"] = (layout.peak_used_bytes - printed.peak_used_bytes) / total
    return errors


def spreads(results: Sequence[Result]) -> dict[str, Spread]:
    found = {}
    for measure in MEASURES:
        by_source: dict[str, list[float]] = defaultdict(list)
        for result in results:
            if measure in result.errors:
                by_source[result.case.source].append(abs(result.errors[measure]))
        if by_source:
            sizes = sorted(size for some in by_source.values() for size in some)
            weighted = [(size, 1 / len(some)) for some in by_source.values() for size in some]
            found[measure] = Spread(
                sizes[len(sizes) // 2],
                sizes[int(0.9 * len(sizes))],
                weighted_quantile(weighted, 0.5),
                weighted_quantile(weighted, 0.9),
            )
    return found


def weighted_quantile(pairs: Sequence[tuple[float, float]], share: float) -> float:
    """The smallest value at which the weights of it and all smaller ones reach `share` of the whole."""
    ordered = sorted(pairs)
    wanted, reached = share * sum(weight for _, weight in ordered), 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= wanted - 1e-12:
            return value
    return ordered[-1][0]


def share_within(results: Sequence[Result], measure: str, bound: float) -> float:
    """The share of the measured errors that are smaller than `bound`."""
    sizes = [abs(result.errors[measure]) for result in results if measure in result.errors]
    return statistics.fmean(size < bound for size in sizes) if sizes else 0.0


def verdicts_right(results: Sequence[Result], started: bool) -> float:
    """Of the start-ups that did (or did not) start, the share that the plan called right."""
    right = [result.verdict_right for result in results if result.plan and result.case.printed.started is started]
    return statistics.fmean(map(bool, right)) if right else 0.0
