from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.memory.dtypes import head_token_bytes, latent_token_bytes
from legroom.memory.kv.specs import (
    CacheSpec,
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    LatentSpec,
    SlidingWindowSpec,
    StateSpec,
)

FULL = FullAttentionSpec(16, 8, 128, 128, 4096)
SLIDING = SlidingWindowSpec(16, 8, 128, 128, 4096, window=1024, in_flight_tokens=2048)
CHUNKED = ChunkedLocalSpec(16, 8, 128, 128, 4096, chunk=8192, in_flight_tokens=2048)
STATE = StateSpec(1 << 40, 1_000_000, 3)
SPECS: list[CacheSpec] = [FULL, SLIDING, CHUNKED, STATE, LatentSpec(64, 1, 576, 0, 1152)]


@given(st.sampled_from(SPECS), st.integers(1, 10**6), st.integers(0, 10**5))
def test_a_longer_request_never_needs_fewer_blocks(spec: CacheSpec, length: int, more: int) -> None:
    assert spec.blocks(length) <= spec.blocks(length + more)


@given(st.integers(1, 10**6))
def test_full_attention_holds_every_token(length: int) -> None:
    assert (FULL.blocks(length) - 1) * 16 < length <= FULL.blocks(length) * 16


def test_a_window_never_holds_more_than_itself_what_is_in_flight_and_a_block() -> None:
    assert SLIDING.blocks(10**6) == -(-(1023 + 2048) // 16) + 1
    assert SLIDING.blocks(100) == 7 + 1


def test_chunks_hold_one_chunk_and_what_is_in_flight() -> None:
    assert CHUNKED.blocks(10**6) == (8192 + 2048) // 16


def test_a_state_is_held_whatever_the_length() -> None:
    assert STATE.blocks(1) == STATE.blocks(10**6) == 3


def test_context_parallel_ranks_share_the_sequence() -> None:
    shared = FullAttentionSpec(16, 8, 128, 128, 4096, context_shards=4)
    assert shared.blocks(64_000) == 1000


def test_cross_attention_holds_the_encoder_not_the_decoder() -> None:
    cross = CrossAttentionSpec(16, 20, 64, 64, 5120, encoder_tokens=1500)
    assert cross.blocks(1) == cross.blocks(448) == 94


def test_a_page_is_a_block_of_tokens() -> None:
    assert FULL.page_bytes == 65_536
    assert FULL.with_block_size(32).page_bytes == 131_072
    assert replace(FULL, padded_bytes=70_000).page_bytes == 70_000


@pytest.mark.parametrize(
    ("dtype", "bytes_"),
    [
        ("auto", 512),
        ("bfloat16", 512),
        ("fp8", 256),
        ("fp8_e5m2", 256),
        ("int8_per_token_head", 264),
        ("fp8_per_token_head", 264),
        ("int4_per_token_head", 136),
        ("nvfp4", 144),
    ],
)
def test_one_head_of_128_takes(dtype: str, bytes_: int) -> None:
    assert head_token_bytes(128, 128, dtype, "bfloat16") == bytes_


@pytest.mark.parametrize(
    ("dtype", "bytes_"), [("auto", 1152), ("fp8", 576), ("fp8_ds_mla", 656), ("nvfp4_ds_mla", 352)]
)
def test_one_latent_of_576_takes(dtype: str, bytes_: int) -> None:
    assert latent_token_bytes(576, dtype, "bfloat16") == bytes_
