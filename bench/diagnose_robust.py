"""Does `legroom diagnose` answer alike however a log was copied?

    python bench/diagnose_robust.py CASES.jsonl [--half 0|1] [--show] [--min-lines 15]

Each log is diagnosed whole, wrapped at 80 columns, cut to its last lines, without head or tail, with the
prefixes of platforms, and as eight ranks at once. `changed` counts other answers; `above` those whose evidence was cut
away and that say so; `wrong` asserted causes that are not the case's, where the whole log's answer is. The last line is
JSON.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable
from typing import NamedTuple

from bench_harness import arguments
from diagnose import cases_of

from legroom.diagnosis.log_diagnosis import read_log

COLUMNS, LAST_LINES, RANKS = 80, 30, 8


class Answer(NamedTuple):
    verdict: str
    cause: str
    proof: tuple[int, ...] = ()
    """The lines that decided."""

    @property
    def asserts(self) -> bool:
        return self.verdict in ("cause found", "not a memory problem", "no problem found")


def answer(log: str) -> Answer:
    reading = read_log([log.encode("utf-8", "replace")])
    if not reading.runs:
        return Answer("not understood", "")
    run = reading.runs[0]
    cause = run.findings[0].cause if run.findings else ""
    evidence = run.findings[0].evidence if run.findings else ()
    proof = tuple(item.line for item in evidence if item.role in ("failure", "host", "exception", "symptom"))
    return Answer(run.verdict, cause or ("not_memory" if run.verdict == "not a memory problem" else ""), proof)


def is_gone(log: str, whole: Answer, text: str) -> bool:
    """Whether a cut left none of the lines that decided the whole log."""
    lines, left = log.split("\n"), set(text.split("\n"))
    return not any(lines[number - 1] in left for number in whole.proof)


def wrapped(log: str) -> str:
    lines = []
    for line in log.split("\n"):
        lines += [line[at : at + COLUMNS] for at in range(0, len(line), COLUMNS)] or [""]
    return "\n".join(lines)


def words_wrapped(log: str) -> str:
    return "\n".join(
        piece
        for line in log.split("\n")
        for piece in textwrap.wrap(line, COLUMNS, drop_whitespace=False, break_on_hyphens=False) or [""]
    )


def last_lines(log: str) -> str:
    return "\n".join(log.rstrip("\n").split("\n")[-LAST_LINES:])


def without_head(log: str) -> str:
    lines = log.split("\n")
    return "\n".join(lines[max(len(lines) // 4, 1) :])


def without_tail(log: str) -> str:
    """Without its last tenth, and broken off in the middle of a line."""
    lines = log.rstrip("\n").split("\n")
    kept = lines[: len(lines) - max(len(lines) // 10, 1)]
    return "\n".join(kept)[:-20]


def prefixed(form: Callable[[str], str]) -> Callable[[str], str]:
    return lambda log: "\n".join(form(line) for line in log.split("\n"))


def interleaved(log: str) -> str:
    """Eight ranks that print the same lines at nearly the same time."""
    return "\n".join(f"(Worker_TP{rank} pid={300 + rank}) {line}" for line in log.split("\n") for rank in range(RANKS))


VARIANTS: dict[str, Callable[[str], str]] = {
    "wrapped at 80": wrapped,
    "last 30 lines": last_lines,
    "without its head": without_head,
    "without its tail": without_tail,
    "rank prefix": prefixed(lambda line: f"[rank0]: {line}"),
    "worker prefix": prefixed(lambda line: f"(Worker_TP0 pid=301) {line}"),
    "ray prefix": prefixed(lambda line: f"(RayWorkerWrapper pid=4711, ip=10.0.0.7) {line}"),
    "cri prefix": prefixed(lambda line: f"2026-02-03T04:05:06.789012345Z stderr F {line}"),
    "journald prefix": prefixed(lambda line: f"Feb 03 04:05:06 node-1 vllm[812]: {line}"),
    "compose prefix": prefixed(lambda line: f"vllm-1  | {line}"),
    "kubectl prefix": prefixed(lambda line: f"[pod/vllm-0/vllm] {line}"),
    "docker json": prefixed(
        lambda line: json.dumps(
            {"log": line + "\n", "stream": "stderr", "time": "2026-02-03T04:05:06.7Z"}, ensure_ascii=False
        )
    ),
    "eight ranks": interleaved,
    "ray, wrapped": lambda log: wrapped(VARIANTS["ray prefix"](log)),
    "wrapped at words": words_wrapped,
}


CUTS = ("last 30 lines", "without its head", "without its tail")


def robust(path: str, half: int | None, show: bool, fewest_lines: int) -> dict[str, dict[str, int]]:
    counts = {name: dict.fromkeys(("logs", "changed", "above", "wrong"), 0) for name in VARIANTS}
    for case in cases_of(path, half, fewest_lines):
        whole = answer(case["log"])
        right = {case["cause"], *(case.get("accept_causes") or ())}
        is_scored = case.get("log_decisive", True) and whole.cause in right
        for name, variant in VARIANTS.items():
            text = variant(case["log"])
            if text == case["log"]:
                continue
            now = answer(text)
            above = name in CUTS and now.verdict == "cause above" != whole.verdict and is_gone(case["log"], whole, text)
            changed = not above and (now.cause != whole.cause or now.asserts != whole.asserts)
            wrong = is_scored and now.asserts and now.cause not in right
            for what, holds in (("logs", True), ("changed", changed), ("above", above), ("wrong", wrong)):
                counts[name][what] += holds
            if show and (changed or above):
                mark = "WRONG" if wrong else ""
                print(f"  {name}: {case['id']}: {whole.cause} -> {now.verdict} {now.cause} {mark}", file=sys.stderr)
    print(f"{'as given':18} {'logs':>5} {'changed':>8} {'above':>6} {'wrong':>6}")
    for name, row in counts.items():
        print(f"{name:18} {row['logs']:5} {row['changed']:8} {row['above']:6} {row['wrong']:6}")
    return counts


def main() -> None:
    args = arguments(__doc__, "path", half=int, show=False, min_lines=15)
    print(json.dumps(robust(args.path, args.half, args.show, args.min_lines)))


if __name__ == "__main__":
    main()
