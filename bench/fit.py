"""Fit the constants of memory that no formula gives, and say how well they hold.

    python bench/fit.py GPU_DIR [TRUTH_DIR] [--runs tests/fixtures/h200_0.26.jsonl] [--write]

GPU_DIR holds `measured.jsonl` and `kit/configs`, TRUTH_DIR `startups.jsonl` and `models.json`, as `bench/scoring.py`
reads them. Formulas give the activation peak and the buffers that stay; here the rest is fitted: what torch keeps
cached, the graphs' pool, and the newest release's non-torch memory. With --write the constants go to
`src/legroom/facts/data/fit.json`; without it, only the residuals are printed. Every fit is repeated with each model
left out in turn, and the error on the model left out is what the table shows.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench_harness import ROOT, arguments, read_lines
from scoring import published_cases

from legroom.errors import LegroomError
from legroom.facts.config.model_config import model_from_config
from legroom.facts.fit import by_release, constants
from legroom.facts.gpus import Gpu, gpu, with_total
from legroom.facts.model import Model
from legroom.facts.releases import release
from legroom.memory.activation.profile_run import activation, activation_cold, forward_bytes
from legroom.memory.attention_workspace import largest_split_buffers
from legroom.memory.cudagraph_memory import (
    captured_activations,
    captured_sizes,
    graph_bytes,
    graph_estimate,
    layer_nodes,
)
from legroom.memory.overhead import communication_bytes, cuda_context, non_torch, outside
from legroom.units import GIB, MIB
from legroom.vllm.args import EngineSettings, ServeArgs
from legroom.vllm.resolve import resolve

FIT = ROOT / "src/legroom/facts/data/fit.json"
RECORDED = ROOT / "tests/fixtures/h200_0.26.jsonl"
H200 = with_total(gpu("NVIDIA H200"), 150109880320)
ARGS = {field for field in ServeArgs.__dataclass_fields__ if field not in ("model", "usage", "env", "others")}


@dataclass(frozen=True)
class Run:
    """One measured start-up, with what legroom resolves for it."""

    id: str
    name: str
    model: Model
    settings: EngineSettings
    compile: str
    seen: dict[str, Any]
    gpu: Gpu = H200


def settings_of(model: Model, args: dict[str, Any], env: dict[str, Any] | None, card: Gpu = H200) -> EngineSettings:
    known = {key: value for key, value in args.items() if key in ARGS}
    given = ServeArgs(model=model.name, usage="llm", env={k: str(v) for k, v in (env or {}).items()}, **known)
    return resolve(given, model, card, release("0.26.0"))


def recorded_runs(path: Path) -> list[Run]:
    """legroom's own recordings."""
    lines = list(read_lines(path))
    models = {
        line["name"]: model_from_config(line["config"], line["name"]) for line in lines if line["kind"] == "model"
    }
    found = []
    for line in lines:
        if line["kind"] == "run":
            model = models[line["model"]]
            try:
                settings = settings_of(model, line["args"], line.get("env"))
            except LegroomError:
                continue
            family = line["model"].split("-", 1)[1]
            found.append(Run(line["id"], family, model, settings, line["compile"], line))
    return found


def measured_runs(folder: Path) -> list[Run]:
    """The runs of a folder of instrumented start-ups, in the same form."""
    found = []
    models: dict[str, Model] = {}
    for raw in read_lines(folder / "measured.jsonl"):
        if not raw.get("ok"):
            continue
        name = raw["model"]
        if name not in models:
            models[name] = model_from_config(
                json.loads((folder / "kit/configs" / name / "config.json").read_text()), name
            )
        memory = [raw["mem_ready"]] + [raw[k]["mem"] for k in ("gen0", "gen1") if "mem" in raw.get(k, {})]
        seen = {
            "activation_bytes": raw["peak_activation"],
            "weights_bytes": raw["weights_bytes"],
            "non_torch_bytes": raw["non_torch"],
            "graph_estimate_bytes": raw["cudagraph_estimate"],
            "graph_bytes": raw.get("cuda_graph_bytes", 0),
            "kv_cache_bytes": raw["available_kv_bytes"],
            "budget_bytes": raw["requested_memory"],
            "served": len(memory) > 1,
            "used_bytes": memory[0]["total"] - min(part["free"] for part in memory),
        }
        state = "eager" if raw["cfg"]["eager"] else raw.get("compile") or "warm"
        found.append(
            Run(raw["id"], name, models[name], settings_of(models[name], raw["args"], raw["env"]), state, seen)
        )
    return found


def least_squares(rows: Sequence[tuple[str, Sequence[float], float]]) -> tuple[list[float], list[float]]:
    """Coefficients that are not negative, and the error on each row when its model is left out."""
    x, y = np.array([row[1] for row in rows]), np.array([row[2] for row in rows])
    errors = []
    for name, features, value in rows:
        kept = [i for i, row in enumerate(rows) if row[0] != name]
        errors.append(float(np.dot(_solve(x[kept], y[kept]), features) - value))
    return [float(c) for c in _solve(x, y)], errors


def _solve(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Least squares with negative coefficients set to zero, one at a time."""
    active = list(range(x.shape[1]))
    while active:
        solution, *_ = np.linalg.lstsq(x[:, active], y, rcond=None)
        if (solution >= 0).all():
            break
        active.pop(int(np.argmin(solution)))
    full = np.zeros(x.shape[1])
    full[active] = solution
    return full


def table(title: str, errors: Sequence[float], unit: str = "MiB") -> None:
    sizes = sorted(abs(error) for error in errors)
    if sizes:
        p90 = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
        middle = statistics.median(sizes)
        print(f"{title:44s} n={len(sizes):3d} median {middle:8.2f} p90 {p90:8.2f} worst {sizes[-1]:8.2f} {unit}")


def fit_cached(runs: Sequence[Run], fit: dict[str, Any]) -> None:
    """What torch keeps cached after full batches: runs without graphs, or that served requests."""
    for runner in ("V1", "V2"):
        rows = []
        for run in runs:
            if run.settings.runner != runner or "used_bytes" not in run.seen or run.compile == "cold":
                continue
            if run.compile != "eager" and not run.seen["served"]:
                continue
            kept = {term.label: term.bytes for term in outside(run.model, run.settings, run.gpu).terms}
            rest = run.seen["used_bytes"] - cuda_context(run.gpu).bytes - run.seen["graph_bytes"]
            rest -= run.seen["non_torch_bytes"] + run.seen["weights_bytes"] + run.seen["kv_cache_bytes"]
            rest -= kept["runner buffers"] + kept["workspaces"]
            logits = min(run.settings.max_num_seqs, run.settings.max_num_batched_tokens) * run.model.vocab_size * 4
            features = (1.0, logits / MIB, forward_bytes(run.model, run.settings, run.gpu) / MIB)
            rows.append((run.name, features, rest / MIB))
        (fixed, logit, forward), errors = least_squares(rows)
        by_release(fit["cached"][runner], release("0.26.0")).update(
            mib=round(fixed, 1), per_logit_byte=round(logit, 3), per_forward_byte=round(forward, 3)
        )
        table(f"cached by torch, runner {runner}", errors)


def fit_graphs(runs: Sequence[Run], fit: dict[str, Any]) -> None:
    """The pool of captured graphs; the driver's part of each node was read off the growth outside torch."""
    for runner in ("V1", "V2"):
        row = by_release(fit["graphs"][runner], release("0.26.0"))
        rows = []
        for run in runs:
            if run.settings.runner != runner or not run.seen.get("graph_bytes"):
                continue
            pieces, full = captured_sizes(run.settings)
            nodes = layer_nodes(run.model) * (len(pieces) * row["piecewise_mib"] + len(full) * row["full_mib"])
            splits = largest_split_buffers(run.model, run.settings, run.gpu, full) / MIB
            activations = captured_activations(run.model, run.settings, run.gpu) / MIB
            experts = any(hasattr(layer.feedforward, "num_experts") for layer in run.model.layers)
            share = max(run.settings.cudagraph_capture_sizes) / 512 if experts else 0.0
            rows.append((run.name, (1.0, splits, activations, share), run.seen["graph_bytes"] / MIB - nodes))
        (pool, split, activation_byte, experts_pool), errors = least_squares(rows)
        row.update(
            pool_mib=round(pool, 1),
            pool_per_split_byte=round(split, 3),
            pool_per_activation_byte=round(activation_byte, 3),
            pool_mib_experts=round(experts_pool, 1),
        )
        table(f"CUDA graphs, runner {runner}", errors)


def fit_non_torch(runs: Sequence[Run], fit: dict[str, Any]) -> None:
    """Single-GPU runs of the newest row of the table."""
    values = [run.seen["non_torch_bytes"] / MIB for run in runs if "non_torch_bytes" in run.seen]
    by_release(fit["non_torch"]["base"], release("0.26.0"))["hopper_mib"] = round(statistics.median(values))
    table("non-torch, one GPU", [value - statistics.median(values) for value in values])


def published_residuals(folder: Path) -> None:
    """activation + non-torch + estimate against budget - weights - KV of published start-ups, by release row."""
    loaded = published_cases(folder)
    by_row: dict[str, list[float]] = defaultdict(list)
    every: dict[str, list[float]] = defaultdict(list)
    for case in loaded.cases:
        weights, kv = case.printed.weights_bytes, case.printed.kv_bytes
        if not weights or not kv or kv < GIB // 2:
            continue
        try:
            settings = resolve(case.args, case.target.model, case.target.gpu, case.target.release)
        except LegroomError:
            continue
        card, model = case.target.gpu, case.target.model
        left = card.total_bytes * settings.gpu_memory_utilization - weights - kv
        predicted = activation(model, settings, card, settings.pipeline_parallel_size - 1).bytes
        predicted += graph_estimate(model, settings, card).bytes + non_torch(model, settings, card).bytes
        error = (predicted - left) / card.total_bytes * 100
        kind = "Hopper+" if card.compute_capability >= (9, 0) else "other"
        wire = "one GPU" if not communication_bytes(settings, card) else f"TP {settings.tensor_parallel_size}"
        by_row[f"{settings.release} {kind} {wire}"].append(error)
        every[case.source].append(abs(error))
    print("\npublished start-ups: error of (activation + non-torch + estimate), % of the card")
    for name, errors in sorted(by_row.items(), key=lambda item: [int(p) for p in item[0].split()[0].split(".")[:2]]):
        middle, worst = statistics.median(errors), max(errors, key=abs)
        print(f"  {name:34s} n={len(errors):3d} median {middle:+7.2f} worst {worst:+7.2f}")
    table("all, one vote a source", [statistics.mean(errors) for errors in every.values()], "% of card")
    table("all, one vote a start-up", [error for errors in every.values() for error in errors], "% of card")


def report(runs: Sequence[Run]) -> list[float]:
    """Errors of the figures as they stand; returns the relative errors of the activation."""
    relative, kv, peak = [], [], []
    checks: list[tuple[str, str, Callable[..., Any]]] = [
        ("graph estimate", "graph_estimate_bytes", graph_estimate),
        ("CUDA graphs", "graph_bytes", graph_bytes),
    ]
    errors: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        what = (run.model, run.settings, run.gpu)
        figure = (activation_cold if run.compile == "cold" else activation)(*what)
        relative.append((figure.bytes - run.seen["activation_bytes"]) / run.seen["activation_bytes"] * 100)
        errors[f"activation, {run.compile}"].append((figure.bytes - run.seen["activation_bytes"]) / MIB)
        if "kv_cache_bytes" not in run.seen:
            continue
        for title, key, rule in checks:
            errors[title].append((rule(*what).bytes - run.seen[key]) / MIB)
        inside = run.seen["weights_bytes"] + figure.bytes + graph_estimate(*what).bytes + non_torch(*what).bytes
        if run.settings.kv_cache_memory_bytes is None:
            kv.append((run.seen["budget_bytes"] - inside) / run.seen["kv_cache_bytes"] * 100 - 100)
        used = inside + run.seen["kv_cache_bytes"] + outside(*what).bytes
        peak.append((used - run.seen["used_bytes"]) / run.gpu.total_bytes * 100)
    for title, found in errors.items():
        table(title, found)
    table("KV bytes, weights given", kv, "%")
    table("peak use of the card", peak, "% of card")
    return relative


def main() -> None:
    args = arguments(__doc__, "gpu:path", "truth:path?", runs=RECORDED, write=False)
    runs = measured_runs(args.gpu) + recorded_runs(args.runs)
    runs = [run for run in runs if run.settings.runner == run.seen.get("runner", run.settings.runner)]
    fit = json.loads(json.dumps(constants()))
    print(f"{len(runs)} runs; each model left out in turn:")
    fit_cached(runs, fit)
    fit_graphs(runs, fit)
    fit_non_torch(runs, fit)
    print("\nwith the constants in use:")
    relative = sorted(abs(error) for error in report(runs) if error)
    fit["activation_band"]["relative"] = round(max(0.01, relative[int(0.9 * len(relative))] / 100), 3)
    if args.truth:
        published_residuals(args.truth)
    if args.write:
        FIT.write_text(json.dumps(fit, indent=1) + "\n")
        print(f"\nwrote {FIT}")


if __name__ == "__main__":
    main()
