"""What is secret in a command line is found however it is written."""

from __future__ import annotations

import shlex

import pytest

from legroom.facts.flags import env_names
from legroom.facts.releases import known_releases, release
from legroom.masking import is_secret
from legroom.vllm.command_line import without_secrets


@pytest.mark.parametrize(
    "line",
    [
        "vllm serve m --api-key hush",
        "vllm serve m --api_key=hush",
        "vllm serve m --api-k hush --seed 1",
        "vllm serve m --api-key a hush",
        "vllm serve m --hf-token hush",
        "vllm serve m --hf_tok=hush",
        "VLLM_API_KEY=hush vllm serve m",
        "HF_TOKEN=hush vllm serve m",
        "DB_PASSWORD=hush vllm serve m",
        """vllm serve m --kv-transfer-config '{"extra": {"aws_secret_access_key": "hu\\"sh hush", "x": 1}}'""",
        """vllm serve m --model-loader-extra-config='{"api_key": "hush"}'""",
        "vllm serve m --kv-transfer-config.extra.secret_key hush",
        "vllm serve m --x.password=hush",
        "HTTPS_PROXY=http://u:hush@p:1 vllm serve m",
        "vllm serve m --otlp-traces-endpoint http://u:hush@c",
    ],
)
def test_no_secret_is_shown_in_any_spelling(line):
    shown = list(without_secrets(shlex.split(line)))
    assert "hush" not in shlex.join(shown)
    assert len(shown) == len(shlex.split(line))


def test_what_is_no_secret_stays_as_it_was_written():
    words = shlex.split(
        "OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false vllm serve m --seed=1 --hf-overrides '{}' -tp 2"
        """ --hf-overrides '{"pad_token": "<pad>", "speculative_token_tree": "[(0,)]"}'"""
    )
    assert list(without_secrets(words)) == words


def test_a_variable_is_secret_by_its_name_or_by_the_credentials_in_it():
    assert is_secret("OPENAI_KEY_PROD") and not is_secret("VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE")
    assert is_secret("AWS_SECRET_ACCESS_KEY") and is_secret("HTTPS_PROXY", "http://u:p@h:1")
    assert not is_secret("HTTPS_PROXY", "http://h:1") and not is_secret("TOKENIZERS_PARALLELISM", "false")


def test_of_the_variables_of_vllm_only_those_with_a_key_are_secret():
    assert {name for one in known_releases() for name in env_names(release(one)) if is_secret(name)} == {
        "VLLM_API_KEY",
        "S3_ACCESS_KEY_ID",
        "S3_SECRET_ACCESS_KEY",
    }


@pytest.mark.parametrize(
    "name", ["authorization", "Set-Cookie", "api-key", "apiKey", "db_pass", "PGPASSWORD", "X-Auth-Token", "key-prod"]
)
def test_a_header_and_a_key_of_json_are_named_as_variables_are(name):
    assert is_secret(name)
