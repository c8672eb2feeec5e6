"""Does a change of the code change an answer? The same calls through two versions of legroom, compared.

    python bench/same_answers.py --old "python -m legroom" --old-path ../before/src [--logs FOLDER]

Every call's JSON, text, pictures and exit code are compared. Differences that are meant stand in same_answers.json
beside this file, each with its reason: `rewordings` are applied to the old text first, `expected` names calls whose
answer may differ. The exit code is 1 while a difference is left that nobody explained.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXPLAINED = Path(__file__).with_name("same_answers.json")
GPUS = ("h100", "h200", "a100-80gb", "l4", "rtx4090", "t4", "b200", "mi300x")
RELEASES = ("0.6.3", "0.8.5", "0.10.0", "0.11.0", "0.14.0", "0.19.0", "0.20.0", "0.26.0", "0.29.0", "0.32.0")
FLAGS = (
    ("--max-model-len", "8192"),
    ("--max-num-seqs", "64", "--max-num-batched-tokens", "4096"),
    ("--kv-cache-dtype", "fp8"),
    ("--gpu-memory-utilization", "0.5"),
    ("--enforce-eager", "--no-enable-prefix-caching"),
    ("--enable-lora", "--max-loras", "4"),
    ("--tensor-parallel-size", "2"),
    ("--cpu-offload-gb", "8"),
)
FORMATS = (
    "prometheus",
    "grafana",
    "systemd",
    "docker",
    "compose",
    "kubernetes",
    "helm-values",
    "script",
    "env",
    "runbook",
)
KINDS = ("identical", "reworded", "explained", "different")
SERVE = "vllm serve meta-llama/Llama-3.1-8B --max-model-len 16384 --port 8001"
TEXTS = {
    "start.sh": f"#!/bin/bash\nexport VLLM_USE_V1=1\nexec {SERVE} --max-num-seqs 32\n",
    "compose.yaml": "services:\n  llm:\n    image: vllm/vllm-openai:v0.19.0\n"
    "    command: --model Qwen/Qwen3-8B --max-model-len 8192\n",
    "vllm.service": f"[Service]\nEnvironment=HF_HUB_OFFLINE=1\nExecStart=/usr/bin/{SERVE}\n",
    "offline.py": "from vllm import LLM\nllm = LLM(model='Qwen/Qwen3-8B', max_model_len=8192)\n",
    "alerts.yml": "groups:\n- name: a\n  rules:\n  - alert: Full\n    expr: vllm:gpu_cache_usage_perc > 0.95\n",
    "broken.yaml": "a: [1\n",
}
TRACE = "".join(
    json.dumps({"id": str(i), "arrival_step": i // 3, "prompt_len": 40 + 17 * (i % 29), "output_len": 5 + i % 61})
    + "\n"
    for i in range(400)
)


@dataclass(frozen=True)
class Answer:
    """What a call gave: its exit code and everything it wrote."""

    code: int
    texts: tuple[str, ...]


def calls(models: list[str], logs: list[str]) -> list[list[str]]:
    """The recorded set: every command that needs no server, over models, cards, releases, flags and files."""
    made: list[list[str]] = []
    for index, model in enumerate(models):
        gpu, version = GPUS[index % len(GPUS)], RELEASES[index % len(RELEASES)]
        made.append(["plan", model, "--gpu", gpu, "--json"])
        made.append(["plan", model, "--gpu", gpu, "--vllm", version, *FLAGS[index % len(FLAGS)], "--json"])
        if index % 4 == 0:
            made.append(["plan", model, "--gpu", gpu, "--vllm", version, "--explain-math"])
            made.append(["plan", model, "--gpu", gpu, "--svg", "$OUT/plan.svg"])
            made.append(
                [
                    "plan",
                    model,
                    "--gpu",
                    gpu,
                    "--gpus",
                    "2",
                    "--want-context",
                    "8k",
                    "--want-concurrency",
                    "4",
                    "--json",
                ]
            )
            made.append(["size", model, "--context", "8k", "--concurrency", "8", "--json"])
    for version in RELEASES:
        for gpu in GPUS:
            made.append(["plan", "llama-3.1-8b", "--gpu", gpu, "--vllm", version, "--json"])
    for entry in (*range(101, 106), *range(201, 206), 301, 302, 401, 501, 999):
        made += [["explain", f"LR{entry}", *extra] for extra in ((), ("--json",), ("--lang", "zh"))]
    for words in ("cumem", "max seq len", "preempt", "no such thing"):
        made.append(["explain", "--search", words, "--json"])
    for log in logs:
        made += [
            ["diagnose", log, *extra] for extra in (("--json",), (), ("--gpu", "h100", "--json"), ("--lang", "zh"))
        ]
        made.append(["calibrate", log, "--gpu", "h100", "--dry-run", "--json"])
    for form in FORMATS:
        for extra in ((), ("--vllm", "0.19.0"), ("--max-model-len", "8192")):
            made.append(["export", form, "llama-3.1-8b", "--gpu", "h100", *extra, "-o", "$OUT/files"])
    for name in TEXTS:
        made += [["lint", f"$IN/{name}", *extra] for extra in ((), ("--json",), ("--vllm", "0.19.0", "--json"))]
        made.append(["plan", "--file", f"$IN/{name}", "--gpu", "h100", "--json"])
    made.append(["plan", "--gpu", "h100", "--json", "--", *SERVE.split()])
    for blocks, seqs, batched in ((60, 8, 256), (200, 64, 2048), (2000, 128, 512)):
        flags = ["--blocks", str(blocks), "--max-num-seqs", str(seqs), "--max-num-batched-tokens", str(batched)]
        made.append(["simulate", "$IN/trace.jsonl", *flags, "--json", "--timeline", "$OUT/steps.jsonl"])
        made.append(["simulate", "$IN/trace.jsonl", *flags, "--svg", "$OUT/load.svg"])
    made += [
        ["catalog", "validate"],
        ["lint", "--rules"],
        ["plan", "no-such-model", "--gpu", "h100"],
        ["plan", "llama-3.1-8b"],
    ]
    made += [
        ["plan", "llama-3.1-8b", "--gpu", "nothing"],
        ["plan", "llama-3.1-8b", "--gpu", "h100", "--max-modle-len", "1"],
    ]
    return made


def answer(command: list[str], path: str | None, call: list[str], texts: Path) -> Answer:
    """Runs one call in a folder of its own, with a home of its own and no network."""
    with tempfile.TemporaryDirectory() as out:
        words = [word.replace("$OUT", "OUT").replace("$IN", str(texts)) for word in call]
        env = {**os.environ, "LEGROOM_HOME": f"{out}/home", "HF_HUB_OFFLINE": "1", "COLUMNS": "100", "NO_COLOR": "1"}
        if path:
            env["PYTHONPATH"] = path
        done = subprocess.run([*command, *words], cwd=out, env=env, capture_output=True, text=True, check=False)
        written = sorted(Path(out, "OUT").rglob("*")) if Path(out, "OUT").exists() else []
        files = [f"{file.relative_to(out)}\n{file.read_text('utf-8')}" for file in written if file.is_file()]
        return Answer(done.returncode, (done.stdout, done.stderr, *files))


def reworded(answer: Answer, rewordings: list[dict[str, str]]) -> Answer:
    """The old answer in today's words."""
    texts = []
    for text in answer.texts:
        today = " ".join(text.split())
        for rewording in rewordings:
            today = re.sub(rewording["old"], rewording["new"], today)
        texts.append(today)
    return Answer(answer.code, tuple(texts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", default=f"{sys.executable} -m legroom", help="how the old version is called")
    parser.add_argument("--old-path", help="PYTHONPATH of the old version")
    parser.add_argument("--new", default=f"{sys.executable} -m legroom")
    parser.add_argument("--new-path", default=str(ROOT / "src"))
    parser.add_argument("--logs", type=Path, action="append", default=[], help="a folder of logs to diagnose as well")
    parser.add_argument("--only", default="", help="only calls that hold these words")
    parser.add_argument("--show", type=int, default=3, help="how many unexplained differences to print")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    explained = json.loads(EXPLAINED.read_text("utf-8"))
    sys.path.insert(0, str(ROOT / "src"))
    from legroom.facts.bundled import bundled_names

    folders = [ROOT / "docs/samples", ROOT / "tests/fixtures/logs", *options.logs]
    logs = [str(path) for folder in folders for path in sorted(folder.glob("*.log"))]
    models = sorted(bundled_names())[::3]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder)
        for name, text in {**TEXTS, "trace.jsonl": TRACE}.items():
            (texts / name).write_text(text, "utf-8")
        chosen = [call for call in calls(models, logs) if options.only in " ".join(call)]

        def both(call: list[str]) -> tuple[Answer, Answer]:
            return (
                answer(shlex.split(options.old), options.old_path, call, texts),
                answer(shlex.split(options.new), options.new_path, call, texts),
            )

        with ThreadPoolExecutor(options.jobs) as pool:
            pairs = list(pool.map(both, chosen))
    return report(chosen, pairs, explained, options.show, time.monotonic() - began)


def report(
    chosen: list[list[str]], pairs: list[tuple[Answer, Answer]], explained: dict, show: int, took_s: float
) -> int:  # type: ignore[type-arg]
    """The table by command, the first unexplained differences, and a line of JSON."""
    counts: dict[str, Counter[str]] = {}
    unexplained: list[str] = []
    for call, (old, new) in zip(chosen, pairs, strict=True):
        words = " ".join(call)
        reason = next((entry["reason"] for entry in explained["expected"] if re.search(entry["call"], words)), None)
        if old == new:
            verdict = "identical"
        elif reworded(old, explained["rewordings"]) == reworded(new, []):
            verdict = "reworded"
        else:
            verdict = "explained" if reason else "different"
        counts.setdefault(call[0], Counter())[verdict] += 1
        if verdict == "different":
            unexplained.append(
                f"$ legroom {words}  ({old.code} -> {new.code})\n" + difference(old, new, explained["rewordings"])
            )
    print(f"{'command':12}{'calls':>7}" + "".join(f"{kind:>{max(10, len(kind) + 2)}}" for kind in KINDS))
    for command, count in sorted(counts.items()):
        kinds = "".join(f"{count[kind]:{max(10, len(kind) + 2)}}" for kind in KINDS)
        print(f"{command:12}{count.total():7}{kinds}")
    for text in unexplained[:show]:
        print("\n" + text)
    total = Counter[str]()
    for count in counts.values():
        total.update(count)
    print(json.dumps({"calls": len(chosen), **total, "wall_s": round(took_s)}))
    return 1 if unexplained else 0


def difference(old: Answer, new: Answer, rewordings: list[dict[str, str]]) -> str:
    """The first lines that differ once the meant rewordings are applied."""
    lines: list[str] = []
    for before, after in zip(reworded(old, rewordings).texts, reworded(new, []).texts, strict=False):
        if before != after:
            lines += difflib.unified_diff(
                re.split(r"(?<=[,.;}]) ", before), re.split(r"(?<=[,.;}]) ", after), lineterm="", n=0
            )
    return "\n".join(lines[:30])


if __name__ == "__main__":
    raise SystemExit(main())
