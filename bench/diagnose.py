"""How well and how fast `legroom diagnose` reads logs.

    python bench/diagnose.py accuracy CASES.jsonl      right cause first, among three, look-alikes, kinds of fixes
    python bench/diagnose.py speed [--mib 1024]        a generated log, beside ripgrep counting the same texts

A case is an object with `log`, `cause`, and optionally `accept_causes`, `hard`, `log_decisive`, `fix_tags`.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from legroom.diagnosis.log_diagnosis import read_log
from legroom.vllm_logs.log_scanner import all_marks
from legroom.vllm_logs.log_sources import pieces_of_file

LOOK_ALIKES = frozenset({"not_memory", "driver_or_cuda_mismatch"})


def accuracy(path: str) -> dict[str, object]:
    """The share of cases whose cause comes first, and what goes with it."""
    counts: dict[str, int] = defaultdict(int)
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        if not case.get("log_decisive", True):
            continue
        reading = read_log([case["log"].encode()])
        findings = reading.runs[0].findings if reading.runs else ()
        named = [finding.cause for finding in findings]
        right = {case["cause"], *(case.get("accept_causes") or ())}
        first = bool(named) and named[0] in right
        counts["cases"] += 1
        counts["first"] += first
        counts["three"] += bool(right.intersection(named[:3]))
        counts["hard"] += bool(case.get("hard"))
        counts["hard_first"] += bool(case.get("hard")) and first
        if case["cause"] in LOOK_ALIKES:
            counts["look_alikes"] += 1
            counts["sold_as_memory"] += bool(named) and named[0] not in LOOK_ALIKES and not first
        if not first:
            print(f"  {case.get('id')}: {case['cause']}, named {named[:3]}", file=sys.stderr)
        _count_fixes(counts, set(case.get("fix_tags") or ()), findings)
    return {
        "cases": counts["cases"],
        "right cause first": round(counts["first"] / max(counts["cases"], 1), 4),
        "right cause among three": round(counts["three"] / max(counts["cases"], 1), 4),
        "hard cases": counts["hard"],
        "hard, right cause first": round(counts["hard_first"] / max(counts["hard"], 1), 4),
        "look-alikes": counts["look_alikes"],
        "look-alikes called memory": counts["sold_as_memory"],
        "cases with a confirmed fix": counts["fixes"],
        "that kind among the first two": round(counts["fix_named"] / max(counts["fixes"], 1), 4),
    }


def _count_fixes(counts: dict[str, int], tags: set[str], findings: tuple) -> None:  # type: ignore[type-arg]
    if not tags:
        return
    if "code_fix" in tags:
        tags.add("engine_version_or_V0")
    offered = [fix.kind for fix in findings[0].fixes[:2]] if findings else []
    counts["fixes"] += 1
    counts["fix_named"] += bool(tags.intersection(offered))


def write_log(path: Path, mib: int) -> None:
    """A busy server's log: access lines, request lines, statistics every so often, and a crash at the end."""
    dice = random.Random(20)
    words = ["the", "model", "cache", "token", "user", "wants", "long", "answer", "about", "memory", "time", "today"]
    ending = (
        "(EngineCore_DP0 pid=77) ERROR 01-02 03:04:05 [core.py:708] torch.OutOfMemoryError: CUDA out of memory. "
        "Tried to allocate 300.00 MiB. GPU 0 has a total capacity of 47.40 GiB of which 120.00 MiB is free.\n"
    )
    with path.open("w", encoding="utf-8") as out:
        written = out.write("INFO:     Application startup complete.\n")
        block = ["".join(_line(dice, words) for _ in range(2000)) for _ in range(20)]
        while written < mib << 20:
            written += out.write(block[dice.randrange(len(block))])
        out.write(ending)


def _line(dice: random.Random, words: list[str]) -> str:
    kind = dice.random()
    at = f"{dice.randrange(24):02}:{dice.randrange(60):02}:{dice.randrange(60):02}"
    if kind < 0.55:
        return (
            f'INFO:     10.0.{dice.randrange(255)}.7:{dice.randrange(60000)} - "POST /v1/completions HTTP/1.1" 200 OK\n'
        )
    if kind < 0.98:
        prompt = " ".join(dice.choices(words, k=40))
        name = f"{dice.getrandbits(128):032x}"
        asked = f"Received request cmpl-{name}: prompt: {prompt!r}, params: SamplingParams(n=1)"
        return f"INFO 01-02 {at} [logger.py:43] {asked}\n"
    return (
        f"INFO 01-02 {at} [loggers.py:118] Engine 000: Avg prompt throughput: 0.0 tokens/s, "
        "Avg generation throughput: 240.8 tokens/s, Running: 8 reqs, Waiting: 0 reqs, GPU KV cache usage: 33.9%, "
        "Prefix cache hit rate: 0.0%\n"
    )


def speed(mib: int) -> dict[str, object]:
    """Megabytes a second and the most memory, in a process of its own, and ripgrep on the same file and texts."""
    with tempfile.TemporaryDirectory() as folder:
        log, texts = Path(folder) / "server.log", Path(folder) / "texts"
        write_log(log, mib)
        texts.write_bytes(b"\n".join(all_marks()))
        megabytes = log.stat().st_size / 1e6
        start = time.perf_counter()
        child = subprocess.run([sys.executable, __file__, "read", str(log)], capture_output=True, text=True, check=True)
        wall = time.perf_counter() - start
        own = json.loads(child.stdout)
        figures: dict[str, object] = {
            "MB": round(megabytes),
            "legroom MB/s": round(megabytes / wall, 1),
            "legroom MB/s of CPU": round(megabytes / own["cpu_s"], 1),
            "legroom MB of memory": own["most_mb"],
            "first cause": own["cause"],
        }
        if shutil.which("rg"):
            figures |= _ripgrep(log, texts, megabytes)
        return figures


def _ripgrep(log: Path, texts: Path, megabytes: float) -> dict[str, object]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    words = ["rg", "--threads", "1", "--count", "--fixed-strings", "--file", str(texts), str(log)]
    counted = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "ripgrep MB/s": round(megabytes / wall, 1),
        "ripgrep MB/s of CPU": round(megabytes / max(cpu, 1e-6), 1),
        "ripgrep lines": counted,
    }


def read(path: str) -> dict[str, object]:
    """Diagnose one file and say what it took."""
    reading = read_log(pieces_of_file(path), path)
    used = resource.getrusage(resource.RUSAGE_SELF)
    findings = reading.runs[0].findings if reading.runs else ()
    return {
        "cpu_s": used.ru_utime + used.ru_stime,
        "most_mb": round(used.ru_maxrss * 1024 / 1e6),
        "cause": findings[0].cause if findings else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    for name in ("accuracy", "read"):
        commands.add_parser(name).add_argument("path")
    commands.add_parser("speed").add_argument("--mib", type=int, default=1024)
    args = parser.parse_args()
    figures = speed(args.mib) if args.what == "speed" else {"accuracy": accuracy, "read": read}[args.what](args.path)
    print(json.dumps(figures, ensure_ascii=False))


if __name__ == "__main__":
    main()
