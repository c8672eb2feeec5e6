"""Random settings of bundled models, vLLM's own answers to them (a judge that runs its configuration code without a
GPU), and how often legroom says the same.

    python tests/vllm/config_answers.py --judge FOLDER --python PYTHON [--src FOLDER] [--seed N] [--count N] --out FILE

FOLDER holds the judge's `oracle_config.py`, PYTHON is the interpreter with vLLM's packages. FILE gets one line a case:
the settings, accepted or refused, vLLM's error, and the values it resolved.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.bundled import bundled_config, bundled_names, find
from legroom.facts.config_classes import field_of_flag, known_names
from legroom.facts.flags import choices, flag_name
from legroom.facts.gpus import gpu as named_gpu
from legroom.facts.model_sources import load
from legroom.facts.release_support import quantization_methods
from legroom.facts.releases import Release
from legroom.facts.releases import release as known_release
from legroom.memory.deployment_memory import deployment_memory
from legroom.units import GIB
from legroom.vllm.args import EngineSettings
from legroom.vllm.parse import parse_flags
from legroom.vllm.resolve import resolve, with_draft
from legroom.vllm.unsupported import unsupported

CARDS = ("t4", "a10", "a100-80gb", "l4", "rtx 4090", "h100", "h200", "b200", "rtx 5090")
SIZES = (1, 2, 3, 4, 8, 16)
NUMBERS: dict[str, tuple[int | float, ...]] = {
    "max_model_len": (1024, 4096, 32768, 131072),
    "max_num_seqs": (1, 64, 256, 2048),
    "max_num_batched_tokens": (1, 512, 8192, 65536),
    "block_size": (8, 16, 32, 64, 100, 128),
    "gpu_memory_utilization": (0.4, 0.9, 1.0),
    "long_prefill_token_threshold": (512, 500000),
    "max_cpu_loras": (1, 16),
    "max_loras": (2, 8),
    "num_gpu_blocks_override": (64, 4096),
}
CHOSEN = ("dtype", "kv_cache_dtype", "quantization", "attention_backend", "max_lora_rank", "runner", "convert")
SWITCHES = (
    "--enable-lora",
    "--enable-expert-parallel",
    "--enable-eplb",
    "--enable-dbo",
    "--no-enable-chunked-prefill",
    "--no-enable-prefix-caching",
    "--enforce-eager",
    "--async-scheduling",
    "--disable-hybrid-kv-cache-manager",
    "--language-model-only",
)
PARALLEL = {"tensor_parallel_size": 6, "pipeline_parallel_size": 2, "data_parallel_size": 2}
LIMITS = {"false_accepts": 0.02, "false_refusals": 0.005, "resolved_wrong": 0.01}
COMPARED = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_dtype",
    "dtype",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "async_scheduling",
    "max_concurrent_batches",
)


def drawn(seed: int, count: int, release: Release) -> Iterator[dict[str, Any]]:
    """Settings of which about half are valid: values at and beyond the bounds of their fields come often."""
    rng = random.Random(seed)
    names = list(bundled_names())
    for _ in range(count):
        card = named_gpu(rng.choice(CARDS))
        flags: list[str] = []
        for _ in range(rng.choice((0, 1, 1, 2, 2, 3))):
            words = _flag(rng, release)
            if words[0] not in flags:
                flags += words
        sizes = [int(flags[flags.index(flag_name(name)) + 1]) for name in PARALLEL if flag_name(name) in flags]
        ranks = 1
        for size in sizes:
            ranks *= size
        capability = ".".join(map(str, card.compute_capability))
        model = rng.choice(names)
        while not _is_text_generator(model):
            model = rng.choice(names)
        yield {
            "model": model,
            "gpu": card.name,
            "capability": capability,
            "total_gib": round(card.total_bytes / GIB, 2),
            "gpus": ranks,
            "flags": flags,
        }


def _is_text_generator(name: str) -> bool:
    """Whether the bundled config says all that vLLM reads; encoders and poolers have more files."""
    model = load(name, offline=True)
    return not (model.modalities or model.is_pooling)


def _flag(rng: random.Random, release: Release) -> list[str]:
    kind = rng.random()
    if kind < 0.25:
        name = rng.choices(list(PARALLEL), list(PARALLEL.values()))[0]
        size = rng.choice(SIZES)
        words = [flag_name(name), str(size)]
        return [*words, "--decode-context-parallel-size", "2"] if rng.random() < 0.15 else words
    if kind < 0.5:
        name = rng.choice(list(NUMBERS))
        rule = field_of_flag(name, release)
        edges = [rule[key] - 1 for key in ("ge", "gt") if key in rule] + [
            rule[key] + 1 for key in ("le",) if key in rule
        ]
        value = rng.choice(edges) if edges and rng.random() < 0.25 else rng.choice(NUMBERS[name])
        extra = ["--enable-lora"] if "lora" in name else []
        return [flag_name(name), str(value), *extra]
    if kind < 0.75:
        name = rng.choice(CHOSEN)
        pools = {
            "quantization": quantization_methods(release),
            "attention_backend": known_names("attention_backends", release),
        }
        allowed = pools.get(name) or choices(flag_name(name), release) or ("auto",)
        value = "no_such_value" if rng.random() < 0.05 else rng.choice([item for item in allowed if item is not None])
        return [flag_name(name), str(value), *(["--enable-lora"] if "lora" in name else [])]
    if kind < 0.9:
        return [rng.choice(SWITCHES)]
    spec: dict[str, Any] = {"method": rng.choice(("ngram", "mtp", "suffix", "no_such_method"))}
    if rng.random() < 0.8:
        spec["num_speculative_tokens"] = rng.choice((0, 1, 4))
    return ["--speculative-config", json.dumps(spec)]


def record(cases: Iterable[dict[str, Any]], judge: Path, python: Path, src: Path | None) -> Iterator[dict[str, Any]]:
    """The judge's answers to the cases, in their order; cases that it cannot decide are left out."""
    with tempfile.TemporaryDirectory() as folder:
        asked = []
        for number, case in enumerate(cases):
            model = find(case["model"])
            assert model is not None
            config = Path(folder, "models", case["model"].replace("/", "--"), "config.json")
            config.parent.mkdir(parents=True, exist_ok=True)
            config.write_text(json.dumps(bundled_config(model, model.ids[0])))
            asked.append({**case, "id": str(number), "config": str(config.parent)})
        listed, answers = Path(folder, "cases.jsonl"), Path(folder, "answers.jsonl")
        listed.write_text("".join(json.dumps(case) + "\n" for case in asked))
        words = [python, judge / "oracle_config.py", listed, "--out", answers, *(["--src", src] if src else [])]
        subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL)
        found = {answer["id"]: answer for answer in map(json.loads, answers.read_text().splitlines())}
    for case in asked:
        answer = found.get(case["id"], {})
        if answer.get("verdict") not in ("accepted", "refused") or answer.get("memory"):
            continue
        resolved = answer.get("resolved") or {}
        kept = {name: resolved[name] for name in COMPARED if name in resolved} if answer["accepted"] else {}
        plain = {key: value for key, value in case.items() if key not in ("id", "config")}
        yield {**plain, "accepted": answer["accepted"], "error": (answer.get("error") or "")[:160], "resolved": kept}


@dataclass
class Agreement:
    """How legroom's answers compare with vLLM's."""

    accepted: int = 0
    refused: int = 0
    compared: int = 0
    false_accepts: list[dict[str, Any]] = field(default_factory=list)
    false_refusals: list[dict[str, Any]] = field(default_factory=list)
    resolved_wrong: list[dict[str, Any]] = field(default_factory=list)

    def rates(self) -> dict[str, float]:
        return {
            "false_accepts": len(self.false_accepts) / max(1, self.refused),
            "false_refusals": len(self.false_refusals) / max(1, self.accepted),
            "resolved_wrong": len(self.resolved_wrong) / max(1, self.compared),
        }

    def errors(self) -> Counter[str]:
        """vLLM's errors behind the false accepts."""
        return Counter(case["error"][:90] for case in self.false_accepts)


def compared(answers: Iterable[dict[str, Any]], version: str) -> Agreement:
    """legroom's answer to every recorded case, beside vLLM's."""
    found = Agreement()
    for case in answers:
        settings, refusal = legrooms_answer(case, known_release(version))
        if not case["accepted"]:
            found.refused += 1
            if not refusal:
                found.false_accepts.append(case)
            continue
        found.accepted += 1
        if refusal:
            found.false_refusals.append({**case, "legroom": refusal})
        elif settings is not None:
            found.compared += 1
            wrong = {
                name: getattr(settings, name)
                for name, value in case["resolved"].items()
                if _differs(settings, name, value)
            }
            if wrong:
                found.resolved_wrong.append({**case, "legroom": wrong})
    return found


def _differs(settings: EngineSettings, name: str, value: Any) -> bool:
    ours = getattr(settings, name)
    if name == "kv_cache_dtype" and {ours, value} <= {"fp8", "fp8_e4m3"}:
        return False
    return bool(ours != value)


def legrooms_answer(case: dict[str, Any], release: Release) -> tuple[EngineSettings | None, str]:
    """The settings that legroom resolves, and why vLLM refuses them; empty where it does not."""
    card = named_gpu(case["gpu"])
    parsed = parse_flags(["vllm", "serve", case["model"], *case["flags"]], release)
    fatal = [problem.message for problem in parsed.problems if problem.stops_vllm]
    if fatal:
        return None, fatal[0]
    try:
        # The judge was given this very config, so nothing in it is assumed.
        model = with_draft(replace(load(case["model"], offline=True), assumed=False), parsed.args)
        settings = resolve(parsed.args, model, card, release)
    except LegroomError as error:
        return None, error.message
    reason = unsupported(settings, model, card)
    if reason is not None and reason.certain:
        return settings, reason.message
    shape = deployment_memory(model, card, settings).failure
    return settings, shape.message if shape and shape.id in ("unsupported_kv_cache", "refused") else ""


def read_answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judge", type=Path, required=True)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--src", type=Path)
    parser.add_argument("--release", default="0.32.0")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=340)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    cases = drawn(options.seed, options.count, known_release(options.release))
    rows = list(record(cases, options.judge, options.python, options.src))
    text = "".join(json.dumps(row) + "\n" for row in rows)
    options.out.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{len(rows)} answers in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
