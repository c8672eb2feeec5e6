"""How long a cold process takes: `legroom plan` of a bundled model beside hf-mem and kvfit, in one run.

    python bench/cold_start.py [--runs 15] [--peers VENV] [--json FILE]

hf-mem and kvfit ask the Hugging Face Hub on every call, so their full answer depends on the network. Each is timed on
the same question; where the Hub cannot be reached, that ends with its network error, which is the least any answer of
theirs can take, and the row says so. legroom is timed to the full answer. Runs of all commands alternate, so that a
busy machine slows all of them alike, and the first round (cold disk cache, no bytecode yet) is thrown away.

Without `--peers`, the two are installed from the configured package index into a temporary environment.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from bench_harness import arguments, print_table, write_json

PEERS = {
    "hf-mem": ["--model-id", "Qwen/Qwen3-8B", "--experimental", "--json-output"],
    "kvfit": ["Qwen/Qwen3-8B", "--hardware", "h100", "--gpus", "1", "--json"],
}


def install_peers(folder: Path) -> Path:
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *PEERS], check=True, stderr=subprocess.DEVNULL)
    return folder


def commands(peers: Path) -> dict[str, list[str]]:
    legroom = shutil.which("legroom", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if legroom is None:
        sys.exit("legroom is not installed beside this Python: pip install . first")
    found = {
        "legroom plan": [legroom, "plan", "qwen3-8b", "--gpu", "h100"],
        "legroom plan --json": [legroom, "plan", "qwen3-8b", "--gpu", "h100", "--json"],
        "legroom --help": [legroom, "--help"],
    }
    for peer, question in PEERS.items():
        path = peers / "bin" / peer
        if path.exists():
            found[peer] = [str(path), *question]
            found[f"{peer} --help"] = [str(path), "--help"]
    return found


def timed(command: list[str]) -> tuple[float, bool]:
    """Seconds, and whether it answered."""
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    elapsed = time.perf_counter() - start
    if done.returncode and "legroom" in command[0]:
        sys.exit(f"{' '.join(command)} failed: {done.stderr.decode(errors='replace')[-400:]}")
    return elapsed, done.returncode == 0


def measure(table: dict[str, list[str]], runs: int) -> tuple[dict[str, list[float]], set[str]]:
    times: dict[str, list[float]] = {name: [] for name in table}
    unanswered: set[str] = set()
    for number in range(runs + 1):
        for name, command in table.items():
            elapsed, answered = timed(command)
            if not answered:
                unanswered.add(name)
            if number:
                times[name].append(elapsed)
    return times, unanswered


def main() -> None:
    args = arguments(__doc__, runs=15, peers=Path, json=Path)
    with tempfile.TemporaryDirectory() as folder:
        peers = args.peers or install_peers(Path(folder) / "peers")
        times, unanswered = measure(commands(peers), args.runs)
    ours = statistics.median(times["legroom plan"])
    rows = {
        name: {
            "median_s": round(statistics.median(values), 4),
            "fastest_s": round(min(values), 4),
            "slowest_s": round(max(values), 4),
            "times_legroom_plan": round(statistics.median(values) / ours, 2),
            "answered": name not in unanswered,
        }
        for name, values in times.items()
    }
    table = [("command", "median", "fastest", "slowest", "x legroom plan", "")]
    for name, row in rows.items():
        times_ms = (f"{row[column] * 1000:.0f} ms" for column in ("median_s", "fastest_s", "slowest_s"))
        stopped = "" if row["answered"] else "stopped at its first request: no network"
        table.append((name, *times_ms, f"{row['times_legroom_plan']:.2f}", stopped))
    print_table(table)
    document = {"runs": args.runs, "python": sys.version.split()[0], "commands": rows}
    write_json(args.json, document)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
