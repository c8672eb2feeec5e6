"""Engine settings for tests of the KV planner: every field has a plain value that a test may replace."""

from __future__ import annotations

from typing import Any

from legroom.facts.gpus import Gpu
from legroom.facts.releases import release as known_release
from legroom.vllm.args import EngineSettings, ServeArgs

GIB = 2**30
H100 = Gpu("NVIDIA H100 80GB HBM3", int(79.1 * GIB), compute_capability=(9, 0))


def settings(release: str = "0.32.0", **changes: Any) -> EngineSettings:
    values: dict[str, Any] = {
        "release": known_release(release),
        "engine": "V1",
        "runner": "V1",
        "usage": "serve",
        "dtype": "bfloat16",
        "quantization": None,
        "kv_cache_dtype": "auto",
        "max_model_len": 8192,
        "auto_fit_len": False,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.9,
        "kv_cache_memory_bytes": None,
        "num_gpu_blocks_override": None,
        "block_size": None,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "enable_expert_parallel": False,
        "enforce_eager": True,
        "cudagraph_mode": "NONE",
        "cudagraph_capture_sizes": (),
        "graph_estimate_applied": False,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "max_concurrent_batches": 1,
        "disable_hybrid_kv_cache_manager": False,
        "num_speculative_tokens": 0,
        "given": ServeArgs(),
    }
    return EngineSettings(**(values | changes))
