"""legroom's KV plans against answers that tests/recorders/record_blocks.py recorded from vLLM's own planner.

Identical means: blocks, tokens and concurrency as printed, the bytes of one full-length request, the fitted length,
and, where vLLM refuses, its message.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recorded_model_facts import model_of

from legroom.facts.gpus import Gpu
from legroom.facts.model import Model
from legroom.facts.releases import release as known_release
from legroom.memory.kv.kv_plan import KvPlan, kv_plan
from legroom.vllm.args import EngineSettings, ServeArgs

FIXTURE = Path(__file__).parents[1] / "fixtures" / "vllm_blocks.jsonl.gz"
H100 = Gpu("NVIDIA H100 80GB HBM3", int(79.1 * 2**30), compute_capability=(9, 0))


def rows(paths: list[Path]) -> Iterator[dict[str, Any]]:
    """The recorded cases; facts that many cases share are written once, by name."""
    for path in paths:
        written = path.read_bytes()
        facts: dict[str, Any] = {}
        for line in (gzip.decompress(written) if path.suffix == ".gz" else written).decode().splitlines():
            row = json.loads(line)
            if "facts_of" in row:
                facts[row["facts_of"]] = row["facts"]
                continue
            yield row if "facts" in row else {**row, "facts": facts[row["model"]]}


def settings_of(row: dict[str, Any], model: Model) -> EngineSettings:
    """The engine settings of a recorded case: what vLLM resolved is in the row, the rest are its flags."""
    flags = row["flags"]
    value = {flag: flags[index + 1] for index, flag in enumerate(flags[:-1])}
    length = int(value.get("--max-model-len", model.max_position_embeddings))
    speculative = json.loads(value["--speculative-config"]) if "--speculative-config" in value else None
    override = value.get("--num-gpu-blocks-override")
    block_size = value.get("--block-size")
    return EngineSettings(
        release=known_release(row["vllm"]),
        engine="V1",
        runner="V2",
        usage="serve",
        dtype=row["dtype"],
        quantization=None,
        kv_cache_dtype=row["kv_cache_dtype"],
        max_model_len=length if length > 0 else model.max_position_embeddings,
        auto_fit_len=length < 0,
        max_num_seqs=1024,
        max_num_batched_tokens=row["max_num_batched_tokens"],
        gpu_memory_utilization=0.92,
        kv_cache_memory_bytes=None,
        num_gpu_blocks_override=int(override) if override else None,
        block_size=int(block_size) if block_size else None,
        tensor_parallel_size=row["tp"],
        pipeline_parallel_size=row["pp"],
        data_parallel_size=1,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        enable_expert_parallel=False,
        enforce_eager=True,
        cudagraph_mode="NONE",
        cudagraph_capture_sizes=(),
        graph_estimate_applied=True,
        enable_chunked_prefill=True,
        enable_prefix_caching=row["prefix_caching"],
        async_scheduling=True,
        max_concurrent_batches=row["batches"],
        disable_hybrid_kv_cache_manager="--disable-hybrid-kv-cache-manager" in flags,
        num_speculative_tokens=(speculative or {}).get("num_speculative_tokens", 0),
        given=ServeArgs(speculative_config=speculative, attention_backend=_only(row["backends"])),
    )


def _only(backends: list[str]) -> str | None:
    """The backend of every attention layer: the recording's platform may select another than an H100 would."""
    return backends[0] if len(backends) == 1 else None


def differences(row: dict[str, Any]) -> list[str]:
    """What legroom says otherwise than vLLM in one recorded case."""
    model = model_of(row["facts"])
    settings = settings_of(row, model)
    found = []
    for answer in row["answers"]:
        plan = kv_plan(model, settings, H100, [answer["available_bytes"]] * row["pp"])
        expected = expected_of(answer, row["pp"])
        said = said_of(plan, expected)
        if said != expected:
            found.append(f"vLLM {expected}, legroom {said}")
    return found


def expected_of(answer: dict[str, Any], stages: int) -> dict[str, Any]:
    """What vLLM answered. With several stages its request bytes are of the first one, legroom's of the tightest."""
    skipped = {"available_bytes", "groups"} | ({"needed_bytes"} if stages > 1 else set())
    return {name: value for name, value in answer.items() if name not in skipped}


def said_of(plan: KvPlan, expected: dict[str, Any]) -> dict[str, Any]:
    """legroom's plan in the same words."""
    if plan.failure is not None:
        return {"error": plan.failure.message}
    said = {
        "num_blocks": plan.num_blocks,
        "tokens": plan.tokens,
        "concurrency": round(plan.max_concurrency, 4),
        "max_model_len": plan.max_model_len,
        "needed_bytes": plan.needed_bytes,
    }
    return {name: value for name, value in said.items() if name in expected or "error" in expected}
