"""Values that a text calls failing bound the fix; other programs, trainers and one memory are told by their signs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from legroom.diagnosis.finding import Fix
from legroom.diagnosis.log_diagnosis import read_log
from legroom.diagnosis.verdict import Diagnosis
from legroom.render.diagnosis_text import diagnosis_text

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of {} GiB of which "
    "{} MiB is free. Of the allocated memory {} GiB is allocated by PyTorch, and 30.00 MiB is reserved by PyTorch but "
    "unallocated."
)
PROFILE = '  File "/x/vllm/worker/worker.py", line 2, in determine_num_available_blocks\n'


def run_of(text: str) -> Diagnosis:
    return read_log([text.encode()]).runs[0]


def share_of(fix: Fix) -> float:
    return float(fix.flags.get("gpu_memory_utilization", 0))


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("utilization: 0.75 works; 0.85 caused a CUDA OOM during graph capture", lambda share: share in (0, 0.75, 0.8)),
        (
            "vLLM OOMs on the first request at 0.96.\n0.88 -> 1.1 GB cache: it aborts, cache below one context\n"
            "0.96 -> 9.7 GB cache: OOMs on the first request",
            lambda share: share == 0 or 0.88 < share < 0.96,
        ),
        ("prompt_logprobs OOM 7.1GiB while serving requests at util 0.7", lambda share: share < 0.7),
    ],
)
def test_no_fix_lies_on_the_failing_side_of_a_share_that_the_text_says_failed(
    text: str, is_right: Callable[[float], bool]
) -> None:
    fixes = run_of(text).findings[0].fixes
    assert fixes and all(is_right(share_of(fix)) for fix in fixes)


def test_a_fixed_share_is_no_share_that_fixed_it() -> None:
    run = run_of("At fixed `gpu_memory_utilization=0.9` every rank ran out: CUDA out of memory.")
    assert not any(worked for _, worked in run.case.reported)


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("Not enough memory for 9000 tokens: decrease `--max-batch-prefill-tokens`", "engine_tgi"),
        ("Error: model requires more system memory (40.1 GiB) than is available (30.2 GiB)", "engine_ollama"),
        ("vllm.cpp built with VLLM_CPP_CUDA: cuda out of memory after 5 s", "engine_vllm_cpp"),
        ("allocation_mode: sglang:d2t2\nresult: cuda out of memory", "engine_sglang"),
        (
            f"2026-01-02 03:04:05,678 xinference.core.model 77 ERROR {OOM.format('1.00 GiB', '15.70', 900, '6.10')}",
            "engine_xinference",
        ),
    ],
)
def test_the_memory_of_another_program_is_not_diagnosed_as_vllms(text: str, engine: str) -> None:
    run = run_of(text)
    assert not run.findings
    assert run.case.has(engine)


@pytest.mark.parametrize(
    ("text", "engine", "step"),
    [
        ("[TensorRT-LLM][ERROR] Assertion failed: d == a + length (x.cpp:3)", "TensorRT-LLM", "build the engine again"),
        ('  File "/x/sglang/srt/server.py", line 3, in launch\nValueError: a parser', "SGLang", "issues of SGLang"),
        ("ggml_cuda_init: found 1 ROCm devices\nROCm error: invalid device function", "llama.cpp", "of llama.cpp"),
        ("[TM][FATAL] x.cu(212): Check failed: a == b", "LMDeploy", "one feature at a time"),
    ],
)
def test_what_fails_in_another_engine_beside_memory_is_named_with_steps_of_any_engine(
    text: str, engine: str, step: str
) -> None:
    run = run_of(text)
    steps = [step for fix in run.findings[0].fixes for step in fix.steps]
    assert run.verdict == "not a memory problem"
    assert engine in diagnosis_text(run).splitlines()[0]
    assert any(step in each for each in steps) and not any("vllm" in each.lower() for each in steps)


@pytest.mark.parametrize(
    ("text", "lever"),
    [
        (
            'File "/x/nanovllm/engine/model_runner.py", line 9\n    assert config.num_kvcache_blocks > 0',
            "gpu_memory_utilization",
        ),
        ('File "/x/sglang/srt/x.py", line 3\nRuntimeError: Not enough memory. Please increase --mem-fraction-static',
         "raise --mem-fraction-static"),
        ("llama_kv_cache_init: failed to allocate buffer for kv cache: out of memory", "--ctx-size"),
    ],
)  # fmt: skip
def test_a_memory_message_of_another_engine_is_told_what_it_means_there(text: str, lever: str) -> None:
    run = run_of(text)
    assert not run.findings and lever in run.notes[1]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (f'{OOM.format("3.00 GiB", "79.19", 900, "70.00")}\n  File "x/ppo_utils.py", line 2, in loss', "sleep_mode"),
        ("I ran train_math.sh and got: No available memory for the cache blocks.", "sleep_mode"),
        ("slurmstepd: error: Some of the step tasks have been OOM Killed.", "host_ram_oom"),
        ("from unsloth import FastLanguageModel: it goes OOM on a 4090", "sleep_mode"),
        ("It OOMs after training for 120 steps", "sleep_mode"),
        ("vLLM holds onto memory even after its shutdown", "gpu_shared"),
        ("vLLM 启动后显存越占越多", "leak_over_time"),
        ("vLLM OOMs while loading a 13B model; the same server starts alone", "gpu_shared"),
        ("My RAM is occupied by vLLM and other containers go OOM", "host_ram_oom"),
        ("The worker exits with return code = -7", "host_ram_oom"),
        ("模型加载完成后推理时OOM", "runtime_activation_burst"),
        ("On a jetson agx orin, why does vLLM take so much GPU memory?", "unified_memory"),
        ("There is no response anymore after the model is loaded by vllm serve", "not_memory"),
        ("Collecting flash-attn==2.8.2\n  Downloading flash_attn-2.8.2.tar.gz (8 MB)\nRAM is full", "not_memory"),
        ("Failed: Cuda error x/custom_all_reduce.cuh:455\n'an illegal memory access was encountered'", "not_memory"),
        (f"{PROFILE}{OOM.format('100.00 MiB', '14.58', 90, '14.35')}", "weights_too_big"),
        (f"{PROFILE}{OOM.format('1.20 GiB', '14.58', 900, '13.20')}", "profiling_activation_peak"),
        ("It OOMs in profile_cudagraph_memory with 45 GiB of weights per rank", "cudagraph_capture_oom"),
        ("spark-12ab kernel: oom-kill:constraint=CONSTRAINT_NONE,global_oom,task=VLLM::EngineCor", "unified_memory"),
        ("On a UMA iGPU the page cache counts: Free memory on device xpu:0 is less than desired GPU memory "
         "utilization.", "unified_memory"),
    ],
)  # fmt: skip
def test_the_cause_is(text: str, cause: str) -> None:
    assert run_of(text).findings[0].cause.startswith(cause)


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("It OOMs in profile_cudagraph_memory", lambda fix: fix.flags.keys() == {"max_cudagraph_capture_size"}),
        (
            "DGX Spark: the page cache of a cold load is counted, so no memory is left for the KV cache",
            lambda fix: "--kv-cache-memory-bytes" in fix.steps[0],
        ),
        (
            "Memory on the node (IP: 10.0.0.1) was 110.40GB / 121.60GB (0.9), which exceeds the memory usage threshold",
            lambda fix: fix.kind == "lower_util",
        ),
        (
            "Memory on the node (IP: 10.0.0.1) was 119.40GB / 125.60GB (0.9), which exceeds the memory usage threshold",
            lambda fix: fix.kind == "more_host_ram_or_shm",
        ),
        ("Two LLM engines on the same GPU go OOM", lambda fix: "second only after the first" in fix.steps[0]),
        ("A Strix Halo with gpu_memory_utilization=0.92 OOMs the host", lambda fix: share_of(fix) < 0.92),
    ],
)
def test_the_first_fix_is(text: str, is_right: Callable[[Fix], bool]) -> None:
    fix = run_of(text).findings[0].fixes[0]
    assert is_right(fix), fix
