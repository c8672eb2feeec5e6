"""Short texts of cards that another process holds a part of."""

from __future__ import annotations

import pytest
from short_logs import diagnosis, first, oom

NO_BLOCKS = "Available KV cache memory: {} GiB\nValueError: No available memory for the cache blocks.\n"


SERVING = 'File "/opt/vllm/v1/engine/core.py", line 700, in run_busy_loop\n'


def served_oom(own: float, total: float = 80.0) -> str:
    """A step of a server that holds `own` of the card fails for lack of 100 MiB."""
    return (
        f"{SERVING}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 200.00 MiB. GPU 0 has a total "
        f"capacity of {total:.2f} GiB of which 100.00 MiB is free. Process 7 has {total - own - 0.1:.2f} GiB memory in "
        f"use. Including non-PyTorch memory, this process has {own:.2f} GiB memory in use. Of the allocated memory "
        f"{own - 1:.2f} GiB is allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated.\n"
    )


def listed_oom(others: str, own: float, torch: float, unused: str = "14.00 MiB") -> str:
    return (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 786.00 MiB. GPU 0 has a total capacity of "
        f"44.35 GiB of which 739.50 MiB is free. {others}Including non-PyTorch memory, this process has {own:.2f} GiB "
        f"memory in use. Of the allocated memory {torch:.2f} GiB is allocated by PyTorch, and {unused} is reserved by "
        "PyTorch but unallocated.\n"
    )


def test_equal_shards_with_unequal_pools_share_a_card() -> None:
    line = "(Worker_TP{} pid=1) INFO 12-10 03:24:48 [gpu_worker.py:298] Available KV cache memory: {} GiB\n"
    failed = "(EngineCore_DP0 pid=4) ERROR 12-10 03:24:49 [core.py:708] EngineCore failed to start.\n"
    found = first(line.format(0, 9.9) + line.format(1, -3.86) + failed)
    assert found.cause == "gpu_shared_or_not_free"
    assert "13.76 GiB on the card of rank 1" in found.why
    assert first(line.format(0, -3.5) + line.format(1, -3.86) + failed).cause == "no_cache_blocks"


@pytest.mark.parametrize(
    ("free", "loaded", "kind"), [(111.99, 26.47, "lower_util"), (44.99, 3.0, "free_gpu_or_kill_orphans")]
)
def test_the_stage_of_the_same_server_is_no_orphan(free: float, loaded: float, kind: str) -> None:
    log = (
        "(Worker pid=2) ERROR 03-12 08:22:28 [multiproc_executor.py:800] ValueError: Free memory on device cuda:0 "
        f"({free}/139.8 GiB) on startup is less than desired GPU memory utilization (0.95, 132.81 GiB).\n"
        f"INFO 03-12 08:22:28 [model_runner.py:133] Model loading took {loaded} GiB and 13.1 seconds\n"
    )
    assert first(log).fixes[0].kind == kind


@pytest.mark.parametrize(("weights", "pool", "kind"), [(17.66, -0.99, "checkpoint_format"), (34.0, -0.3, "raise_util")])
def test_a_higher_share_is_a_fix_only_where_it_brings_what_is_missing(weights: float, pool: float, kind: str) -> None:
    log = f"Model loading took {weights} GiB\nAvailable KV cache memory: {pool} GiB\n"
    assert first(log).fixes[0].kind == kind


def test_a_wake_up_without_a_trainer_waits_for_the_other_server() -> None:
    wake = "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:139"
    assert first(f"Exception: Call to wake_up method failed: {wake}").fixes[0].kind == "sequence_starts_or_wait"
    assert first(f"(ActorModelRayActor pid=3) RuntimeError: {wake}").fixes[0].kind == "lower_util"


def test_a_small_share_means_a_second_server() -> None:
    log = (
        "ValueError: Free memory on device cuda:0 (2.6/79.2 GiB) on startup is less than desired GPU memory "
        "utilization (0.08, 6.3 GiB)."
    )
    assert "--gpu-memory-utilization 0.82 or less" in first(log).fixes[0].steps[1]


def test_the_own_process_holds_what_torch_holds() -> None:
    oom = (
        "CUDA out of memory. Tried to allocate 260.00 MiB. GPU 0 has a total capacity of 23.64 GiB of which 77.12 MiB "
        "is free. Process 7 has 19.19 GiB memory in use. Process 8 has 4.36 GiB memory in use. Of the allocated memory "
        "3.82 GiB is allocated by PyTorch, and 102.20 MiB is reserved by PyTorch but unallocated."
    )
    assert "(process 7 19.19 GiB; this one 4.36 GiB)" in first(oom).why


def test_an_empty_pool_beside_large_weights_needs_no_neighbour() -> None:
    log = "vllm {}\nERROR 04-27 11:08:32 [core.py:340] ValueError: No available memory for the cache blocks.\n"
    assert first(log.format("serve ...")).cause == "gpu_shared_or_not_free"
    large = first(
        log.format("Version: 0.8.1, two RTX 3090.\nvllm serve Qwen/Qwen2.5-32B-Instruct -tp 4 --enforce-eager")
    )
    assert large.cause == "no_cache_blocks"
    assert "the weights take" in large.why


def test_a_share_is_raised_for_the_smallest_card_that_the_figures_allow() -> None:
    log = "$ -tp 2 --gpu-memory-utilization 0.10\nLoading model weights took 28.4767 GB\n" + NO_BLOCKS.format(-23.55)
    fix = first(log).fixes[0]
    # 28.48 - 23.55 + 0.5 GiB are a tenth of 54.3 GiB at least, of which 24.55 GiB are 0.453.
    assert fix.flags == {"gpu_memory_utilization": 0.56}
    assert fix.command[-2:] == ("--tensor-parallel-size", "2")


@pytest.mark.parametrize("before", ["", "# two containers on the same GPU\n"])
def test_a_pool_far_below_zero_is_a_neighbour_s_first(before: str) -> None:
    missing = -6.5 if before else -30.18
    assert first(before + NO_BLOCKS.format(missing)).fixes[0].kind == "sequence_starts_or_wait"


def test_what_neither_torch_nor_this_process_holds_is_another_container_s() -> None:
    log = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 768.00 MiB. GPU 0 has a total capacity of 83.05 "
        "GiB of which 140.38 MiB is free. Including non-PyTorch memory, this process has 23.33 GiB memory in use. Of "
        "the allocated memory 21.92 GiB is allocated by PyTorch.\n"
    )
    assert first(log).cause == "gpu_shared_or_not_free"
    assert diagnosis("sglang.launch_server\n" + log).notes[0].startswith("59.58 GiB of the card belong to another")


def test_a_neighbour_that_torch_does_not_name_bounds_the_share_beside_it() -> None:
    steps = " ".join(first(oom(44.0, 0.5, 27.5, 0.0, "1.60 GiB", "CUDA")).fixes[0].steps)
    assert "--gpu-memory-utilization 0.62" in steps  # 16 GiB of 44 are another process's


@pytest.mark.parametrize(("own", "highest"), [(76.0, 0.9), (40.0, 0.5), (24.0, 0.3)])
def test_a_share_that_is_not_shown_is_at_most_what_the_server_holds(own: float, highest: float) -> None:
    fixes = [fix for finding in diagnosis(served_oom(own)).findings for fix in finding.fixes]
    shares = [fix.flags["gpu_memory_utilization"] for fix in fixes if fix.kind == "lower_util"]
    assert shares
    assert max(shares) < highest


def test_the_share_beside_listed_processes_is_what_they_leave() -> None:
    frame = '  File "vllm/worker/cache_engine.py", line 103, in _allocate_kv_cache\n'
    found = first(frame + listed_oom("Process 7 has 28.14 GiB memory in use. ", 15.49, 15.0))
    assert found.cause == "gpu_shared_or_not_free" and "process 7" in found.fixes[0].why
    assert {"gpu_memory_utilization": 0.3} in [
        dict(fix.flags) for fix in found.fixes
    ]  # the graphs and a live neighbour


def test_the_process_s_own_memory_is_no_neighbour_s() -> None:
    assert not diagnosis(listed_oom("", 43.6, 43.0)).case.has("neighbour_holds")


def test_orphans_that_a_failed_step_left_are_not_its_cause() -> None:
    frame = '  File "vllm/v1/sample/sampler.py", line 207, in compute_logprobs\n    return logits.log_softmax(dim=-1)\n'
    told = "vLLM leaves orphan processes when the parent dies of OOM\n"
    assert first(told).cause == "gpu_shared_or_not_free"
    assert first(told + frame).cause == "runtime_activation_burst"


def test_what_fills_an_integrated_gpu_is_limited_by_its_share_of_the_ram() -> None:
    frame = '  File "torch/utils/_device.py", line 109, in __torch_function__\n'
    found = first(frame + oom(62.47, 0.75, 61.41, 0.13, "1.08 GiB", "HIP"))
    assert (found.cause, found.fixes[0].kind) == ("unified_memory_or_wsl", "more_host_ram_or_shm")


@pytest.mark.parametrize(
    "told",
    [
        "vLLM: I cannot start two Qwen2.5-0.5B servers on a 8G 4060 Ti",
        "With vLLM the first container runs, the second container fails to start on the same card",
    ],
)
def test_a_second_server_that_does_not_start_shares_the_card(told: str) -> None:
    assert first(told).cause == "gpu_shared_or_not_free"


def test_a_release_that_charges_others_is_left() -> None:
    told = "vllm/vllm-openai:v0.8.5 with VLLM_USE_V1=1: the second container fails to start on the same card"
    assert "0.9.1" in first(told).fixes[0].steps[0]


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        ("vllm serve Qwen/Qwen2.5-7B-Instruct --gpu-memory-utilization 0.95", "gpu_shared_or_not_free"),
        ("vllm serve Qwen/Qwen2.5-32B-Instruct --gpu-memory-utilization 0.95", "weights_too_big"),
    ],
)
def test_weights_that_the_card_holds_with_ease_do_not_fill_it(command: str, cause: str) -> None:
    text = f"On the A100 40GB I run\n{command}\nand it dies while loading the model:\n"
    found = first(text + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 130.00 MiB.")
    assert found.cause == cause


def test_a_share_with_a_decimal_comma_is_read() -> None:
    text = "Qwen2.5-7B on an RTX 4090, gpu_memory_utilization 0,35: No available memory for the cache blocks."
    assert "8.27 GiB" in first(text).why


def test_a_share_behind_a_comparison_sign_is_the_failed_one() -> None:
    text = "Llama-3.1-8B on an L4 runs out of memory while capturing graphs with `--gpu-memory-utilization ≥ 0.85`."
    assert first(text).fixes[0].flags["gpu_memory_utilization"] < 0.85
