"""How well `legroom diagnose` reads logs; `diagnose_robust.py` has wrapped and cut logs.

    python bench/diagnose.py accuracy CASES.jsonl      right cause first, among three, look-alikes
    python bench/diagnose.py fixes CASES.jsonl [--half 0|1] [--show]    would the first fix have worked?
    python bench/diagnose.py reliability CASES.jsonl --judged JUDGED.jsonl    how often a confidence is right
    python bench/diagnose.py messages      each message of each release about too little memory, alone

A case is an object with `id`, `log`, `cause`, and optionally `accept_causes`, `hard`, `log_decisive`, `fix_tags`,
`fixes_that_failed`. Halves are by a hash of the id. The last line is JSON.

fixes: a first fix `works` when it belongs to the cause or is of the kind that the thread confirmed (cause, kind), its
plan starts (starts), it keeps the flags of the log (keeps), the release has its flags (known), the log's numbers do not
refuse it (numbers), and the thread did not try it in vain (refuted). `wrong`: refuted, refused by the numbers, unknown,
of another cause and kind, or nothing offered. `partly`: the rest.

reliability: answers that were given at first sight (`got` of JUDGED.jsonl, the causes in order) by what they rest on,
which are the counts of facts/data/diagnosis_confidence.json; then the confidence that the other sources give each
answer, in fifths, beside the share that was right.

messages: the share whose cause is right, or that is answered with an honest question; also wrapped at words.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench_harness import arguments, read_lines

from legroom.diagnosis.finding import Fix
from legroom.diagnosis.log_diagnosis import read_log
from legroom.facts.flags import env_history, env_names, flags_of
from legroom.facts.releases import release
from legroom.vllm.command_line import command, command_parts
from legroom.vllm_logs.startup_log import Startup

LOOK_ALIKES = frozenset({"not_memory", "driver_or_cuda_mismatch"})


def cases_of(path: str, half: int | None, fewest_lines: int = 0) -> Iterator[dict[str, Any]]:
    for case in read_lines(Path(path)):
        side = int(hashlib.sha256(case["id"].encode()).hexdigest(), 16) % 2
        if case["log"].count("\n") + 1 >= fewest_lines and half in (None, side):
            yield case


def accuracy(path: str) -> dict[str, object]:
    """The share of cases whose cause comes first, and what goes with it."""
    counts: Counter[str] = Counter()
    for case in read_lines(Path(path)):
        if not case.get("log_decisive", True):
            continue
        runs = read_log([case["log"].encode()]).runs
        named = [finding.cause for finding in runs[0].findings] if runs else []
        right = {case["cause"], *(case.get("accept_causes") or ())}
        first = bool(named) and named[0] in right
        alike, hard = case["cause"] in LOOK_ALIKES, bool(case.get("hard"))
        sold = alike and bool(named) and named[0] not in LOOK_ALIKES and not first
        three = bool(right.intersection(named[:3]))
        for what, holds in (("first", first), ("three", three), ("hard", hard), ("hard first", hard and first)):
            counts[what] += holds
        counts.update({"cases": 1, "look-alikes": alike, "look-alikes called memory": sold})
        if not first:
            print(f"  {case.get('id')}: {case['cause']}, named {named[:3]}", file=sys.stderr)
    shares = {what: round(counts[what] / max(counts["cases"], 1), 4) for what in ("first", "three")}
    return {**counts, **shares, "hard first": round(counts["hard first"] / max(counts["hard"], 1), 4)}


Outcome = Literal["works", "partly", "wrong"]

# What ended such failures at all: the counts of `insights.md`, "what really works, per class", and vLLM's own checks.
WORKING_KINDS = {
    "weights_too_big": "checkpoint_format more_or_fewer_gpus_tp_pp cpu_offload",
    "kv_too_small_for_max_len": "max_model_len kv_cache_memory_bytes raise_util kv_cache_dtype",
    "no_cache_blocks": "raise_util engine_version_or_V0 checkpoint_format more_or_fewer_gpus_tp_pp cpu_offload",
    "gpu_shared_or_not_free": "free_gpu_or_kill_orphans sequence_starts_or_wait engine_version_or_V0 lower_util",
    "profiling_activation_peak": "max_num_seqs max_num_batched_tokens max_model_len "
    "limit_multimodal checkpoint_format more_or_fewer_gpus_tp_pp",
    "cudagraph_capture_oom": "engine_version_or_V0 lower_util eager_or_fewer_graphs max_num_seqs",
    "runtime_activation_burst": "lower_util max_num_batched_tokens "
    "more_or_fewer_gpus_tp_pp kv_cache_memory_bytes request",
    "multimodal_inputs": "limit_multimodal other_engine_feature_off engine_version_or_V0 max_num_batched_tokens",
    "lora_or_spec_decode_extra": "other_engine_feature_off lower_util max_num_seqs",
    "kv_preemption_thrash": "max_num_seqs raise_util max_model_len swap_space",
    "allocator_fragmentation": "allocator_conf lower_util",
    "host_ram_oom": "more_host_ram_or_shm checkpoint_format sequence_starts_or_wait swap_space engine_version_or_V0",
    "prefix_cache_pressure": "report",
    "leak_over_time": "engine_version_or_V0 eager_or_fewer_graphs limit_multimodal",
    "nccl_or_custom_allreduce_buffers": "disable_custom_allreduce_or_nccl_env lower_util",
    "tp_kv_head_replication_or_pp_imbalance": "more_or_fewer_gpus_tp_pp max_model_len",
    "quantization_kernel_workspace": "engine_version_or_V0 checkpoint_format lower_util",
    "sleep_mode_or_rlhf_colocation": "lower_util sequence_starts_or_wait engine_version_or_V0 other_engine_feature_off",
    "unified_memory_or_wsl": "drop_page_cache sequence_starts_or_wait lower_util more_host_ram_or_shm",
    "wrong_flag": "flag",
    "request_too_long": "request max_model_len max_num_batched_tokens",
    "hybrid_state_cache_limit": "max_num_seqs",
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
class FixVerdict:
    """One case, its first fix and what speaks against it."""

    id: str
    outcome: Outcome
    cause: str
    named: str
    kind: str
    against: tuple[str, ...]
    confirmed: bool


def check_first_fix(case: dict[str, Any]) -> FixVerdict:
    reading = read_log([case["log"].encode()])
    run = reading.runs[0] if reading.runs else None
    first = run.findings[0] if run and run.findings else None
    fix = first.fixes[0] if first and first.fixes else None
    tags = set(case.get("fix_tags") or ())
    if "code_fix" in tags:
        tags.add("engine_version_or_V0")
    if run is None or first is None or fix is None:
        return FixVerdict(case["id"], "wrong", case["cause"], "", "", ("nothing offered",), bool(tags))
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
    usual = {kind for cause in right for kind in WORKING_KINDS.get(cause, "").split()}
    if tags and not agrees and fix.kind in usual:
        doubts.append(f"the thread ended with {', '.join(sorted(tags))}")
    elif not agrees and fix.kind not in usual:
        doubts.append("not a kind that fixes this cause")
    if fix.plan is not None and fix.plan.verdict == "tight":
        doubts.append("its plan is tight")
    lost = _lost_flags(fix, run.case.startup)
    if lost:
        doubts.append(f"drops {' '.join(lost)}")
    outcome: Outcome = "wrong" if wrong else "partly" if doubts else "works"
    return FixVerdict(case["id"], outcome, case["cause"], first.cause, fix.kind, (*wrong, *doubts), bool(tags))


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


def fixes(path: str, half: int | None, show: bool) -> dict[str, object]:
    """The share of first fixes that would have worked, and a table by cause."""
    verdicts = [
        check_first_fix(case)
        for case in cases_of(path, half)
        if case["cause"] not in LOOK_ALIKES and case.get("log_decisive", True)
    ]
    print(f"{'cause':42}{'cases':>6}{'works':>7}{'partly':>8}{'wrong':>7}")
    for cause in sorted({verdict.cause for verdict in verdicts}):
        own = Counter(verdict.outcome for verdict in verdicts if verdict.cause == cause)
        print(f"{cause:42}{own.total():>6}{own['works']:>7}{own['partly']:>8}{own['wrong']:>7}")
    for one in verdicts if show else ():
        if one.outcome != "works":
            print(f"  {one.outcome:7}{one.id}: {one.cause}, named {one.named}, {one.kind}: {'; '.join(one.against)}")
    counts = Counter(verdict.outcome for verdict in verdicts)
    confirmed = [verdict for verdict in verdicts if verdict.confirmed]
    reasons = (" ".join(reason.split(" ")[:3]) for verdict in verdicts for reason in verdict.against)
    return {
        "cases": len(verdicts),
        **{name: round(counts[name] / max(len(verdicts), 1), 3) for name in ("works", "partly", "wrong")},
        "confirmed by a thread": len(confirmed),
        "of those, works": sum(verdict.outcome == "works" for verdict in confirmed),
        "against": dict(Counter(reasons)),
    }


def reliability(path: str, judged: str) -> dict[str, object]:
    """Right answers by kind of evidence, and the reliability with each source left out."""
    got = {each["id"]: each["got"] for each in read_lines(Path(judged))}
    answers: list[tuple[str, str, bool]] = []
    for case in read_lines(Path(path)):
        runs = read_log([case["log"].encode()]).runs
        if not got.get(case["id"]) or not runs or runs[0].rests_on is None or not runs[0].findings:
            continue
        right = {case["cause"], *(case.get("accept_causes") or ())}
        source = str(case.get("url") or case["id"])  # a thread, with all its cases
        answers.append((source, runs[0].rests_on, got[case["id"]][0] in right))
    table = {kind: _counts(answers, kind) for kind in sorted({kind for _, kind, _ in answers})}
    for kind, (given, right_count) in table.items():
        print(f"{kind:18} {right_count:4} of {given:4}")
    told = []
    # Sorted by kind: the share without a source falls by its own right answers, which would sort them first.
    for source, kind, is_right in sorted(answers, key=lambda each: (table[each[1]][1] / table[each[1]][0], each[0])):
        given, count = _counts([each for each in answers if each[0] != source], kind)
        told.append(((count + 1) / (given + 2), is_right))
    size = max(len(told) // 5, 1)
    fifths = [told[start : start + size] for start in range(0, size * 5, size)]
    rows = [(sum(p for p, _ in each) / len(each), sum(is_right for _, is_right in each) / len(each)) for each in fifths]
    for stated, true in rows:
        print(f"stated {stated:.2f}  right {true:.2f}")
    worst = max(abs(stated - true) for stated, true in rows)
    return {"answers": len(answers), "worst_fifth": round(worst, 3)}


def _counts(answers: list[tuple[str, str, bool]], kind: str) -> tuple[int, int]:
    """(given, right) answers on one kind of evidence."""
    same = [is_right for _, each, is_right in answers if each == kind]
    return len(same), sum(same)


def messages() -> dict[str, object]:
    """The share of messages about too little memory that are right, or an honest question, by their line alone."""
    tests = Path(__file__).parent.parent / "tests"
    sys.path[:0] = [str(tests), str(tests / "diagnosis")]
    from test_messages_alone import as_line, diagnosis, is_right, shortages

    every = shortages()
    shares = {}
    for width in (10_000, 100, 80, 60):
        texts = ["\n".join(textwrap.wrap(as_line(message), width)) for message in every]
        wrong = [text for message, text in zip(every, texts, strict=True) if not is_right(message, diagnosis(text))]
        shares["alone" if width == 10_000 else f"wrapped at {width}"] = round(1 - len(wrong) / len(every), 4)
        print(*(f"  {text}" for text in wrong), sep="\n", file=sys.stderr)
    return {"messages": len(every), **shares}


def main() -> None:
    args = arguments(__doc__, "what", "path?", half=int, show=False, judged="")
    figures = {
        "accuracy": lambda: accuracy(args.path),
        "fixes": lambda: fixes(args.path, args.half, args.show),
        "reliability": lambda: reliability(args.path, args.judged),
        "messages": messages,
    }[args.what]()
    print(json.dumps(figures, ensure_ascii=False))


if __name__ == "__main__":
    main()
