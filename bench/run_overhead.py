"""What does `legroom run` cost beside the server? CPU and memory of the supervisor and its keeper, idle and under load.

    python bench/run_overhead.py --vllm VENV/bin/vllm [--seconds 60] [--json overhead.json]

Starts a real server with a tiny model below `legroom run`, waits until it is verified, then looks twice: with nothing
to do, and with several clients that send one request after the other. Time is that of the kernel's own accounting.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench_harness import arguments, cpu_s, write_json
from tiny_models import SERVE_ENV, SERVE_FLAGS, write_model

MOST_CPU, MOST_BYTES = 0.01, 60_000_000


def memory(pid: int) -> dict[str, int]:
    """Resident, and the part of it that no other process shares."""
    found = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("Rss", "Pss"):
            found[f"{name.lower()}_bytes"] = int(value.split()[0]) * 1024
    return found


def watch(pids: dict[str, int], seconds: float) -> dict[str, Any]:
    before, began = {name: cpu_s(pid) for name, pid in pids.items()}, time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began
    return {
        name: {"cpu_ratio": round((cpu_s(pid) - before[name]) / took, 5), **memory(pid)} for name, pid in pids.items()
    }


class Load:
    """Clients that send one request after the other."""

    def __init__(self, url: str, model: str, clients: int) -> None:
        self.done = 0
        self._body = json.dumps({"model": model, "prompt": "x" * 32, "max_tokens": 16}).encode()
        self._url, self._stop = f"{url}/v1/completions", False
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._stop:
            request = urllib.request.Request(self._url, self._body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=120) as answer:
                answer.read()
            self.done += 1

    def stop(self) -> None:
        self._stop = True
        for thread in self._threads:
            thread.join()


def main() -> None:
    args = arguments(__doc__, vllm=str, seconds=60.0, clients=16, port=18150, json=Path)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "llama")
        home = Path(folder) / "home"
        words = [sys.executable, "-m", "legroom", "run", "--", args.vllm, "serve", str(model), "--port", str(args.port)]
        words += [*SERVE_FLAGS, *["--host", "127.0.0.1", "--max-model-len", "2048", "--kv-cache-memory-bytes", "16M"]]
        said = Path(folder) / "said"
        with said.open("wb") as err:
            environ = {**os.environ, **SERVE_ENV, "LEGROOM_HOME": str(home)}
            run = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=err, env=environ)
        try:
            while b"legroom: serving at" not in said.read_bytes():
                if run.poll() is not None:
                    sys.exit(said.read_text()[-2000:])
                time.sleep(0.5)
            file = json.loads((home / f"runs/{args.port}.json").read_text())
            pids = {"supervisor": file["pid"], "keeper": file["keeper_pid"]}
            result: dict[str, Any] = {"seconds": args.seconds, "idle": watch(pids, args.seconds)}
            load = Load(file["url"], str(model), args.clients)
            began = time.monotonic()
            result["load"] = watch(pids, args.seconds)
            load.stop()
            result["requests_per_s"] = round(load.done / (time.monotonic() - began), 1)
        finally:
            run.send_signal(signal.SIGINT)
            run.wait(60)
    show(result)
    write_json(args.json, result)


def show(result: dict[str, Any]) -> None:
    print(f"{'':6} {'process':12} {'CPU of a core':>14} {'RSS':>9} {'PSS':>9}")
    for phase in ("idle", "load"):
        rows = dict(result[phase])
        rows["together"] = {key: sum(row[key] for row in result[phase].values()) for key in next(iter(rows.values()))}
        for name, row in rows.items():
            sizes = " ".join(f"{row[key] / 1e6:6.1f} MB" for key in ("rss_bytes", "pss_bytes"))
            print(f"{phase:6} {name:12} {row['cpu_ratio']:13.2%} {sizes}")
        ok = rows["together"]["cpu_ratio"] <= MOST_CPU and rows["together"]["rss_bytes"] <= MOST_BYTES
        print(f"{phase:6} {'within' if ok else 'OVER'} 1 % and 60 MB")
    print(f"under load: {result['requests_per_s']} requests/s")


if __name__ == "__main__":
    main()
