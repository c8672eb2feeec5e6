"""The KV cache without its size in bytes: groups, pages, and the blocks of a request."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Literal

from legroom.facts.gpus import Gpu
from legroom.facts.model import Model
from legroom.facts.releases import Release
from legroom.facts.releases import release as known_release
from legroom.memo import Memo
from legroom.memory.figure_cache import BUDGET, GRAPHS, Inputs, cached
from legroom.memory.kv.attention_backend import attention_backend
from legroom.memory.kv.groups import CacheGroup, UnsupportedCache, cache_groups
from legroom.memory.kv.layer_specs import DRAFT, block_size, context_shards, kv_specs
from legroom.memory.kv.specs import CacheSpec, FullAttentionSpec, StateSpec
from legroom.records import dataclass
from legroom.vllm.args import EngineSettings

LengthCheck = Literal["slots", "layers", "first group of the model", "first group", "all groups"]
TokensLine = Literal["slots", "slots over groups", "full-length requests"]


@dataclass(frozen=True, slots=True)
class Era:
    """How one release computes and prints the KV cache size."""

    length_check: LengthCheck
    """What the bytes of one full-length request are summed over."""
    null_block_held_back: bool
    """The check excludes the null block."""
    override_replaces_memory: bool
    """num_gpu_blocks_override also replaces the memory that the checks use."""
    override_forgotten: bool
    """num_gpu_blocks_override is not applied."""
    tokens_line: TokensLine
    concurrency_by_slots: bool
    concurrency_by_blocks: bool
    """Concurrency is blocks over blocks per request; before 0.27 bytes over bytes, which rounds differently."""
    first_stage_printed: bool
    """The log shows the first stage's count, not the smallest."""
    smallest_stage_alone: bool
    """The whole model is checked against the smallest stage."""


@cache
def era(version: str, engine: str) -> Era:
    """How a release, with its V0 or V1 engine, counts and prints KV blocks, tokens and concurrency."""
    now = known_release(version)
    v0 = engine == "V0"
    checks: tuple[tuple[str, LengthCheck], ...] = (
        ("0.19.0", "all groups"),
        ("0.17.0", "first group"),
        ("0.14.0", "first group of the model"),
    )
    check: LengthCheck = next((name for since, name in checks if now.at_least(since)), "layers")
    tokens: TokensLine = "full-length requests" if now.at_least("0.20.1") else "slots over groups"
    if v0 or now.before("0.9.1"):
        tokens = "slots"
    return Era(
        length_check="slots" if v0 else check,
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
"""The upper end of the search for the longest length: 134 million tokens, above every model's limit."""

Demand = tuple[tuple[int, tuple[CacheSpec, ...]], ...]
"""Terms of a sum: a weight (bytes or groups) times the most blocks of any of these specs."""


def demanded(demand: Demand, length: int) -> int:
    """Blocks or bytes that a request of `length` tokens needs: per term its weight x the most blocks of its specs."""
    total = 0
    for weight, specs in demand:
        total += weight * (specs[0].blocks(length) if len(specs) == 1 else max(spec.blocks(length) for spec in specs))
    return total


@dataclass(frozen=True)
class StageCaches:
    """The caches of one pipeline stage."""

    specs: dict[str, CacheSpec]
    """The layers' specs before grouping."""
    groups: tuple[CacheGroup, ...]
    bytes_per_block: int
    """Bytes of one block id on this stage: those of the widest group."""
    blocks: Demand
    """Blocks of one request."""
    needed: Demand
    """Bytes of one request in the release's length check."""


@dataclass(frozen=True)
class KvShape:
    """The KV cache of a deployment, apart from the number of blocks."""

    release: Release
    era: Era
    engine: str
    block_size: int
    """Tokens per block of the attention layers, as the release reports it."""
    groups: tuple[CacheGroup, ...]
    stages: tuple[StageCaches, ...]
    printed: Demand = ()
    """The divisor of the concurrency line: blocks of a request, or its bytes before 0.27."""
    context_shards: int = 1
    unsupported: str | None = None
    """The release's error message where it does not support this mix of caches; may be empty."""
    is_empty: bool = False
    """No layer has a KV cache: bidirectional embedding models."""
    has_states: bool = False
    """Some layer has a recurrent state."""

    def blocks(self, length: int, stage: int = 0) -> int:
        """Blocks of one request of `length` tokens on a pipeline stage, over all groups."""
        return demanded(self.stages[stage].blocks, length)

    def needed_bytes(self, length: int, stage: int = 0) -> int:
        """Bytes that vLLM's length check counts on a pipeline stage for one request of `length` tokens."""
        return demanded(self.stages[stage].needed, length)

    def longest_len(self, available_bytes: int, stage: int = 0, limit: int = LONGEST_LEN) -> int:
        """The longest request that passes the length check of a pipeline stage, up to `limit`; 0 where none does."""
        demand = self.stages[stage].needed

        def longest() -> int:
            """The longest request, by bisection, as a longer one never needs less."""
            return bisect_left(range(1, limit + 1), True, key=lambda length: demanded(demand, length) > available_bytes)

        return _lengths.get((self,), (available_bytes, stage, limit), longest)

    def checked_bytes(self, available_bytes: int, stage: int = 0) -> int:
        """The available bytes that vLLM's length check compares: from 0.29 on one block less, the null block."""
        return available_bytes - self.stages[stage].bytes_per_block * self.era.null_block_held_back


_lengths: Memo[int] = Memo()
_SHAPE_INPUTS = Inputs(*BUDGET, *GRAPHS, "max_model_len", "auto_fit_len", "max_num_seqs", "enforce_eager")


@cached(_SHAPE_INPUTS)
def kv_shape(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> KvShape:
    """The KV cache's groups and pages; settings that differ in max_model_len or memory alone share one object."""
    specs = [kv_specs(model, settings, gpu, rank) for rank in range(settings.pipeline_parallel_size)]
    size = block_size(model, settings, gpu)
    if settings.engine == "V0":
        return _v0_shape(specs, settings.release, size)
    return shape_of_specs(
        specs,
        settings.release,
        size,
        shards=context_shards(settings),
        hybrid_off=settings.disable_hybrid_kv_cache_manager,
        # DeepSeek-V4's backend puts pages of several sizes into one block (0.20+).
        packed=attention_backend(model, settings, gpu).name == "DEEPSEEK_SPARSE_SWA",
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
    """The V1 engine's KV cache of each stage's specs by layer name; `size`: tokens per block, `shards`:
    context-parallel ranks, `hybrid_off`: --disable-hybrid-kv-cache-manager, `packed`: blocks mix page sizes."""
    now = era(release.version, "V1")
    empty = not any(specs)
    states = any(isinstance(spec, StateSpec) for stage_specs in specs for spec in stage_specs.values())
    try:
        groups, stage_groups = _groups_of_stages(specs, release, hybrid_off, packed)
    except UnsupportedCache as problem:
        stages = tuple(StageCaches(stage_specs, (), 0, (), ()) for stage_specs in specs)
        return KvShape(release, now, "V1", size, (), stages, (), shards, str(problem), empty, states)
    widths = [_bytes_per_block(own) for own in stage_groups]
    if release.within("0.7.3", "0.8.1"):
        # These releases size the blocks of every stage by the stage with the most layers.
        widths = [max(widths)] * len(widths)
    stages = tuple(
        StageCaches(stage_specs, own, width, _block_demand(own), _needed_demand(now, stage_specs, own, groups, release))
        for stage_specs, own, width in zip(specs, stage_groups, widths, strict=True)
    )
    counts = Counter(group.spec for group in stages[0].groups)
    printed = tuple(
        (count if now.concurrency_by_blocks else count * spec.page_bytes, (spec,)) for spec, count in counts.items()
    )
    return KvShape(release, now, "V1", size, groups, stages, printed, shards, None, empty, states)


def _block_demand(groups: Sequence[CacheGroup]) -> Demand:
    """The blocks of one request as a sum over groups, where groups with equal specs are one term."""
    return tuple((count, specs) for specs, count in Counter(_distinct(group) for group in groups).items())


def _needed_demand(
    now: Era, specs: dict[str, CacheSpec], own: Sequence[CacheGroup], whole: Sequence[CacheGroup], release: Release
) -> Demand:
    """The bytes of one request in the check of max_model_len; `own`: the stage's groups, `whole`: the model's."""
    if not specs:
        return ()
    if now.length_check == "all groups":
        width = _bytes_per_block(own)
        return tuple((width * count, caches) for count, caches in _block_demand(own))
    if now.length_check == "layers":
        # Up to 0.9.0 sliding layers count as full attention.
        layers = [spec for group in own for spec in group.specs] if release.before("0.9.1") else specs.values()
        return tuple((spec.page_bytes * count, (spec,)) for spec, count in Counter(layers).items())
    # Only the first group counts, which understates hybrid models.
    counted = whole if now.length_check == "first group of the model" else own
    return ((_bytes_per_block(counted), _distinct(counted[0])),)


def _distinct(group: CacheGroup) -> tuple[CacheSpec, ...]:
    """The different specs of the group, in order."""
    return tuple(dict.fromkeys(group.specs))


def _groups_of_stages(
    specs: Sequence[dict[str, CacheSpec]], release: Release, hybrid_off: bool, packed: bool
) -> tuple[tuple[CacheGroup, ...], list[tuple[CacheGroup, ...]]]:
    """(the model's groups, each stage's own, which before 0.11.0 differ); arguments are those of `cache_groups`."""
    if release.before("0.11.0"):
        own = [cache_groups(stage_specs, release, hybrid_off=hybrid_off) for stage_specs in specs]
        return own[0], own
    merged = {name: spec for stage_specs in specs for name, spec in stage_specs.items()}
    groups = cache_groups(merged, release, hybrid_off=hybrid_off, packed=packed)
    return groups, [tuple(group.on_stage(stage_specs) for group in groups) for stage_specs in specs]


def _bytes_per_block(groups: Sequence[CacheGroup]) -> int:
    """Bytes of one block id: of the group that needs most, as all groups share the memory; 0 without groups."""
    return max((group.bytes_per_block if group.layers else 0 for group in groups), default=0)


def _v0_shape(specs: Sequence[dict[str, CacheSpec]], release: Release, size: int) -> KvShape:
    """The V0 engine's KV cache: one page per layer, all as full attention, no states; `size`: tokens per block."""
    slots = FullAttentionSpec(size, 1, 1, 1, 1)
    stages = []
    for stage_specs in specs:
        paged = {name: spec for name, spec in stage_specs.items() if not isinstance(spec, StateSpec)}
        sizes = {name: spec.with_block_size(size).page_bytes for name, spec in paged.items()}
        drafts = [page for name, page in sizes.items() if name.startswith(DRAFT)]  # a pool of the same blocks beside it
        pages = [page for name, page in sizes.items() if not name.startswith(DRAFT)]
        width = max(pages, default=0) * len(pages) + sum(drafts)
        stages.append(StageCaches(stage_specs, (), width, ((1, (slots,)),), ((width, (slots,)),)))
    empty = not any(stage.bytes_per_block for stage in stages)
    return KvShape(release, era(release.version, "V0"), "V0", size, (), tuple(stages), is_empty=empty)
