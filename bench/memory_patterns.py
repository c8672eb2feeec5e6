#!/usr/bin/env python3
"""A burst, a fragmentation pattern, a leak and a neighbour, five of each, on a made-up card: named rightly?

    memory_patterns.py [--seeds 5] [--cases CASE ...] [--keep FOLDER]

A worker that serves is played through legroom's model of PyTorch's allocator (held against recordings of a real one in
tests/memory): weights, a KV pool, steps whose tensors come and go, and what the case adds, with sizes and times drawn
anew for every seed, until a request is refused. The fragmented one is built to be so: what it asks for at the end is
drawn between what can be given back and all that is free, and enough is left beside the pool for `watch` to speak.
What it leaves is written in the formats of the real thing: a torch
memory snapshot with its history, a black box, and the gauges of the last minutes. `legroom fragments` reads the
snapshot (of a leak: two), `legroom diagnose` the black box, and the detectors of `legroom watch` the gauges; a seed
counts where each says what it can: of a burst and a neighbour a snapshot shows only that no setting would have helped
and nothing leaks. No card is asked: memory_patterns_gpu.py does the same in a real vLLM on one.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import legroom
from legroom.fragments.fragment_report import FragmentReport, fragment_report
from legroom.fragments.fragment_sources import read_source
from legroom.live.detectors import Watcher
from legroom.live.metrics.sample import EngineSample, Sample
from legroom.memory.caching_allocator import Block, CachingAllocator, RequestRefused

GIB, MIB = 1 << 30, 1 << 20
CARD, CONTEXT = 80 * GIB, 600 * MIB
CASES = ("burst", "fragmentation", "leak", "neighbour")
CAUSES = {
    "burst": "runtime_activation_burst",
    "fragmentation": "allocator_fragmentation",
    "leak": "leak_over_time",
    "neighbour": "gpu_shared_or_not_free",
}
SEEN_BY_WATCH = {
    "burst": "memory_burst",
    "fragmentation": "fragmentation",
    "leak": "memory_creep",
    "neighbour": "gpu_neighbour",
}
LOOK_S = 5.0
BASE_S = 1_790_000_000.0


class WorkerLook(NamedTuple):
    time_s: float
    allocated_bytes: int
    reserved_bytes: int
    others_bytes: int
    alloc_retries: int


class PlayedWorker:
    """Writes down what the allocator is asked, and how it scrapes every five seconds."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.allocator = CachingAllocator(card_bytes=CARD - CONTEXT)
        self.trace: list[dict[str, Any]] = []
        self.live: dict[int, tuple[Block, int, str]] = {}
        self.looks: list[WorkerLook] = []
        self.time_s = BASE_S
        self.others = self.retries = 0

    def take(self, size: int, place: str) -> int:
        before = self.allocator.reserved_bytes
        try:
            block = self.allocator.allocate(size)
        finally:
            self._reserved_since(before)
        self.live[block.address] = (block, size, place)
        self._event("alloc", block.address, size, place)
        return block.address

    def give(self, address: int) -> None:
        block, size, place = self.live.pop(address)
        self.allocator.free(block)
        self._event("free_completed", address, size, place)

    def refuse(self, size: int, place: str) -> None:
        self.retries += 1
        self._event("oom", 0, size, place, device_free=self.free_bytes)

    def _reserved_since(self, before: int) -> None:
        change = self.allocator.reserved_bytes - before
        if change:
            self._event("segment_alloc" if change > 0 else "segment_free", 0, abs(change), "")

    def _event(self, action: str, address: int, size: int, place: str, **more: Any) -> None:
        frames = [frame(place)] if place else []
        self.trace.append({"action": action, "addr": address, "size": size, "stream": 0, "frames": frames, **more})

    @property
    def free_bytes(self) -> int:
        return CARD - CONTEXT - self.others - self.allocator.reserved_bytes

    def look(self, seconds: float = LOOK_S) -> None:
        self.time_s += seconds
        state = self.allocator
        self.looks.append(
            WorkerLook(self.time_s, state.allocated_bytes, state.reserved_bytes, self.others, self.retries)
        )

    def step(self, max_bytes: int) -> None:
        """Tensors that live for one step of the model."""
        sizes = [self.chance.randrange(max_bytes // 8, max_bytes) // 4 for _ in range(4)]
        taken = [self.take(size, "step") for size in sizes]
        for address in self.chance.sample(taken, len(taken)):
            self.give(address)

    def segments(self) -> list[dict[str, Any]]:
        blocks = [block for block, _, _ in self.live.values()]
        blocks += [block for pool in self.allocator._pools.values() for _, _, block in pool.free]
        heads = [block for block in blocks if block.before is None]
        return [self._segment(head) for head in heads]

    def _segment(self, head: Block) -> dict[str, Any]:
        entries: list[dict[str, Any]] = []
        block: Block | None = head
        while block is not None:
            _, requested, place = self.live.get(block.address, (block, 0, ""))
            state = "active_allocated" if block.is_allocated else "inactive"
            entries.append(
                {
                    "size": block.size_bytes,
                    "requested_size": requested,
                    "address": block.address,
                    "state": state,
                    "frames": [frame(place)] if place else [],
                }
            )
            block = block.after
        total = sum(entry["size"] for entry in entries)
        used = sum(entry["size"] for entry in entries if entry["state"] == "active_allocated")
        return {
            "device": 0,
            "address": head.address,
            "total_size": total,
            "allocated_size": used,
            "stream": 0,
            "segment_type": "small" if head.pool.is_small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "blocks": entries,
            "frames": [],
        }

    def snapshot(self) -> bytes:
        settings = {"expandable_segments": False, "max_split_size": -1}
        document = {"segments": self.segments(), "device_traces": [self.trace], "allocator_settings": settings}
        return pickle.dumps(document, 4)

    def black_box(self, wanted: int, tokens: int) -> dict[str, Any]:
        state, used = self.allocator, CARD - self.free_bytes
        segments = [
            {
                "size_bytes": segment["total_size"],
                "allocated_bytes": segment["allocated_size"],
                "largest_free_bytes": max(
                    (b["size"] for b in segment["blocks"] if b["state"] == "inactive"), default=0
                ),
                "blocks": [
                    {"size_bytes": b["size"], "state": "free" if b["state"] == "inactive" else "allocated"}
                    for b in segment["blocks"]
                ],
            }
            for segment in self.segments()
        ]
        history = [
            {
                "time_s": look.time_s,
                "allocated_bytes": look.allocated_bytes,
                "reserved_bytes": look.reserved_bytes,
                "used_bytes": look.reserved_bytes + CONTEXT,
                "non_torch_bytes": CONTEXT,
            }
            for look in self.looks[-70:]
        ]
        return {
            "legroom": "black box",
            "version": 1,
            "time_s": self.time_s,
            "trigger": "out_of_memory",
            "worker": {"pid": 4711, "rank": 0, "vllm": "0.32.0", "torch": "2.11.0", "platform": "cuda"},
            "request": {"wanted_bytes": wanted},
            "card": {
                "gpu": "0",
                "name": "NVIDIA H100 80GB HBM3",
                "total_bytes": CARD,
                "free_bytes": self.free_bytes,
                "own_bytes": used - self.others,
                "others_bytes": self.others,
            },
            "allocator": {
                "allocated_bytes": state.allocated_bytes,
                "reserved_bytes": state.reserved_bytes,
                "largest_free_bytes": state.largest_free_bytes,
                "segments": segments,
            },
            "step": {
                "requests": 3,
                "tokens": tokens,
                "new_requests": 1,
                "largest": [{"id": "long", "scheduled_tokens": tokens - 2}],
            },
            "history": history,
        }


def frame(place: str) -> dict[str, Any]:
    return {"name": place, "filename": "/srv/site-packages/vllm/v1/worker/gpu_model_runner.py", "line": 100}


def started(chance: random.Random, left: int) -> PlayedWorker:
    """Weights, a pool that leaves so much, and minutes of steps that are small beside that."""
    worker = PlayedWorker(chance)
    for _ in range(chance.randrange(60, 90)):
        worker.take(chance.randrange(100 * MIB, 300 * MIB), "load_weights")
    worker.take(worker.free_bytes - left, "kv_cache")
    for _ in range(40):
        worker.step(GIB)
        worker.look()
    return worker


def play(case: str, seed: int) -> tuple[PlayedWorker, int, bytes]:
    """Until a request is refused; with the snapshot of some time before."""
    chance = random.Random(f"{case} {seed}")
    # `watch` speaks from 15 % of what is reserved on, so what lies in pieces has to be more.
    left = chance.randrange(24 * GIB, 28 * GIB) if case == "fragmentation" else chance.randrange(9 * GIB, 12 * GIB)
    worker = started(chance, left)
    earlier = worker.snapshot()
    wanted = chance.randrange(2 * GIB, 3 * GIB)
    if case == "burst":
        wanted = chance.randrange(13 * GIB, 16 * GIB)
    elif case == "leak":
        while True:
            try:
                worker.take(chance.randrange(20 * MIB, 90 * MIB), "keep_request")
                worker.step(GIB)
            except RequestRefused:
                break
            worker.look(300.0)
    elif case == "neighbour":
        wanted = chance.randrange(4 * GIB, 6 * GIB)
        worker.others = worker.free_bytes - chance.randrange(100 * MIB, 900 * MIB)
        worker.allocator.card_bytes = CARD - CONTEXT - worker.others
        for _ in range(4):
            worker.look()
    else:
        cut_into_pieces(worker)
        wanted = between_pieces_and_all(worker)
        for _ in range(80):
            worker.look()
    try:
        worker.take(wanted, "sampler")
    except RequestRefused:
        worker.refuse(wanted, "sampler")
        worker.look()
        return worker, wanted, earlier
    raise AssertionError(f"{case} {seed}: the request was served")


def cut_into_pieces(worker: PlayedWorker) -> None:
    """Steps with large tensors take what is left in large segments. Later ones are smaller, and beside each something
    stays for good (an adapter, an encoder's output): every segment is pinned when they are gone."""
    whole = []
    while worker.free_bytes > (size := worker.chance.randrange(900 * MIB, 1200 * MIB)):
        whole.append(worker.take(size, "step"))
    for address in whole:
        worker.give(address)
    smaller = []
    for _ in whole:
        smaller.append(worker.take(worker.chance.randrange(480 * MIB, 600 * MIB), "step"))
        worker.take(worker.chance.randrange(260 * MIB, 295 * MIB), "adapter")
    for address in smaller:
        worker.give(address)


def between_pieces_and_all(worker: PlayedWorker) -> int:
    """A size that what can be given back does not serve, and all that is free would."""
    free = [[block for block in segment["blocks"] if block["state"] == "inactive"] for segment in worker.segments()]
    whole = sum(
        segment["total_size"]
        for segment, blocks in zip(worker.segments(), free, strict=True)
        if blocks and not segment["allocated_size"]
    )
    all_free = sum(block["size"] for blocks in free for block in blocks) + worker.free_bytes
    least = whole + worker.free_bytes
    return least + int(worker.chance.uniform(0.2, 0.7) * (all_free - least))


def watched(worker: PlayedWorker) -> set[str]:
    """Kinds of what `legroom watch` finds in the gauges."""
    watcher = Watcher("http://host:8000")
    kinds: set[str] = set()
    for look in worker.looks:
        engine = EngineSample(
            model="m", engine="0", kv_use=0.5, running=3.0, waiting=0.0, num_blocks=1000, block_size=16
        )
        time_s, *gauges = look
        memory = dict(zip(look._fields[1:], gauges, strict=True))
        watcher.take(Sample(time_s, "http://host:8000", (engine,), **memory))
        kinds |= {finding.kind for finding in watcher.findings}
    return kinds & {*SEEN_BY_WATCH.values()}


def fragments(path: Path, before: Path | None = None) -> FragmentReport:
    """As `legroom fragments [BEFORE] PATH` does."""
    earlier = read_source(str(before))[0] if before else None
    return fragment_report(read_source(str(path))[0], earlier=earlier)


def named(case: str, seed: int, folder: Path) -> dict[str, bool]:
    worker, wanted, earlier = play(case, seed)
    snapshot, before, box = (folder / f"{case}-{seed}{end}" for end in (".pickle", "-before.pickle", ".json"))
    snapshot.write_bytes(worker.snapshot())
    before.write_bytes(earlier)
    box.write_text(json.dumps(worker.black_box(wanted, 8192)))
    report, leak = fragments(snapshot), fragments(snapshot, before).part("leak")
    leaks = leak is not None and "keep_request" in leak.details["sites"][0]["place"]
    findings = legroom.diagnose(box).findings
    by_watch = watched(worker)
    return {
        "fragments": report.would_expandable_segments_help is (case == "fragmentation") and leaks is (case == "leak"),
        "diagnose": bool(findings) and findings[0].cause == CAUSES[case],
        "watch": by_watch == {SEEN_BY_WATCH[case]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=CASES)
    parser.add_argument("--keep", type=Path, help="leave the files there")
    args = parser.parse_args()
    right: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        for case in args.cases:
            results = [named(case, seed, folder) for seed in range(1, args.seeds + 1)]
            right[case] = {by: sum(result[by] for result in results) for by in results[0]}
            print(f"{case:14s}", *(f"{by} {count} of {args.seeds}" for by, count in right[case].items()), flush=True)
    print(json.dumps(right))
    sys.exit(any(count < args.seeds for counts in right.values() for count in counts.values()))


if __name__ == "__main__":
    main()
