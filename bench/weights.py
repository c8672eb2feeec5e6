#!/usr/bin/env python3
"""legroom's weights per rank against what vLLM printed, and against what its model classes hold.

    bench/weights.py [FOLDER] [--classes FIXTURE.jsonl] [--json] [--show N]

FOLDER holds startups.jsonl (real start-ups) and models.json (the config fields of their models); without it only the
recorded model classes are compared (tests/recorders/record_weights.py records them). Prints a table a source of truth:
errors overall, by quantization and by model family; with --json, one JSON document.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "memory"))

from weight_cases import H100, settings

from legroom.errors import LegroomError
from legroom.facts.config.model_config import model_from_config
from legroom.facts.gpus import Gpu
from legroom.facts.gpus import gpu as find_gpu
from legroom.memory.weights.loaded import parameter_bytes, weights

GIB = 2**30
CLASSES = ROOT / "tests" / "fixtures" / "vllm_weights.jsonl"
NOT_CONFIG = {"source", "base", "num_parameters", "notes", "weight_quantization"}
SCHEMES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("awq", {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}),
    ("marlin", {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}),
    ("gptq", {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}),
    ("nf4", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    ("nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}),
    ("mxfp4", {"quant_method": "mxfp4"}),
    (
        "fp8 per-channel",
        {
            "quant_method": "compressed-tensors",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                    "input_activations": {"dynamic": True},
                }
            },
        },
    ),
    ("fp8", {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}),
    (
        "int8 w8a8",
        {
            "quant_method": "compressed-tensors",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                    "input_activations": {"dynamic": True},
                }
            },
        },
    ),
    (
        "int4",
        {
            "quant_method": "compressed-tensors",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
                }
            },
        },
    ),
)
"""What a one-line description of a quantization means as a config section."""


@dataclass(frozen=True)
class Error:
    """One prediction: relative error, and what it belongs to."""

    relative: float
    source: str
    family: str
    quantization: str
    what: str


def config_of(facts: dict[str, Any]) -> dict[str, Any]:
    """A config.json made of the recorded fields of a model."""
    config = {name: value for name, value in facts.items() if name not in NOT_CONFIG and value is not None}
    described = str(facts.get("weight_quantization") or "")
    stated = (config.get("quantization_config") or {}).get("quant_method")
    for word, section in SCHEMES:
        if word in described:
            if stated not in (section["quant_method"], "modelopt"):
                config["quantization_config"] = section
            break
    return config


def usable(record: dict[str, Any], models: dict[str, Any]) -> bool:
    facts = models.get(record.get("model") or "")
    known = facts is not None and facts.get("source") not in ("deduced", "assumed")
    good = record.get("good") and record.get("flags_known") and not record.get("approximate")
    return bool(known and good and record.get("weights_gib") and release_of(record))


def release_of(record: dict[str, Any]) -> str | None:
    found = re.match(r"0\.([4-9]|\d\d)(\.\d+)?", record.get("vllm_version") or "")
    return found.group(0) if found else None


def card(record: dict[str, Any]) -> Gpu:
    try:
        return find_gpu(record["gpu"]) if record.get("gpu") else H100
    except LegroomError:
        return H100


def startup_errors(folder: Path) -> Iterator[Error]:
    """Real start-ups: GiB per rank as printed."""
    models = json.loads((folder / "models.json").read_text(encoding="utf-8"))
    for line in (folder / "startups.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if not usable(record, models):
            continue
        try:
            model = model_from_config(config_of(models[record["model"]]), record["model"])
        except LegroomError as problem:
            print(f"{record['id']} {record['model']}: {problem.message}", file=sys.stderr)
            continue
        dtype = record.get("dtype")
        chosen = settings(
            release_of(record) or "0.32.0",
            dtype=dtype if dtype in ("float16", "bfloat16", "float32") else model.dtype,
            quantization=record.get("quantization"),
            kv_cache_dtype=record.get("kv_cache_dtype") or "auto",
            tensor_parallel_size=record.get("tp") or 1,
            pipeline_parallel_size=record.get("pp") or 1,
            enforce_eager=bool(record.get("enforce_eager")),
        )
        stages = range(chosen.pipeline_parallel_size)
        found = max(weights(model, chosen, card(record), stage).bytes for stage in stages)
        source = re.sub(r"/(blob|issues|pull|tree)/.*", "", record.get("url") or "")
        method = model.quantization.method if model.quantization else "none"
        relative = found / GIB / record["weights_gib"] - 1
        yield Error(relative, source, model.model_type, method, f"{record['id'][:4]} {record['model']}")


def class_errors(fixture: Path) -> Iterator[Error]:
    """vLLM's own model classes: bytes of parameters."""
    for line in fixture.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        model = replace(model_from_config(record["config"]), quantization=None)
        for ranks, stages in record["stages"].items():
            tp, _, pp = ranks.partition("x")
            chosen = settings(tensor_parallel_size=int(tp), pipeline_parallel_size=int(pp), dtype=record["dtype"])
            for stage, expected in enumerate(stages):
                found = parameter_bytes(model, chosen, H100, stage)
                yield Error(found / expected - 1, ranks, model.model_type, "none", f"{record['name']} {ranks}.{stage}")


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(errors: list[Error]) -> dict[str, Any]:
    """Median, 90th percentile and means, overall and by group."""
    sizes = [abs(error.relative) for error in errors]
    by_source: dict[str, list[float]] = defaultdict(list)
    for error in errors:
        by_source[error.source].append(abs(error.relative))
    out: dict[str, Any] = {
        "n": len(errors),
        "exact": sum(size == 0 for size in sizes) / len(sizes),
        "median": statistics.median(sizes),
        "p90": quantile(sizes, 0.9),
        "mean": statistics.mean(sizes),
        "mean_by_source": statistics.mean(statistics.mean(group) for group in by_source.values()),
    }
    for name in ("quantization", "family"):
        groups: dict[str, list[float]] = defaultdict(list)
        for error in errors:
            groups[getattr(error, name)].append(abs(error.relative))
        out[name] = {
            key: {"n": len(group), "median": statistics.median(group), "worst": max(group)}
            for key, group in sorted(groups.items())
        }
    return out


def show(title: str, found: dict[str, Any]) -> None:
    print(
        f"{title}: n={found['n']} exact={found['exact']:.1%} median={found['median']:.3%} p90={found['p90']:.2%} "
        f"mean={found['mean']:.2%} by source={found['mean_by_source']:.2%}"
    )
    for name in ("quantization", "family"):
        for key, group in found[name].items():
            print(f"  {name:12s} {key:24s} n={group['n']:3d} median={group['median']:.3%} worst={group['worst']:.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--classes", type=Path, default=CLASSES)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--show", type=int, default=0, help="the N worst predictions")
    asked = parser.parse_args()
    tables = {"classes": list(class_errors(asked.classes))}
    if asked.folder:
        tables["startups"] = list(startup_errors(asked.folder))
    found = {name: summary(errors) for name, errors in tables.items() if errors}
    if asked.json:
        print(json.dumps(found))
        return
    for name, table in found.items():
        show(name, table)
        for error in sorted(tables[name], key=lambda one: -abs(one.relative))[: asked.show]:
            print(f"    {error.relative:+9.3%} {error.what}")


if __name__ == "__main__":
    main()
