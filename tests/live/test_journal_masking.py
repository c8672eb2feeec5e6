"""No secret reaches the journal, a message or a report."""

from __future__ import annotations

import pytest

from legroom.live.journal_masking import masked


@pytest.mark.parametrize(
    "text",
    [
        "VLLM_API_KEY=hush vllm serve m", "OPENAI_KEY='hush'", "--api-key hush", "--api_key=hush",
        "http://u:hush@host:1/x", "Authorization: Bearer hush", "my_secret: hush",
    ],
)  # fmt: skip
def test_a_secret_is_masked_wherever_it_stands(text):
    assert "hush" not in masked(text)


@pytest.mark.parametrize("text", ["eos_token=</s>", "max_tokens=128", "the monkey=brown", "KEYS are 3"])
def test_what_only_looks_like_one_is_left(text):
    assert masked(text) == text
