"""The memory flags of one server: as given (`ServeArgs`) and as the release resolves them (`EngineSettings`)."""

from __future__ import annotations  # the types of fields are read as text

import json
import math
from collections.abc import Mapping
from itertools import takewhile
from typing import Any, Literal

from legroom.facts.releases import Release
from legroom.records import dataclass, field

Usage = Literal["serve", "llm"]


@dataclass(frozen=True)
class ServeArgs:
    """The given flags under vLLM's `dest` names; None: the release's default applies."""

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
    """Up to 0.11.2 it also holds `-O3` and `--compilation-config 3`, as {"level": 3}."""
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
    """Environment variables of the server (VLLM_*, PYTORCH_*, CUDA_VISIBLE_DEVICES, NCCL_*)."""
    others: tuple[str, ...] = ()
    """Every other flag as written, so that the command line can be written again."""

    @property
    def engine_ranks(self) -> int:
        """GPUs of one engine (vLLM's world_size): tensor x pipeline x prefill-context parallel size."""
        sizes = (self.tensor_parallel_size, self.pipeline_parallel_size, self.prefill_context_parallel_size)
        return math.prod(size or 1 for size in sizes)

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one unquantized parameter: 4 with --dtype float32, else 2 (also without --dtype)."""
        return 4 if self.dtype in ("float", "float32") else 2

    @property
    def gpus_needed(self) -> int:
        """The GPUs of all data-parallel engines together."""
        return self.engine_ranks * (self.data_parallel_size or 1)


@dataclass(frozen=True)
class EngineSettings:
    """The settings that the release resolves from `ServeArgs` for one model and GPU, defaults included."""

    release: Release
    engine: Literal["V0", "V1"]
    runner: Literal["V1", "V2"]
    """The model runner; V2 exists from 0.22 on."""
    usage: Usage
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    """`auto` is replaced by the checkpoint's KV cache dtype where the release does so."""
    max_model_len: int
    auto_fit_len: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    num_gpu_blocks_override: int | None
    block_size: int | None
    """As given; None: the attention backend decides (`memory.kv`)."""
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
    """Sentences about settings that were clamped, ignored or replaced."""

    @property
    def gpus_used(self) -> int:
        """tensor x pipeline x data x prefill-context parallel size."""
        return self.expert_ranks * self.pipeline_parallel_size

    @property
    def expert_ranks(self) -> int:
        """The ranks over which experts are split: tensor x data x prefill-context parallel size."""
        return self.tensor_parallel_size * self.data_parallel_size * self.prefill_context_parallel_size


def other_values(args: ServeArgs, name: str) -> tuple[str, ...] | None:
    """The values of the flag `name` (`--port`) where it stands last in `others`; () for a switch, None if not given."""
    tokens = args.others
    values: tuple[str, ...] | None = None
    for i, token in enumerate(tokens):
        flag, has_value, value = token.partition("=")
        if flag == name and has_value:
            values = (value,)
        elif flag == name:
            values = tuple(takewhile(lambda word: not word.startswith("--"), tokens[i + 1 :]))
    return values


def other_value(args: ServeArgs, name: str) -> str | None:
    """The first value of the flag `name` (`--port`) in `others`; None where it is not given or has no value."""
    values = other_values(args, name)
    return values[0] if values else None


def served_port(args: ServeArgs) -> str:
    """The port that the server listens on, as written; vLLM's default is 8000."""
    return other_value(args, "--port") or "8000"


def json_value(args: ServeArgs, name: str) -> Mapping[str, Any] | None:
    """The JSON object given to the flag `name`, one of `others`; None where it is not given or is no JSON object."""
    text = other_value(args, name)
    try:
        value = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, Mapping) else None


def redundant_experts(args: ServeArgs) -> int:
    """Redundant copies of experts that --eplb-config or, up to 0.11, a flag asks for; 0 without load balancing."""
    written = other_value(args, "--num-redundant-experts") or ""
    config = {} if written.isdecimal() else json_value(args, "--eplb-config") or {}
    count = config.get("num_redundant_experts", int(written or 0))
    return count if isinstance(count, int) and is_given(args, "--enable-eplb") else 0


def is_given(args: ServeArgs, name: str) -> bool:
    """Whether `others`, the flags without a field of their own, have the flag `name` (`--port`)."""
    return other_values(args, name) is not None


def env_flag(args: ServeArgs, name: str) -> bool | None:
    """The boolean environment variable `name`, False where it is empty; None where it is unset or unreadable."""
    value = args.env.get(name)
    if value is None:
        return None
    text = value.strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    return False if text in ("0", "false", "no", "off", "") else None


def named_backend(args: ServeArgs, release: Release) -> str:
    """The attention backend of the flags, or up to 0.14.1 of VLLM_ATTENTION_BACKEND, in capitals; empty for `auto`."""
    name = args.attention_backend or (json_value(args, "--attention-config") or {}).get("backend")
    if not name and release.before("0.15.0"):
        name = args.env.get("VLLM_ATTENTION_BACKEND")
    return str(name).upper() if name and str(name).lower() != "auto" else ""


PARALLEL_SIZES = (
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    *("decode_context_parallel_size", "prefill_context_parallel_size"),
)

HEADS = frozenset({"eagle", "eagle3"})
"""Speculative methods with a small head on the model's hidden states and shared embeddings."""
WITHOUT_CACHE = frozenset({"ngram", "ngram_gpu", "medusa", "mlp_speculator", "suffix", "custom_class"})
"""Speculative methods without a KV cache."""
_WITHOUT_MODEL = frozenset({"ngram", "ngram_gpu", "suffix", "custom_class"})
_PREDICTORS = ("mtp", "dspark")
_NAMED = (("eagle3", "eagle3"), ("eagle-", "eagle"), ("dflash", "dflash"), ("dspark", "dspark"))


def draft_method(config: Mapping[str, Any] | None) -> str:
    """The method of a --speculative-config; if it states none or `draft_model`, the one that the draft's name implies
    (`ngram` without a name). Empty without speculative decoding."""
    if not config:
        return ""
    given, name = str(config.get("method") or ""), str(config.get("model") or "")
    if given and given != "draft_model":
        return given
    if name in ("ngram", "[ngram]"):
        return "ngram"
    by_name = next((method for part, method in _NAMED if part in name.lower()), None)
    return by_name or ("draft_model" if name or given else "ngram")


def head_kind(config: Mapping[str, Any] | None) -> str:
    """As `draft_method`, but `eagle3` for an EAGLE head with eagle3 in its name, even if the config says `eagle`."""
    method = draft_method(config)
    return "eagle3" if method in HEADS and "eagle3" in draft_name(config).lower() else method


def predicts_itself(method: str) -> bool:
    """Whether this speculative method drafts with MTP layers of the model itself."""
    return method.endswith(_PREDICTORS)


def draft_name(config: Mapping[str, Any] | None) -> str:
    """The draft checkpoint's name in a --speculative-config; empty where its method loads none."""
    method = draft_method(config)
    if not config or method in _WITHOUT_MODEL or predicts_itself(method):
        return ""
    return str(config.get("model") or "").strip()
