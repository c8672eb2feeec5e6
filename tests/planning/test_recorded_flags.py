"""Flags that published start-ups keep as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.planning.recorded import recorded_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--enable-expert-parallel", ["--enable-expert-parallel"]),
        ("'cpu_offload_gb': 12.0", ["--cpu-offload-gb", "12.0"]),
        ("'enable_lora': True, 'max_lora_rank': 32", ["--enable-lora", "--max-lora-rank", "32"]),
        ("'enable_prefix_caching': False", ["--no-enable-prefix-caching"]),
        ("'runner': 'pooling'", ["--runner", "pooling"]),
        ("'speculative_config': {'method': 'mtp'", ["--speculative-config", '{"method": "mtp"}']),
        ("MTP k=3, prefix caching", []),
    ],
)
def test_text_becomes_the_words_of_a_command_line(text, words):
    assert recorded_words(text) == words


@given(st.text())
def test_any_text_is_read_without_an_error(text):
    assert all(isinstance(word, str) for word in recorded_words(text))
