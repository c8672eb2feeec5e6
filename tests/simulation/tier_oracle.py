#!/usr/bin/env python3
"""legroom's second tier against vLLM's own offloading connector, step by step, on random loads.

    tier_oracle.py VLLM_PYTHON [--workloads 100] [--seed 0] [--kind async] [--files] [--record FILE.jsonl.gz]

VLLM_PYTHON is the interpreter of an environment with vLLM 0.32 (a CPU build will do). It runs this file again with
`--ask QUESTIONS ANSWERS`, which drives vLLM's Scheduler, both sides of its OffloadingConnector and its CPU manager;
only the copies themselves are made up: a direction copies one job after the other, so many units of time a block.
Compared in every step: scheduled tokens, preemptions, ends, requests running and waiting, free blocks, the chunks that
are loaded, stored and evicted, the stores waited for, chunks in the tier and those that could be evicted.

vLLM keeps the requests that ended in a step in a set, whose order differs from process to process; here they come in
the order in which they ended.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
# Powers of two, so that sums of times are the same numbers on both sides.
COPY_TIMES = (0.0, 1 / 64, 1 / 8, 1 / 2, 2.0)


def load(rng: random.Random, kind: str = "plain", *, files: bool = False) -> dict[str, Any]:
    """Settings, a tier (with files behind it) and requests that share prefixes and press on both pools."""
    from random_workloads import workload

    item = workload(rng, kind)
    settings = item["settings"]
    if rng.random() < 0.85:
        settings["enable_prefix_caching"] = True
    need = -(-settings["max_model_len"] // settings["block_size"])
    per_chunk = rng.choice([1, 1, 1, 2, 3, 4])
    room = rng.choice([2, need // 2, need, 2 * need, 5 * need, 20 * need])
    item["tier"] = {
        "num_chunks": max(1, room // per_chunk),
        "blocks_per_chunk": per_chunk,
        "policy": rng.choice(["lru", "lru", "arc"]),
        "store_threshold": rng.choice([0, 0, 0, 2, 3]),
        "max_tracker_size": rng.choice([64_000, 64_000, 8, 40]),
        "prompt_only": rng.random() < 0.7,
        "load_s_per_block": rng.choice(COPY_TIMES),
        "store_s_per_block": rng.choice(COPY_TIMES),
    }
    if files:
        # vLLM refuses a threshold there.
        item["tier"] |= {"store_threshold": 0, "disk_s_per_chunk": rng.choice(COPY_TIMES)}
    return item


def ask_vllm(python: str, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps that vLLM takes, one answer a load."""
    with tempfile.TemporaryDirectory() as folder:
        questions, answers = Path(folder, "questions.jsonl"), Path(folder, "answers.jsonl")
        questions.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
        subprocess.run([python, str(HERE / "tier_oracle.py"), "--ask", str(questions), str(answers)], check=True)
        return [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]


class ChunkNames:
    """Chunks by the request that first stored them, and their place in it."""

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}

    def stored(self, request: str, places: dict[Any, int], keys: Any) -> list[str]:
        for key in keys:
            self._names.setdefault(key, f"{request}/{places[key]}")
        return self.of(keys)

    def of(self, keys: Any) -> list[str]:
        return sorted(self._names[key] for key in keys)


def replay(item: dict[str, Any]) -> list[list[Any]]:
    """The steps that legroom takes."""
    from legroom.simulation.scheduler_settings import SchedulerSettings
    from legroom.simulation.tiers.host_tier import TierSettings
    from legroom.simulation.tiers.tiered_replay import TierReplay
    from legroom.simulation.traces import jsonl

    names = ChunkNames()
    transfers: dict[int, list[Any]] = {}
    steps: dict[int, list[Any]] = {}

    def keep_transfers(step: int, plan: Any, offload: Any) -> None:
        stores = [
            [job.request.id, names.stored(job.request.id, offload._states[job.request].access.positions, job.keys)]
            for job in plan.stores
        ]
        loads = [[job.request.id, names.of(job.keys), job.num_blocks] for job in plan.loads]
        transfers[step] = [
            loads,
            stores,
            names.of(offload.evicted),
            len(plan.flushes),
            len(offload.tier.readers),
            offload.tier.num_idle,
        ]
        if "disk_s_per_chunk" in item["tier"]:
            # Nothing is read back that was not stored before, so every chunk has its name.
            promoted = [names.of(job.keys) for job in offload.tier.submitted_loads]
            transfers[step].append([promoted, len(offload.tier.jobs)])

    def keep(s: Any) -> None:
        steps[s.step] = [s.scheduled, sorted(s.preempted), sorted(s.finished), s.running, s.waiting, s.free_blocks]

    trace = jsonl.read((json.dumps(row) for row in item["requests"]), "random").checked()

    class ObservedReplay(TierReplay):
        def _advance_clock(self, output: Any) -> None:
            if self.has_requests:
                keep_transfers(self.step, self.scheduler.plan, self.scheduler.offload)
            super()._advance_clock(output)

    ObservedReplay(TierSettings(**item["tier"]), trace, SchedulerSettings(**item["settings"]), keep).run()
    return [[step, steps.get(step), transfers[step]] for step in sorted(transfers)]


class MadeUpCopies:
    """Stands in for the copies of vLLM's `CPUOffloadingWorker`: each direction one job after the other."""

    def __init__(self, tier: dict[str, Any]) -> None:
        self.now = 0.0
        self.times = {True: tier["store_s_per_block"], False: tier["load_s_per_block"]}
        self.free_at = {True: 0.0, False: 0.0}
        self.queues: dict[bool, deque[tuple[int, float]]] = {True: deque(), False: deque()}

    def _submit(self, is_store: bool, job: int, num_blocks: int) -> bool:
        self.free_at[is_store] = max(self.free_at[is_store], self.now) + num_blocks * self.times[is_store]
        self.queues[is_store].append((job, self.free_at[is_store]))
        return True

    def submit_store(self, job: int, source: Any, target: Any) -> bool:
        return self._submit(True, job, len(source.block_ids))

    def submit_load(self, job: int, source: Any, target: Any) -> bool:
        return self._submit(False, job, len(target.block_ids))

    def wait(self, jobs: set[int]) -> None:
        ends = [end for queue in self.queues.values() for job, end in queue if job in jobs]
        self.now = max([self.now, *ends])

    def get_finished(self) -> list[Any]:
        from vllm.v1.kv_offload.base import TransferResult

        done = []
        for queue in self.queues.values():
            while queue and queue[0][1] <= self.now:
                done.append(TransferResult(job_id=queue.popleft()[0], success=True))
        return done


class MadeUpFiles:
    """Stands in for the threads of vLLM's `FileSystemTierManager`: one job after another, answers by the next step."""

    def __init__(self, secondary: Any, copies: MadeUpCopies, s_per_chunk: float) -> None:
        self.secondary, self.copies, self.s_per_chunk = secondary, copies, s_per_chunk
        self.free_at = {True: 0.0, False: 0.0}
        self.queues: dict[bool, deque[tuple[int, float]]] = {True: deque(), False: deque()}
        self.file_at: dict[str, float] = {}
        secondary._pool.shutdown()
        secondary._pool = self
        lookups = secondary._lookup_manager
        lookups.shutdown()
        lookups.batch_lookup = self.batch_lookup
        lookups._lookup_queue = self

    def _enqueue(self, is_store: bool, job: int) -> float:
        took = self.secondary._job_block_counts[job] * self.s_per_chunk
        self.free_at[is_store] = max(self.free_at[is_store], self.copies.now) + took
        self.queues[is_store].append((job, self.free_at[is_store]))
        return self.free_at[is_store]

    def enqueue_store(self, job: int, count: int, tasks: list[Any]) -> None:
        end = self._enqueue(True, job)
        for path in tasks[0].args[0]:
            self.file_at.setdefault(path, end)

    def enqueue_load(self, job: int, count: int, tasks: list[Any]) -> None:
        self._enqueue(False, job)

    def get_finished(self) -> list[tuple[int, bool, float]]:
        done = []
        for queue in self.queues.values():
            while queue and queue[0][1] <= self.copies.now:
                done.append((queue.popleft()[0], True, 0.0))
        return done

    def batch_lookup(self, keys: Any, context: Any) -> list[bool]:
        now, paths = self.copies.now, map(self.secondary.file_mapper.get_file_name, keys)
        return [self.file_at.get(path, now + 1) <= now for path in paths]

    def put(self, batch: Any) -> None:
        """A step's questions, answered at once: they are looked at in the next step."""
        hits = [self.batch_lookup([key], context)[0] for key, context, _ in batch]
        answers = [(key, generation, hit) for (key, _, generation), hit in zip(batch, hits, strict=True)]
        self.secondary._lookup_manager._pending_results.put(answers)


def connect(config: Any, settings: dict[str, Any], tier: dict[str, Any]) -> None:
    """Turn the native offloading on, with room for so many chunks."""
    import mmap

    from vllm.config import KVTransferConfig

    # Keys and values, 2 heads of 32 values of 2 bytes: the shape that simulate_oracle.py gives its layers.
    chunk_bytes = settings["block_size"] * 2 * 2 * 32 * 2 * tier["blocks_per_chunk"]
    aligned = -(-chunk_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "cpu_bytes_to_use": tier["num_chunks"] * aligned,
            "blocks_per_chunk": tier["blocks_per_chunk"],
            "eviction_policy": tier["policy"],
            "store_threshold": tier["store_threshold"],
            "max_tracker_size": tier["max_tracker_size"],
            "offload_prompt_only": tier["prompt_only"],
        },
    )
    if "disk_s_per_chunk" in tier:
        config.kv_transfer_config.kv_connector_extra_config |= {
            "spec_name": "TieringOffloadingSpec",
            "secondary_tiers": [{"type": "fs", "root_dir": tempfile.mkdtemp()}],
        }


def make_up_files(manager: Any, copies: MadeUpCopies, tier: dict[str, Any]) -> list[Any]:
    """No real files; a list to which the chunks of each job that reads files are added."""
    (secondary,) = manager.secondary_tiers
    MadeUpFiles(secondary, copies, tier["disk_s_per_chunk"])
    promotions: list[Any] = []
    submit_load = secondary.submit_load

    def keep_promotion(job: Any) -> None:
        promotions.append(list(job.keys))
        submit_load(job)

    secondary.submit_load = keep_promotion
    return promotions


def drive(oracle: Any, item: dict[str, Any]) -> list[list[Any]]:
    """Run one load through vLLM's scheduler and connector."""
    from simulate_oracle import Drive
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    settings, tier = item["settings"], item["tier"]
    connect(oracle.config, settings, tier)
    scheduler, hasher = oracle.scheduler(settings)
    if hasher is None:
        # The engine hashes blocks for a connector too.
        hash_function = get_hash_fn_by_name(oracle.config.cache_config.prefix_caching_hash_algo)
        hasher = kv_cache_utils.get_request_block_hasher(settings["block_size"], hash_function)
    side = scheduler.connector.connector_scheduler
    manager = whole = side.manager
    if "disk_s_per_chunk" in tier:
        manager = whole.primary_tier
    assert manager._num_chunks == tier["num_chunks"], (manager._num_chunks, tier)
    worker = OffloadingConnectorWorker.__new__(OffloadingConnectorWorker)
    worker._is_store_writer, worker._load_jobs, worker._unsubmitted_store_jobs = True, {}, []
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

    worker._connector_worker_meta = OffloadingWorkerMetadata()
    copies = worker.worker = MadeUpCopies(tier)
    promotions = [] if manager is whole else make_up_files(whole, copies, tier)
    names, ended, evicted = ChunkNames(), list[str](), list[Any]()
    prepare, build = manager.prepare_store, side.build_connector_meta

    def prepare_store(keys: Any, context: Any) -> Any:
        output = prepare(keys, context)
        if output is not None:
            evicted.extend(output.evicted_keys)
        return output

    def build_connector_meta(decided: Any) -> Any:
        ends, decided.finished_req_ids = decided.finished_req_ids, list(ended)
        assert set(ended) == ends
        # Ended requests leave the connector's books here, and their chunks are named below.
        places.update({name: status.group_states[0].offload_keys for name, status in side._req_status.items()})
        meta = build(decided)
        decided.finished_req_ids = ends
        ended.clear()
        return meta

    places: dict[str, Any] = {}
    manager.prepare_store, side.build_connector_meta = prepare_store, build_connector_meta
    if manager is not whole:
        manager.prepare_write = prepare_store

    class TierDrive(Drive):
        last_run = 0

        def is_busy(self) -> bool:
            return bool(self.scheduler.has_requests() or self.pending)

        def is_endless(self, step: int) -> bool:
            assert step < 200_000, "does not end"
            if manager is whole or step - self.last_run <= ENDLESS_STEPS:
                return False
            # A tier that is too small for a prompt: what is read back from files evicts itself for ever.
            self.steps = [row for row in self.steps if row[0] <= self.last_run + 50]
            return True

        def one_step(self, step: int) -> None:
            if not self.scheduler.has_requests():
                finished: list[str] = []
                self.settle(finished)
                ended.extend(finished)
                return
            evicted.clear()
            promotions.clear()
            decided = self.scheduler.schedule()
            meta = decided.kv_connector_metadata
            label = {job: side._jobs[job] for job in [*meta.load_jobs, *meta.store_jobs]}
            stores = []
            for job in meta.store_jobs:
                name = label[job].req_id
                where = {key: i for i, key in enumerate(places[name])}
                stores.append([name, names.stored(name, where, label[job].keys)])
            loads = [
                [entry.req_id, names.of(label[job].keys), len(entry.dst_spec.block_ids)]
                for job, entry in meta.load_jobs.items()
            ]
            chunks = manager._num_allocated_chunks - len(manager._free_list)
            transfers = [
                loads,
                stores,
                names.of(evicted),
                len(meta.jobs_to_flush),
                chunks,
                manager._num_evictable_cache_chunks,
            ]
            if manager is not whole:
                transfers.append([[names.of(keys) for keys in promotions], len(whole._jobs)])
            worker.handle_preemptions(meta)
            worker.start_kv_transfers(meta)
            ids = list(decided.num_scheduled_tokens)
            sampled = [[7] if self.samples(self.live[name]) else [] for name in ids]
            copies.now += 1.0
            worker.prepare_store_kv(meta)
            _, received = worker.get_finished(set())
            done = KVConnectorOutput(
                finished_recving=received, kv_connector_worker_meta=worker.build_connector_worker_meta()
            )
            output = ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={name: i for i, name in enumerate(ids)},
                sampled_token_ids=sampled,
                kv_connector_output=done,
            )
            thrown_out = self.newly_preempted()
            finished = []
            self.pending.append((decided, output))
            # As in the engine's step with a queue of batches: it is filled first.
            if len(self.pending) >= self.batches_in_flight or not (ids or self.scheduler.has_requests()):
                self.settle(finished)
            ended.extend(finished)
            row = None
            if ids:
                self.last_run = step
                running, waiting = self.scheduler.get_request_counts()
                free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
                row = [decided.num_scheduled_tokens, sorted(thrown_out), sorted(finished), running, waiting, free]
            self.steps.append([step, row, transfers])

    driver = TierDrive(scheduler, hasher, item["requests"], 2 if settings.get("async_scheduling") else 1)
    driver.run()
    if manager is not whole:
        shutil.rmtree(oracle.config.kv_transfer_config.kv_connector_extra_config["secondary_tiers"][0]["root_dir"])
        manager.shutdown()
    return driver.steps


def answer(questions: str, answers: str) -> None:
    """Inside vLLM's environment."""
    import os

    from simulate_oracle import Oracle

    oracle = Oracle()
    with Path(answers).open("w", encoding="utf-8") as out:
        for line in Path(questions).read_text(encoding="utf-8").splitlines():
            out.write(json.dumps({"steps": drive(oracle, json.loads(line))}) + "\n")
            out.flush()
    os._exit(0)


ENDLESS_STEPS = 20_000


def first_difference(ours: list[Any], theirs: list[Any]) -> str:
    for mine, vllm in zip(ours, theirs, strict=False):
        if json.loads(json.dumps(mine)) != vllm:
            return f"legroom {json.dumps(mine)[:600]}\n   vllm {json.dumps(vllm)[:600]}"
    is_endless = len(theirs) > 50 and all(row is None for _, row, _ in theirs[-50:]) and any(theirs[-1][2][6:])
    return "" if len(ours) == len(theirs) or is_endless else f"{len(ours)} steps, vllm {len(theirs)}"


def main() -> int:
    if sys.argv[1:2] == ["--ask"]:
        answer(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vllm_python")
    parser.add_argument("--workloads", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=("plain", "async"), default="plain")
    parser.add_argument("--files", action="store_true", help="a tier of files behind the one in host memory")
    parser.add_argument("--record", help="write the recordings to this .jsonl.gz")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    items = [load(rng, args.kind, files=args.files) for _ in range(args.workloads)]
    answers = ask_vllm(args.vllm_python, items)
    recordings = [{**item, **decided} for item, decided in zip(items, answers, strict=True)]
    if args.record:
        with gzip.open(args.record, "wt", encoding="utf-8") as out:
            out.writelines(json.dumps(recording) + "\n" for recording in recordings)
    same = 0
    counts = dict.fromkeys(("steps", "loads", "stores", "evictions", "flushes", "preemptions", "promotions"), 0)
    for number, recording in enumerate(recordings):
        try:
            difference = first_difference(replay(recording), recording["steps"])
        except Exception as error:
            difference = f"{type(error).__name__}: {error}"
        same += not difference
        if difference:
            print(f"load {number} differs: {difference}\n   {recording['settings']} {recording['tier']}")
        for _, row, (loads, stores, evicted, flushes, _, _, *files) in recording["steps"]:
            counts["promotions"] += sum(len(promoted) for promoted, _ in files)
            counts["steps"] += 1
            counts["loads"] += len(loads)
            counts["stores"] += len(stores)
            counts["evictions"] += len(evicted)
            counts["flushes"] += flushes
            counts["preemptions"] += len(row[1]) if row else 0
    print(json.dumps({"workloads": len(recordings), "identical": same, **counts}))
    return 0 if same == len(recordings) else 1


if __name__ == "__main__":
    sys.exit(main())
