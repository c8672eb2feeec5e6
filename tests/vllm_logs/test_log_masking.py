from __future__ import annotations

import pytest

from legroom.vllm_logs.log_masking import mask_log_values, masked_log_text


@pytest.mark.parametrize(
    "text",
    [
        "non-default args: {'api_key': ['SECRETSECRET'], 'port': 1}",
        "HF_TOKEN=SECRETSECRET vllm serve x",
        "Authorization: Bearer SECRETSECRET",
        "vllm serve x --api-key SECRETSECRET",
        "pulling https://user:SECRETSECRET@host/x",
        "Received request 1: prompt: 'my SECRETSECRET plan', params",
        'prompt: "it\'s SECRETSECRET"',
        "password: SECRETSECRET",
    ],
)
def test_secrets_and_prompts_are_masked(text: str) -> None:
    assert "SECRETSECRET" not in masked_log_text(text)


@pytest.mark.parametrize("token", ["hf_" + "A" * 30, "sk-" + "a1" * 12, "ghp_" + "b" * 36, "AKIA" + "Z" * 16])
def test_tokens_are_known_by_their_shape(token: str) -> None:
    assert token not in masked_log_text(f"using {token} here")


def test_bytes_that_are_no_text_are_no_reason_to_show_a_secret() -> None:
    assert masked_log_text("na\udcefve token=SECRETSECRET") == "na?ve token=[masked]"


def test_links_in_a_log_are_not_passed_on() -> None:
    assert masked_log_text("get the fix at https://files.example/fix.zip now") == "get the fix at [link] now"


def test_token_counts_are_no_secrets() -> None:
    text = "KV cache size: 98,304 tokens, max_num_batched_tokens=8192, 128 tokens per request"
    assert masked_log_text(text) == text


def test_masking_reaches_into_documents() -> None:
    assert mask_log_values({"a": [{"api_key": "x" * 9}], "b": "hf_" + "Q" * 20}) == {
        "a": [{"api_key": "[masked]"}],
        "b": "[masked]",
    }
