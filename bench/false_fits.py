"""How often `legroom plan` says "fits" of what did not start, and "does not fit" of what did.

    python bench/false_fits.py TRUTH_DIR [--runs measured.jsonl] [--cases cases.jsonl]

Five kinds of settings: starts and failures that people published (TRUTH_DIR, as bench/accuracy.py reads it), failures
provoked on a GPU (--runs), failures with a command line that can be read (--cases), failed starts written down here as
facts with their threads (bench/failed_starts.jsonl), and settings that vLLM refuses, made here from its own rules.
Prints a table of what is wrong; the last line is JSON.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench_harness import arguments, read_lines
from scoring import ScoredStart, gpu_run_cases, predict, published_cases, read_records

from legroom.errors import LegroomError
from legroom.facts.gpus import gpu
from legroom.facts.releases import release
from legroom.planning.machine import Machine, make_plan
from legroom.planning.plan import Target, plan_on_named_card
from legroom.vllm.parse import parse_flags
from legroom.vllm.resolve import served_model

PLAIN, AWQ, FP8 = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B-AWQ", "Qwen/Qwen3-8B-FP8"
FAILED_STARTS = Path(__file__).with_name("failed_starts.jsonl")
OLD_AND_NEW = ("0.6.3", "0.9.2", "0.12.0", "0.19.0", "0.27.0", "0.32.0")
START_UP_CAUSES = frozenset(
    {
        "weights_too_big",
        "kv_too_small_for_max_len",
        "no_cache_blocks",
        "profiling_activation_peak",
        "cudagraph_capture_oom",
        "hybrid_state_cache_limit",
        "unified_memory_or_wsl",
    }
)


@dataclass(frozen=True)
class Verdict:
    """What legroom said of one setting; `started` is what happened."""

    kind: str
    id: str
    started: bool
    said: str
    why: str = ""

    @property
    def wrong(self) -> bool:
        return self.said == ("does_not_fit" if self.started else "fits")


def refused_settings() -> Iterator[tuple[str, str, str, str]]:
    """(model, card, release, flags) that vLLM refuses, from each release's own source."""
    for version in OLD_AND_NEW:
        yield PLAIN, "h100", version, "--quantization bananas"
        for method in ("awq", "gptq"):
            yield PLAIN, "h100", version, f"--quantization {method} --dtype half"
        yield PLAIN, "t4", version, "--dtype bfloat16 --max-model-len 1024"
        yield PLAIN, "p40", version, "--dtype half --max-model-len 2048"
    for version in ("0.9.2", "0.12.0", "0.19.0"):
        yield PLAIN, "v100-32gb", version, "--quantization fp8 --dtype half"
        yield AWQ, "v100-32gb", version, "--dtype half"
        yield AWQ, "a100-80gb", version, "--quantization gptq"
        yield FP8, "v100-32gb", version, "--dtype half"
    for version in ("0.9.2", "0.12.0"):
        yield FP8, "t4", version, "--max-model-len 2048"
        yield AWQ, "t4", version, "--quantization awq_marlin --max-model-len 2048"
        yield PLAIN, "h100", version, "--quantization compressed-tensors"
    for version in ("0.20.0", "0.27.0", "0.32.0"):
        yield "Qwen/Qwen3-4B", "v100-32gb", version, "--dtype half"
    for card in ("t4", "v100-32gb"):
        yield "gpt-oss-20b", card, "0.11.0", ""
        yield "gpt-oss-20b", card, "0.19.0", ""
    for version in ("0.14.0", "0.19.0", "0.23.0"):
        yield AWQ, "a100-80gb", version, "--quantization awq --dtype bfloat16"
    yield "Qwen/Qwen3-4B", "t4", "0.26.0", "--kv-cache-dtype fp8"
    yield "Qwen/Qwen3-4B", "a100-80gb", "0.11.0", "--kv-cache-dtype fp8"
    for version in ("0.5.4", "0.6.3", "0.8.0"):
        yield "Qwen/Qwen3-8B", "h100", version, ""
        yield "Qwen/Qwen3-30B-A3B", "h200", version, ""
    for version in ("0.8.5", "0.12.0", "0.15.1"):
        yield "Qwen/Qwen3-14B", "rtx4090", version, "--quantization fp8 --max-model-len 4096"  # all of it in bf16 first


def planned(name: str, card: str, version: str, flags: list[str]) -> tuple[str, str]:
    """The verdict on one setting, or why there is none."""
    known = release(version)
    args = replace(parse_flags(flags, known).args, model=name)
    try:
        target = Target(served_model(args), gpu(card), args.gpus_needed, known)
        made = plan_on_named_card(target, args)
    except LegroomError as error:
        return "refused", error.message
    return made.verdict, made.reason


def from_rules() -> Iterator[Verdict]:
    for name, card, version, flags in refused_settings():
        said, why = planned(name, card, version, shlex.split(flags))
        yield Verdict("refused by vLLM", f"{name} on {card}, {version} {flags}".strip(), False, said, why)


def from_failed_starts() -> Iterator[Verdict]:
    """Starts that failed, with model, card, release and flags as their threads state them."""
    for case in read_lines(FAILED_STARTS):
        used = release(case["vllm"])
        parsed = parse_flags(shlex.split(case["flags"]), used).args
        args = replace(parsed, model=case["model"], env={**parsed.env, **case.get("env", {})})
        machine = Machine(case["gpu"], None, case.get("gpu_memory"), None, case.get("host_memory"))
        try:
            made = make_plan(args, used, machine, advice=False)
        except LegroomError as error:
            yield Verdict("failed start", case["id"], False, "refused", error.message)
            continue
        yield Verdict("failed start", case["id"], False, made.verdict, made.reason)


def from_records(kind: str, cases: list[ScoredStart]) -> Iterator[Verdict]:
    for case in cases:
        if case.printed.started is None:
            continue
        result = predict(case)
        said = result.plan.verdict if result.plan else "refused"
        yield Verdict(kind, case.id, case.printed.started, said, result.plan.reason if result.plan else "")


def from_commands(path: Path) -> Iterator[Verdict]:
    """Published failures whose flags are a command line, on a card and a model that legroom knows."""
    for case in read_lines(path):
        version = re.match(r"v?(\d+\.\d+(?:\.\d+)?)", str(case.get("vllm_version") or ""))
        flags = str(case.get("flags") or "")
        if case["cause"] not in START_UP_CAUSES or not str(case["phase"]).startswith("startup") or version is None:
            continue
        if "--" not in flags:
            continue
        try:
            words = [word for word in shlex.split(flags) if word != "\\"]
            said, why = planned(str(case["model"]), str(case["gpu"]), version.group(1), words)
        except (LegroomError, ValueError):
            continue
        if said != "refused":
            yield Verdict("published failure", str(case["id"]), False, said, why)


def main() -> None:
    args = arguments(__doc__, "data:path", runs=Path, cases=Path)
    published = published_cases(args.data)
    verdicts = [*from_rules(), *from_failed_starts(), *from_records("published start", published.cases)]
    if args.runs:
        configs = args.runs.parent / "kit" / "configs"
        runs = gpu_run_cases(read_records(args.runs), configs)
        verdicts += from_records("run on a GPU", runs.cases)
    if args.cases:
        verdicts += from_commands(args.cases)
    for verdict in verdicts:
        if verdict.wrong:
            print(f"WRONG  {verdict.kind}: {verdict.id}: said {verdict.said} {verdict.why}")
    count = Counter((verdict.kind, verdict.started, verdict.said) for verdict in verdicts)
    for (kind, started, said), number in sorted(count.items()):
        print(f"{kind:18s} {'started' if started else 'did not start':14s} {said:13s} {number:4d}")
    failed = [verdict for verdict in verdicts if not verdict.started]
    started_ones = [verdict for verdict in verdicts if verdict.started]
    print(
        json.dumps(
            {
                "did_not_start": len(failed),
                "false_fits": sum(verdict.wrong for verdict in failed),
                "started": len(started_ones),
                "false_does_not_fit": sum(verdict.wrong for verdict in started_ones),
            }
        )
    )


if __name__ == "__main__":
    main()
