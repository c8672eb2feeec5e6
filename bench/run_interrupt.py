"""One Ctrl-C under load, for each shape a real vLLM can have: how soon does it end, and what does every client get?

    python bench/run_interrupt.py --vllm VENV/bin/vllm [--shapes plain api dp dp+api ...] [--rounds 2]

Clients stream or wait for the whole answer, half and half, all with requests that take much longer than the bench.
A client has an answer when it gets a status of 4xx or 5xx, a stream that ends with an error event, or a whole answer;
a connection that breaks off is a client that was left. The shape `second` sends a second SIGINT 0.1 s after the first:
that one kills, so its clients are not judged.

`for a CPU` is how long the supervisor, which has a hundredth of a second of work to do, waited for a processor in that
time: on a machine that is busy with other things it is most of it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from bench_harness import arguments, free_port, write_json
from tiny_models import SERVE_ENV, SERVE_FLAGS, write_model

from legroom.process_table import descendants, process_start_ticks

SHAPES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "api": ("--api-server-count", "2"),
    "dp": ("--data-parallel-size", "2", "--api-server-count", "1"),
    "dp+api": ("--data-parallel-size", "2"),  # as many API servers as engines is vLLM's default
    "uni": ("--distributed-executor-backend", "uni"),
    "api-uni": ("--api-server-count", "2", "--distributed-executor-backend", "uni"),
    "second": ("--api-server-count", "2"),
}
NO_WORKERS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""The engine core works itself, as with one GPU an engine: without this the CPU build gives it a worker process."""
CLIENTS = 12
TOKENS = 3500
PATIENCE_S = 400.0


class Interrupted:
    """One server below `legroom run`, its clients, and a Ctrl-C."""

    def __init__(self, vllm: str, folder: Path, shape: str) -> None:
        self.shape, self.port = shape, free_port()
        self.home, self.said = folder / "home", folder / "said"
        model = write_model(folder / "tiny")
        words = [sys.executable, "-m", "legroom", "run", "--no-verify", "--", vllm, "serve", str(model), *SERVE_FLAGS]
        words += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "tiny"]
        words += ["--kv-cache-memory-bytes", "64M", "--max-model-len", "4096", *SHAPES[shape]]
        env = {**os.environ, **SERVE_ENV, "LEGROOM_HOME": str(self.home)}
        env |= NO_WORKERS if "uni" in shape else {}
        with self.said.open("wb") as err:
            self.run = subprocess.Popen(words, stdout=err, stderr=err, env=env)

    async def play(self) -> dict[str, Any]:
        await self._until_serving()
        record = json.loads((self.home / f"runs/{self.port}.json").read_text())
        pids = [record["keeper_pid"], *descendants(record["keeper_pid"])]
        self.begun = 0
        clients = [asyncio.create_task(self._client(streams=number % 2 == 0)) for number in range(CLIENTS)]
        until = time.monotonic() + 60
        while self.begun < CLIENTS // 2 and time.monotonic() < until:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        record_requested_s, printed = time.monotonic(), self.said.stat().st_size
        self.run.send_signal(signal.SIGINT)
        if self.shape == "second":
            await asyncio.sleep(0.1)
            self.run.send_signal(signal.SIGINT)
        code, waited_s = await asyncio.to_thread(self._ended, self._cpu_wait_s() or 0.0)
        ended_s = time.monotonic() - record_requested_s
        orphans = [pid for pid in pids if process_start_ticks(pid)]
        fates = await asyncio.gather(*clients)
        return {
            "shape": self.shape,
            "exit_s": round(ended_s, 2),
            "exit_code": code,
            "orphans": len(orphans),
            "fates": dict(collections.Counter(fate for fate, _ in fates)),
            "last_answer_s": round(max(at_s for _, at_s in fates) - record_requested_s, 2),
            "cpu_wait_s": round(waited_s, 2),
            "log": self.said.read_bytes()[printed:].decode("utf-8", "replace").splitlines(),
        }

    def _ended(self, waited_before_s: float) -> tuple[int, float]:
        """Its exit code, and how long it waited for a CPU until then."""
        until, waited_s = time.monotonic() + PATIENCE_S, 0.0
        while (code := self.run.poll()) is None and time.monotonic() < until:
            waited_s = (self._cpu_wait_s() or waited_before_s + waited_s) - waited_before_s
            time.sleep(0.01)
        return (-1 if code is None else code), waited_s

    def _cpu_wait_s(self) -> float | None:
        """Of the supervisor, so far; None where the kernel does not tell, or it has gone."""
        try:
            return int(Path(f"/proc/{self.run.pid}/schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return None

    async def _until_serving(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while b"legroom: serving at" not in self.said.read_bytes():
            if self.run.poll() is not None or time.monotonic() > until:
                sys.exit(self.said.read_text("utf-8", "replace")[-3000:])
            await asyncio.sleep(0.1)

    async def _client(self, streams: bool) -> tuple[str, float]:
        body = {"model": "tiny", "prompt": "x" * 32, "max_tokens": TOKENS, "ignore_eos": True, "stream": streams}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        fate = "broken off"
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
                lines = []
                async for line in answer.content:
                    if not lines and streams:
                        self.begun += 1
                    lines.append(line)
                text = b"".join(lines[-4:])
                if answer.status != 200:
                    fate = str(answer.status)
                elif streams:
                    fate = "error event" if b'"error"' in text else "whole" if b"[DONE]" in text else "broken off"
                else:
                    fate = "whole"
        return fate, time.monotonic()

    def close(self) -> None:
        self.run.kill()
        self.run.wait()


def main() -> None:
    args = arguments(__doc__, vllm=str, shapes=tuple(SHAPES), rounds=2, json=Path)
    results = []
    print(
        f"{'shape':15} {'ended after':>12} {'last answer':>12} {'for a CPU':>10} {'exit':>5} {'orphans':>8}  clients",
        flush=True,
    )
    for _ in range(args.rounds):
        for shape in args.shapes:
            with tempfile.TemporaryDirectory() as name:
                held = Interrupted(args.vllm, Path(name), shape)
                try:
                    result = asyncio.run(held.play())
                finally:
                    held.close()
            results.append(result)
            fates = ", ".join(f"{count} {fate}" for fate, count in sorted(result["fates"].items()))
            print(
                f"{shape:15} {result['exit_s']:10.2f} s {result['last_answer_s']:10.2f} s "
                f"{result['cpu_wait_s']:8.2f} s {result['exit_code']:5} "
                f"{result['orphans']:8}  {fates}",
                flush=True,
            )
            write_json(args.json, results)


if __name__ == "__main__":
    main()
