"""How fast the gate answers, and how much memory hostile bodies make it take: AdmissionReviews over TLS.

    python bench/gate.py [--rate 500] [--seconds 20] [--manifests 200] [--new-every 50] [--json FILE]

A gate is started here with a certificate of its own. Four loads: objects it has not seen (each is planned), the same
objects at a steady rate (the deadline of the promise: 50 ms at the 99th percentile at 500 requests a second on two
cores, with the clients on the same machine), as many as it answers, and the steady rate with one in so many objects
new: another model, card, release and flags each, most of them such that they fit. Then bodies that nobody should send.
`cpu_ms` is what the gate's processes use of the cores for an answer, `clients` how many cores this program uses itself:
the gate has what is left of the machine's.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_harness import arguments, write_json

MODELS = ("Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct", "mistralai/Mistral-7B-v0.1", "Qwen/Qwen3-32B")
NEW_CARDS = (
    ("NVIDIA-L4", 22),
    ("NVIDIA-L40S", 44),
    ("NVIDIA-A100-SXM4-80GB", 79),
    ("NVIDIA-H100-80GB-HBM3", 79),
    ("NVIDIA-H200", 140),
    ("NVIDIA-B200", 178),
)
STORED_BYTES = {"fp8": 1.0, "w8a8": 1.0, "awq": 0.6, "gptq": 0.6, "fp4": 0.6, "int4": 0.6, "w4a16": 0.6, "4bit": 0.6}
RELEASES = ("0.8.5", "0.9.2", "0.10.2", "0.11.0", "0.12.0", "0.14.0", "0.19.0", "0.22.0", "0.28.0")
BEING_SEARCHED = b"being searched for"
CARDS = ("NVIDIA-L4", "NVIDIA-A10G", "NVIDIA-H100-80GB-HBM3", "NVIDIA-A100-SXM4-80GB")


def review(number: int, manifests: int) -> bytes:
    """One of so many Deployments, as an API server sends it: with what kubectl and the server add."""
    which = number % manifests
    length = 2048 + 16 * (which // 16)
    flags = f"--model {MODELS[which % len(MODELS)]} --max-model-len {length} --gpu-memory-utilization 0.9".split()
    return _reviewed(number, flags, CARDS[which // len(MODELS) % len(CARDS)])


def new_review(number: int) -> bytes:
    """A Deployment like no other: a bundled model on the fewest cards that should hold it, now and then on fewer."""
    from legroom.facts.bundled import bundled_names, find

    choices = random.Random(number)
    bundled = find(choices.choice(bundled_names()))
    assert bundled is not None
    base = find(bundled.base) if bundled.base else bundled
    assert base is not None
    name = bundled.ids[0] if bundled.ids else bundled.name
    wide = next((width for word, width in STORED_BYTES.items() if word in name.lower()), 2.0)
    card, card_gib = choices.choice(NEW_CARDS)
    gpus = 1
    while gpus < 8 and (base.parameters or 8e9) * wide > gpus * 0.8 * card_gib * 2**30:
        gpus *= 2
    if choices.random() < 0.1:
        gpus = max(gpus // 2, 1)
    flags = f"--model {name} --tensor-parallel-size {gpus} --seed {number}".split()
    flags += ["--gpu-memory-utilization", str(choices.choice((0.85, 0.9, 0.92, 0.95)))]
    flags += ["--max-model-len", str(choices.choice((2048, 4096)))] if choices.random() < 0.6 else []
    flags += ["--max-num-seqs", str(choices.choice((16, 64, 128, 256)))] if choices.random() < 0.4 else []
    flags += ["--enforce-eager"] if choices.random() < 0.2 else []
    return _reviewed(number, flags, card, gpus, choices.choice(RELEASES))


def _reviewed(number: int, flags: list[str], card: str, gpus: int = 1, release: str = "0.11.0") -> bytes:
    container = {
        "name": "vllm",
        "image": f"vllm/vllm-openai:v{release}",
        "imagePullPolicy": "IfNotPresent",
        "args": flags,
        "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}],
        "ports": [{"containerPort": 8000, "protocol": "TCP"}],
        "resources": {"limits": {"nvidia.com/gpu": str(gpus), "memory": "32Gi" if gpus == 1 else "400Gi"}},
        "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 5},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        "nodeSelector": {"nvidia.com/gpu.product": card},
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}],
    }
    managed = [{"manager": "kubectl", "operation": "Update", "fieldsV1": {f"f:{i}": {} for i in range(60)}}]
    thing = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": f"llm-{number}", "namespace": "models", "uid": str(number), "managedFields": managed},
        "spec": {
            "replicas": 1 + number % 7,
            "selector": {"matchLabels": {"app": "llm"}},
            "template": {"metadata": {"labels": {"app": "llm"}}, "spec": pod},
        },
    }
    request = {
        "uid": f"review-{number}",
        "operation": "CREATE",
        "namespace": "models",
        "name": f"llm-{number}",
        "kind": {"group": "apps", "version": "v1", "kind": "Deployment"},
        "object": thing,
    }
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()


class Caller:
    """One connection that is kept, as an API server keeps it."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        self._port, self._context = port, context
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, body: bytes) -> tuple[int, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("localhost", self._port, ssl=self._context)
        reader, writer = self._streams
        head = "POST /validate/enforce HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        length = next(int(line[15:]) for line in lines if line.lower().startswith(b"content-length:"))
        return int(lines[0].split()[1]), await reader.readexactly(length)


def summary(times_s: list[float], seconds: float, failed: int) -> dict[str, Any]:
    ordered = sorted(times_s)
    at = lambda share: round(1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)  # noqa: E731
    return {
        "requests": len(ordered),
        "failed": failed,
        "per_s": round(len(ordered) / seconds, 1),
        "p50_ms": at(0.5),
        "p90_ms": at(0.9),
        "p99_ms": at(0.99),
        "max_ms": round(1e3 * ordered[-1], 2),
        "mean_ms": round(1e3 * statistics.fmean(ordered), 2),
    }


async def timed(caller: Caller, body: bytes, times_s: list[float], failures: list[int], since_s: float) -> None:
    status, answer = await caller.ask(body)
    times_s.append(time.perf_counter() - since_s)
    if status != 200 or b"failed" in answer or b"not checked" in answer:
        failures.append(status)


async def unseen(callers: list[Caller], manifests: int) -> dict[str, Any]:
    """Every manifest once, one at a time: what the first of its kind waits for."""
    times_s: list[float] = []
    failures: list[int] = []
    began = time.perf_counter()
    for number in range(manifests):
        await timed(callers[0], review(number, manifests), times_s, failures, time.perf_counter())
    return summary(times_s, time.perf_counter() - began, len(failures))


async def everywhere(callers: list[Caller], manifests: int) -> None:
    """Every manifest over every connection, until all searches are done."""

    async def all_of(caller: Caller) -> int:
        answers = [(await caller.ask(review(number, manifests)))[1] for number in range(manifests)]
        return sum(BEING_SEARCHED in answer for answer in answers)

    while sum(await asyncio.gather(*map(all_of, callers))):
        await asyncio.sleep(1)


async def steady(callers: list[Caller], rate: float, seconds: float, manifests: int) -> dict[str, Any]:
    """An open loop: what comes too late still counts from when it should have been asked."""
    times_s: list[float] = []
    failures: list[int] = []
    queue: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue()

    async def worker(caller: Caller) -> None:
        while (item := await queue.get()) is not None:
            await timed(caller, item[1], times_s, failures, item[0])

    tasks = [asyncio.create_task(worker(caller)) for caller in callers]
    bodies = [review(number, manifests) for number in range(1000)]
    began = time.perf_counter()
    for number in range(int(rate * seconds)):
        due = began + number / rate
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        queue.put_nowait((due, bodies[number % len(bodies)]))
    for _ in tasks:
        queue.put_nowait(None)
    await asyncio.gather(*tasks)
    return summary(times_s, time.perf_counter() - began, len(failures))


async def mixed(callers: list[Caller], bodies: list[bytes], rate: float, every: int) -> dict[str, Any]:
    """The steady rate with new objects among those seen before: each kind's times, and those of the new by answer."""
    times_s: dict[str, list[float]] = {"all": [], "seen": [], "new": [], "new, let through": [], "new, refused": []}
    times_s["new, no fix yet"] = []
    failures: list[int] = []
    count, seconds = len(bodies), len(bodies) / rate
    queue: asyncio.Queue[int | None] = asyncio.Queue()
    began = time.perf_counter() + 0.5

    async def worker(caller: Caller) -> None:
        while (number := await queue.get()) is not None:
            status, answer = await caller.ask(bodies[number])
            took_s = time.perf_counter() - began - number / rate
            kinds = ["all", "seen"]
            if number % every == 0:
                kinds = ["all", "new", "new, refused" if b'"allowed": false' in answer else "new, let through"]
                kinds += ["new, no fix yet"] if BEING_SEARCHED in answer else []
            for kind in kinds:
                times_s[kind].append(took_s)
            if status != 200 or b"not checked" in answer:
                failures.append(status)

    tasks = [asyncio.create_task(worker(caller)) for caller in callers]
    for number in range(count):
        if (wait := began + number / rate - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        queue.put_nowait(number)
    for _ in tasks:
        queue.put_nowait(None)
    await asyncio.gather(*tasks)
    rows = {kind: summary(times, seconds, len(failures)) for kind, times in times_s.items() if times}
    return rows | {"requests": count}


async def most(callers: list[Caller], seconds: float, manifests: int) -> dict[str, Any]:
    times_s: list[float] = []
    failures: list[int] = []
    bodies = [review(number, manifests) for number in range(1000)]
    end = time.perf_counter() + seconds

    async def worker(caller: Caller, number: int) -> None:
        while time.perf_counter() < end:
            number += len(callers)
            await timed(caller, bodies[number % len(bodies)], times_s, failures, time.perf_counter())

    await asyncio.gather(*(worker(caller, number) for number, caller in enumerate(callers)))
    return summary(times_s, seconds, len(failures))


def hostile() -> dict[str, bytes]:
    deep = b"[" * 200_000
    container = {"name": "v", "image": "vllm/vllm-openai", "args": ["--model", "x"] * 100_000}
    pod = {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [container]}}
    request = {"uid": "u", "operation": "CREATE", "object": pod}
    review_ = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    wide = json.dumps(review_).encode()
    many = b'{"a":[' + b"{}," * 2_000_000 + b"{}]}"
    over = b"x" * (9 << 20)
    return {"deep": deep, "wide": wide, "many values": many, "over the limit": over, "no JSON": b"\x00" * 4096}


def tree(pid: int) -> list[Any]:
    """A process and everything below it."""
    import psutil

    top = psutil.Process(pid)
    return [top, *top.children(recursive=True)]


def resident_mib(pid: int) -> float:
    return round(sum(process.memory_info().rss for process in tree(pid)) / 2**20, 1)


def cpu_s(pid: int) -> float:
    """What the gate's processes have used of the cores: a figure that other work on the machine does not change."""
    return sum(sum(process.cpu_times()[:2]) for process in tree(pid))


async def with_cpu(pid: int, load: Any) -> dict[str, Any]:
    before, own_s, began_s = cpu_s(pid), time.process_time(), time.perf_counter()
    row: dict[str, Any] = await load
    own = (time.process_time() - own_s) / (time.perf_counter() - began_s)
    return row | {"cpu_ms": round(1e3 * (cpu_s(pid) - before) / row["requests"], 3), "clients": round(own, 2)}


def started(folder: str) -> tuple[subprocess.Popen[str], int, ssl.SSLContext]:
    from legroom.exports.gate_certificates import new_authority, new_certificate

    authority = new_authority()
    pair = new_certificate(authority, ["localhost"])
    for name, data in (("ca.crt", authority.certificate), ("tls.crt", pair.certificate), ("tls.key", pair.key)):
        (Path(folder) / name).write_bytes(data)
    options = f"gate --host 127.0.0.1 --port 0 --json --tls-dir {folder} --deadline 30"
    words = [sys.executable, "-m", "legroom", *options.split()]
    gate = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert gate.stdout is not None
    port = int(json.loads(gate.stdout.readline())["url"].rpartition(":")[2].partition("/")[0])
    return gate, port, ssl.create_default_context(cafile=str(Path(folder) / "ca.crt"))


async def measured(args: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        gate, port, context = started(folder)
        try:
            callers = [Caller(port, context) for _ in range(args.connections)]
            await callers[0].ask(review(0, 1))
            result: dict[str, Any] = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
            result["unseen"] = await unseen(callers, args.manifests)
            await everywhere(callers, args.manifests)
            result["memory_mib"] = resident_mib(gate.pid)
            result["steady"] = await with_cpu(gate.pid, steady(callers, args.rate, args.seconds, args.manifests))
            result["most"] = await with_cpu(gate.pid, most(callers, min(args.seconds, 10), args.manifests))
            # An API server opens another connection where all wait for an answer.
            many = [Caller(port, context) for _ in range(16 * args.connections)]
            for caller in many:  # 256 handshakes would stand in the way of the first second
                await caller.ask(review(0, args.manifests))
            bodies = [
                new_review(number) if number % args.new_every == 0 else review(number, args.manifests)
                for number in range(int(args.rate * args.seconds))
            ]
            load = mixed(many, bodies, args.rate, args.new_every)
            result["mixed"] = await with_cpu(gate.pid, load)
            result["hostile"] = {}
            for name, body in hostile().items():
                status, _ = await Caller(port, context).ask(body)
                result["hostile"][name] = {"status": status, "memory_mib": resident_mib(gate.pid)}
            return result
        finally:
            gate.terminate()
            gate.wait(10)


def main() -> None:
    args = arguments(__doc__, rate=500.0, seconds=20.0, manifests=200, new_every=50, connections=16, json=Path)
    result = asyncio.run(measured(args))
    columns = ("requests", "failed", "per_s", "p50_ms", "p90_ms", "p99_ms", "max_ms", "cpu_ms", "clients")
    print(f"{'load':17}" + "".join(f"{name:>10}" for name in columns))
    rows = {load: result[load] for load in ("unseen", "steady", "most")}
    rows |= {kind: row for kind, row in result["mixed"].items() if isinstance(row, dict)}
    rows["all"] |= {name: result["mixed"][name] for name in ("cpu_ms", "clients")}
    for load, row in rows.items():
        print(f"{load:17}" + "".join(f"{row.get(name, ''):>10}" for name in columns))
    print(f"memory {result['memory_mib']} MiB; after hostile bodies: {result['hostile']}")
    write_json(args.json, result)


if __name__ == "__main__":
    main()
