"""Texts with several servers or attempts, and what they say of other settings."""

from __future__ import annotations

from typing import Any

import pytest

from legroom.diagnosis.contrasts import contrasts
from legroom.diagnosis.log_diagnosis import read_log
from legroom.diagnosis.verdict import Diagnosis
from legroom.facts.releases import latest

SHORT = (
    "ValueError: To serve at least one request with the model's max seq len (131072), 16.00 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (11.20 GiB)."
)
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of {} GiB of which "
    "{} MiB is free."
)


def run_of(text: str) -> Diagnosis:
    return read_log([text.encode()]).runs[0]


@pytest.mark.parametrize(
    ("sentence", "settings", "worked"),
    [
        ("With --enforce-eager it starts fine.", {"enforce_eager": True}, True),
        ("Without LoRA the server runs fine.", {"enable_lora": None}, True),
        ("It happens only with speculative decoding.", {"speculative_config": None}, True),
        ("`--speculative-config` at 128K (without it the same command serves)", {"speculative_config": None}, True),
        ("Lowering gpu_memory_utilization from 0.95 to 0.88 solved it.", {"gpu_memory_utilization": 0.88}, True),
        ("With --max-num-seqs 512 it OOMs, with 128 it is fine.", {"max_num_seqs": 128}, True),
        ("--max-model-len 131072 fails, 65536 works", {"max_model_len": 65536}, True),
        ("gpu_memory_utilization 0.05 (at 0.10: 0/15 crashes)", {"gpu_memory_utilization": 0.1}, True),
        ("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0 helps", {"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0"}, True),
        ("I tried --max-model-len 4096 and it did not help.", {"max_model_len": 4096}, False),
    ],
)
def test_a_clause_says_with_which_settings_the_server_started(
    sentence: str, settings: dict[str, Any], worked: bool
) -> None:
    assert (settings, worked) in [(told, does) for told, does, _ in contrasts(sentence, latest())]


@pytest.mark.parametrize(
    "sentence",
    [
        "It starts at --gpu-memory-utilization 0.97 and then dies on the first request.",
        "We run --max-num-seqs 64 on this server.",
    ],
)
def test_a_server_that_dies_later_or_is_only_described_is_no_contrast(sentence: str) -> None:
    assert not any(worked for _, worked, _ in contrasts(sentence, latest()))


@pytest.mark.parametrize(
    ("text", "cause", "flags"),
    [
        (f"`--max-model-len 131072` fails, 65536 works:\n\n{SHORT}", "kv_too_small", {"max_model_len": 65536}),
        (
            "Without LoRA the server runs fine, with --enable-lora it OOMs at startup.\n"
            + OOM.format("224.00 MiB", 23.68, 110),
            "lora_or_spec",
            {"enable_lora": None},
        ),
        (
            "OOM at startup only with speculative decoding, util 0.92, Qwen/Qwen3-14B on an L40S.",
            "lora_or_spec",
            {"speculative_config": None},
        ),
    ],
)
def test_what_the_text_says_works_is_the_first_fix_and_names_the_cause(
    text: str, cause: str, flags: dict[str, Any]
) -> None:
    finding = run_of(text).findings[0]
    assert finding.cause.startswith(cause)
    assert dict(finding.fixes[0].flags) == flags


def test_the_settings_of_a_clause_that_worked_are_not_those_of_the_failed_run() -> None:
    run = run_of(f"What worked was --gpu-memory-utilization 0.97 --enforce-eager.\n{SHORT}")
    assert run.case.startup.args.enforce_eager is None
    assert dict(run.findings[0].fixes[0].flags) == {"gpu_memory_utilization": 0.97, "enforce_eager": True}


def test_two_services_that_load_at_once_are_charged_each_others_memory() -> None:
    text = """a  | INFO 03-09 12:54:16 [utils.py:238] non-default args: {'model': 'Qwen/Qwen3-4B'}
b  | INFO 03-09 12:54:16 [utils.py:238] non-default args: {'model': 'Qwen/Qwen3-8B', 'gpu_memory_utilization': 0.5}
b  | INFO 03-09 12:54:47 [gpu_model_runner.py:4344] Model loading took 15.27 GiB memory and 5.4 seconds
b  | INFO 03-09 12:55:28 [gpu_worker.py:424] Available KV cache memory: 4.43 GiB
b  | INFO:     Application startup complete.
a  | INFO 03-09 12:56:01 [gpu_model_runner.py:4344] Model loading took 7.55 GiB memory and 80.1 seconds
a  | INFO 03-09 12:56:44 [gpu_worker.py:424] Available KV cache memory: -8.59 GiB
a  | ERROR 03-09 12:56:44 [core.py:1100] ValueError: No available memory for the cache blocks.
"""
    run = run_of(text)
    assert run.case.startup.args.model == "Qwen/Qwen3-4B"
    assert [other.args.model for other in run.case.neighbours] == ["Qwen/Qwen3-8B"]
    assert run.findings[0].cause == "gpu_shared_or_not_free"
    assert run.findings[0].fixes[0].kind == "sequence_starts_or_wait"


def test_of_two_commands_the_one_whose_length_was_refused_is_meant() -> None:
    chat = "vllm serve Qwen/Qwen3-8B --max-model-len 131072 --gpu-memory-utilization 0.6"
    embed = "vllm serve Qwen/Qwen3-Embedding-8B --max-model-len 8192 --gpu-memory-utilization 0.2"
    assert run_of(f"{chat}\n{embed}\n\n{SHORT}").findings[0].fixes[0].command[2] == "Qwen/Qwen3-8B"


def test_the_last_attempt_counts_and_earlier_ones_bound_its_share() -> None:
    text = (
        f"Attempt 1: --gpu-memory-utilization 0.9\n  {SHORT}\nAttempt 2: --gpu-memory-utilization 0.97\n  "
        + OOM.format("148.00 MiB", 23.69, 72)
        + " (during CUDA graph capture)\n"
    )
    run = run_of(text)
    assert run.findings[0].cause == "cudagraph_capture_oom"
    assert run.case.too_small_share == 0.9
    assert all(fix.flags.get("gpu_memory_utilization", 1) > 0.9 for fix in run.findings[0].fixes)


def test_vllms_own_share_is_taken_before_a_computed_one() -> None:
    advice = (
        "--gpu-memory-utilization=0.8000 is equivalent to --gpu-memory-utilization=0.7611 without CUDA graph memory "
        "profiling. To maintain the same effective KV cache size, increase --gpu-memory-utilization to 0.8389."
    )
    assert dict(run_of(f"{SHORT}\n{advice}").findings[0].fixes[0].flags) == {"gpu_memory_utilization": 0.8389}


def test_a_share_of_the_host_that_every_rank_pins_is_compared_with_its_ram() -> None:
    text = "vLLM fails to start with max_local_cpu_size: 100 and -tp 4.\nMemory size: 256GB\n--tensor-parallel-size 4\n"
    finding = run_of(text).findings[0]
    assert finding.cause == "host_ram_oom" and "48 GB or less" in finding.fixes[0].steps[0]


def test_what_is_fixed_by_design_fixed_nothing() -> None:
    assert not list(contrasts("On a TP4 service, fixed startup allocation with TP4 left each rank 218 MiB.", latest()))
    assert list(contrasts("TP=4 fixed it.", latest()))
