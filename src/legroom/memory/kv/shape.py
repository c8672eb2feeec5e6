"""Everything about the KV cache that does not depend on how many bytes there are: groups, pages, blocks a request."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Literal

from legroom.facts.releases import Release
from legroom.facts.releases import release as known_release
from legroom.memo import Memo
from legroom.memory.figure_cache import BUDGET, GRAPHS, Inputs, cached
from legroom.memory.kv.attention_backend import attention_backend
from legroom.memory.kv.groups import CacheGroup, UnsupportedCache, cache_groups
from legroom.memory.kv.layer_specs import DRAFT, block_size, context_shards, kv_specs
from legroom.memory.kv.specs import CacheSpec, FullAttentionSpec, StateSpec
from legroom.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from legroom.facts.gpus import Gpu
    from legroom.facts.model import Model
    from legroom.vllm.args import EngineSettings


LengthCheck = Literal["slots", "layers", "first group of the model", "first group", "all groups"]
TokensLine = Literal["slots", "slots over groups", "full-length requests"]


@dataclass(frozen=True, slots=True)
class Era:
    """The planner's habits in one release."""

    length_check: LengthCheck
    """What the bytes of one full-length request are summed over."""
    null_block_held_back: bool
    """The check leaves out the block that the pool never hands out."""
    override_replaces_memory: bool
    """num_gpu_blocks_override also decides the memory that the checks see."""
    override_forgotten: bool
    tokens_line: TokensLine
    concurrency_by_slots: bool
    concurrency_by_blocks: bool
    """Blocks over blocks a request; before, bytes over bytes, which rounds otherwise."""
    first_stage_printed: bool
    """Every stage printed its own line before the smallest count was taken."""
    smallest_stage_alone: bool
    """One check of the whole model against the smallest stage."""


@cache
def era(version: str, engine: str) -> Era:
    """The era of a release; V0 never left the first one."""
    now = known_release(version)
    v0 = engine == "V0"
    check: LengthCheck = "slots"
    if not v0:
        if now.at_least("0.19.0"):
            check = "all groups"
        elif now.at_least("0.17.0"):
            check = "first group"
        elif now.at_least("0.14.0"):
            check = "first group of the model"
        else:
            check = "layers"
    tokens: TokensLine = "slots over groups"
    if v0 or now.before("0.9.1"):
        tokens = "slots"
    elif now.at_least("0.20.1"):
        tokens = "full-length requests"
    return Era(
        length_check=check,
        null_block_held_back=not v0 and now.at_least("0.29.0"),
        override_replaces_memory=not v0 and now.at_least("0.20.1"),
        override_forgotten=now.version == "0.9.1" and not v0,
        tokens_line=tokens,
        concurrency_by_slots=v0 or now.before("0.9.1"),
        concurrency_by_blocks=now.at_least("0.27.0"),
        first_stage_printed=now.before("0.11.1"),
        smallest_stage_alone=not v0 and now.within("0.14.0", "0.16.0"),
    )


LONGEST_LEN = 1 << 27
"""Where a search for the longest length stops."""


Demand = tuple[tuple[int, tuple[CacheSpec, ...]], ...]
"""Terms of a sum: so many (bytes or groups) times the blocks of the greediest of these caches."""


def demanded(demand: Demand, length: int) -> int:
    """The sum for a request of some length."""
    total = 0
    for weight, specs in demand:
        total += weight * (specs[0].blocks(length) if len(specs) == 1 else max(spec.blocks(length) for spec in specs))
    return total


@dataclass(frozen=True)
class StageCaches:
    """The caches of one pipeline stage."""

    specs: dict[str, CacheSpec]
    """As the layers ask for them, before grouping."""
    groups: tuple[CacheGroup, ...]
    bytes_per_block: int
    """What one block id costs on this stage: the widest group."""
    blocks: Demand
    """Block ids of one request."""
    needed: Demand
    """Bytes the release's own check wants for one request."""


@dataclass(frozen=True)
class KvShape:
    """The plan of the KV cache before any bytes are divided by it."""

    release: Release
    era: Era
    engine: str
    block_size: int
    """As the release reports it: tokens a block of the primary attention layers."""
    groups: tuple[CacheGroup, ...]
    stages: tuple[StageCaches, ...]
    printed: Demand = ()
    """What the concurrency line divides by: blocks of a request, or its bytes before 0.27."""
    context_shards: int = 1
    unsupported: str | None = None
    """The release has no plan for this mix of caches; its words, if it has any."""
    is_empty: bool = False
    """No layer keeps a cache: embedding models that attend both ways."""
    has_states: bool = False
    """Some layer keeps a recurrent state."""

    def blocks(self, length: int, stage: int = 0) -> int:
        """Block ids one request of this length takes, over all groups."""
        return demanded(self.stages[stage].blocks, length)

    def needed_bytes(self, length: int, stage: int = 0) -> int:
        """Bytes the release's own check wants for one request of this length."""
        return demanded(self.stages[stage].needed, length)

    def longest_len(self, available_bytes: int, stage: int = 0, limit: int = LONGEST_LEN) -> int:
        """The longest request that the release's check lets through, up to `limit`; 0 where one token is too many."""
        demand = self.stages[stage].needed

        def longest() -> int:
            return _longest(lambda length: demanded(demand, length) <= available_bytes, limit)

        return _lengths.get((self,), (available_bytes, stage, limit), longest)

    def checked_bytes(self, available_bytes: int, stage: int = 0) -> int:
        """What the length check plans with: 0.29+ holds the null block back."""
        return available_bytes - self.stages[stage].bytes_per_block * self.era.null_block_held_back


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


_lengths: Memo[int] = Memo()


_SHAPE_INPUTS = Inputs(*BUDGET, *GRAPHS, "max_model_len", "auto_fit_len", "max_num_seqs", "enforce_eager")


def kv_shape(model: Model, settings: EngineSettings, gpu: Gpu) -> KvShape:
    """The shape for these settings; the same object for settings that differ in lengths or memory alone."""
    return cached(_shape, model, settings, gpu, inputs=_SHAPE_INPUTS)


def _shape(model: Model, settings: EngineSettings, gpu: Gpu, _: int) -> KvShape:
    release = known_release(settings.release)
    specs = [kv_specs(model, settings, gpu, rank) for rank in range(settings.pipeline_parallel_size)]
    size = block_size(model, settings, gpu)
    if settings.engine == "V0":
        return _v0_shape(specs, release, size)
    return shape_of_specs(
        specs,
        release,
        size,
        shards=context_shards(settings),
        hybrid_off=settings.disable_hybrid_kv_cache_manager,
        packed=_packs_pages(model, settings, gpu),
    )


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
    now = era(release.version, "V1")
    empty = not any(specs)
    states = any(isinstance(spec, StateSpec) for stage_specs in specs for spec in stage_specs.values())
    try:
        groups, stage_groups = _grouped(specs, release, hybrid_off, packed)
    except UnsupportedCache as problem:
        stages = tuple(StageCaches(stage_specs, (), 0, (), ()) for stage_specs in specs)
        return KvShape(release, now, "V1", size, (), stages, (), shards, str(problem), empty, states)
    widths = [_bytes_per_block(own) for own in stage_groups]
    if release.within("0.7.3", "0.8.1"):
        # These releases sized every stage's blocks by the stage with the most layers.
        widths = [max(widths)] * len(widths)
    stages = tuple(
        StageCaches(stage_specs, own, width, _block_demand(own), _needed_demand(now, stage_specs, own, groups, release))
        for stage_specs, own, width in zip(specs, stage_groups, widths, strict=True)
    )
    printed = _printed_demand(now, stages[0].groups)
    return KvShape(release, now, "V1", size, groups, stages, printed, shards, None, empty, states)


def _block_demand(groups: Sequence[CacheGroup]) -> Demand:
    return tuple((count, specs) for specs, count in Counter(_distinct(group) for group in groups).items())


def _needed_demand(
    now: Era, specs: dict[str, CacheSpec], own: Sequence[CacheGroup], whole: Sequence[CacheGroup], release: Release
) -> Demand:
    if not specs:
        return ()
    if now.length_check == "all groups":
        width = _bytes_per_block(own)
        return tuple((width * count, caches) for count, caches in _block_demand(own))
    if now.length_check == "layers":
        # Up to 0.9.0 sliding layers were kept whole before the check.
        layers = [spec for group in own for spec in group.specs] if release.before("0.9.1") else specs.values()
        return tuple((spec.page_bytes * count, (spec,)) for spec, count in Counter(layers).items())
    # Only the first group was counted, which makes hybrids look cheaper than they are.
    counted = whole if now.length_check == "first group of the model" else own
    return ((_bytes_per_block(counted), _distinct(counted[0])),)


def _printed_demand(now: Era, groups: Sequence[CacheGroup]) -> Demand:
    counts = Counter(group.spec for group in groups)
    return tuple(
        (count if now.concurrency_by_blocks else count * spec.page_bytes, (spec,)) for spec, count in counts.items()
    )


def _distinct(group: CacheGroup) -> tuple[CacheSpec, ...]:
    return tuple(dict.fromkeys(group.specs))


def _grouped(
    specs: Sequence[dict[str, CacheSpec]], release: Release, off: bool, packed: bool
) -> tuple[tuple[CacheGroup, ...], list[tuple[CacheGroup, ...]]]:
    if release.before("0.11.0"):
        own = [cache_groups(stage_specs, release, hybrid_off=off) for stage_specs in specs]
        return own[0], own
    merged = {name: spec for stage_specs in specs for name, spec in stage_specs.items()}
    groups = cache_groups(merged, release, hybrid_off=off, packed=packed)
    return groups, [tuple(group.on_stage(stage_specs) for group in groups) for stage_specs in specs]


def _bytes_per_block(groups: Sequence[CacheGroup]) -> int:
    return max((group.bytes_per_block if group.layers else 0 for group in groups), default=0)


def _v0_shape(specs: Sequence[dict[str, CacheSpec]], release: Release, size: int) -> KvShape:
    """V0: one page a layer, every layer whole, recurrent states kept outside the pool."""
    slots = FullAttentionSpec(size, 1, 1, 1, 1)
    stages = []
    for stage_specs in specs:
        sizes = {
            name: spec.with_block_size(size).page_bytes
            for name, spec in stage_specs.items()
            if not isinstance(spec, StateSpec)
        }
        drafts = [page for name, page in sizes.items() if name.startswith(DRAFT)]  # a pool of the same blocks beside it
        pages = [page for name, page in sizes.items() if not name.startswith(DRAFT)]
        width = max(pages, default=0) * len(pages) + sum(drafts)
        stages.append(StageCaches(stage_specs, (), width, ((1, (slots,)),), ((width, (slots,)),)))
    empty = not any(stage.bytes_per_block for stage in stages)
    return KvShape(release, era(release.version, "V0"), "V0", size, (), tuple(stages), is_empty=empty)


def _packs_pages(model: Model, settings: EngineSettings, gpu: Gpu) -> bool:
    """DeepSeek-V4's backend lays pages of several sizes side by side (0.20+)."""
    return attention_backend(model, settings, gpu).name == "DEEPSEEK_SPARSE_SWA"
