"""A real vLLM that its memory cgroup kills, while it starts or while it serves: does `legroom run` say so, each time?

    python bench/cgroup_kills.py --vllm VENV/bin/vllm [--rounds 10]

Needs a machine where a memory cgroup can be made (root, a writable /sys/fs/cgroup). Even rounds give the server a KV
cache that its cgroup cannot hold: the kernel kills it while it starts. Odd rounds let it come up and then have another
process of the same cgroup take what is left; the kernel is told to prefer the server. Named means: the entry (LR501),
the limit in GiB with the file it stands in, the peak, and a remedy (a smaller KV cache, or the limit to set).
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_harness import arguments, write_json
from own_cgroup import limited_cgroup
from tiny_models import SERVE_ENV, SERVE_FLAGS, write_model

GIB = 1 << 30
EATER = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
eaten = []
while True:
    eaten.append(b"x" * (8 << 20))
    time.sleep(0.005)
"""
REMEDY = re.compile(r"raise the memory limit to \d+|--kv-cache-memory-bytes")
PATIENCE_S = 300.0


def play(vllm: str, number: int, folder: Path, cgroup: Path, limit: int, dice: random.Random) -> dict[str, Any]:
    is_serving = number % 2 == 1
    pool = 64 << 20 if is_serving else limit + dice.randrange(GIB)
    wrapper, said = folder / "vllm", folder / "said"
    wrapper.write_text(
        f'#!/bin/sh\necho $$ > {cgroup}/cgroup.procs\necho 1000 > /proc/self/oom_score_adj\nexec {vllm} "$@"\n'
    )
    wrapper.chmod(0o755)
    words = [sys.executable, "-m", "legroom", "run", "--no-verify", "--tries", "0", "--on-crash", "exit", "--"]
    words += [str(wrapper), "serve", str(write_model(folder / "tiny")), *SERVE_FLAGS, "--port", str(18300 + number)]
    words += ["--kv-cache-memory-bytes", str(pool), "--max-model-len", "2048"]
    env = {**os.environ, **SERVE_ENV, "LEGROOM_HOME": str(folder / "home")}
    with said.open("wb") as log:
        run = subprocess.Popen(words, stdout=log, stderr=log, env=env)
    eater = None
    try:
        if is_serving:
            until = time.monotonic() + PATIENCE_S
            while b"legroom: serving at" not in said.read_bytes() and run.poll() is None and time.monotonic() < until:
                time.sleep(0.2)
            eater = subprocess.Popen([sys.executable, "-c", EATER, str(cgroup)])
        until = time.monotonic() + PATIENCE_S
        while run.poll() is None and time.monotonic() < until:
            if eater is not None and b"legroom: diagnosis" in said.read_bytes():
                eater.kill()
            time.sleep(0.2)
    finally:
        for process in (eater, run):
            if process is not None:
                process.kill() if process is eater else process.send_signal(signal.SIGINT)
                process.wait(60)
    lines = [line for line in said.read_text("utf-8", "replace").splitlines() if line.startswith("legroom: ")]
    return checked("serving" if is_serving else "starting", limit, lines)


def checked(moment: str, limit: int, lines: list[str]) -> dict[str, Any]:
    text = "\n".join(lines)
    checks = {
        "entry": "LR501" in text,
        "limit": f"may use {limit / GIB:.2f} GiB (/sys/fs/cgroup" in text,
        "peak": re.search(r"of which [\d.]+ GiB were in use at the peak", text) is not None,
        "remedy": REMEDY.search(text.partition("LR501")[2]) is not None,
    }
    named = next((line for line in lines if "LR501" in line), "")
    return {
        "moment": moment,
        "limit_bytes": limit,
        **checks,
        "named": all(checks.values()),
        "said": named or lines[-3:],
    }


def main() -> None:
    args = arguments(__doc__, vllm=str, rounds=10, seed=1, json=Path)
    dice, results = random.Random(args.seed), []
    for number in range(args.rounds):
        limit = dice.randrange(2200, 3000) << 20
        with tempfile.TemporaryDirectory() as name, limited_cgroup(limit) as cgroup:
            results.append(play(args.vllm, number, Path(name), cgroup, limit, dice))
        shown = {key: value for key, value in results[-1].items() if key != "said"}
        print(json.dumps(shown), flush=True)
        write_json(args.json, results)
    print(f"named with limit, peak and remedy: {sum(result['named'] for result in results)} of {len(results)}")


if __name__ == "__main__":
    main()
