"""KV cache groups: layers that share a block table, as each release forms them. All groups allocate from one pool of
equal blocks. Releases differ in how layers are split into groups, and in what they do with pages of different sizes."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from legroom.facts.releases import Release
from legroom.memory.kv import specs as kv
from legroom.memory.layout import check_text
from legroom.records import dataclass
from legroom.units import cdiv

Specs = Mapping[str, kv.CacheSpec]


class UnsupportedCache(Exception):
    """The release does not support this mix of caches; `args[0]` is its error message."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with one block table. `specs` holds one spec per layer."""

    layers: tuple[str, ...]
    specs: tuple[kv.CacheSpec, ...]

    @property
    def spec(self) -> kv.CacheSpec:
        """The first layer's spec, which stands for all layers of the group."""
        return self.specs[0]

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.specs[0].block_size

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: the pages that all layers of the group keep under one block id."""
        return sum(spec.page_bytes for spec in self.specs)

    def on_stage(self, stage: Specs) -> "CacheGroup":
        """The group with the layers that `stage`, a pipeline stage's specs, has; without a layer it keeps one spec."""
        kept = [(name, spec) for name, spec in zip(self.layers, self.specs, strict=True) if name in stage]
        if not kept:
            return CacheGroup((), (self.spec,))
        return CacheGroup(tuple(name for name, _ in kept), tuple(spec for _, spec in kept))


def cache_groups(
    specs: Specs, release: Release, *, hybrid_off: bool = False, packed: bool = False
) -> tuple[CacheGroup, ...]:
    """The KV cache groups that vLLM makes of these layers; raises UnsupportedCache where the release cannot.
    `hybrid_off`: --disable-hybrid-kv-cache-manager; `packed`: one block holds pages of several sizes."""
    if not specs:
        return ()
    if hybrid_off or release.before("0.9.1"):
        specs = promoted(specs)
        if not _is_one_type(specs, release):
            raise UnsupportedCache(check_text("no_single_type", release))
    if _is_one_type(specs, release):
        return (_group(specs, tuple(specs)),)
    if packed and len({spec.page_bytes for spec in specs.values()}) > 1:
        return _packed_groups(specs)
    try:
        # Make all pages equal: smaller pages get larger blocks (0.12+), or padding in later releases.
        largest = max(spec.page_bytes for spec in specs.values())
        specs = {name: _with_page_bytes(name, spec, largest, release) for name, spec in specs.items()}
    except UnsupportedCache:
        if release.before("0.27.0") or not _latent_beside_window(specs):
            raise
        specs = promoted(specs)
        return (_group(specs, tuple(specs)),)
    buckets = _grouped(specs, lambda name: specs[name].merge_key if release.at_least("0.27.0") else specs[name])
    counts = [len(names) for names in buckets.values()]
    size = min(counts)
    # 0.18 pads up to a ratio of 1.5 instead of 1.25, for drafters that add a layer or two to one type.
    band = 1.5 if release.at_least("0.18.0") else 1.25 if release.at_least("0.12.0") else 0.0
    if max(counts) < size * band:
        size = max(counts)
    groups: list[CacheGroup] = []
    for names in buckets.values():
        number = cdiv(len(names), size)
        for index in range(number):
            # 0.11+ assigns layers round-robin so that every pipeline stage holds some of each group.
            dealt = names[index::number] if release.at_least("0.11.0") else names[index * size : (index + 1) * size]
            groups.append(_group(specs, dealt))
    return tuple(groups)


def _is_one_type(specs: Specs, release: Release) -> bool:
    """Whether all layers have equal caches, or from 0.11 on ones that hold the same tokens in pages of other sizes."""
    if len({spec.merge_key for spec in specs.values()}) == 1:
        return True
    return release.at_least("0.11.0") and len({spec.type_key for spec in specs.values()}) == 1


def promoted(specs: Specs) -> dict[str, kv.CacheSpec]:
    """The specs with window and chunk layers counted as full attention; unchanged where no layer has full attention."""
    full = [spec for spec in specs.values() if isinstance(spec, kv.FullAttentionSpec)]
    if not full:
        return dict(specs)
    block_sizes = {spec.block_size for spec in full}
    block_size = block_sizes.pop() if len(block_sizes) == 1 else None
    return {name: _as_full_attention(spec, block_size or spec.block_size) for name, spec in specs.items()}


def _as_full_attention(spec: kv.CacheSpec, block_size: int) -> kv.CacheSpec:
    """A sliding-window or chunked spec as a full-attention spec that notes the window or chunk; others unchanged."""
    if not isinstance(spec, kv.SlidingWindowSpec | kv.ChunkedLocalSpec):
        return spec
    heads = (spec.kv_heads, spec.head_dim, spec.v_head_dim)
    page = (block_size, *heads, spec.token_bytes, spec.padded_bytes, spec.tokens_per_state)
    if isinstance(spec, kv.ChunkedLocalSpec):
        return kv.FullAttentionSpec(*page, chunk=spec.chunk)
    full = kv.LatentSpec if isinstance(spec, kv.LatentWindowSpec) else kv.FullAttentionSpec
    return full(*page, window=spec.window)


def _group(specs: Specs, names: Sequence[str]) -> CacheGroup:
    """The KV cache group of the layers with these names."""
    return CacheGroup(tuple(names), tuple(specs[name] for name in names))


def _latent_beside_window(specs: Specs) -> bool:
    """Whether the layers mix MLA with sliding windows of plain KV heads, and none has latent windows or chunks."""
    kinds = {type(spec) for spec in specs.values()}
    return (
        kv.LatentSpec in kinds
        and kv.SlidingWindowSpec in kinds
        and not kinds & {kv.LatentWindowSpec, kv.ChunkedLocalSpec}
    )


def _with_page_bytes(name: str, spec: kv.CacheSpec, largest: int, release: Release) -> kv.CacheSpec:
    """The spec of layer `name` with pages of `largest` bytes, by a larger block or padding; else UnsupportedCache."""
    page = spec.page_bytes
    if page == largest:
        return spec
    if release.before("0.12.0"):
        raise UnsupportedCache("")  # an assertion without words
    if isinstance(spec, kv.StateSpec) and release.at_least("0.26.0"):
        return replace(spec, padded_bytes=largest)
    if largest % page == 0:
        return spec.with_block_size(spec.block_size * (largest // page))
    latent = isinstance(spec, kv.LatentSpec | kv.LatentWindowSpec)
    if isinstance(spec, kv.AttentionSpec) and release.at_least("0.24.0") and not latent:
        return replace(spec, padded_bytes=largest)
    raise UnsupportedCache(check_text("page_sizes", release, layer=name))


def _packed_groups(specs: Specs) -> tuple[CacheGroup, ...]:
    """The KV cache groups where one block id covers pages of several sizes; layers of one `type_key` form a bucket."""
    buckets = list(_grouped(specs, lambda name: specs[name].type_key).values())
    pages = [_grouped(names, lambda name: specs[name].page_bytes) for names in buckets]
    balanced = [len({len(names) for names in by_page.values()}) == 1 for by_page in pages]
    repeats = [max(len(names) for names in by_page.values()) for by_page in pages]
    floor = max(
        (count for count, by_page, even in zip(repeats, pages, balanced, strict=True) if even and len(by_page) > 1),
        default=0,
    )
    per_group = None
    if floor:
        per_group = _least_padding([count for count, even in zip(repeats, balanced, strict=True) if even], floor)

    def group_count(index: int) -> int:
        """Into how many groups the bucket of this index is split, unless it holds recurrent states."""
        return cdiv(repeats[index], per_group) if balanced[index] and per_group else 1

    def is_state(index: int) -> bool:
        """Whether the bucket of this index holds recurrent states, or windows that vLLM splits like states."""
        first = specs[buckets[index][0]]
        return isinstance(first, kv.StateSpec) or (per_group is None and isinstance(first, kv.SlidingWindowSpec))

    def widest(index: int, number: int) -> int:
        """Bytes per block of the largest group if the bucket of this index is split into `number` groups."""
        return sum(cdiv(len(names), number) * page for page, names in pages[index].items())

    anchor = max(
        widest(index, len(names) if is_state(index) else group_count(index)) for index, names in enumerate(buckets)
    )
    groups: list[CacheGroup] = []
    for index, names in enumerate(buckets):
        number = group_count(index)
        if is_state(index):
            number = max(number, cdiv(len(names), max(anchor // specs[names[0]].page_bytes, 1)))
        if number == 1:
            groups.append(_group(specs, names))
            continue
        turns = list(zip(*pages[index].values(), strict=False))
        groups += [_group(specs, [name for turn in turns[start::number] for name in turn]) for start in range(number)]
    return tuple(groups)


def _grouped(names: Iterable[str], key: Callable[[str], Any]) -> dict[Any, list[str]]:
    """The layer names that have equal values of `key`, by that value, in the order of first appearance."""
    groups: dict[Any, list[str]] = defaultdict(list)
    for name in names:
        groups[key(name)].append(name)
    return groups


def _least_padding(counts: Sequence[int], floor: int) -> int:
    """The group size, at least `floor`, for which rounding each layer count up to a multiple of it adds the fewest."""
    sizes = range(max(1, floor), max(counts) + 1)
    return min(sizes, key=lambda size: (sum(-count % size for count in counts), -size), default=floor)
