"""Does `legroom run` heal? Fails a real vLLM in many ways, and counts the retries until each one serves.

    python bench/run_heal.py --vllm VENV/bin/vllm --json healed.json
    python bench/run_heal.py --logs FOLDER --gpu h200 --json replayed.json

The first form needs a vLLM that runs here (a CPU build will do) and makes its own tiny models; a case is healed when
the server became healthy and answered one request at its full context; --quick takes every second case, --case names
some. The second form replays the logs of failed
start-ups on a GPU: each must give a fix whose plan fits that card.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_harness import arguments, write_json
from tiny_models import SERVE_ENV, SERVE_FLAGS, write_model

POOL = ["--kv-cache-memory-bytes", "16M"]
LENGTH = ["--max-model-len", "2048"]
HALF = ["--dtype", "bfloat16"]  # linear attention takes nothing else on a CPU
PLAIN_MLA = ["--attention-backend", "CPU_MLA"]  # the other one wants AMX instructions, and no float32
# Prompts of a state-space model above one chunk (256) fail on the CPU in 0.32, whatever the pool: hence its length.
CASES: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "KV too small": ("llama", ["--kv-cache-memory-bytes", "1M", *LENGTH], {}),
    "KV too small, sliding windows": ("gemma3", ["--kv-cache-memory-bytes", "768K", *LENGTH], {}),
    "KV too small, latent attention": ("deepseekv2", ["--kv-cache-memory-bytes", "1M", *LENGTH, *PLAIN_MLA], {}),
    "KV too small, linear attention": ("qwen3next", ["--kv-cache-memory-bytes", "1M", *LENGTH, *HALF], {}),
    "KV too small, state space": ("mamba_hybrid", ["--kv-cache-memory-bytes", "600K", "--max-model-len", "240"], {}),
    "KV too small, experts": ("qwen3moe", ["--kv-cache-memory-bytes", "1200K", "--max-model-len", "4096"], {}),
    "no cache blocks: share too small": ("llama", ["--gpu-memory-utilization", "0.01", "--max-model-len", "2048"], {}),
    "no cache blocks: one byte": ("llama", ["--kv-cache-memory-bytes", "1"], {}),
    "no cache blocks: space 0": ("gemma3", ["--max-model-len", "4096"], {"VLLM_CPU_KVCACHE_SPACE": "0"}),
    "too few blocks": ("llama", ["--num-gpu-blocks-override", "4", "--max-model-len", "2048", *POOL], {}),
    "no blocks": ("llama", ["--num-gpu-blocks-override", "0", *POOL], {}),
    "pool larger than RAM": ("llama", ["--kv-cache-memory-bytes", "2000G"], {}),
    "space larger than RAM": ("llama", [], {"VLLM_CPU_KVCACHE_SPACE": "2000"}),
    "length over the model's own": ("llama", ["--max-model-len", "8192", *POOL], {}),
    "a removed flag": ("llama", ["--swap-space", "4", *POOL], {}),
    "a removed switch": ("llama", ["--use-v2-block-manager", *POOL], {}),
    "a flag of another release": ("llama", ["--guided-decoding-backend", "outlines", *POOL], {}),
    "a misspelt flag": ("llama", ["--max-modle-len", "2048", *POOL], {}),
    "a bad block size": ("llama", ["--block-size", "24", *POOL], {}),
    "a step below the length": (
        "llama",
        ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "512", "--max-model-len", "2048", *POOL],
        {},
    ),
    "more sequences than tokens": ("llama", ["--max-num-seqs", "512", "--max-num-batched-tokens", "256", *POOL], {}),
    "no sequences": ("llama", ["--max-num-seqs", "0", *POOL], {}),
    "a choice that is none": ("llama", ["--kv-cache-dtype", "fp4", *POOL], {}),
    "a length that is none": ("llama", ["--max-model-len", "2k5", *POOL], {}),
    "a value that is missing": ("llama", [*POOL, "--max-model-len"], {}),
    "ranks that do not divide the heads": ("llama", ["--tensor-parallel-size", "3", *POOL], {}),
    "a mode this platform lacks": ("llama", ["--enable-sleep-mode", *POOL], {}),
}


def heal(vllm: str, name: str, models: Path, port: int, patience_s: float) -> dict[str, Any]:
    """Run one case until it serves or gives up; the server is gone afterwards."""
    kind, flags, env = CASES[name]
    model = write_model(models / kind, kind)
    with tempfile.TemporaryDirectory() as home:
        words = [sys.executable, "-m", "legroom", "run", "--ready-timeout", str(patience_s), "--", vllm, "serve"]
        words += [str(model), "--host", "127.0.0.1", "--port", str(port), *SERVE_FLAGS, *flags]
        began = time.monotonic()
        with tempfile.TemporaryFile("w+b") as said:
            environ = {**os.environ, **SERVE_ENV, **env, "LEGROOM_HOME": home}
            run = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=said, env=environ)
            lines: list[str] = []
            while run.poll() is None and time.monotonic() - began < 3 * patience_s:
                time.sleep(0.5)
                said.seek(0)
                lines = [
                    line[9:]
                    for line in said.read().decode("utf-8", "replace").splitlines()
                    if line.startswith("legroom: ")
                ]
                if any(line.startswith(("serving at", "NOT verified")) for line in lines):
                    break
            if run.poll() is None:
                run.send_signal(signal.SIGINT)
            code = run.wait(120)
    tries = [line for line in lines if line.startswith("try ")]
    changed = [found[1] for line in tries if (found := re.search(r"Changed: (.*?)\. Expected now", line))]
    return {
        "case": name,
        "model": kind,
        "healed": any(line.startswith("serving at") for line in lines),
        "verified": any(line.startswith("verified") for line in lines),
        "retries": len(tries),
        "changed": changed,
        "as_planned": next((line for line in lines if line.startswith("vLLM says")), ""),
        "seconds": round(time.monotonic() - began),
        "exit_code": code,
        "said": [] if any(line.startswith("serving at") for line in lines) else lines[-4:],
    }


def replay(log: Path, gpu: str) -> dict[str, Any]:
    """Diagnose a recorded failure as `legroom run` does; the first fix that it would apply must have a fitting plan."""
    from legroom.diagnosis.fixes.failed_run import Hints
    from legroom.diagnosis.log_diagnosis import read_log
    from legroom.run.healing import computed_fixes
    from legroom.vllm_logs.log_sources import pieces_of_file

    findings = read_log(pieces_of_file(str(log)), str(log), Hints(gpu=gpu)).runs[0].findings
    fix = next(computed_fixes(findings), None)
    planned = fix.plan.verdict if fix is not None and fix.plan is not None else None
    return {
        "case": log.stem,
        "cause": findings[0].cause if findings else None,
        "failed": bool(findings),
        "flags": dict(fix.flags) if fix else None,
        "env": dict(fix.env) if fix else None,
        "verdict": planned,
        "healed": planned in ("fits", "tight"),
    }


def main() -> None:
    files = {"vllm": str, "logs": Path, "json": Path, "case": ()}
    args = arguments(__doc__, gpu="h200", quick=False, port=18140, patience=300.0, **files)
    results: list[dict[str, Any]] = []
    if args.logs:
        replayed = [replay(log, args.gpu) for log in sorted(args.logs.glob("*.log"))]
        results += [result for result in replayed if result["failed"]]  # some logs are of starts that went well
    if args.vllm:
        with tempfile.TemporaryDirectory() as models:
            for name in args.case or list(CASES)[:: 2 if args.quick else 1]:
                results.append(heal(args.vllm, name, Path(models), args.port, args.patience))
                show(results[-1])
    else:
        for result in results:
            show(result)
    first = sum(result["healed"] and result.get("retries", 1) == 1 for result in results)
    print(f"{first} of {len(results)} healed on the first retry")
    write_json(args.json, results)


def show(result: dict[str, Any]) -> None:
    what = "; ".join(result["changed"]) if "changed" in result else f"{result['flags']} ({result['verdict']})"
    mark = "healed" if result["healed"] else "NOT   "
    retries = f"{result['retries']} retry" if "retries" in result else str(result["cause"])
    print(f"{mark}  {result['case']:38} {retries:26} {what}", flush=True)
    for line in result.get("said", ()):
        print(f"        {line[:300]}")


if __name__ == "__main__":
    main()
