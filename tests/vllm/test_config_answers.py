"""Random settings against the recorded answers of vLLM 0.32.0's own configuration code."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from config_answers import LIMITS, Agreement, compared, drawn, legrooms_answer, read_answers, record

from legroom.facts.releases import release

VERSION = "0.32.0"
RECORDED = Path(__file__).parents[1] / "fixtures/config_answers.jsonl.gz"


@pytest.fixture(scope="module")
def agreement() -> Agreement:
    return compared(read_answers(RECORDED), VERSION)


def test_three_hundred_answers_are_recorded(agreement: Agreement) -> None:
    assert agreement.accepted + agreement.refused >= 300
    assert min(agreement.accepted, agreement.refused) >= 100


def test_what_vllm_refuses_is_refused(agreement: Agreement) -> None:
    assert agreement.rates()["false_accepts"] <= LIMITS["false_accepts"], agreement.errors()


def test_what_vllm_takes_is_taken(agreement: Agreement) -> None:
    assert agreement.rates()["false_refusals"] <= LIMITS["false_refusals"], agreement.false_refusals


def test_settings_are_resolved_as_vllm_does(agreement: Agreement) -> None:
    assert agreement.rates()["resolved_wrong"] <= LIMITS["resolved_wrong"], agreement.resolved_wrong


def test_the_same_seed_draws_the_same_settings() -> None:
    first, second = (list(drawn(7, 20, release(VERSION))) for _ in range(2))
    assert first == second


@pytest.mark.skipif("LEGROOM_CONFIG_JUDGE" not in os.environ, reason="names the folder of vLLM's configuration judge")
def test_a_new_seed_agrees_with_the_judge() -> None:
    """LEGROOM_CONFIG_JUDGE=CODE:INSTALLED, the judge's own folder and the one its install.sh filled."""
    code, _, installed = os.environ["LEGROOM_CONFIG_JUDGE"].partition(":")
    seed = random.randrange(10**6)
    cases = drawn(seed, 60, release(VERSION))
    found = compared(record(cases, Path(code), Path(installed, "venv/bin/python"), None), VERSION)
    print(f"seed {seed}: {found.rates()}, {dict(found.errors())}")
    assert found.rates()["false_accepts"] <= 0.1
    assert found.rates()["false_refusals"] <= 0.05


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--attention-backend", "XFORMERS"], "Unknown attention backend"),
        (["--prefill-context-parallel-size", "2"], "No valid attention backend"),
        (["--tensor-parallel-size", "4", "--decode-context-parallel-size", "2"], "Decode context parallelism for GQA"),
        (["--enable-eplb"], "enable_expert_parallel must be True"),
        (["--enable-lora", "--max-loras", "8", "--max-cpu-loras", "4"], "max_cpu_loras (4) must be >= max_loras (8)"),
        (["--kv-transfer-config", '{"kv_connector": "NoSuch", "kv_role": "kv_both"}'], "Unsupported connector type"),
        (["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}'], "Unsupported speculative method"),
        (["--compilation-config", '{"cudagraph_mode": "NOPE"}'], "cudagraph_mode"),
        (["--compilation-config", '{"mode": -1}'], "mode: Input should be one of"),
        (["--quantization", "inc"], "Cannot find the config file"),
    ],
)
def test_a_refusal_has_vllms_words(flags: list[str], words: str) -> None:
    case = {"model": "llama-3.1-8b", "gpu": "h100", "flags": flags}
    assert words in legrooms_answer(case, release(VERSION))[1]
