"""The first way out: what the text names, with its own amounts, for its program, platform and release."""

from __future__ import annotations

from legroom.diagnosis.finding import Finding, Fix
from legroom.diagnosis.log_diagnosis import read_log


def first(text: str) -> Finding:
    return read_log([text.encode()], "log").runs[0].findings[0]


def way(text: str) -> Fix:
    return first(text).fixes[0]


def test_the_limit_of_a_container_is_raised_only_where_one_is_named() -> None:
    machine = "vLLM on 4 GPUs, 64 GB of RAM: while it loads the weights the system OOM killer kills the process."
    assert "RAM or swap" in way(machine).steps[0]
    pod = "vLLM in a pod: while it loads the weights the pod is OOMKilled."
    assert "container's memory limit" in way(pod).steps[0]


def test_a_cpuset_is_a_limit_that_is_widened() -> None:
    kernel = (
        "[99] oom-kill:constraint=CONSTRAINT_CPUSET,nodemask=(null),cpuset=vllm,mems_allowed=1,global_oom\n"
        "[99] Out of memory: Killed process 77 (VLLM::Worker_TP) total-vm:9kB, anon-rss:9000000kB\n"
    )
    found = first(kernel)
    assert "NUMA" in found.fixes[0].steps[0]
    assert "cpuset" in found.why


def test_the_gpus_of_a_try_that_failed_are_the_present_and_the_next_are_twice_as_many() -> None:
    text = (
        "vLLM: we used 2 GPUs, which died:\n(original error: CUDA out of memory. Tried to allocate 768.00 "
        "MiB. GPU 0 has a total capacity of 95.01 GiB of which 438.31 MiB is free. Including non-PyTorch memory, this "
        "process has 94.57 GiB memory in use.)\n"
    )
    log = f"{text}ERROR [gpu_model_runner.py:5403] Failed to load model - not enough GPU memory.\n"
    assert way(log).flags == {"tensor_parallel_size": 4}


def test_nothing_of_the_hint_in_an_error_is_a_setting_of_the_user() -> None:
    log = (
        "ERROR [gpu_model_runner.py:5403] Failed to load model - not enough GPU memory.\nTry lowering\n"
        "--gpu-memory-utilization to free memory for weights, increasing\n--tensor-parallel-size, or using "
        "--quantization.\n(original error: CUDA out of memory. Tried to allocate 768.00 MiB.)\n"
    )
    assert not any("--quantization ''" in " ".join(fix.command) for fix in first(log).fixes)
    assert "''" not in str([fix.command for fix in first(log).fixes])


def test_what_stands_behind_a_comment_sign_is_no_setting() -> None:
    text = (
        "vllm serve, --gpu-memory-utilization 0.27\nAvailable KV cache memory: 1.27 GiB\nGPU KV cache size: 23,680 "
        "tokens   # block_size=128 -> 185 blocks\nRunning: 6 reqs, Waiting: 3 reqs, GPU KV cache usage: 100.0%\n"
    )
    assert not any("--block-size" in fix.command for fix in first(text).fixes)
