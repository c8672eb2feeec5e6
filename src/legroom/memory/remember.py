"""Remember a figure for as long as what it is computed from stays the same: a search asks for it thousands of times."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from legroom.memo import Memo

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.facts.model import Model
    from legroom.figures import Figure
    from legroom.vllm.args import EngineSettings

_Found = TypeVar("_Found")
_Rule = Callable[["Model", "EngineSettings", "Gpu", int], "Figure"]
_figures: Memo[Figure] = Memo()
_structures: Memo[Any] = Memo()


def of_structure(rule: Callable[..., _Found], model: Model, *rest: object) -> _Found:
    """`rule(model, *rest)`, computed once: for what depends on the model's structure and a few small values alone."""
    found: _Found = _structures.get((model,), (rule, *rest), lambda: rule(model, *rest))
    return found


def remembered(rule: _Rule, model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int) -> Figure:
    """`rule(model, settings, gpu, pp_rank)`, computed once for the settings that any rule of this room reads."""
    given = settings.given
    key = (
        rule, gpu.name, gpu.total_bytes, pp_rank, settings.release, settings.engine, settings.runner,
        settings.dtype, settings.quantization, settings.kv_cache_dtype, settings.max_model_len, settings.max_num_seqs,
        settings.max_num_batched_tokens, settings.tensor_parallel_size, settings.pipeline_parallel_size,
        settings.enable_expert_parallel, settings.enforce_eager, settings.cudagraph_mode,
        settings.cudagraph_capture_sizes, settings.graph_estimate_applied, settings.block_size,
        settings.num_speculative_tokens, settings.expert_ranks, settings.data_parallel_size,
        settings.gpu_memory_utilization,
        given.enable_lora, given.max_loras, given.max_lora_rank, given.skip_mm_profiling, given.language_model_only,
        repr(given.limit_mm_per_prompt), repr(given.compilation_config), repr(given.mm_processor_kwargs),
        repr(given.env), given.runner, given.others,
    )  # fmt: skip
    return _figures.get((model,), key, lambda: rule(model, settings, gpu, pp_rank))
