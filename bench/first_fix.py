"""Would the first fix of a diagnosis have worked?

    python bench/first_fix.py CASES.jsonl [--half look|measure] [--json] [--show]

A case is an object with `id`, `log`, `cause` and, where its thread tells, `accept_causes`, `fix_tags`,
`fixes_that_failed`. A first fix is judged by rules, each of which can be argued with:

    cause     it belongs to the cause that the case has, or is of the kind that the thread confirmed
    kind      of the kind that the thread confirmed; where it confirmed none, of a kind that fixes this cause at all
    starts    the plan that it carries starts (a plan that is only tight counts as half)
    keeps     its command has every flag that the log prints as given, but for those it changes
    known     the release, by the log or by the thread, has every flag and variable of it; no advice is for older ones
    numbers   what the log itself says does not refuse it: more ranks than those that speak, no smaller batches where
              the weights alone are above share x total, no quantized checkpoint of one that is
    refuted   it is nothing that the thread tried in vain

`works`: all of them. `wrong`: refuted, refused by the numbers, unknown to the release, of another cause and kind, or
nothing offered.
`partly`: the rest. Cases are split in halves by a hash of their id: one to look at, one to measure on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from legroom.diagnosis.finding import Fix
from legroom.diagnosis.log_diagnosis import read_log
from legroom.facts.flags import env_history, env_names, flags_of
from legroom.facts.releases import release
from legroom.vllm.command_line import command, command_parts
from legroom.vllm_logs.startup_log import Startup

LOOK_ALIKES = frozenset({"not_memory", "driver_or_cuda_mismatch"})
Judged = Literal["works", "partly", "wrong"]

# What ended such failures at all: the counts of `insights.md`, "what really works, per class", and vLLM's own checks.
WORKING_KINDS: dict[str, frozenset[str]] = {
    "weights_too_big": frozenset({"checkpoint_format", "more_or_fewer_gpus_tp_pp", "cpu_offload"}),
    "kv_too_small_for_max_len": frozenset({"max_model_len", "kv_cache_memory_bytes", "raise_util", "kv_cache_dtype"}),
    "no_cache_blocks": frozenset(
        {"raise_util", "engine_version_or_V0", "checkpoint_format", "more_or_fewer_gpus_tp_pp", "cpu_offload"}
    ),
    "gpu_shared_or_not_free": frozenset(
        {"free_gpu_or_kill_orphans", "sequence_starts_or_wait", "engine_version_or_V0"}
    ),
    "profiling_activation_peak": frozenset(
        {
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "limit_multimodal",
            "checkpoint_format",
            "more_or_fewer_gpus_tp_pp",
        }
    ),
    "cudagraph_capture_oom": frozenset({"engine_version_or_V0", "lower_util", "eager_or_fewer_graphs", "max_num_seqs"}),
    "runtime_activation_burst": frozenset(
        {"lower_util", "max_num_batched_tokens", "more_or_fewer_gpus_tp_pp", "kv_cache_memory_bytes", "request"}
    ),
    "multimodal_inputs": frozenset({"limit_multimodal", "engine_version_or_V0", "max_num_batched_tokens"}),
    "lora_or_spec_decode_extra": frozenset({"other_engine_feature_off", "lower_util", "max_num_seqs"}),
    "kv_preemption_thrash": frozenset({"max_num_seqs", "max_model_len", "swap_space"}),
    "allocator_fragmentation": frozenset({"allocator_conf", "lower_util"}),
    "host_ram_oom": frozenset(
        {"more_host_ram_or_shm", "checkpoint_format", "sequence_starts_or_wait", "swap_space", "engine_version_or_V0"}
    ),
    "prefix_cache_pressure": frozenset({"report"}),
    "leak_over_time": frozenset({"engine_version_or_V0", "eager_or_fewer_graphs", "limit_multimodal"}),
    "nccl_or_custom_allreduce_buffers": frozenset({"disable_custom_allreduce_or_nccl_env", "lower_util"}),
    "tp_kv_head_replication_or_pp_imbalance": frozenset({"more_or_fewer_gpus_tp_pp", "max_model_len"}),
    "quantization_kernel_workspace": frozenset({"engine_version_or_V0", "checkpoint_format", "lower_util"}),
    "sleep_mode_or_rlhf_colocation": frozenset(
        {"lower_util", "sequence_starts_or_wait", "engine_version_or_V0", "other_engine_feature_off"}
    ),
    "unified_memory_or_wsl": frozenset(
        {"drop_page_cache", "sequence_starts_or_wait", "lower_util", "more_host_ram_or_shm"}
    ),
    "wrong_flag": frozenset({"flag"}),
    "request_too_long": frozenset({"request", "max_model_len", "max_num_batched_tokens"}),
    "hybrid_state_cache_limit": frozenset({"max_num_seqs"}),
}
_TRIED = {
    "lower_util": re.compile(
        r"(?i)lower\w* (?:the )?(?:--)?(?:gpu.memory.utilization|ratio|fraction)|"
        r"gpu.memory.utilization[= ]0\.[1-8]|fraction chases|several values of --gpu"
    ),
    "raise_util": re.compile(r"(?i)rais\w+ (?:the )?(?:--)?(?:gpu.memory.utilization|ratio)|utilization 0\.9[5-9]"),
    "eager_or_fewer_graphs": re.compile(r"(?i)enforce.eager"),
    "allocator_conf": re.compile(r"(?i)expandable"),
    "max_model_len": re.compile(r"(?i)max.model.len"),
    "max_num_seqs": re.compile(r"(?i)max.num.seqs"),
    "max_num_batched_tokens": re.compile(r"(?i)max.num.batched"),
    "swap_space": re.compile(r"(?i)swap"),
    "cpu_offload": re.compile(r"(?i)cpu.offload"),
    "more_or_fewer_gpus_tp_pp": re.compile(r"(?i)tensor.parallel|more gpus|\btp\b"),
}


@dataclass(frozen=True)
class FixJudgement:
    """One case, its first fix and what speaks against it."""

    id: str
    judged: Judged
    cause: str
    named: str
    kind: str
    against: tuple[str, ...]
    confirmed: bool


def half_of(case_id: str) -> str:
    return "look" if hashlib.sha256(case_id.encode()).digest()[0] % 2 == 0 else "measure"


def judge(case: dict[str, Any]) -> FixJudgement:
    reading = read_log([case["log"].encode()])
    run = reading.runs[0] if reading.runs else None
    first = run.findings[0] if run and run.findings else None
    fix = first.fixes[0] if first and first.fixes else None
    tags = set(case.get("fix_tags") or ())
    if "code_fix" in tags:
        tags.add("engine_version_or_V0")
    if run is None or first is None or fix is None:
        return FixJudgement(case["id"], "wrong", case["cause"], "", "", ("nothing offered",), bool(tags))
    right = {case["cause"], *(case.get("accept_causes") or ())}
    wrong, doubts = [], []
    agrees = fix.kind in tags
    if first.cause not in right and not agrees:
        wrong.append("another cause")
    if not agrees and _was_tried(fix, case.get("fixes_that_failed") or ()):
        wrong.append("refuted by the thread")
    if not _is_known(fix, run.case.startup.vllm) or not _is_known(fix, _thread_version(case)):
        wrong.append("unknown to the release")
    wrong += _against_numbers(fix, case["log"])
    if _QUANTIZED.search(str(case.get("model") or "")) and any("quantized checkpoint" in step for step in fix.steps):
        doubts.append("asks for a quantized checkpoint of one that is")
    usual = set().union(*(WORKING_KINDS.get(cause, frozenset()) for cause in right))
    if tags and not agrees and fix.kind in usual:
        doubts.append(f"the thread ended with {', '.join(sorted(tags))}")
    elif not agrees and fix.kind not in usual:
        doubts.append("not a kind that fixes this cause")
    if fix.plan is not None and fix.plan.verdict == "tight":
        doubts.append("its plan is tight")
    lost = _lost_flags(fix, run.case.startup)
    if lost:
        doubts.append(f"drops {' '.join(lost)}")
    judged: Judged = "wrong" if wrong else "partly" if doubts else "works"
    return FixJudgement(case["id"], judged, case["cause"], first.cause, fix.kind, (*wrong, *doubts), bool(tags))


def _was_tried(fix: Fix, failed: Any) -> bool:
    tried = " | ".join(failed)
    pattern = _TRIED.get(fix.kind)
    return bool(pattern and len(fix.flags) + len(fix.env) <= 1 and pattern.search(tried))


_QUANTIZED = re.compile(r"(?i)awq|gptq|int[48]|nvfp4|fp8|gguf|[48]bit")
_RANK = re.compile(r"rank=(\d+)|\[rank(\d+)\]|Worker_TP(\d+)|\bTP(\d+) pid")
_WORLD = re.compile(r"world size (\d+)|local_reader_ranks=\[[\d, ]*?(\d+)\]")
_WEIGHTS = re.compile(r"(?:Loading model weights|Model loading) took ([\d.]+) Gi?B")
_TOTAL = re.compile(r"total capacity of ([\d.]+) GiB|total_gpu_memory \(([\d.]+)GiB\)")
_SHARE = re.compile(r"gpu_memory_utilization['\"]?[:= (]+([\d.]+)")


def _against_numbers(fix: Fix, log: str) -> list[str]:
    """By patterns of this file's own, so that a reader's mistake in the package does not excuse itself."""
    against = []
    ranks = [int(next(filter(None, found.groups()))) + 1 for found in _RANK.finditer(log)]
    ranks += [int(next(filter(None, found.groups()))) for found in _WORLD.finditer(log)]
    size = fix.flags.get("tensor_parallel_size")
    if isinstance(size, int) and size <= max(ranks, default=1):
        against.append("fewer ranks than in the log")
    weights, total, share = (pattern.search(log) for pattern in (_WEIGHTS, _TOTAL, _SHARE))
    if weights and total:
        budget = float(next(filter(None, total.groups()))) * (float(share[1]) if share else 0.9)
        raised = fix.flags.get("gpu_memory_utilization", 0)
        untouched = not fix.flags.keys() & {"model", "quantization", "tensor_parallel_size", "cpu_offload_gb"}
        if fix.flags and untouched and not raised and float(weights[1]) > budget:
            against.append("weights above the budget")
    return against


def _thread_version(case: dict[str, Any]) -> str | None:
    found = re.match(r"0\.\d+\.\d+", str(case.get("vllm_version") or ""))
    return found[0] if found else None


def _is_known(fix: Fix, version: str | None) -> bool:
    if version is None:
        return True
    try:
        running = release(version)
    except Exception:  # a build without a number has no table
        return True
    needed = [found[1] for step in fix.steps if (found := re.search(r"vllm>=(\d+\.\d+\.\d+)", step))]
    if any(running.at_least(bound) for bound in needed):
        return False
    if running.at_least("0.11.0") and "VLLM_USE_V1" in fix.env:
        return False
    dests = {flag.dest for flag in flags_of(running).values()}
    flags = all(value is None or name in dests for name, value in fix.flags.items())
    return flags and all(name in env_names(running) for name in fix.env if env_history(name))


def _lost_flags(fix: Fix, startup: Startup) -> list[str]:
    """The flags that the log prints as given and the command does not have."""
    if not fix.command or not startup.args_known:
        return []
    known = release(startup.vllm) if startup.vllm else release("0.32.0")
    given = {part.dest for part in command_parts(command(startup.given.args, known), known) if part.name}
    kept = {part.dest for part in command_parts(fix.command, known) if part.name}
    return sorted(given - kept - set(fix.flags))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases")
    parser.add_argument("--half", choices=("look", "measure"))
    parser.add_argument("--show", action="store_true", help="every case that does not work")
    args = parser.parse_args()
    judgements = []
    for line in Path(args.cases).read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        if case["cause"] in LOOK_ALIKES or not case.get("log_decisive", True):
            continue
        if args.half is None or half_of(case["id"]) == args.half:
            judgements.append(judge(case))
    causes = sorted({judgement.cause for judgement in judgements})
    print(f"{'cause':42}{'cases':>6}{'works':>7}{'partly':>8}{'wrong':>7}")
    for cause in causes:
        own = Counter(judgement.judged for judgement in judgements if judgement.cause == cause)
        print(f"{cause:42}{own.total():>6}{own['works']:>7}{own['partly']:>8}{own['wrong']:>7}")
    if args.show:
        for one in judgements:
            if one.judged != "works":
                print(f"  {one.judged:7}{one.id}: {one.cause}, named {one.named}, {one.kind}: {'; '.join(one.against)}")
    counts = Counter(judgement.judged for judgement in judgements)
    confirmed = [judgement for judgement in judgements if judgement.confirmed]
    summary = {
        "cases": len(judgements),
        "works": round(counts["works"] / max(len(judgements), 1), 3),
        "partly": round(counts["partly"] / max(len(judgements), 1), 3),
        "wrong": round(counts["wrong"] / max(len(judgements), 1), 3),
        "confirmed by a thread": len(confirmed),
        "of those, works": sum(judgement.judged == "works" for judgement in confirmed),
        "against": dict(
            Counter(
                reason.split(" ")[0] + " " + " ".join(reason.split(" ")[1:3])
                for judgement in judgements
                for reason in judgement.against
            )
        ),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    sys.exit(main())
