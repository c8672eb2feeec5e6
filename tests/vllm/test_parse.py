"""Command lines as one release reads them."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.facts.releases import known_releases, release
from legroom.vllm.args import ServeArgs
from legroom.vllm.parse import ParsedArgs, parse_flags


def parsed(text: str, version: str = "0.32.0") -> ParsedArgs:
    return parse_flags(shlex.split(text), release(version))


def args_of(text: str, version: str = "0.32.0") -> ServeArgs:
    found = parsed(text, version)
    assert found.problems == ()
    return found.args


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("vllm serve M --max-model-len 8192", "max_model_len", 8192),
        ("vllm serve M --max-model-len=8192", "max_model_len", 8192),
        ("vllm serve M --max_model_len 8192", "max_model_len", 8192),
        ("vllm serve M --max-model-len 32k", "max_model_len", 32_000),
        ("vllm serve M --max-model-len 32K", "max_model_len", 32_768),
        ("vllm serve M --max-model-len 25.6k", "max_model_len", 25_600),
        ("vllm serve M --max-model-len auto", "max_model_len", -1),
        ("vllm serve M --max-model-len -1", "max_model_len", -1),
        ("vllm serve M -tp 4", "tensor_parallel_size", 4),
        ("vllm serve M -pp 2", "pipeline_parallel_size", 2),
        ("vllm serve M -dp 8", "data_parallel_size", 8),
        ("vllm serve M -dcp 2", "decode_context_parallel_size", 2),
        ("vllm serve M -ep", "enable_expert_parallel", True),
        ("vllm serve M -q fp8", "quantization", "fp8"),
        ("vllm serve M --no-enable-prefix-caching", "enable_prefix_caching", False),
        ("vllm serve M --enforce-eager", "enforce_eager", True),
        ("vllm serve M --kv-cache-memory 16G", "kv_cache_memory_bytes", 16 * 2**30),
        ("vllm serve M --cudagraph-capture-sizes 1 2 4 --port 1", "cudagraph_capture_sizes", (1, 2, 4)),
        ("vllm serve M -O2", "optimization_level", 2),
        ("vllm serve M -O 0", "optimization_level", 0),
        (
            'vllm serve M --compilation-config \'{"cudagraph_mode": "NONE"}\'',
            "compilation_config",
            {"cudagraph_mode": "NONE"},
        ),
        ("vllm serve M --compilation-config.cudagraph_mode NONE", "compilation_config", {"cudagraph_mode": "NONE"}),
        ("vllm serve M -cc.cudagraph_mode=NONE", "compilation_config", {"cudagraph_mode": "NONE"}),
        (
            "vllm serve M -sc.method eagle -sc.num_speculative_tokens 3",
            "speculative_config",
            {"method": "eagle", "num_speculative_tokens": 3},
        ),
        (
            "vllm serve M --spec-method mtp --spec-tokens 2",
            "speculative_config",
            {"method": "mtp", "num_speculative_tokens": 2},
        ),
        ("vllm serve M --limit-mm-per-prompt '{\"image\": 2}'", "limit_mm_per_prompt", {"image": 2}),
        ("vllm serve M --limit-mm-per-prompt.image 2", "limit_mm_per_prompt", {"image": 2}),
        ("vllm serve --gpu-memory-utilization 0.85 M", "model", "M"),
        ("vllm serve --model M", "model", "M"),
        ("/opt/venv/bin/vllm serve M --dtype half", "dtype", "half"),
        ("python3 -m vllm.entrypoints.openai.api_server --model M", "model", "M"),
    ],
)
def test_a_flag_lands_in_its_field(text: str, field: str, value: Any) -> None:
    args = args_of(text)
    assert getattr(args, field) == value
    assert args.model == "M"


@pytest.mark.parametrize(
    ("text", "version", "field", "value"),
    [
        ("vllm serve M -O3", "0.11.0", "compilation_config", {"level": 3}),
        ("vllm serve M -O.level=3", "0.10.0", "compilation_config", {"level": 3}),
        ("vllm serve M --compilation-config 3", "0.9.0", "compilation_config", {"level": 3}),
        (
            "vllm serve M --limit-mm-per-prompt image=2,video=1",
            "0.8.4",
            "limit_mm_per_prompt",
            {"image": 2, "video": 1},
        ),
        ("vllm serve M --enable-chunked-prefill=False", "0.6.3", "enable_chunked_prefill", False),
        ("vllm serve M --enable-chunked-prefill true", "0.6.3", "enable_chunked_prefill", True),
        (
            "vllm serve M --speculative-model D --num-speculative-tokens 5",
            "0.6.3",
            "speculative_config",
            {"model": "D", "num_speculative_tokens": 5},
        ),
        ("vllm serve M --swap-space 8", "0.7.3", "swap_space", 8.0),
    ],
)
def test_older_releases_read_what_they_read(text: str, version: str, field: str, value: Any) -> None:
    assert getattr(args_of(text, version), field) == value


def test_flags_without_a_field_are_kept_as_written() -> None:
    args = args_of("vllm serve M --served-model-name a b --port 8000 --trust-remote-code --api-key k")
    assert args.others == ("--served-model-name", "a", "b", "--port", "8000", "--trust-remote-code", "--api-key", "k")


def test_a_later_value_wins() -> None:
    args = args_of("vllm serve M --max-num-seqs 8 --max-num-seqs 16 --port 1 --port 2")
    assert (args.max_num_seqs, args.others) == (16, ("--port", "2"))


def test_dotted_keys_are_gathered_and_replace_json_given_whole() -> None:
    args = args_of("vllm serve M --hf-overrides '{\"a\": 1}' --hf-overrides.b 2 --hf-overrides.c.d+ x,y")
    assert args.hf_overrides == {"b": 2, "c": {"d": ["x", "y"]}}


def test_environment_before_the_command_is_kept() -> None:
    args = args_of("VLLM_USE_V1=1 CUDA_VISIBLE_DEVICES=0,1 vllm serve M")
    assert args.env == {"VLLM_USE_V1": "1", "CUDA_VISIBLE_DEVICES": "0,1"}


@pytest.mark.parametrize(
    ("flag", "version", "kind", "word", "instead"),
    [
        ("--max-num-on-the-fly-batches 8", "0.32.0", "unknown", "no vLLM release", "--max-num-seqs"),
        ("--swap-space 4", "0.18.0", "removed", "0.18.0", "--kv-offloading-size"),
        ("--swap-space 4", "0.17.1", "ignored", "does nothing", ""),
        ("--cuda-graph-sizes 8", "0.14.0", "renamed", "0.13.0", "--cudagraph-capture-sizes"),
        ("--kv-cache-memory-bytes 1G", "0.9.0", "not_yet", "0.10.2", "--gpu-memory-utilization"),
        ("--disable-log-requests", "0.20.0", "removed", "0.17.0", ""),
        ("--disable-log-requests", "0.12.0", "ignored", "does nothing", ""),
        ("--gpu-memory-utilisation 0.9", "0.32.0", "unknown", "no vLLM release", "--gpu-memory-utilization"),
        ("--max-num 4", "0.32.0", "unknown", "several flags", "--max-num-active-seqs"),
        ("--kv-cache-dtype fp9", "0.10.2", "bad_choice", "fp8_e5m2", "fp8"),
        ("--block-size 17", "0.10.2", "bad_choice", "choices", "16"),
        ("--max-num-seqs many", "0.32.0", "bad_value", "whole number", ""),
        ("--max-num-seqs 1k", "0.32.0", "bad_value", "whole number", ""),
        ("--max-model-len 1.5K", "0.32.0", "bad_value", "fraction", ""),
        ("--max-model-len 8k", "0.6.0", "bad_value", "whole number", ""),
        ("--gpu-memory-utilization nan", "0.32.0", "bad_value", "number", ""),
        ("--max-model-len", "0.32.0", "bad_value", "needs a value", ""),
        ("--compilation-config nonsense", "0.32.0", "bad_value", "JSON", ""),
        ("--compilation-config 3", "0.32.0", "bad_value", "JSON", "-O3"),
        ("--limit-mm-per-prompt image=2", "0.32.0", "bad_value", "JSON", "--limit-mm-per-prompt '{\"image\": 2}'"),
        ("--enable-prefix-caching=False", "0.32.0", "bad_value", "no value", "--no-enable-prefix-caching"),
        ("--no-enforce-eager", "0.6.0", "unknown", "no --no- form", ""),
        ("-O3", "0.5.0", "not_yet", "0.6.5", ""),
        ("--tp 4", "0.32.0", "unknown", "-tp", "--tensor-parallel-size"),
        ("stray words", "0.32.0", "unknown", "belongs to no flag", ""),
    ],
)
def test_what_a_release_does_not_take_is_named_with_what_to_use(
    flag: str, version: str, kind: str, word: str, instead: str
) -> None:
    problem = parsed(f"vllm serve M {flag}", version).problems[0]
    assert problem.kind == kind
    assert word in problem.message
    assert problem.instead == instead


def test_an_unknown_flag_takes_its_value_with_it() -> None:
    found = parsed("vllm serve M --max-batch-size 8 --max-num-seqs 4 --use-v2-block-manager --port 1")
    assert (found.args.max_num_seqs, found.args.others) == (4, ("--port", "1"))
    assert [problem.flag for problem in found.problems] == ["--max-batch-size", "--use-v2-block-manager"]


def test_a_short_switch_of_a_later_release_takes_no_word_with_it() -> None:
    assert parsed("vllm serve -ep M", "0.7.0").args.model == "M"


WORDS = st.one_of(
    st.sampled_from(
        [
            "--max-model-len",
            "-tp",
            "--compilation-config",
            "-O",
            "-O3",
            "--no-enable-prefix-caching",
            "-cc.a.b",
            "{}",
            "--limit-mm-per-prompt",
            "image=2",
            "8k",
            "-1",
            "--",
            "=",
            "--=",
            "--a.b=c",
            "vllm",
            "serve",
            "[1, 2]",
            "None",
            "--cudagraph-capture-sizes",
            "--served-model-name",
            "--enable-chunked-prefill",
            "False",
            "--hf-token",
            "-",
        ]
    ),
    st.text(max_size=12),
)


@given(st.lists(WORDS, max_size=12), st.sampled_from(known_releases()))
def test_any_words_are_read_without_failing(words: list[str], version: str) -> None:
    found = parse_flags(words, release(version))
    assert isinstance(found.args, ServeArgs)
    assert all(problem.message for problem in found.problems)


def test_a_build_between_two_releases_may_take_what_the_newer_one_takes():
    parsed = parse_flags(["serve", "m", "--kv-cache-dtype", "int8_per_token_head"], release("0.19.2"))
    assert parsed.args.kv_cache_dtype == "int8_per_token_head"
    assert [problem.kind for problem in parsed.problems] == ["uncertain"]
    assert not parsed.problems[0].stops_vllm
