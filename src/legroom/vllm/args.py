"""The memory flags of one server: as given (`ServeArgs`) and as the release resolves them (`EngineSettings`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from legroom.records import dataclass, field

Usage = Literal["serve", "llm"]


@dataclass(frozen=True)
class ServeArgs:
    """What the user gave; None means the release's default applies. Field names are vLLM's own `dest` names."""

    model: str = ""
    usage: Usage = "serve"
    """`vllm serve` or the `LLM` class: some defaults differ."""
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    max_model_len: int | None = None
    """-1: fit the length to the memory (0.14+)."""
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    block_size: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    decode_context_parallel_size: int | None = None
    prefill_context_parallel_size: int | None = None
    enable_expert_parallel: bool | None = None
    enforce_eager: bool | None = None
    enable_chunked_prefill: bool | None = None
    enable_prefix_caching: bool | None = None
    async_scheduling: bool | None = None
    disable_hybrid_kv_cache_manager: bool | None = None
    cpu_offload_gb: float | None = None
    swap_space: float | None = None
    enable_lora: bool | None = None
    max_loras: int | None = None
    max_lora_rank: int | None = None
    speculative_config: Mapping[str, Any] | None = None
    compilation_config: Mapping[str, Any] | None = None
    """Until 0.11.2 it also holds `-O3` / `--compilation-config 3` as {"level": 3}; `cudagraph_mode`, ..."""
    optimization_level: int | None = None
    """`-O0` to `-O3` from 0.12.0 on."""
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    max_cudagraph_capture_size: int | None = None
    max_seq_len_to_capture: int | None = None
    limit_mm_per_prompt: Mapping[str, Any] | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None
    skip_mm_profiling: bool | None = None
    language_model_only: bool | None = None
    mamba_cache_dtype: str | None = None
    mamba_ssm_cache_dtype: str | None = None
    mamba_cache_mode: str | None = None
    mamba_block_size: int | None = None
    hf_overrides: Mapping[str, Any] | None = None
    attention_backend: str | None = None
    runner: str | None = None
    performance_mode: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the server that legroom saw (VLLM_*, PYTORCH_*, CUDA_VISIBLE_DEVICES, NCCL_*)."""
    others: tuple[str, ...] = ()
    """Every other flag as it was written, kept so that a command line survives the round trip."""

    @property
    def engine_ranks(self) -> int:
        """The GPUs of one engine: what vLLM calls the world size. Decode context parallelism takes none of its own."""
        sizes = (self.tensor_parallel_size, self.pipeline_parallel_size, self.prefill_context_parallel_size)
        return math.prod(size or 1 for size in sizes)

    @property
    def gpus_needed(self) -> int:
        """The GPUs of all data-parallel engines together."""
        return self.engine_ranks * (self.data_parallel_size or 1)


@dataclass(frozen=True)
class EngineSettings:
    """What the release makes of `ServeArgs` on one model and GPU: no None is left where the release has a value."""

    release: str
    engine: Literal["V0", "V1"]
    runner: Literal["V1", "V2"]
    """The model runner; V2 arrives with 0.22 for some architectures."""
    usage: Usage
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    """Resolved: `auto` has become the checkpoint's own choice where the release honours it."""
    max_model_len: int
    auto_fit_len: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    num_gpu_blocks_override: int | None
    block_size: int | None
    """As given by the user; None: the attention backend and the hybrid rules decide (`memory.kv`)."""
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    decode_context_parallel_size: int
    prefill_context_parallel_size: int
    enable_expert_parallel: bool
    enforce_eager: bool
    cudagraph_mode: str
    """NONE | PIECEWISE | FULL | FULL_DECODE_ONLY | FULL_AND_PIECEWISE"""
    cudagraph_capture_sizes: tuple[int, ...]
    graph_estimate_applied: bool
    """Whether the release subtracts its CUDA-graph estimate from the budget."""
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    async_scheduling: bool
    max_concurrent_batches: int
    disable_hybrid_kv_cache_manager: bool
    num_speculative_tokens: int
    given: ServeArgs
    notes: tuple[str, ...] = ()
    """Sentences about what was clamped, ignored or replaced."""

    @property
    def gpus_used(self) -> int:
        """The GPUs that the tensor, pipeline and data-parallel sizes take together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def expert_ranks(self) -> int:
        """Over how many GPUs experts are divided, whole or in slices: data-parallel ranks share them (0.8.0 on)."""
        return self.tensor_parallel_size * self.data_parallel_size * self.prefill_context_parallel_size


def other_values(args: ServeArgs, name: str) -> tuple[str, ...] | None:
    """The values of a flag kept in `others`: () for a bare switch, None where it was not given. The last one wins."""
    tokens = args.others
    if not tokens:
        return None
    values: tuple[str, ...] | None = None
    for i, token in enumerate(tokens):
        flag, has_value, value = token.partition("=")
        if flag != name:
            continue
        if has_value:
            values = (value,)
            continue
        stop = i + 1
        while stop < len(tokens) and not tokens[stop].startswith("--"):
            stop += 1
        values = tokens[i + 1 : stop]
    return values


def other_value(args: ServeArgs, name: str) -> str | None:
    """The first value of a flag kept in `others`, None where it was not given."""
    values = other_values(args, name)
    return values[0] if values else None


def is_given(args: ServeArgs, name: str) -> bool:
    """Whether a flag is among `others`."""
    return other_values(args, name) is not None


def env_flag(args: ServeArgs, name: str) -> bool | None:
    """An environment variable that holds 0 or 1; None where it is not set or not readable as one."""
    value = args.env.get(name)
    if value is None:
        return None
    text = value.strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    return False if text in ("0", "false", "no", "off", "") else None


HEADS = frozenset({"eagle", "eagle3"})
"""Small heads that run on the model's own hidden states and share its embeddings."""
WITHOUT_CACHE = frozenset({"ngram", "ngram_gpu", "medusa", "mlp_speculator", "suffix", "custom_class"})
"""Methods that keep no keys and values of their own."""
_WITHOUT_MODEL = frozenset({"ngram", "ngram_gpu", "suffix", "custom_class"})
_PREDICTORS = ("mtp", "dspark")
_NAMED = (("eagle3", "eagle3"), ("eagle-", "eagle"), ("dflash", "dflash"), ("dspark", "dspark"))


def draft_method(config: Mapping[str, Any] | None) -> str:
    """The method in use, told by the draft's name where none was given; empty without speculative decoding."""
    if not config:
        return ""
    stated, name = str(config.get("method") or ""), str(config.get("model") or "")
    if stated and stated != "draft_model":
        return stated
    if name in ("ngram", "[ngram]"):
        return "ngram"
    told = next((method for part, method in _NAMED if part in name.lower()), None)
    return told or ("draft_model" if name or stated else "ngram")


def head_kind(config: Mapping[str, Any] | None) -> str:
    """How an EAGLE head is built: vLLM keeps a stated `eagle`, but the head's own class is that of its checkpoint."""
    method = draft_method(config)
    return "eagle3" if method in HEADS and "eagle3" in draft_name(config).lower() else method


def predicts_itself(method: str) -> bool:
    """Whether the model's own prediction layers draft (MTP)."""
    return method.endswith(_PREDICTORS)


def draft_name(config: Mapping[str, Any] | None) -> str:
    """The other checkpoint that is loaded beside the model; empty where there is none."""
    method = draft_method(config)
    if not config or method in _WITHOUT_MODEL or predicts_itself(method):
        return ""
    return str(config.get("model") or "").strip()
