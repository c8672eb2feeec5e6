"""The HTTP API of `legroom ui` under load and under random requests.

python bench/ui_api.py [--clients 200] [--seconds 60]        many clients at once: no 5xx, memory flat
python bench/ui_api.py --schemathesis [--examples 50]        random requests by /openapi.json (needs schemathesis)
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
from bench_harness import arguments

SAMPLE = Path(__file__).parents[1] / "docs" / "samples" / "kv-too-small.log"
MODELS = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-8b", "qwen3-32b", "mistral-7b-v0.1", "nobody/nothing")
GPUS = ("h100", "l4", "a100-80gb", "rtx4090", "24GiB")
SCHEMATHESIS = """\
[checks]
# The form is right and it still cannot be answered: an unknown model, a flag that a release does not have.
positive_data_acceptance.expected-statuses = [200, 422, 424, 404, 413]
"""


def one_request(rng: random.Random) -> tuple[str, bytes]:
    kind = rng.random()
    model, length = rng.choice(MODELS), rng.randrange(1, 64) * 512
    plan = {"model": model, "gpu": rng.choice(GPUS), "flags": {"max_model_len": length}, "advice": rng.random() < 0.1}
    if kind < 0.75:
        return "/api/plan", json.dumps(plan).encode()
    if kind < 0.85:
        return "/api/math", json.dumps(plan).encode()
    if kind < 0.9:
        return "/api/catalog", json.dumps({"query": rng.choice(("fragmentation", "cumem", "preempt"))}).encode()
    if kind < 0.95:
        return "/api/diagnose", json.dumps({"log": SAMPLE.read_text("utf-8"), "gpu": rng.choice(GPUS)}).encode()
    return "/api/read", json.dumps({"text": "vllm serve Qwen/Qwen3-8B --max-model-len 4096"}).encode()


async def ask(port: int, path: str, body: bytes) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ", 2)[1])


async def client(port: int, number: int, until: float, statuses: Counter[int], waits: list[float]) -> None:
    rng = random.Random(number)
    while time.monotonic() < until:
        began = time.monotonic()
        statuses[await ask(port, *one_request(rng))] += 1
        waits.append(time.monotonic() - began)


def memory_mb(process: psutil.Process) -> float:
    everyone = [process, *process.children(recursive=True)]
    total = 0
    for member in everyone:
        try:
            total += member.memory_info().rss
        except psutil.Error:
            continue
    return total / 1e6


async def load(port: int, process: psutil.Process, clients: int, seconds: float) -> bool:
    statuses: Counter[int] = Counter()
    waits: list[float] = []
    memory: list[float] = []
    until = time.monotonic() + seconds
    tasks = [asyncio.create_task(client(port, number, until, statuses, waits)) for number in range(clients)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(1)
        memory.append(memory_mb(process))
    await asyncio.gather(*tasks)
    waits.sort()
    third = len(memory) // 3
    middle, end = max(memory[third : 2 * third], default=0), max(memory[2 * third :], default=0)
    print(f"{clients} clients, {seconds:.0f} s: {sum(statuses.values()):,} answers {dict(statuses)}")
    print(f"waits: median {waits[len(waits) // 2]:.2f} s, 95th {waits[int(len(waits) * 0.95)]:.2f} s")
    print(f"memory: {memory[third]:.0f} MB after a third, at most {middle:.0f} in the second, {end:.0f} in the last")
    return not any(status >= 500 for status in statuses) and end <= middle * 1.1 + 20


def schemathesis(port: int, examples: int) -> bool:
    program = shutil.which("schemathesis") or str(Path(sys.executable).with_name("schemathesis"))
    settings = Path("schemathesis.bench.toml")
    settings.write_text(SCHEMATHESIS)
    url = f"http://127.0.0.1:{port}"
    words = f"--config-file {settings} run {url}/openapi.json --url {url} --max-examples {examples} --seed 1".split()
    words += ["--exclude-path", "/api/live", "--exclude-path", "/api/hub"]
    try:
        return subprocess.run([program, *words], check=False).returncode == 0
    finally:
        settings.unlink()


def main() -> int:
    args = arguments(__doc__, clients=200, seconds=60.0, schemathesis=False, examples=50)
    words = [sys.executable, "-m", "legroom", "ui", "--port", "0", "--json"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert server.stdout is not None
    port = int(json.loads(server.stdout.readline())["url"].rstrip("/").rpartition(":")[2])
    try:
        if args.schemathesis:
            passed = schemathesis(port, args.examples)
        else:
            passed = asyncio.run(load(port, psutil.Process(server.pid), args.clients, args.seconds))
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)
    print("pass" if passed else "fail")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
