"""A command that is pasted with a log, in each of the forms in which people write one."""

from __future__ import annotations

import pytest

from legroom.diagnosis.log_diagnosis import read_log
from legroom.diagnosis.pasted_command import named_card, pasted_command

ERROR = "torch.OutOfMemoryError: CUDA out of memory."


@pytest.mark.parametrize(
    "text",
    [
        "$ vllm serve Qwen/Qwen3-8B --max-model-len 8192 --enforce-eager",
        "vllm serve Qwen/Qwen3-8B \\\n    --max-model-len 8192 \\\n    --enforce-eager",
        "It dies when I run `vllm serve Qwen/Qwen3-8B --max-model-len 8192 --enforce-eager` here.",
        "$ python -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-8B --max-model-len=8192 --enforce-eager",
        "$ --model Qwen/Qwen3-8B --max-model-len 8192 --enforce-eager",
        'llm = LLM(model="Qwen/Qwen3-8B", max_model_len=8192, enforce_eager=True)',
        "model: Qwen/Qwen3-8B\nmax_model_len: 8192\nenforce_eager: true",
        "command:\n  - --model\n  - Qwen/Qwen3-8B\n  - --max-model-len\n  - '8192'\n  - --enforce-eager",
        'command: ["--model", "Qwen/Qwen3-8B", "--max-model-len", "8192", "--enforce-eager"]',
    ],
)
def test_every_form_gives_the_same_settings(text: str) -> None:
    args = pasted_command(f"{text}\n{ERROR}", None, None)[1]
    assert (args.model, args.max_model_len, args.enforce_eager) == ("Qwen/Qwen3-8B", 8192, True)


def test_the_last_of_two_equal_flags_counts() -> None:
    text = "$ vllm serve ... --gpu-memory-utilization 0.9 --max-num-seqs 8 --gpu-memory-utilization 0.7"
    assert pasted_command(text, None, None)[1].gpu_memory_utilization == 0.7


@pytest.mark.parametrize(
    ("text", "share", "length"),
    [
        ("two --gpu-memory-utilization flags (0.95 and later 0.80)", 0.8, None),
        ("it leaves nothing at mem_util=0.92, 8K window", 0.92, 8192),
        ("at util 0.9 it prints `--gpu-memory-utilization=0.95 is equivalent to 0.93 without graphs`", 0.9, None),
    ],
)
def test_settings_are_read_from_sentences(text: str, share: float, length: int | None) -> None:
    args = pasted_command(text, None, None)[1]
    assert (args.gpu_memory_utilization, args.max_model_len) == (share, length)


def test_of_two_values_the_first_is_the_failed_run_s() -> None:
    text = "With --max-model-len 4096 it fails, with --max-model-len 2048 it starts."
    assert pasted_command(text, None, None)[1].max_model_len == 4096


def test_advice_of_vllm_is_no_setting() -> None:
    line = "INFO 01-02 10:00:00 [gpu_worker.py:1] Desired: use `--kv-cache-memory-bytes=1073741824` to fit."
    assert pasted_command(line, None, None)[1].kv_cache_memory_bytes is None


def test_the_command_above_the_failure_is_used() -> None:
    text = f"vllm serve Qwen/Qwen3-8B --max-num-seqs 64\n{ERROR}\nvllm serve Qwen/Qwen3-8B --max-num-seqs 8 works"
    assert pasted_command(text, 2, None)[1].max_num_seqs == 64


def test_the_fix_repeats_the_pasted_command() -> None:
    text = (
        "$ vllm serve Qwen/Qwen3-8B --max-model-len 40960 --seed 7\n"
        "ValueError: To serve at least one request with the models's max seq len (40960), (5.62 GiB KV cache is needed"
        ", which is larger than the available KV cache memory (2.00 GiB). Based on the available memory, the estimated "
        "maximum model length is 14560."
    )
    command = " ".join(read_log([text.encode()]).runs[0].findings[0].fixes[0].command)
    assert "Qwen/Qwen3-8B" in command
    assert "--seed 7" in command


@pytest.mark.parametrize(
    ("text", "card"),
    [
        ("on a 5090.", "5090"),
        ("4x3090", "3090"),
        ("I have two RTX 3090. Why?", "RTX 3090"),
        ("on 8 A100s", "A100"),
        ("16 gpu (90G memory)", "90GiB"),
        ("one 24 GB card", "24GiB"),
        ("a model of 24 GB", None),
        ("port 4090", None),
    ],
)
def test_cards_are_named_as_people_write_them(text: str, card: str | None) -> None:
    assert named_card(text) == card


@pytest.mark.parametrize(
    ("text", "card"), [("I use a 3080 Ti", "3080 Ti"), ("my 4070 Ti Super", None), ("on a 3080ti", "3080ti")]
)
def test_a_ti_is_another_card_than_its_number(text: str, card: str | None) -> None:
    assert named_card(text) == card


def test_a_command_ends_at_a_full_width_mark() -> None:
    text = "命令：vllm serve Qwen/Qwen3-8B --gpu-memory-utilization 0.3，80G的显卡"
    assert pasted_command(text, None, None)[1].gpu_memory_utilization == 0.3


def test_of_two_cards_of_a_name_the_size_beside_it_decides() -> None:
    assert named_card("vLLM 部署在 A100 上，80G的显卡") == "NVIDIA A100-SXM4-80GB"
    assert named_card("vLLM on an A100") == "A100"


def test_a_setting_in_a_comment_is_not_in_force() -> None:
    text = 'llm = LLM(\n    model="Qwen/Qwen3-8B",\n    # gpu_memory_utilization=0.5,\n    max_model_len=8192,\n)'
    args = pasted_command(text, None, None)[1]
    assert (args.gpu_memory_utilization, args.max_model_len) == (None, 8192)
