"""Real start-ups to score on, as records: published ones, and those of instrumented GPU runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.bundled import find, mirrored
from legroom.facts.config.model_config import model_from_config
from legroom.facts.flags import flag_name
from legroom.facts.gpus import Gpu, gpu, with_total
from legroom.facts.model import Model
from legroom.facts.model_sources import from_bundled, load
from legroom.facts.releases import Release, release
from legroom.planning.plan import Target
from legroom.planning.recorded import UNSCORED_SOURCES, config_of, recorded_words
from legroom.planning.scoring import Bad, Printed, ScoredStart
from legroom.records import dataclass
from legroom.units import GIB, MIB
from legroom.vllm.args import ServeArgs
from legroom.vllm.parse import parse_flags
from legroom.vllm.resolve import with_draft

LOG_ROUNDING_BYTES = 6 * MIB
"""Logs print hundredths of a GiB, so a figure read from one is known to half of that and a little."""
_LARGEST_FILE_BYTES = 512 * 2**20
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.\d+)?")
_OLDEST = (0, 4)
_SCORED_QUANTIZATION = frozenset(
    {"awq", "awq_marlin", "gptq", "gptq_marlin", "fp8", "bitsandbytes", "compressed-tensors", "mxfp4", "modelopt"}
)
"""Values of a record's `quantization` that are vLLM flag values; others describe the checkpoint in words."""
FREE_MEMORY_FAILURE = "free_memory_lt_requested"
_RECORD_FLAGS = {
    "tp": "--tensor-parallel-size",
    "pp": "--pipeline-parallel-size",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "block_size": "--block-size",
    "dtype": "--dtype",
    "kv_cache_dtype": "--kv-cache-dtype",
    "quantization": "--quantization",
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """The cases of a source, the records that could not be read, and how many are not meant to be scored."""

    cases: tuple[ScoredStart, ...]
    bad: tuple[Bad, ...] = ()
    passed_over: int = 0


def read_records(path: Path) -> list[tuple[str, Mapping[str, Any] | str]]:
    """Every line of a JSONL file as (name, record), or (name, what is wrong with it)."""
    records: list[tuple[str, Mapping[str, Any] | str]] = []
    for number, line in enumerate(text_of(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            records.append((f"line {number}", f"not JSON: {error}"))
            continue
        if isinstance(record, dict):
            records.append((str(record.get("id") or f"line {number}"), record))
        else:
            records.append((f"line {number}", "not a JSON object"))
    if not records:
        raise LegroomError(f"{path} holds no records", "give a file with one JSON object a line")
    return records


def is_gpu_run(record: Mapping[str, Any]) -> bool:
    """Whether a record is of an instrumented run (exact bytes) rather than of a published log."""
    return "available_kv_bytes" in record or "init_snapshot" in record


def read_models(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """The model facts that records refer to."""
    try:
        models = json.loads(text_of(path))
    except (ValueError, RecursionError) as error:
        raise LegroomError(
            f"{path} is not JSON: {error}", "give the models.json that belongs to the records"
        ) from error
    if not isinstance(models, dict):
        raise LegroomError(f"{path} is not a JSON object of models", "give the models.json that belongs to the records")
    return models


def published_cases(
    records: list[tuple[str, Mapping[str, Any] | str]], models: Mapping[str, Mapping[str, Any]]
) -> Loaded:
    """Cases from published start-ups; only those whose model, flags and card are known well enough are scored."""
    known_models: dict[str, Model] = {}

    def model(name: str) -> Model:
        if name not in known_models:
            known_models[name] = model_from_config(config_of(models[name]), name=name, source="start-up records")
        return known_models[name]

    return _collect(records, lambda record: _published(record, models, model))


def bundled_cases(records: list[tuple[str, Mapping[str, Any] | str]]) -> Loaded:
    """Cases from published start-ups without a models.json: those of bundled models, and why each other is left out."""
    known_models: dict[str, Model | None] = {}

    def model(name: str) -> Model:
        if name not in known_models:
            entry = find(name) or mirrored(name)
            known_models[name] = from_bundled(entry, name) if entry else None
        if (known := known_models[name]) is None:
            raise LegroomError(f"{name} is not a bundled model: its facts have to stand in a models.json")
        return known

    def case_of(record: Mapping[str, Any]) -> ScoredStart | None:
        name = str(record.get("model") or "")
        scheme = model(name).quantization if name else None
        return _published(record, {name: {"weight_quantization": scheme.method if scheme else None}}, model)

    return _collect(records, case_of)


def gpu_run_cases(records: list[tuple[str, Mapping[str, Any] | str]], *configs: Path) -> Loaded:
    """Cases from instrumented runs; `configs` hold a folder with a config.json for every model."""
    known_models: dict[str, Model] = {}

    def model(name: str) -> Model:
        if name not in known_models:
            homes = [folder / name for folder in configs if (folder / name).is_dir()]
            if not homes:
                raise LegroomError(f"there is no config.json of {name}", "name its folder: --configs DIR")
            known_models[name] = load(str(homes[0]))
        return known_models[name]

    return _collect(records, lambda record: _gpu_run(record, model))


def _collect(
    records: list[tuple[str, Mapping[str, Any] | str]], case_of: Callable[[Mapping[str, Any]], ScoredStart | None]
) -> Loaded:
    cases, bad, passed_over = [], [], 0
    for name, record in records:
        if isinstance(record, str):
            bad.append(Bad(name, record))
            continue
        try:
            case = case_of(record)
        except LegroomError as error:
            bad.append(Bad(name, error.message))
        except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            bad.append(Bad(name, f"{type(error).__name__}: {error}"))
        else:
            if case is None:
                passed_over += 1
            else:
                cases.append(case)
    return Loaded(tuple(cases), tuple(bad), passed_over)


def _version(record: Mapping[str, Any]) -> str | None:
    """The release that wrote it; for a development build the first that contains its commit."""
    match = _VERSION.match(str(record.get("vllm_release") or record.get("vllm_version") or ""))
    if not match or (int(match[1]), int(match[2])) < _OLDEST:
        return None
    return match[0]


def is_scored(record: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a published record says enough to be predicted: model, release, flags, and the card or its total."""
    facts = models.get(record.get("model") or "")
    mixed_cards = "+" in (record.get("gpu") or "")
    return bool(
        _version(record)
        and not mixed_cards
        and record.get("good")
        and record.get("flags_known")
        and not record.get("approximate")
        and facts
        and not str(facts.get("source") or "").startswith(UNSCORED_SOURCES)
        and record.get("scorable", True)
        and (record.get("gpu") or record.get("total_gpu_memory_gib"))
    )


def _published(
    record: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]], model: Callable[[str], Model]
) -> ScoredStart | None:
    if not is_scored(record, models):
        return None
    flags = {flag: record[key] for key, flag in _RECORD_FLAGS.items() if record.get(key) is not None}
    if flags.get("--quantization") not in _SCORED_QUANTIZATION:
        flags.pop("--quantization", None)
    if record.get("enforce_eager"):
        flags["--enforce-eager"] = True
    written = release(_version(record) or "")
    args = _with_recorded(flags, str(record.get("other_flags") or ""), written)
    env = {name: str(value) for name, value in (record.get("env") or {}).items()}
    needed = (record.get("tp") or 1) * (record.get("pp") or 1)
    target = Target(
        model=model(record["model"]),
        gpu=card_of(record.get("gpu"), _bytes(record.get("total_gpu_memory_gib"))),
        gpus=max(record.get("gpu_count") or 1, needed),
        release=written,
    )
    return ScoredStart(
        id=str(record.get("id")),
        source=re.sub(r"/(?:blob|issues|pull|tree)/.*", "", record.get("url") or ""),
        target=target,
        args=replace(args, model=record["model"], env=env),
        printed=_printed(record),
        cold=bool(record.get("cold")),
        groups={
            "family": str(record.get("model_family") or ""),
            "gpu": str(record.get("gpu") or ""),
            "release": target.release.version,
            "quantization": str(models[record["model"]].get("weight_quantization") or "none"),
        },
    )


def _with_recorded(flags: Mapping[str, Any], others: str, written: Release) -> ServeArgs:
    """The flags with those the record keeps as text, where the release takes them."""
    recorded = recorded_words(others)
    try:
        return _parsed(flags, written, recorded)
    except LegroomError:
        return _parsed(flags, written)


def _parsed(flags: Mapping[str, Any], written: Release, further: list[str] | None = None) -> ServeArgs:
    """The flags read as the release's own command line would; one that it refuses is an error."""
    words: list[str] = list(further or ())
    for flag, value in flags.items():
        text = json.dumps(value) if isinstance(value, dict | list) else str(value)
        words += [flag] if value is True else [flag, text]
    parsed = parse_flags(words, written)
    refused = [problem.message for problem in parsed.problems if problem.stops_vllm]
    if refused:
        raise LegroomError("; ".join(refused))
    return parsed.args


def _printed(record: Mapping[str, Any]) -> Printed:
    tokens = record.get("kv_tokens") or (record.get("gpu_blocks") or 0) * (record.get("block_size") or 16)
    outcome = {"started": True, "failed_startup": False}.get(str(record.get("outcome")))
    if record.get("error_type") == FREE_MEMORY_FAILURE:
        outcome = None  # other processes held the memory; no plan could know
    return Printed(
        weights_bytes=_bytes(record.get("weights_gib")),
        kv_bytes=_bytes(record.get("available_kv_gib")),
        tokens=tokens or None,
        total_bytes=_bytes(record.get("total_gpu_memory_gib")),
        activation_bytes=_bytes(record.get("peak_activation_gib")),
        non_torch_bytes=_bytes(record.get("non_torch_gib")),
        graph_estimate_bytes=_bytes(record.get("cudagraph_estimated_gib")),
        rounding_bytes=LOG_ROUNDING_BYTES,
        started=outcome,
        failure=str(record.get("error_type") or ""),
    )


def _gpu_run(record: Mapping[str, Any], model: Callable[[str], Model]) -> ScoredStart | None:
    env = record.get("env") or {}
    if not record.get("ok") or env.get("VLLM_DISABLE_COMPILE_CACHE"):
        return None  # a run that never keeps what it compiled is like no user's
    total = record["init_snapshot"]["total_memory"]
    written = release(str(record.get("vllm") or record.get("vllm_version") or "0.26.0"))
    flags = {
        flag_name(name).replace("--", "--no-", 1) if value is False else flag_name(name): value is False or value
        for name, value in (record.get("args") or {}).items()
        if name != "skip_tokenizer_init"
    }
    args = replace(_parsed(flags, written), model=record["model"], env={name: str(env[name]) for name in env})
    frees = [record[name]["mem"]["free"] for name in record if name.startswith("gen") and "mem" in record[name]]
    ready = (record.get("mem_ready") or {}).get("free")
    frees += [ready] if ready is not None else []
    return ScoredStart(
        id=str(record["id"]),
        source=str(record["model"]),
        target=Target(
            with_draft(model(record["model"]), args), card_of(record.get("gpu") or "NVIDIA H200", total), 1, written
        ),
        args=args,
        printed=Printed(
            weights_bytes=record["weights_bytes"],
            kv_bytes=record["available_kv_bytes"],
            tokens=record.get("kv_tokens"),
            total_bytes=total,
            activation_bytes=record["peak_activation"],
            non_torch_bytes=_charged_beside(record),
            graph_estimate_bytes=record.get("cudagraph_estimate") or 0,
            peak_used_bytes=total - min(frees) if frees else None,
            started=True,
        ),
        cold=record.get("compile") == "cold",
        groups={
            "family": str(record["model"]),
            "release": written.version,
            "gpu": str(record.get("gpu") or "NVIDIA H200"),
        },
    )


def _charged_beside(record: Mapping[str, Any]) -> int | None:
    """What the run charged beside weights, activation and graphs, whatever the release counts as non-torch."""
    if "requested_memory" not in record or (record.get("args") or {}).get("kv_cache_memory_bytes"):
        return None
    counted = ("available_kv_bytes", "weights_bytes", "peak_activation")
    graphs = record.get("cudagraph_estimate") or 0
    return int(record["requested_memory"] - sum(record[name] for name in counted) - graphs)


def card_of(name: str | None, total_bytes: int | None) -> Gpu:
    if name:
        card = gpu(name)
        return with_total(card, total_bytes) if total_bytes else card
    if total_bytes:
        card = gpu(f"{total_bytes / GIB:.4f}GiB")
        return replace(card, total_bytes=total_bytes)
    raise LegroomError("neither the GPU nor its memory is named", "say which GPU it was with --gpu")


def _bytes(gib: Any) -> int | None:
    return None if gib is None else round(float(gib) * GIB)


def text_of(path: Path) -> str:
    try:
        if path.stat().st_size > _LARGEST_FILE_BYTES:
            raise LegroomError(f"{path} is larger than {_LARGEST_FILE_BYTES >> 20} MiB", "give the start-up part of it")
        return path.read_text("utf-8", errors="replace")
    except OSError as error:
        raise LegroomError(f"{path} cannot be read: {error.strerror}") from error
