from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.facts.releases import release
from legroom.memory.kv.groups import CacheGroup, UnsupportedCache, cache_groups
from legroom.memory.kv.specs import CacheSpec, FullAttentionSpec, SlidingWindowSpec, StateSpec

NOW = release("0.32.0")


def full(kv_heads: int = 8, block_size: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size, kv_heads, 128, 128, 512 * kv_heads)


def sliding(kv_heads: int = 8, window: int = 512) -> SlidingWindowSpec:
    return SlidingWindowSpec(16, kv_heads, 128, 128, 512 * kv_heads, window=window, in_flight_tokens=2048)


def layers(*specs: CacheSpec) -> dict[str, CacheSpec]:
    return {str(index): spec for index, spec in enumerate(specs)}


def sizes(groups: tuple[CacheGroup, ...]) -> list[int]:
    return [len(group.layers) for group in groups]


def test_equal_layers_share_one_table() -> None:
    assert sizes(cache_groups(layers(*[full()] * 32), NOW)) == [32]


def test_five_windows_to_one_full_layer_make_six_groups() -> None:
    assert sizes(cache_groups(layers(*([sliding()] * 5 + [full()]) * 4), NOW)) == [4] * 6


def test_types_nearly_as_many_are_padded_not_split() -> None:
    specs = layers(*[sliding(), full()] * 12, full())
    assert sizes(cache_groups(specs, NOW)) == [12, 13]
    assert sizes(cache_groups(specs, release("0.11.2"))) == [12, 7, 6]


def test_full_layers_of_several_widths_share_a_table_from_0_11() -> None:
    specs = layers(full(8), full(4), full(8))
    (group,) = cache_groups(specs, NOW)
    assert group.bytes_per_block == sum(spec.page_bytes for spec in specs.values())


def test_a_smaller_page_gets_a_larger_block_from_0_12() -> None:
    groups = cache_groups(layers(full(4), sliding(8)), release("0.12.0"))
    assert [group.block_size for group in groups] == [32, 16]
    with pytest.raises(UnsupportedCache):
        cache_groups(layers(full(4), sliding(8)), release("0.11.2"))


def test_a_page_that_does_not_divide_is_padded_from_0_24() -> None:
    specs = layers(full(5), sliding(8))
    groups = cache_groups(specs, release("0.24.0"))
    assert {group.spec.page_bytes for group in groups} == {sliding(8).page_bytes}
    with pytest.raises(UnsupportedCache, match="not divisible"):
        cache_groups(specs, release("0.23.0"))


def test_with_the_hybrid_manager_off_windows_are_kept_whole() -> None:
    (group,) = cache_groups(layers(*([sliding()] * 5 + [full()]) * 4), NOW, hybrid_off=True)
    assert {spec.blocks(32_768) for spec in group.specs} == {2048}


def test_states_cannot_do_without_the_hybrid_manager() -> None:
    specs = layers(full(), StateSpec(16, full().page_bytes, 2))
    with pytest.raises(UnsupportedCache, match="one unified type"):
        cache_groups(specs, NOW, hybrid_off=True)


@given(
    st.lists(st.sampled_from([full(), sliding(), sliding(window=128), full(4)]), min_size=1, max_size=60),
    st.sampled_from(["0.12.0", "0.17.1", "0.18.0", "0.27.0", "0.32.0"]),
)
def test_every_layer_is_in_exactly_one_group(specs: list[CacheSpec], version: str) -> None:
    named = layers(*specs)
    groups = cache_groups(named, release(version))
    assert sorted(name for group in groups for name in group.layers) == sorted(named)
