"""Is the first step for a failure that only looks like memory of any use?

    python bench/lookalike_steps.py CASES.jsonl [--cases 40] [--seed 14] [--show]

A random sample of the cases whose cause is `not_memory` or `driver_or_cuda_mismatch` is diagnosed, and the first fix of
the first finding is judged by hand, by these rules:

    useful    it acts on what failed in this log, can be done as it is written (a command, a flag, a variable, a
              package with its version, a setting), and is possible on this release and platform. For a crash inside a
              kernel or a collective, for which nobody knows the remedy yet, it says how to find the operation or the
              rank, and what to collect.
    not       it is general ("upgrade, or go back"), belongs to another failure, or cannot be done on this platform;
              or the diagnosis sells the failure as memory.

A judgement holds for the step it was made of: one whose first words have changed is counted as `unjudged`, and is to
be read and labelled again. Last line: the counts as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from legroom.diagnosis.diagnose import read_log
from legroom.diagnosis.finding import Fix

LOOK_ALIKES = ("driver_or_cuda_mismatch", "not_memory")


class Judgement(NamedTuple):
    begins: str
    """The first words of the fix that was judged."""
    useful: tuple[str, ...]
    useless: tuple[str, ...] = ()
    remark: str = ""


JUDGEMENTS = (
    Judgement("Find the index", ("vllm-23954", "vllm-11958", "vllm-21731", "vllm-11375"), remark="how to find it"),
    Judgement("The driver must", ("vllm-31700", "vllm-47397", "vllm-37140"), remark="which driver for which CUDA"),
    Judgement(
        "The traceback points",
        (
            "vllm-13939",
            "vllm-14404",
            "vllm-5376",
            "vllm-7539",
            "vllm-6976",
            "vllm-19631",
            "vllm-28714",
            "vllm-6776",
            "vllm-11366",
        ),
        remark="no remedy is known from these lines; it says what to collect",
    ),
    Judgement("vLLM can sample without", ("vllm-20177",), remark="the kernel that crashed is left out"),
    Judgement("Without graphs nothing is recorded", ("vllm-4432",), remark="the recording is what failed"),
    Judgement("Let NCCL say", ("vllm-6732", "vllm-21661"), remark="the reason is not in the text; this prints it"),
    Judgement("Fetch the file again", ("vllm-7993",), remark="a GGUF was read as config.json; the step says so"),
    Judgement("The older model runner", ("wsl-uva",), remark="needs no pinned memory"),
    Judgement(
        "Without custom all-reduce", ("vllm-pr56193", "vllm-pr43923", "vllm-pr45611"), remark="confirmed by all three"
    ),
    Judgement("Another attention backend", ("flashinfer-362",), remark="has no such workspace"),
    Judgement("Make room", ("vllm-7025",), remark="the disk is full"),
    Judgement(
        "Other kernels need less",
        ("vllm-12498",),
        ("vllm-36802",),
        "a limit of 64 KiB may be AMD's, where this backend does not exist; the kernel is not named",
    ),
    Judgement("Let vLLM choose", ("t4-flex",), remark="the backend that was forced does not run on the card"),
    Judgement("The model is gated", ("opea-2237",), remark="token and licence"),
    Judgement("Install vLLM afresh", ("apollo-hiplib",), remark="names the ROCm build that is needed"),
    Judgement("Virtual GPUs", ("vllm-20226",), remark="peer access on a virtual card"),
    Judgement(
        "Volta (7.0)",
        ("vllm-11485", "vllm-1936", "vllm-19185", "vllm-18835"),
        remark="the card is not named: the command that tells it, then the release for it",
    ),
    Judgement("The attention kernel's blocks", ("vllm-19490",), remark="smaller pages on a TPU"),
    Judgement("A CUDA library", ("vllm-10300",), remark="the library path is the reason"),
    Judgement("The comparison was too strict", ("vllm-33358",), remark="the release that has the correction"),
    Judgement("Find the operation", ("vllm-9342",), remark="a step crashed; how to find where"),
    Judgement("AttributeError", ("vllm-5827",), remark="the request sets it off"),
    Judgement("The rank that did not come", ("vllm-13535",), remark="where the earlier error is"),
    Judgement("A first step that compiles", ("vllm-15199",), remark="the log asks for this very variable"),
    Judgement("Without graphs nothing is captured", ("vllm-6201",), remark="NCCL cannot be recorded with this driver"),
)


def judged(case_id: str, fix: Fix | None) -> str:
    if fix is None:
        return "not"
    for judgement in JUDGEMENTS:
        if case_id in judgement.useful + judgement.useless and fix.why.startswith(judgement.begins):
            return "useful" if case_id in judgement.useful else "not"
    return "unjudged"


def sample(path: str, count: int, seed: int) -> list[dict[str, Any]]:
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    cases = sorted(
        (case for line in lines if (case := json.loads(line))["cause"] in LOOK_ALIKES), key=lambda c: c["id"]
    )
    random.Random(seed).shuffle(cases)
    return cases[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--show", action="store_true", help="print the first fix of every case")
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    for case in sample(args.path, args.cases, args.seed):
        runs = read_log([case["log"].encode("utf-8", "replace")]).runs
        finding = runs[0].findings[0] if runs and runs[0].findings else None
        right = finding is not None and finding.cause in {*LOOK_ALIKES, *(case.get("accept_causes") or ())}
        fix = finding.fixes[0] if finding is not None and right and finding.fixes else None
        verdict = judged(case["id"], fix)
        counts[verdict] += 1
        if args.show or verdict != "useful":
            steps = " / ".join((fix.why, *fix.steps)) if fix else "nothing"
            print(f"{verdict:9} {case['id']}: {steps[:300]}")
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
