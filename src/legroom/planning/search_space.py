"""The settings that a search tries: parallel sizes, and the values of every other flag."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.flags import choices
from legroom.memory.deployment_memory import free_at_start
from legroom.memory.kv.kv_plan import plan_of_shape, state_failure
from legroom.memory.kv.shape import KvShape, kv_shape
from legroom.memory.layout import Layout
from legroom.planning.plan import Policy, Target, headroom_after_band
from legroom.records import dataclass
from legroom.units import human_bytes
from legroom.vllm.args import EngineSettings, ServeArgs
from legroom.vllm.resolve import resolve
from legroom.vllm.unsupported import unsupported


@dataclass(frozen=True, slots=True)
class CapacityGoal:
    """A wanted capacity: concurrent requests of one length, on one of these numbers of GPUs."""

    context: int
    concurrency: float = 1.0
    gpus: tuple[int, ...] = (1,)
    policy: Policy = "balanced"
    most_utilization: float = 1.0
    quantized_only: bool = False
    """Whether only the quantized checkpoints are searched, and not the model itself."""


def counts_up_to(most: int) -> tuple[int, ...]:
    """Powers of two below `most`, and `most` itself."""
    return (*(1 << power for power in range((most - 1).bit_length())), most)


Flags = dict[str, Any]

TOKEN_BUDGETS = (16384, 8192, 4096, 2048, 1024)
SEQUENCES = (1024, 512, 256, 128, 64, 32, 16, 8)
CAPTURE_LIMITS = (256, 64)
NODE_GPUS = 8
"""GPUs of one node: tensor parallelism stays inside a node, pipeline and expert parallelism may span several."""


def parallel_sizes(args: ServeArgs, goal: CapacityGoal, experts: bool) -> Iterator[Flags]:
    """Parallel sizes to try for each GPU count; `experts`: expert parallelism too; `{}` alone if a size is given."""
    given = args.tensor_parallel_size, args.pipeline_parallel_size
    if given != (None, None):
        yield {}
        return
    for count in sorted(goal.gpus):
        if count <= NODE_GPUS:
            yield _sizes_as_flags(tensor_parallel_size=count)
        if experts and count >= NODE_GPUS and args.data_parallel_size is None:
            for tensor in (8, 4, 2, 1):
                if count % tensor == 0 and count > tensor:
                    spread = _sizes_as_flags(tensor_parallel_size=tensor, data_parallel_size=count // tensor)
                    yield {**spread, "enable_expert_parallel": True}
        for pipeline in (2, 3, 4, 8):
            if count % pipeline == 0 and count // pipeline <= NODE_GPUS:
                yield _sizes_as_flags(tensor_parallel_size=count // pipeline, pipeline_parallel_size=pipeline)


def _sizes_as_flags(**sizes: int) -> Flags:
    """The parallel sizes above 1, as flags; a size of 1 is left to the default."""
    return {name: size for name, size in sizes.items() if size > 1}


def flag_axes(target: Target, args: ServeArgs, base: EngineSettings, goal: CapacityGoal) -> dict[str, list[Flags]]:
    """By axis, the flag values to try where the user gave none, those of least loss first; `{}` is the default."""
    axes: dict[str, list[Flags]] = {}
    if args.max_num_batched_tokens is None and base.max_num_batched_tokens < goal.concurrency:
        # vLLM wants a token for each sequence.
        axes["max_num_batched_tokens"] = [{"max_num_batched_tokens": math.ceil(goal.concurrency)}]
    elif args.max_num_batched_tokens is None:
        fewest = goal.concurrency if args.max_num_seqs is None else 0
        smaller = (tokens for tokens in TOKEN_BUDGETS if fewest <= tokens < base.max_num_batched_tokens)
        axes["max_num_batched_tokens"] = [{}, *({"max_num_batched_tokens": tokens} for tokens in smaller)]
    if args.max_num_seqs is None and base.max_num_seqs < goal.concurrency:
        axes["max_num_seqs"] = [{"max_num_seqs": math.ceil(goal.concurrency)}]  # raised, which costs nothing but memory
    elif args.max_num_seqs is None:
        fewer = (seqs for seqs in SEQUENCES if goal.concurrency <= seqs < base.max_num_seqs)
        axes["max_num_seqs"] = [{}, *({"max_num_seqs": seqs} for seqs in fewer)]
    if args.kv_cache_dtype is None and base.kv_cache_dtype == "auto" and any(target.gpu.compute_capability):
        axes["kv_cache_dtype"] = [{}, {"kv_cache_dtype": "fp8"}] if _takes_fp8_cache(target, base) else [{}]
    if args.block_size is None:
        allowed = choices("--block-size", target.release)
        axes["block_size"] = [{}, {"block_size": 32}] if allowed is None or 32 in allowed else [{}]
    if args.enforce_eager is None and args.max_cudagraph_capture_size is None:
        limits = CAPTURE_LIMITS if target.release.at_least("0.11.1") else ()
        axes["graphs"] = [{}, *({"max_cudagraph_capture_size": limit} for limit in limits), {"enforce_eager": True}]
    return axes


def _takes_fp8_cache(target: Target, base: EngineSettings) -> bool:
    """Whether the release takes these settings with an FP8 KV cache too; cards before Ada lack some kernels for it."""
    try:
        fp8 = resolve(replace(base.given, kv_cache_dtype="fp8"), target.model, target.gpu, target.release)
    except LegroomError:
        return False
    return unsupported(fp8, target.model, target.gpu) == unsupported(base, target.model, target.gpu)


def axes_by_loss(axes: Mapping[str, list[Flags]]) -> Iterator[list[list[Flags]]]:
    """Selections of the axes' values to combine, in order of loss: of CUDA graphs, then of KV precision."""
    unchanged: list[Flags] = [{}]
    graphs = axes.get("graphs", unchanged)
    captured = [choice for choice in graphs if "enforce_eager" not in choice]
    eager = [choice for choice in graphs if "enforce_eager" in choice]
    batch_axes = [axes.get(name, unchanged) for name in ("max_num_batched_tokens", "max_num_seqs")]
    for kv_dtype in axes.get("kv_cache_dtype", unchanged):
        for graphs_choice in (captured, eager):
            if graphs_choice:
                yield [[kv_dtype], *batch_axes, graphs_choice, axes.get("block_size", unchanged)]


_SHOWN_STEP = 1024  # Tokens to which a proposed length is rounded down.


@dataclass(frozen=True, slots=True)
class FlagCombination:
    """The memory of a deployment apart from utilization. `band_kept`: fraction of the error band that is held back."""

    target: Target
    settings: EngineSettings
    flags: Mapping[str, Any]
    stages: tuple[Layout, ...]
    kv: KvShape
    needed_bytes: tuple[int, ...]
    """Bytes of one full-length request on every stage in the release's length check."""
    request_blocks: float
    """Blocks of one full-length request in the release's concurrency figure."""
    room_bytes: int
    """Free memory beside the CUDA context and other processes."""

    def kv_bytes(self, utilization: float, band_kept: float) -> tuple[int, ...]:
        """KV cache bytes of every pipeline stage at this utilization, less `band_kept` (0 to 1) of the error band."""
        if self.settings.kv_cache_memory_bytes is not None:
            return (self.settings.kv_cache_memory_bytes,) * len(self.stages)
        shift = int((utilization - self.settings.gpu_memory_utilization) * self.target.gpu.total_bytes)
        return tuple(
            stage.kv_cache.bytes + shift - int((stage.kv_cache.bytes - stage.kv_cache.low) * band_kept)
            for stage in self.stages
        )

    def concurrency(self, utilization: float, band_kept: float) -> float:
        """Full-length requests that all engines hold, less the fraction `band_kept` of the error band; 0 below one."""
        blocks = 1 << 62
        for number, pool in enumerate(self.kv_bytes(utilization, band_kept)):
            if self.kv.checked_bytes(pool, number) < self.needed_bytes[number]:
                return 0.0
            width = self.kv.stages[number].bytes_per_block
            blocks = min(blocks, pool // width if width else blocks)
        if state_failure(self.kv, self.settings, blocks):
            return 0.0
        return blocks / self.request_blocks * self.settings.data_parallel_size

    def headroom_bytes(self, utilization: float, band_kept: float) -> int:
        """Free bytes of the fullest card at its peak, less the fraction `band_kept` of the error band."""
        return min(
            headroom_after_band(stage, band_kept) + max(stage.kv_cache.bytes, 0) - pool
            for stage, pool in zip(self.stages, self.kv_bytes(utilization, 0.0), strict=True)
        )

    def runs_over(self, utilization: float, band_kept: float) -> bool:
        """Whether the budget exceeds the free memory, or the peak with `band_kept` of the error band the card."""
        budget = utilization * self.target.gpu.total_bytes
        return budget > self.room_bytes or self.headroom_bytes(utilization, band_kept) < 0

    def shortfall_bytes(self, goal: CapacityGoal, band_kept: float = 0.0) -> int:
        """Bytes that the fullest card lacks for the goal and `band_kept` of the error band; negative if it has room."""
        return max(self._needed_bytes(stage, goal, band_kept) for stage in self.stages) - self.target.gpu.total_bytes

    def lacking_bytes(self, goal: CapacityGoal, utilizations: Sequence[float], band_kept: float) -> int:
        """Bytes that the fullest card lacks for the goal at the best of these utilizations; 0 if it lacks none."""

        def lacking_at(utilization: float) -> int:
            """What is lacking most, in bytes: KV cache, free memory for the budget, or memory at the peak."""
            pool_lacks = self._goal_pool(goal) - min(self.kv_bytes(utilization, band_kept))
            over_budget = int(utilization * self.target.gpu.total_bytes) - self.room_bytes
            return max(pool_lacks, over_budget, -self.headroom_bytes(utilization, band_kept))

        return max(self.shortfall_bytes(goal, band_kept), min(map(lacking_at, utilizations)), 0)

    def why_short(self, goal: CapacityGoal, lacking_bytes: int, band_kept: float) -> str:
        """A sentence with the memory that the goal needs and what the fullest card lacks (`lacking_bytes`)."""
        stage = max(self.stages, key=lambda layout: self._needed_bytes(layout, goal))
        needed, pool, gpus = self._needed_bytes(stage, goal), self._goal_pool(goal), self.settings.gpus_used
        where = f"of {human_bytes(stage.total_bytes)}" + (f" on each of {gpus} GPUs" if gpus > 1 else "")
        spare = max(stage.total_bytes + lacking_bytes - needed, 0)
        kept = f", {human_bytes(spare)} kept free: the figures are estimates" if spare else ""
        sized = self.target.gpu.source == "given by size" and self.settings.given.kv_cache_dtype is None
        named = "; an 8-bit KV cache is tried on a card that is given by its name (rtx4090, l4)" if sized else ""
        return (
            f"the closest setting needs {human_bytes(needed + spare)} {where}: "
            f"weights {human_bytes(stage.weights.bytes)}, KV cache {human_bytes(pool)} for {goal.concurrency:g} x "
            f"{goal.context:,} tokens, the rest "
            f"{human_bytes(needed - stage.weights.bytes - pool)}{kept}{self._what_fits(stage, goal, band_kept)}{named}"
        )

    def _what_fits(self, stage: Layout, goal: CapacityGoal, band_kept: float) -> str:
        """The end of a sentence: about how many requests, or which length, would fit instead; empty for neither."""
        pool, needed = self._goal_pool(goal), self._needed_bytes(stage, goal, band_kept)
        room = stage.total_bytes - needed + pool
        requests = int(room * goal.concurrency / pool) if pool else 0
        share = room * self.settings.data_parallel_size / goal.concurrency
        length = self.kv.longest_len(int(share), self.stages.index(stage)) // _SHOWN_STEP * _SHOWN_STEP
        wanted = f"{goal.concurrency:g}"
        ways = [f"{requests:,} request{'s' if requests > 1 else ''} of that length"] * (
            1 <= requests < goal.concurrency
        )
        noun = "" if ways else " request" if goal.concurrency == 1 else " requests"
        ways += [f"{wanted}{noun} of {length:,} tokens"] * (0 < length < goal.context)
        return f"; it would hold about {' or '.join(ways)}" if ways else ""

    def _goal_pool(self, goal: CapacityGoal) -> int:
        """KV cache bytes per rank for the goal's requests, on the pipeline stage whose blocks are largest."""
        blocks = math.ceil(goal.concurrency * self.request_blocks / self.settings.data_parallel_size)
        return max(blocks * stage.bytes_per_block for stage in self.kv.stages)

    def _needed_bytes(self, stage: Layout, goal: CapacityGoal, band_kept: float = 0.0) -> int:
        """Peak bytes of a stage with the goal's KV cache, and what the fraction `band_kept` of the error band adds."""
        pool = stage.kv_cache
        band = int((pool.bytes - pool.low) * band_kept) + stage.headroom_bytes - headroom_after_band(stage, band_kept)
        return stage.peak_used_bytes - max(pool.bytes, 0) + self._goal_pool(goal) + band


def flag_combination(target: Target, args: ServeArgs, flags: Mapping[str, Any]) -> FlagCombination | None:
    """The memory of one combination of flags; None where the release refuses it."""
    try:
        settings = resolve(replace(args, **flags), target.model, target.gpu, target.release)
    except LegroomError:
        return None
    # The first start, with an empty compile cache, has to meet the goal too.
    stages = target.stage_layouts(settings, cold=True)
    shape = kv_shape(target.model, settings, target.gpu)
    needed = tuple(shape.needed_bytes(settings.max_model_len, number) for number in range(len(stages)))
    room = free_at_start(target.model, settings, target.gpu, target.held_by_others_bytes)
    return FlagCombination(target, settings, flags, stages, shape, needed, blocks_of_request(shape, settings), room)


def blocks_of_request(shape: KvShape, settings: EngineSettings) -> float:
    """Blocks per full-length request, as the release's "Maximum concurrency" line counts them; 1 without KV cache."""
    plenty = plan_of_shape(shape, settings, [1 << 50] * len(shape.stages))
    return plenty.num_blocks / plenty.max_concurrency if plenty.max_concurrency else 1.0
