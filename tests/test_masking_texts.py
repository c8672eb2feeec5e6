"""No secret reaches the journal, a message or a report."""

from __future__ import annotations

import pytest

from legroom.masking import masked


@pytest.mark.parametrize(
    "text",
    [
        "VLLM_API_KEY=hush vllm serve m",
        "OPENAI_KEY='hush'",
        "--api-key hush",
        "--api_key=hush",
        "http://u:hush@host:1/x",
        "Authorization: Bearer hush",
        "my_secret: hush",
        "OPENAI_KEY_PROD=hush",
        "DB_PASSWD='hush'",
        "PGPASSWORD=hush",
        "--guard-token hush",
        "--kafka-password=hush",
        "--api-key 'hush'",
        "http://h/x?api_key=hush&n=1",
        "http://h/x?n=1&X-Amz-Signature=hush",
    ],
)
def test_a_secret_is_masked_wherever_it_stands(text):
    assert "hush" not in masked(text)


@pytest.mark.parametrize(
    "text",
    [
        "eos_token=</s>",
        "max_tokens=128",
        "the monkey=brown",
        "KEYS are 3",
        "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE=9",
        "--tokenizer org/m",
        "--max-num-batched-tokens 8192",
        "http://h/x?max_tokens=7",
        "--ssl-keyfile k.pem",
    ],
)
def test_what_only_looks_like_one_is_left(text):
    assert masked(text) == text


def test_a_name_in_json_is_judged_as_a_variable_is():
    flags = {"api-key": "hush", "HF_TOKEN": "hush", "cookie": "hush", "tokenizer": "org/m", "max_tokens": "7"}
    assert masked({"flags": flags}) == {
        "flags": {"api-key": "***", "HF_TOKEN": "***", "cookie": "***", "tokenizer": "org/m", "max_tokens": "7"}
    }


@pytest.mark.parametrize("token", ["AKIA" + "A1" * 8, "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0", "AIza" + "b2" * 12])
def test_a_key_known_by_its_beginning_is_masked_without_a_name(token):
    assert token not in masked(f"told the server {token} at start")


def test_the_name_of_a_setting_is_no_token_of_the_hub():
    assert masked("read hf_config_path") == "read hf_config_path"
