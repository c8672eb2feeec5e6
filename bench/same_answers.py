"""Does a change of the code change an answer? The same calls through two versions of legroom, compared.

    python bench/same_answers.py --path ../before/src --record before.json.gz [--cases cases.jsonl]
    python bench/same_answers.py --against before.json.gz

Every call's JSON, text, pictures and exit code are compared. Intended differences stand in same_answers.json beside
this file, each with its reason: `rewordings` are applied to the old text first, `expected` names calls whose answer
may differ. The exit code is 1 while an unexplained difference is left. `--cases` adds failure logs (one JSON object a
line with a `log`), which are recorded beside the answers.
"""

from __future__ import annotations

import argparse
import difflib
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
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
FORMATS = ["prometheus", "grafana", "systemd", "docker", "compose", "kubernetes", "helm-values"]
FORMATS += ["script", "env", "runbook"]
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


Answer = dict[str, str]
"""What a call wrote, by stream or file name; `exit` is its exit code."""


def calls(inputs: dict[str, str]) -> list[list[str]]:
    """The recorded set: every command that needs no server, over models, cards, releases, flags and files."""
    sys.path.insert(0, str(ROOT / "src"))
    from legroom.facts.bundled import bundled_names

    models = sorted(bundled_names())[::3]
    logs = [f"$IN/{name}" for name in inputs if name.endswith(".log") and not name.startswith("case-")]
    made = [["diagnose", f"$IN/{name}", "--json"] for name in inputs if name.startswith("case-")]
    for index, model in enumerate(models):
        gpu, version = GPUS[index % len(GPUS)], RELEASES[index % len(RELEASES)]
        made.append(["plan", model, "--gpu", gpu, "--json"])
        made.append(["plan", model, "--gpu", gpu, "--vllm", version, *FLAGS[index % len(FLAGS)], "--json"])
        if index % 4 == 0:
            wishes = ["--gpus", "2", "--want-context", "8k", "--want-concurrency", "4"]
            made.append(["plan", model, "--gpu", gpu, "--vllm", version, "--explain-math"])
            made.append(["plan", model, "--gpu", gpu, "--svg", "$OUT/plan.svg"])
            made.append(["plan", model, "--gpu", gpu, *wishes, "--json"])
            made.append(["size", model, "--context", "8k", "--concurrency", "8", "--json"])
        if index % 8 == 0:
            serve = ["--", "vllm", "serve", model, *FLAGS[index % len(FLAGS)]]
            made.append(["upgrade", version, "0.32.0", "--gpu", gpu, "--json", *serve])
            made.append(["upgrade", "0.10.2", version, "--all", "--gpu", gpu, *serve])
            made.append(["pack", "--gpu", gpu, "--json", *serve, "--", "vllm", "serve", "qwen3-4b"])
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
    synthetic = ["simulate", "--synthetic", "poisson rate=8 prompt=lognormal(1200,0.8) output=lognormal(300,0.6)"]
    made += [
        [*synthetic, "--model", model, "--gpu", "l4", "--max-model-len", "8192", *extra, "--json"]
        for model in ("qwen3-8b", "llama-3.1-8b")
        for extra in ((), ("--choose",), ("--autoscale", "4"))
    ]
    tiers = "simulate $IN/trace.jsonl --model qwen3-8b --gpu h100 --max-model-len 8192 --tier cpu=20GiB@50GB/s --json"
    made.append(tiers.split())
    for rate in ("1", "5"):
        rated = f"size llama-3.1-8b --rate {rate} --prompt 1000 --answer 300 --ttft 2 --tpot 50 --gpu h100,l4".split()
        made += [rated, [*rated, "--json"]]
    samples = ROOT / "docs/samples"
    pickles = [str(samples / f"{name}.pickle") for name in ("leak-before", "leak-after", "pinned-segments")]
    made += [["fragments", path, *extra] for path in pickles for extra in ((), ("--json",), ("--need", "2GiB"))]
    made += [["fragments", *pickles[:2], "--json"], ["lint", str(samples / "crash-loop.yaml"), "--json"]]
    made += [
        [command, *words, "--json"] for command in ("models", "gpus") for words in ((), ("a100",), ("qwen3", "fp8"))
    ]
    made += [[command] for command in ("models", "gpus")]
    last = """catalog validate; lint --rules; guard --print-policy; incidents --json; plan no-such-model --gpu h100;
        plan llama-3.1-8b; plan llama-3.1-8b --gpu nothing; plan llama-3.1-8b --gpu h100 --max-modle-len 1;
        diagnose no-such.log; simulate no-such.jsonl --blocks 9; export nothing"""
    return made + [call.split() for call in last.split(";")]


def answer(path: str, call: list[str], inputs: Path) -> Answer:
    """Runs one call in a folder of its own, with a home of its own and no network."""
    with tempfile.TemporaryDirectory() as out:
        words = [word.replace("$OUT", "OUT").replace("$IN", str(inputs)) for word in call]
        env = {**os.environ, "LEGROOM_HOME": f"{out}/home", "HF_HUB_OFFLINE": "1", "COLUMNS": "100", "NO_COLOR": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "legroom", *words],
            cwd=out,
            env={**env, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        files = {str(file.relative_to(out)): file.read_text("utf-8") for file in Path(out, "OUT").rglob("*.*")}
        texts = {"stdout": done.stdout, "stderr": done.stderr, **files}
        for place, name in ((str(inputs), "$IN"), (out, "$CWD"), (str(ROOT), "$ROOT")):
            texts = {file: text.replace(place, name) for file, text in texts.items()}
        return {"exit": str(done.returncode), **texts}


def reworded(answer: Answer, rewordings: list[dict[str, str]]) -> Answer:
    """The old answer in today's words."""
    texts = {name: " ".join(text.split()) for name, text in answer.items()}
    for rewording in rewordings:
        texts = {name: re.sub(rewording["old"], rewording["new"], text) for name, text in texts.items()}
    return texts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=str(ROOT / "src"), help="PYTHONPATH of the version that answers")
    parser.add_argument("--record", type=Path, help="write the calls and their answers into this file")
    parser.add_argument("--against", type=Path, help="compare with the answers in this file")
    parser.add_argument("--cases", type=Path, help="failure logs to diagnose as well, with --record")
    parser.add_argument("--only", default="", help="only calls in which this regular expression is found")
    parser.add_argument("--show", type=int, default=3, help="how many unexplained differences to print")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    began = time.monotonic()
    if options.against:
        recorded = json.loads(gzip.decompress(options.against.read_bytes()))
    else:
        recorded = {"inputs": inputs_of(options.cases), "calls": []}
        recorded["calls"] = [{"call": call} for call in calls(recorded["inputs"])]
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder)
        for name, text in recorded["inputs"].items():
            (inputs / name).write_text(text, "utf-8")
        chosen = [entry for entry in recorded["calls"] if re.search(options.only, " ".join(entry["call"]))]
        with ThreadPoolExecutor(options.jobs) as pool:
            answers = list(pool.map(lambda entry: answer(options.path, entry["call"], inputs), chosen))
    if options.against:
        pairs = [(entry["call"], entry["answer"], new) for entry, new in zip(chosen, answers, strict=True)]
        return report(pairs, json.loads(EXPLAINED.read_text("utf-8")), options.show, time.monotonic() - began)
    recorded["calls"] = [{**entry, "answer": new} for entry, new in zip(chosen, answers, strict=True)]
    options.record.write_bytes(gzip.compress(json.dumps(recorded).encode()))
    print(json.dumps({"calls": len(chosen), "wall_s": round(time.monotonic() - began)}))
    return 0


def inputs_of(cases: Path | None) -> dict[str, str]:
    """The files that the calls read, by name."""
    folders = (ROOT / "docs/samples", ROOT / "tests/fixtures/logs")
    logs = {path.name: path.read_text("utf-8") for folder in folders for path in sorted(folder.glob("*.log"))}
    lines = cases.read_text("utf-8").splitlines() if cases else []
    published = {f"case-{index:03}.log": json.loads(line)["log"] for index, line in enumerate(lines) if line.strip()}
    return {**TEXTS, "trace.jsonl": TRACE, **logs, **published}


def report(
    pairs: list[tuple[list[str], Answer, Answer]],
    explained: dict,  # type: ignore[type-arg]
    show: int,
    took_s: float,
) -> int:
    """The table by command, the first unexplained differences, and a line of JSON."""
    counts: dict[str, Counter[str]] = {}
    unexplained: list[str] = []
    for call, old, new in pairs:
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
            unexplained.append(f"$ legroom {words}\n" + difference(old, new, explained["rewordings"]))
    print(f"{'command':12}{'calls':>7}" + "".join(f"{kind:>{max(10, len(kind) + 2)}}" for kind in KINDS))
    for command, count in sorted(counts.items()):
        kinds = "".join(f"{count[kind]:{max(10, len(kind) + 2)}}" for kind in KINDS)
        print(f"{command:12}{count.total():7}{kinds}")
    for text in unexplained[:show]:
        print("\n" + text)
    total = Counter[str]()
    for count in counts.values():
        total.update(count)
    print(json.dumps({"calls": len(pairs), **total, "wall_s": round(took_s)}))
    return 1 if unexplained else 0


def difference(old: Answer, new: Answer, rewordings: list[dict[str, str]]) -> str:
    """The first lines that differ once the meant rewordings are applied."""
    lines: list[str] = []
    old_texts, new_texts = reworded(old, rewordings), reworded(new, [])
    for name in sorted({*old_texts, *new_texts}):
        before, after = old_texts.get(name, ""), new_texts.get(name, "")
        if before != after:
            lines.append(name)
            lines += difflib.unified_diff(
                re.split(r"(?<=[,.;}]) ", before), re.split(r"(?<=[,.;}]) ", after), lineterm="", n=0
            )
    return "\n".join(lines[:30])


if __name__ == "__main__":
    raise SystemExit(main())
