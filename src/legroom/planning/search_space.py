"""The settings that a search may choose from: ways to split a model, and for every other flag the values to try."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from legroom.facts.flags import choices

if TYPE_CHECKING:
    from legroom.planning.plan import Target
    from legroom.planning.wish import Wish
    from legroom.vllm.args import EngineSettings, ServeArgs

Flags = dict[str, Any]

TOKEN_BUDGETS = (16384, 8192, 4096, 2048, 1024)
SEQUENCES = (1024, 512, 256, 128, 64, 32, 16, 8)
CAPTURE_LIMITS = (256, 64)
NODE_GPUS = 8
"""Above this many GPUs a model spans nodes: heads are split inside a node, layers or experts between them."""


def gpus_of(parallel: Flags) -> int:
    return math.prod(size for name, size in parallel.items() if name != "enable_expert_parallel")


def parallel_sizes(args: ServeArgs, wish: Wish, experts: bool) -> Iterator[Flags]:
    """Ways to spread the model over each number of GPUs. Heads are split inside a node; layers, or the experts of
    data-parallel engines, over several."""
    given = args.tensor_parallel_size, args.pipeline_parallel_size
    if given != (None, None):
        yield {}
        return
    for count in sorted(wish.gpus):
        if count <= NODE_GPUS:
            yield _sizes(tensor_parallel_size=count)
        if experts and count >= NODE_GPUS and args.data_parallel_size is None:
            for tensor in (8, 4, 2, 1):
                if count % tensor == 0 and count > tensor:
                    spread = _sizes(tensor_parallel_size=tensor, data_parallel_size=count // tensor)
                    yield {**spread, "enable_expert_parallel": True}
        for pipeline in (2, 3, 4, 8):
            if count % pipeline == 0 and count // pipeline <= NODE_GPUS:
                yield _sizes(tensor_parallel_size=count // pipeline, pipeline_parallel_size=pipeline)


def _sizes(**sizes: int) -> Flags:
    return {name: size for name, size in sizes.items() if size > 1}


def axes_of(target: Target, args: ServeArgs, base: EngineSettings, wish: Wish) -> dict[str, list[Flags]]:
    """For each flag that was not given, the values to try; an empty choice leaves the release's default."""
    axes: dict[str, list[Flags]] = {}
    if args.max_num_batched_tokens is None and base.max_num_batched_tokens < wish.concurrency:
        # vLLM wants a token for each sequence.
        axes["max_num_batched_tokens"] = [{"max_num_batched_tokens": math.ceil(wish.concurrency)}]
    elif args.max_num_batched_tokens is None:
        fewest = wish.concurrency if args.max_num_seqs is None else 0
        smaller = (tokens for tokens in TOKEN_BUDGETS if fewest <= tokens < base.max_num_batched_tokens)
        axes["max_num_batched_tokens"] = [{}, *({"max_num_batched_tokens": tokens} for tokens in smaller)]
    if args.max_num_seqs is None and base.max_num_seqs < wish.concurrency:
        axes["max_num_seqs"] = [{"max_num_seqs": math.ceil(wish.concurrency)}]  # raised, which costs nothing but memory
    elif args.max_num_seqs is None:
        fewer = (seqs for seqs in SEQUENCES if wish.concurrency <= seqs < base.max_num_seqs)
        axes["max_num_seqs"] = [{}, *({"max_num_seqs": seqs} for seqs in fewer)]
    if args.kv_cache_dtype is None and base.kv_cache_dtype == "auto" and target.gpu.compute_capability >= (8, 9):
        axes["kv_cache_dtype"] = [{}, {"kv_cache_dtype": "fp8"}]
    if args.block_size is None:
        axes["block_size"] = [{}, *({"block_size": size} for size in _block_sizes(target))]
    if args.enforce_eager is None and args.max_cudagraph_capture_size is None:
        limits = CAPTURE_LIMITS if target.release.at_least("0.11.1") else ()
        axes["graphs"] = [{}, *({"max_cudagraph_capture_size": limit} for limit in limits), {"enforce_eager": True}]
    return axes


def _block_sizes(target: Target) -> tuple[int, ...]:
    allowed = choices("--block-size", target.release)
    return (32,) if allowed is None or 32 in allowed else ()


def by_loss(axes: Mapping[str, list[Flags]]) -> Iterator[list[list[Flags]]]:
    """The axes in the order of what their choices give up (`search.Option.cost`), the gravest decided first."""
    unchanged: list[Flags] = [{}]
    graphs = axes.get("graphs", unchanged)
    captured = [choice for choice in graphs if "enforce_eager" not in choice]
    eager = [choice for choice in graphs if "enforce_eager" in choice]
    lighter = [axes.get(name, unchanged) for name in ("max_num_batched_tokens", "max_num_seqs")]
    for kept_in in axes.get("kv_cache_dtype", unchanged):
        for run_as in (captured, eager):
            if run_as:
                yield [[kept_in], *lighter, run_as, axes.get("block_size", unchanged)]
