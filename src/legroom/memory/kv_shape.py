"""Everything about the KV cache that does not depend on how many bytes there are: groups, pages, blocks a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from legroom.facts.attention import Attention
from legroom.facts.releases import Release
from legroom.facts.releases import release as known_release
from legroom.memory.kv_block_size import attention_backend
from legroom.memory.kv_groups import CacheGroup, UnsupportedCache, cache_groups
from legroom.memory.kv_layers import block_size, context_shards, draft_mixers, kv_specs
from legroom.memory.kv_specs import CacheSpec, StateSpec
from legroom.units import cdiv

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from legroom.facts.gpus import Gpu
    from legroom.facts.model import Model
    from legroom.vllm.args import EngineSettings

LONGEST_LEN = 1 << 27
"""Where a search for the longest length stops."""


@dataclass(frozen=True)
class Stage:
    """The caches of one pipeline stage."""

    specs: dict[str, CacheSpec]
    """As the layers ask for them, before grouping."""
    groups: tuple[CacheGroup, ...]
    bytes_per_block: int
    """What one block id costs on this stage: the widest group."""


@dataclass(frozen=True)
class KvShape:
    """The plan of the KV cache before any bytes are divided by it."""

    release: Release
    engine: str
    block_size: int
    """As the release reports it: tokens a block of the primary attention layers."""
    groups: tuple[CacheGroup, ...]
    stages: tuple[Stage, ...]
    context_shards: int = 1
    unsupported: str | None = None
    """The release has no plan for this mix of caches; its words, if it has any."""
    _lengths: dict[tuple[int, int, int], int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_empty(self) -> bool:
        """No layer keeps a cache: embedding models that attend both ways."""
        return not any(stage.specs for stage in self.stages)

    @property
    def has_states(self) -> bool:
        """Some layer keeps a recurrent state."""
        return any(isinstance(spec, StateSpec) for stage in self.stages for spec in stage.specs.values())

    def blocks(self, length: int, stage: int = 0) -> int:
        """Block ids one request of this length takes, over all groups."""
        return sum(group.blocks(length) for group in self.stages[stage].groups)

    def needed_bytes(self, length: int, stage: int = 0) -> int:
        """Bytes the release's own check wants for one request of this length."""
        here = self.stages[stage]
        release = self.release
        if self.engine == "V0":
            return cdiv(length, self.block_size) * here.bytes_per_block
        if release.at_least("0.19.0"):
            return here.bytes_per_block * self.blocks(length, stage)
        if release.at_least("0.14.0"):
            # Only the first group was counted, which makes hybrids look cheaper than they are. Up to 0.16 the whole
            # model was checked against the smallest stage.
            groups = here.groups if release.at_least("0.17.0") else self.groups
            width = max(group.bytes_per_block if group.layers else 0 for group in groups)
            return width * groups[0].blocks(length)
        specs = here.specs.values()
        if release.before("0.9.1"):
            specs = [spec for group in here.groups for spec in group.specs]  # type: ignore[assignment]
        return sum(spec.blocks(length) * spec.page_bytes for spec in specs)

    def longest_len(self, available_bytes: int, stage: int = 0, limit: int = LONGEST_LEN) -> int:
        """The longest request that the release's check lets through, up to `limit`; 0 where one token is too many."""
        key = (available_bytes, stage, limit)
        if key not in self._lengths:
            if len(self._lengths) > 4096:
                self._lengths.clear()
            self._lengths[key] = _longest(lambda length: self.needed_bytes(length, stage) <= available_bytes, limit)
        return self._lengths[key]

    def checked_bytes(self, available_bytes: int, stage: int = 0) -> int:
        """What the length check plans with: 0.29+ holds the null block back."""
        if self.engine == "V1" and self.release.at_least("0.29.0"):
            return available_bytes - self.stages[stage].bytes_per_block
        return available_bytes


def _longest(fits: Callable[[int], bool], limit: int) -> int:
    if limit < 1 or not fits(1):
        return 0
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


_CACHE: dict[tuple[object, ...], tuple[object, object, KvShape]] = {}
_CACHE_LIMIT = 2048


def kv_shape(model: Model, settings: EngineSettings, gpu: Gpu) -> KvShape:
    """The shape for these settings; the same object for settings that differ in lengths or memory alone."""
    key = _key(model, settings, gpu)
    found = _CACHE.get(key)
    if found is not None and found[0] is model and found[1] is gpu:
        return found[2]
    shape = _shape(model, settings, gpu)
    if len(_CACHE) >= _CACHE_LIMIT:
        _CACHE.clear()
    _CACHE[key] = (model, gpu, shape)
    return shape


def _key(model: Model, settings: EngineSettings, gpu: Gpu) -> tuple[object, ...]:
    given = settings.given
    speculative = given.speculative_config
    return (
        id(model), id(gpu), settings.release, settings.engine, settings.dtype, settings.kv_cache_dtype,
        settings.max_num_batched_tokens, settings.block_size, settings.tensor_parallel_size,
        settings.pipeline_parallel_size, settings.decode_context_parallel_size,
        settings.prefill_context_parallel_size, settings.enable_prefix_caching, settings.max_concurrent_batches,
        settings.disable_hybrid_kv_cache_manager, settings.num_speculative_tokens, given.mamba_cache_dtype,
        given.mamba_ssm_cache_dtype, given.mamba_cache_mode, given.mamba_block_size, given.attention_backend,
        given.env.get("VLLM_ATTENTION_BACKEND"), given.env.get("VLLM_PP_LAYER_PARTITION"),
        given.env.get("VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE"),
        str(speculative.get("method") or speculative.get("model")) if speculative else None,
    )  # fmt: skip


def _shape(model: Model, settings: EngineSettings, gpu: Gpu) -> KvShape:
    release = known_release(settings.release)
    specs = [kv_specs(model, settings, gpu, rank) for rank in range(settings.pipeline_parallel_size)]
    size = block_size(model, settings, gpu)
    if settings.engine == "V0":
        return KvShape(release, "V0", size, (), _v0_stages(specs, size))
    return shape_of_specs(
        specs, release, size, shards=context_shards(settings), hybrid_off=_hybrid_off(model, settings, release),
        packed=_packs_pages(model, settings, gpu),
    )  # fmt: skip


def shape_of_specs(
    specs: Sequence[dict[str, CacheSpec]],
    release: Release,
    size: int,
    *,
    shards: int = 1,
    hybrid_off: bool = False,
    packed: bool = False,
) -> KvShape:
    """The V1 planner on the caches of every stage."""
    try:
        groups, stage_groups = _grouped(specs, release, hybrid_off, packed)
    except UnsupportedCache as problem:
        stages = tuple(Stage(one, (), 0) for one in specs)
        return KvShape(release, "V1", size, (), stages, shards, unsupported=str(problem))
    stages = tuple(Stage(one, own, _bytes_per_block(own)) for one, own in zip(specs, stage_groups, strict=True))
    if release.within("0.7.3", "0.8.1") and len(stages) > 1:
        # These releases sized every stage's blocks by the stage with the most layers.
        widest = max(stage.bytes_per_block for stage in stages)
        stages = tuple(Stage(stage.specs, stage.groups, widest) for stage in stages)
    return KvShape(release, "V1", size, groups, stages, shards)


def _grouped(
    specs: Sequence[dict[str, CacheSpec]], release: Release, off: bool, packed: bool
) -> tuple[tuple[CacheGroup, ...], list[tuple[CacheGroup, ...]]]:
    if release.before("0.11.0"):
        own = [cache_groups(one, release, hybrid_off=off) for one in specs]
        return own[0], own
    merged = {name: spec for one in specs for name, spec in one.items()}
    groups = cache_groups(merged, release, hybrid_off=off, packed=packed)
    return groups, [tuple(group.on_stage(one) for group in groups) for one in specs]


def _bytes_per_block(groups: tuple[CacheGroup, ...]) -> int:
    return max((group.bytes_per_block if group.layers else 0 for group in groups), default=0)


def _v0_stages(specs: list[dict[str, CacheSpec]], size: int) -> tuple[Stage, ...]:
    """V0: one page a layer, every layer whole, recurrent states kept outside the pool."""
    pages = [
        [spec.with_block_size(size).page_bytes for spec in one.values() if not isinstance(spec, StateSpec)]
        for one in specs
    ]
    return tuple(Stage(one, (), max(own, default=0) * len(own)) for one, own in zip(specs, pages, strict=True))


def _hybrid_off(model: Model, settings: EngineSettings, release: Release) -> bool:
    """The flag, and chunked local attention, for which 0.10.1+ turns the hybrid manager off by itself."""
    if settings.disable_hybrid_kv_cache_manager:
        return True
    chunked = any(isinstance(layer.mixer, Attention) and layer.mixer.chunk is not None for layer in model.layers)
    allowed = settings.given.env.get("VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", "0") == "1"
    return chunked and release.at_least("0.10.1") and not (allowed and not draft_mixers(model, settings))


def _packs_pages(model: Model, settings: EngineSettings, gpu: Gpu) -> bool:
    """DeepSeek-V4's backend lays pages of several sizes side by side (0.20+)."""
    return attention_backend(model, settings, gpu).name == "DEEPSEEK_SPARSE_SWA"
