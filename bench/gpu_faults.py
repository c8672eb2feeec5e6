"""Faults inside the worker of a real vLLM, on demand; loaded by vLLM as a plugin (see gpu_server.beside_vllm).

Every step of the model looks for `fault.json` in the folder of LEGROOM_FAULTS and does what it says, inside the step,
so that legroom's black box sees the scheduler's step as it would of a fault of vLLM's own. `contained` faults catch the
OutOfMemoryError and give everything back, so that one server serves for many; the others let vLLM die of it.
What came of it is written to `fault-done.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from pathlib import Path
from typing import Any

MIB, GIB = 1 << 20, 1 << 30
KEPT: list[Any] = []
LEAK: dict[str, Any] = {}
RECORDERS: list[Any] = []
READ_EVERY_S = 0.2
HISTORY_ENTRIES = 20_000


def register() -> None:
    if not os.environ.get("LEGROOM_FAULTS"):
        return
    if os.environ.get("LEGROOM_WORKER_MEMORY") == "1":
        read_often()
    from vllm.v1.worker import gpu_worker

    if getattr(gpu_worker.Worker, "_has_faults", False):
        return
    real_step, real_load = gpu_worker.Worker.execute_model, gpu_worker.Worker.load_model

    def execute_model(self: Any, scheduler_output: Any, *arguments: Any, **others: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            in_this_step(scheduler_output)
        return real_step(self, scheduler_output, *arguments, **others)

    def load_model(self: Any, *arguments: Any, **others: Any) -> Any:
        if os.environ.get("LEGROOM_FAULTS_HISTORY"):
            record_history()
        return real_load(self, *arguments, **others)

    gpu_worker.Worker.execute_model, gpu_worker.Worker.load_model = execute_model, load_model
    gpu_worker.Worker._has_faults = True


def read_often() -> None:
    """A case lasts seconds here: readings come as often, and a case begins with an empty black box."""
    from legroom.worker import recorder, telemetry

    seconds = float(os.environ.get("LEGROOM_FAULTS_EVERY_S", READ_EVERY_S))
    telemetry.report_until_removed.__defaults__ = (seconds,)
    real = recorder.BlackBoxRecorder.begin

    def begin(self: Any) -> None:
        real(self)
        RECORDERS[:] = [self]

    recorder.BlackBoxRecorder.begin = begin  # type: ignore[method-assign]
    real_read, off = telemetry.read_worker_memory, Path(os.environ["LEGROOM_FAULTS"]) / "off"

    def read() -> Any:
        while off.exists():
            time.sleep(0.2)
        return real_read()

    telemetry.read_worker_memory = read  # type: ignore[attr-defined]


def record_history() -> None:
    import torch

    with contextlib.suppress(Exception):
        torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES, stacks="python")


def in_this_step(scheduler_output: Any) -> None:
    folder = Path(os.environ["LEGROOM_FAULTS"])
    if LEAK:
        keep_leaking(folder)
    order = folder / "fault.json"
    if not order.exists():
        return
    fault = json.loads(order.read_text())
    order.unlink()
    began_s = time.time()
    if fault.get("contained"):
        for recorder in RECORDERS:
            recorder.begin()
    result = FAULTS[fault["kind"]](fault, folder)
    if result is not None:
        done(folder, fault, result | {"took_s": round(time.time() - began_s, 3)})


def done(folder: Path, fault: dict[str, Any], result: dict[str, Any]) -> None:
    new = folder / "fault-done.new"
    new.write_text(json.dumps({"kind": fault["kind"], "name": fault.get("name"), **result}))
    new.replace(folder / "fault-done.json")


def take(size: int) -> Any:
    import torch

    return torch.empty(size, dtype=torch.uint8, device="cuda")


def free_bytes() -> int:
    import torch

    return int(torch.cuda.mem_get_info()[0])


def snapshot(folder: Path, fault: dict[str, Any], end: str = "") -> None:
    import torch

    if fault.get("name") and os.environ.get("LEGROOM_FAULTS_HISTORY"):
        torch.cuda.memory._dump_snapshot(str(folder / f"{fault['name']}{end}.pickle"))


def asked(size: int) -> dict[str, Any]:
    """The request at the end of a case, and what came of it."""
    import torch

    try:
        KEPT.append(take(size))
        return {"outcome": "served", "wanted_bytes": size}
    except torch.cuda.OutOfMemoryError as error:
        return {"outcome": "refused", "wanted_bytes": size, "message": str(error)[:500]}


def burst(fault: dict[str, Any], folder: Path) -> dict[str, Any]:
    dice = random.Random(fault["seed"])
    result = asked(free_bytes() + dice.randrange(2 * GIB, 8 * GIB))
    snapshot(folder, fault)
    return result


def fill(fault: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Leaves so much of the card, before a leak begins: otherwise it would take minutes."""
    KEPT.append(take(free_bytes() - int(fault["leave_bytes"])))
    return {"outcome": "filled", "free_bytes": free_bytes()}


def begin_leak(fault: dict[str, Any], folder: Path) -> None:
    snapshot(folder, fault, "-before")
    LEAK.update(fault, dice=random.Random(fault["seed"]), last_s=0.0, kept=0, steps=0)


def keep_leaking(folder: Path) -> None:
    import torch

    now_s = time.monotonic()
    LEAK["steps"] += 1
    if now_s - LEAK["last_s"] < LEAK.get("every_s", 0.0) or LEAK["steps"] % LEAK.get("every_steps", 1):
        return
    LEAK["last_s"] = now_s
    try:
        keep_request_state(LEAK["dice"].randrange(int(LEAK["least_bytes"]), int(LEAK["most_bytes"])))
    except torch.cuda.OutOfMemoryError as error:
        fault = dict(LEAK)
        LEAK.clear()
        if not fault.get("contained"):
            raise
        snapshot(folder, fault)
        done(folder, fault, {"outcome": "refused", "kept_bytes": fault["kept"], "message": str(error)[:500]})


def keep_request_state(size: int) -> None:
    """The line that a leak is to be named by."""
    import torch

    KEPT.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    LEAK["kept"] += size


def fragmentation(fault: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Large segments, then smaller blocks with something beside each that stays. `requests`: those of an earlier run,
    to be made again under other settings."""
    import torch

    requests = fault.get("requests") or fragmenting_requests(fault)
    live: dict[int, Any] = {}
    for number, (action, size) in enumerate(requests["steps"]):
        if action == "free":
            live.pop(size, None)
            continue
        try:
            live[number] = take(size)
        except torch.cuda.OutOfMemoryError:
            KEPT.append(live)
            return {"outcome": "refused earlier", "step": number, "requests": requests}
    KEPT.append(live)
    torch.cuda.synchronize()
    state = {"reserved_bytes": torch.cuda.memory_reserved(), "allocated_bytes": torch.cuda.memory_allocated()}
    if not fault.get("contained"):
        return {"outcome": "in pieces"} | state
    wanted = requests.get("wanted") or wanted_between(fault["seed"])
    result = asked(int(wanted))
    snapshot(folder, fault)
    return result | state | {"requests": requests | {"wanted": wanted}}


def fragmenting_requests(fault: dict[str, Any]) -> dict[str, Any]:
    """[("take", bytes) or ("free", the step that took it)], for what the card has left."""
    dice = random.Random(fault["seed"])
    left, steps, whole = free_bytes() - int(fault.get("leave_bytes", GIB)), [], []
    scale = float(fault.get("scale", 1.0))
    while left > (size := int(dice.randrange(900, 2200) * scale * MIB) + dice.randrange(MIB)):
        segment = -(-size // (2 * MIB)) * 2 * MIB
        whole.append((len(steps), segment))
        steps.append(("take", size))
        left -= segment
    steps += [("free", step) for step, _ in whole]
    smaller = []
    for _, segment in whole:
        smaller.append(len(steps))
        steps.append(("take", int(segment * dice.uniform(0.52, 0.6))))
        steps.append(("take", int(segment * dice.uniform(0.22, 0.3))))
    steps += [("free", step) for step in smaller]
    return {"steps": steps}


def wanted_between(seed: int) -> int:
    """More than any piece and than what can be given back, less than all that is free."""
    import torch

    segments = torch.cuda.memory_snapshot()
    free = [[block["size"] for block in segment["blocks"] if block["state"] == "inactive"] for segment in segments]
    whole = sum(s["total_size"] for s in segments if not s["allocated_size"])
    largest = max((size for sizes in free for size in sizes), default=0)
    everything = sum(map(sum, free)) + free_bytes()
    least = max(whole + free_bytes(), largest)
    return int(least + random.Random(seed + 100).uniform(0.2, 0.6) * (everything - least))


def request(fault: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Of a given size: a neighbour has the rest."""
    result = asked(int(fault["bytes"]))
    snapshot(folder, fault)
    return result


def fill_rings(fault: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Both rings of the black box with real readings: what they add to the process, and what a reading takes."""
    import gc

    import psutil

    from legroom.worker import worker_memory

    process, took_s = psutil.Process(), []
    gc.collect()
    before = process.memory_info().rss
    for _ in range(int(fault["readings"])):
        began_s = time.thread_time()
        reading = worker_memory.read_worker_memory()
        took_s.append(time.thread_time() - began_s)
        for recorder in RECORDERS:
            recorder.add_reading(reading)
            recorder._earlier.extend(list(recorder._recent)[:1])
    gc.collect()
    took_s.sort()
    return {
        "added_bytes": process.memory_info().rss - before,
        "reading_s": took_s[len(took_s) // 2],
        "reading_most_s": took_s[-1],
        "reading_total_s": sum(took_s),
    }


def give_back(fault: dict[str, Any], folder: Path) -> dict[str, Any]:
    import torch

    LEAK.clear()
    KEPT.clear()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return {"outcome": "given back", "free_bytes": free_bytes()}


FAULTS: dict[str, Any] = {
    "burst": burst,
    "fill": fill,
    "leak": begin_leak,
    "fragmentation": fragmentation,
    "request": request,
    "give_back": give_back,
    "fill_rings": fill_rings,
}
