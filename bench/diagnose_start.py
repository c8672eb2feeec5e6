"""Do computed fixes start? Fails a real vLLM on purpose, diagnoses its log, applies the first fix, starts it again.

    python bench/diagnose_start.py --vllm VENV/bin/vllm --models DIR [--case NAME ...]

Needs a vLLM that runs here (a CPU build will do) and folders with tiny models. One line a case, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CASES: dict[str, tuple[str, list[str]]] = {
    "kv too small": ("llama", ["--kv-cache-memory-bytes", "512K", "--max-model-len", "2048"]),
    "kv too small, sliding windows": ("gemma3", ["--kv-cache-memory-bytes", "384K", "--max-model-len", "2048"]),
    "kv too small, hybrid": ("qwen3next", ["--kv-cache-memory-bytes", "1M", "--max-model-len", "2048"]),
    "too few state blocks": ("mamba_hybrid", ["--kv-cache-memory-bytes", "2M", "--max-num-seqs", "512"]),
    "nothing for the cache": ("llama", ["--gpu-memory-utilization", "0.01", "--max-model-len", "2048"]),
}
_ENV = {
    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def start(vllm: str, model: str, flags: list[str], log: Path, port: int, patience_s: float) -> str:
    """`ready` or `failed` or `too slow`; the server is gone afterwards."""
    words = [vllm, "serve", model, "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", *flags]
    with log.open("wb") as out:
        server = subprocess.Popen(words, stdout=out, stderr=out, env={**os.environ, **_ENV}, start_new_session=True)
    try:
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            if b"Application startup complete" in log.read_bytes():
                return "ready"
            if server.poll() is not None:
                return "failed"
            time.sleep(1)
        return "too slow"
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def diagnosed(log: Path) -> dict:  # type: ignore[type-arg]
    """What `legroom diagnose --json` says."""
    words = [sys.executable, "-m", "legroom", "diagnose", str(log), "--json"]
    document: dict = json.loads(subprocess.run(words, capture_output=True, text=True, check=False).stdout)  # type: ignore[type-arg]
    return document


def merged(flags: list[str], changes: dict[str, object]) -> list[str]:
    """The flags with a fix's changes in their place."""
    kept = list(flags)
    for name, value in changes.items():
        flag = "--" + name.replace("_", "-")
        if flag in kept:
            at = kept.index(flag)
            del kept[at : at + 2]
        if value is not None:
            kept += [flag] if value is True else [flag, str(value)]
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True)
    parser.add_argument("--models", required=True)
    parser.add_argument("--case", action="append")
    parser.add_argument("--port", type=int, default=18431)
    parser.add_argument("--patience", type=float, default=240)
    args = parser.parse_args()
    for name in args.case or CASES:
        model, flags = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            first, second = Path(folder) / "first.log", Path(folder) / "second.log"
            where = str(Path(args.models) / model)
            before = start(args.vllm, where, flags, first, args.port, args.patience)
            answer = diagnosed(first)
            finding = answer["findings"][0] if answer["findings"] else {}
            fix = next((fix for fix in finding.get("fixes", ()) if fix["flags"]), {})
            changed = merged(flags, fix.get("flags", {}))
            after = start(args.vllm, where, changed, second, args.port + 1, args.patience) if fix else "no fix"
            last = second.read_text("utf-8", "replace").splitlines()[-1:] if after == "failed" else []
        found = {"case": name, "before": before, "cause": finding.get("cause"), "fix": fix.get("flags"), "after": after}
        print(json.dumps({**found, "last": last}), flush=True)


if __name__ == "__main__":
    main()
