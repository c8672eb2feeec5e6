#!/usr/bin/env python3
"""What the plugin inside vLLM's worker costs: one server under a steady load, its readings on and off in turn.

    worker_overhead.py VLLM MODEL OUT [--waves 3] [--tokens 1900] [--window 0.6] [--amplified 25] [--sequences 256]

Two servers differ by more than the plugin costs, so one is measured against itself: all that the plugin does while a
server serves is to take readings, and these stop while a file is there. The load is waves of equal sequences that
decode together; in their middle windows follow each other in pairs, the first on or off by the toss of a coin. Tokens
are the server's own count. With `--amplified 25` readings come every 0.2 s, 25 times as often as they do: what is lost
then, over 25, is the plugin's.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from bench_harness import arguments, write_line
from gpu_server import GpuServer
from memory_patterns_gpu import order

READ_INTERVAL_S = 5.0
_TOKENS = re.compile(rb"^vllm:generation_tokens_total\{[^\n]*\} ([0-9.e+]+)$", re.MULTILINE)
_RUNNING = re.compile(rb"^vllm:num_requests_running\{[^\n]*\} ([0-9.e+]+)$", re.MULTILINE)
GRAPHS = json.dumps({"mode": 0, "cudagraph_mode": "FULL"})


def tokens(server: GpuServer) -> tuple[float, float]:
    shown = _TOKENS.search(server.page())
    return time.perf_counter(), float(shown[1]) if shown else 0.0


def is_decoding(server: GpuServer, sequences: int) -> bool:
    """Whether all of a wave still run."""
    shown = _RUNNING.search(server.page())
    return shown is not None and float(shown[1]) >= sequences


def begin_wave(server: GpuServer, sequences: int, tokens_each: int) -> list[threading.Thread]:
    """All sequences at once and all of one length: while they decode, no request comes or goes."""

    def ask(number: int) -> None:
        prompt = [5 + number * 31 % 390] * 16
        server.ask(120.0, prompt=prompt, n=16, ignore_eos=True, max_tokens=tokens_each)

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(sequences // 16)]
    for thread in threads:
        thread.start()
    return threads


def rate(server: GpuServer, off: Path, side: str, window_s: float) -> float:
    if side == "off":
        off.touch()
    else:
        off.unlink(missing_ok=True)
    time.sleep(0.22)  # until the thread has seen it
    began_s, before = tokens(server)
    time.sleep(window_s)
    ended_s, after = tokens(server)
    return (after - before) / (ended_s - began_s)


def interval(values: list[float]) -> tuple[float, float, float]:
    """The mean and its 95 % interval, by resampling."""
    dice = random.Random(1)
    means = sorted(statistics.mean(dice.choices(values, k=len(values))) for _ in range(4000))
    return statistics.mean(values), means[100], means[-101]


def summary(pairs: list[dict[str, float]], amplified: float) -> dict[str, Any]:
    if not pairs:
        raise SystemExit("no window had all sequences decoding: make the waves longer")
    mean, low, high = interval([pair["on"] / pair["off"] for pair in pairs])
    return {
        "pairs": len(pairs),
        "amplified": amplified,
        "tokens_per_s": statistics.mean(pair["off"] for pair in pairs),
        "ratio": mean,
        "ratio_95": [low, high],
        "ratio_not_amplified": 1 - (1 - mean) / amplified,
        "ratio_not_amplified_95": [1 - (1 - value) / amplified for value in (low, high)],
    }


def main() -> None:
    load = {"waves": 3, "tokens": 1900, "window": 0.6, "amplified": 25.0, "sequences": 256}
    args = arguments(__doc__, "vllm", "model:path", "out:path", **load, flags=f"--compilation-config {GRAPHS}")
    words = args.flags.split(" ", 1) if args.flags else []
    common = ("--gpu-memory-utilization", "0.3", "--max-model-len", "2048", "--max-num-seqs", str(args.sequences))
    server = GpuServer(
        args.vllm,
        args.model,
        args.out / "overhead",
        *common,
        *words,
        env={"LEGROOM_FAULTS_EVERY_S": str(READ_INTERVAL_S / args.amplified)},
    )
    off, dice, pairs = server.folder / "off", random.Random(2), list[dict[str, float]]()
    try:
        if not server.start():
            raise SystemExit(f"vLLM did not start: {server.log.read_text()[-2000:]}")
        for _ in range(args.waves):
            wave = begin_wave(server, args.sequences, args.tokens)
            time.sleep(1.0)
            while any(thread.is_alive() for thread in wave) and is_decoding(server, args.sequences):
                sides = ["on", "off"]
                dice.shuffle(sides)
                pair = {side: rate(server, off, side, args.window) for side in sides}
                if is_decoding(server, args.sequences):
                    pairs.append(pair)
                    write_line(args.out / "overhead.jsonl", pair)
            for thread in wave:
                thread.join()
        off.touch()
        begin_wave(server, 16, 200)
        rings = order(server, {"kind": "fill_rings", "readings": 300})
        row = summary(pairs, args.amplified) | {"rings": rings, "start_s": server.start_s}
        write_line(args.out / "overhead.jsonl", row)
        print(json.dumps(row))
    finally:
        server.stop()


if __name__ == "__main__":
    main()
