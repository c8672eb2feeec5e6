#!/usr/bin/env python3
"""Runs inside a vLLM environment: drives vLLM's own Scheduler over workloads and writes down every step.

    simulate_oracle.py QUESTIONS.jsonl ANSWERS.jsonl

A question: {"settings": {...}, "requests": [...]}; an answer: {"steps": [[step, scheduled, preempted, finished,
running, waiting, free_blocks], ...], "preempted": {id: times}, "finished": 0, "seconds": 0.0}. There is no model: every
sampled token is the same one, prompts are made-up tokens, and requests of one prefix_id begin with the same ones.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

for key, value in {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_HOST_IP": "127.0.0.1",
}.items():
    os.environ.setdefault(key, value)

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1 << 20,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def tokens(name: str, count: int) -> list[int]:
    return random.Random(name).choices(range(10, 2000), k=count) if count else []


def prompt(row: dict[str, Any]) -> list[int]:
    shared = min(row.get("prefix_len", 0), row["prompt_len"])
    own = row["prompt_len"] - shared
    return tokens("P" + str(row.get("prefix_id", row["id"])), shared) + tokens("U" + row["id"], own)


class Oracle:
    """One engine configuration, adapted to each question."""

    def __init__(self) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        folder = tempfile.mkdtemp(prefix="legroom-oracle-")
        Path(folder, "config.json").write_text(json.dumps(TINY_LLAMA), encoding="utf-8")
        flags = [
            "--model",
            folder,
            "--skip-tokenizer-init",
            "--load-format",
            "dummy",
            "--enforce-eager",
            "--block-size",
            "16",
            "--max-model-len",
            "8192",
        ]
        parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(flags)
        self.config = EngineArgs.from_cli_args(parsed).create_engine_config()

    def scheduler(self, settings: dict[str, Any]) -> tuple[Any, Any]:
        """vLLM's scheduler and its prompt hasher under these settings."""
        import torch
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
        from vllm.v1.structured_output import StructuredOutputManager

        config, block_size = self.config, settings["block_size"]
        config.model_config.max_model_len = settings["max_model_len"]
        config.cache_config.block_size = block_size
        config.cache_config.num_gpu_blocks = settings["num_blocks"]
        config.cache_config.enable_prefix_caching = settings["enable_prefix_caching"]
        scheduler = config.scheduler_config
        scheduler.max_num_seqs = settings["max_num_seqs"]
        scheduler.max_num_batched_tokens = settings["max_num_batched_tokens"]
        scheduler.enable_chunked_prefill = settings["enable_chunked_prefill"]
        scheduler.long_prefill_token_threshold = settings["long_prefill_token_threshold"]
        scheduler.policy = settings["scheduling_policy"]
        scheduler.watermark = settings["watermark"]
        scheduler.scheduler_reserve_full_isl = settings["reserve_full_isl"]
        scheduler.async_scheduling = bool(settings.get("async_scheduling"))
        shape = {"block_size": block_size, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
        groups = [
            KVCacheGroupSpec(
                [f"layer{i}"],
                FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(**shape, sliding_window=window),
            )
            for i, window in enumerate(settings.get("windows", [None]))
        ]
        kv = KVCacheConfig(num_blocks=settings["num_blocks"], kv_cache_tensors=[], kv_cache_groups=groups)
        if any(window is not None for window in settings.get("windows", [None])):
            kv.prefix_cache_retention_interval = config.cache_config.prefix_cache_retention_interval
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        kv_cache_utils.init_none_hash(hash_function)
        hasher = None
        if settings["enable_prefix_caching"]:
            hasher = kv_cache_utils.get_request_block_hasher(block_size, hash_function)
        kind = AsyncScheduler if scheduler.async_scheduling else Scheduler
        built = kind(
            vllm_config=config,
            kv_cache_config=kv,
            structured_output_manager=StructuredOutputManager(config),
            log_stats=True,
            block_size=block_size,
            hash_block_size=block_size,
        )
        return built, hasher


class Drive:
    """Feeds one workload to a scheduler, as the engine core would."""

    def __init__(self, scheduler: Any, hasher: Any, rows: list[dict[str, Any]], batches_in_flight: int) -> None:
        self.scheduler, self.hasher = scheduler, hasher
        self.rows = sorted(rows, key=lambda row: row["arrival_step"])
        self.batches_in_flight = batches_in_flight
        self.live: dict[str, Any] = {}
        self.preempted: dict[str, int] = {}
        self.steps: list[list[Any]] = []
        self.pending: list[tuple[Any, Any]] = []
        self.brief = False
        self.finished = 0
        self.making_prompts_s = 0.0

    def run(self) -> None:
        step = place = 0
        while (place < len(self.rows) or self.is_busy()) and not self.is_endless(step):
            if place < len(self.rows) and not self.is_busy():
                step = max(step, self.rows[place]["arrival_step"])
            while place < len(self.rows) and self.rows[place]["arrival_step"] <= step:
                self.arrive(self.rows[place])
                place += 1
            self.one_step(step)
            step += 1

    def is_busy(self) -> bool:
        return bool(self.scheduler.has_unfinished_requests() or self.pending)

    def is_endless(self, step: int) -> bool:
        """Whether a load will never end, and is cut here."""
        return False

    def arrive(self, row: dict[str, Any]) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        began = time.process_time()
        prompt_token_ids = prompt(row)
        self.making_prompts_s += time.process_time() - began
        sampling = SamplingParams(max_tokens=row["output_len"], ignore_eos=True, temperature=0.0)
        request = Request(
            request_id=row["id"],
            prompt_token_ids=prompt_token_ids,
            sampling_params=sampling,
            pooling_params=None,
            priority=row.get("priority", 0),
            block_hasher=self.hasher,
        )
        self.live[row["id"]] = request
        self.scheduler.add_request(request)

    def one_step(self, step: int) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        if not self.scheduler.has_requests():
            if self.pending:
                self.settle([])
            return
        decided = self.scheduler.schedule()
        names = list(decided.num_scheduled_tokens)
        sampled = [[7] if self.samples(self.live[name]) else [] for name in names]
        output = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=sampled
        )
        thrown_out = [] if self.brief else self.newly_preempted()
        finished: list[str] = []
        if decided.total_num_scheduled_tokens:
            self.pending.append((decided, output))
        if len(self.pending) >= self.batches_in_flight or not decided.total_num_scheduled_tokens:
            self.settle(finished, (decided, output))
        self.finished += len(finished)
        if names and not self.brief:
            running, waiting = self.scheduler.get_request_counts()
            free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            self.steps.append(
                [step, decided.num_scheduled_tokens, sorted(thrown_out), sorted(finished), running, waiting, free]
            )

    def newly_preempted(self) -> list[str]:
        names = [name for name, request in self.live.items() if request.num_preemptions > self.preempted.get(name, 0)]
        for name in names:
            self.preempted[name] = self.live[name].num_preemptions
        return names

    def samples(self, request: Any) -> bool:
        ahead = max(request.num_output_placeholders - 1, 0)
        return bool(request.num_computed_tokens >= request.num_tokens + ahead)

    def settle(self, finished: list[str], current: tuple[Any, Any] | None = None) -> None:
        step = self.pending.pop(0) if self.pending else current
        for outputs in self.scheduler.update_from_output(*step).values():
            for output in outputs.outputs:
                if output.finish_reason is not None:
                    finished.append(output.request_id)
                    self.live.pop(output.request_id, None)


def main() -> None:
    questions, answers = sys.argv[1:3]
    oracle = Oracle()
    with Path(questions).open(encoding="utf-8") as lines, Path(answers).open("w", encoding="utf-8") as out:
        for line in lines:
            item = json.loads(line)
            scheduler, hasher = oracle.scheduler(item["settings"])
            batches = 2 if item["settings"].get("async_scheduling") else 1
            drive = Drive(scheduler, hasher, item["requests"], batches)
            drive.brief = bool(item.get("brief"))
            began = time.process_time()
            drive.run()
            answer = {
                "steps": drive.steps,
                "preempted": drive.preempted,
                "seconds": round(time.process_time() - began, 4),
            }
            out.write(json.dumps(answer, separators=(",", ":")) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
