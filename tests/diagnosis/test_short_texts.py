"""Failures told in a few lines or in prose: the cause, and a number that the given settings lead to."""

from __future__ import annotations

import re

import pytest

from legroom.diagnosis.causes.host_ram_oom import is_bare_kill
from legroom.diagnosis.confidence import first_fix_success_rate
from legroom.diagnosis.finding import Finding, Fix
from legroom.diagnosis.fixes.failed_run import Hints
from legroom.diagnosis.log_diagnosis import read_log
from legroom.render.diagnosis_text import diagnosis_text
from legroom.units import GIB, MIB


def first(text: str) -> Finding:
    return read_log([text.encode()]).runs[0].findings[0]


def fix(text: str) -> Fix:
    return first(text).fixes[0]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("the kernel OOM-killed VLLM::EngineCore while it read the weights", "host_ram_oom"),
        ("vllm serve Qwen/Qwen3-8B\nGetötet", "host_ram_oom"),
        ("vLLM died: drafter OOM in propose, it needed 300 MiB with 90 MiB free", "lora_or_spec_decode_extra"),
        ("$ vllm serve ...\nValueError: 3.00 GiB KV cache is needed, available 1.20 GiB", "kv_too_small_for_max_len"),
        (
            "vLLM stops with CUDA Out of Memory\n"
            '  File "/x/vllm/v1/worker/gpu_model_runner.py", line 9, in capture_model\n    self._dummy_run(1)',
            "cudagraph_capture_oom",
        ),
        (
            "Free memory on device cuda:1 (… GiB) on startup is less than desired GPU memory utilization (0.8, … GiB)",
            "gpu_shared_or_not_free",
        ),
        (
            "log: Free memory on device ... less than desired GPU memory utilization (0.7, 56 GiB)",
            "gpu_shared_or_not_free",
        ),
        (
            "    # vLLM ended with Free memory on device cuda:0\n    # (20.5/79.3 GiB) ... less than desired "
            "GPU memory utilization (0.6)",
            "gpu_shared_or_not_free",
        ),
        ("vLLM: startup check failed (free=21.3 GB < util*total=22.8 GB)", "gpu_shared_or_not_free"),
        ("Ray killed the vLLM actor as the node got low on memory", "host_ram_oom"),
        ("vllm 0.11.0: host RAM climbs to 98 % while loading, both GPUs are nearly empty", "host_ram_oom"),
        ("vLLM on a Jetson takes all the memory, then the machine hangs", "unified_memory_or_wsl"),
        ("our machine runs out of memory when vLLM loads: RAM is full, Linux starts swapping", "host_ram_oom"),
        ("vLLM's KV cache memory is -2.1 GiB and the engine does not start", "no_cache_blocks"),
        ("vllm says I should reduce max_model_len, the KV cache space is too small", "kv_too_small_for_max_len"),
        ("vLLM was killed with Ctrl-C, nvidia-smi still shows 20 GB in use, it OOMs now", "gpu_shared_or_not_free"),
        ("two LLM() objects in one Python script with vllm: CUDA OOM", "gpu_shared_or_not_free"),
        ("a colleague's job holds 30 GB of the A100, vLLM crashes at once", "gpu_shared_or_not_free"),
        ("vLLM startup: free memory 8.0 of 23.5 GiB is below the share", "gpu_shared_or_not_free"),
        ("vLLM OOM in _dummy_run with max-num-seqs 2048", "profiling_activation_peak"),
        ("enabling speculative decoding pushes vLLM into OOM", "lora_or_spec_decode_extra"),
        ("vLLM with LoRA OOMs with max_loras 32; with max_loras 4 it is okay", "lora_or_spec_decode_extra"),
        ("vllm 显存一直在涨，最后 OOM", "leak_over_time"),
        ("the vLLM server with much offloading is finally killed by the kernel", "host_ram_oom"),
        ("for a long context vLLM stops since only 50,000 tokens fit into the KV cache", "kv_too_small_for_max_len"),
        ("somebody else's process sits on GPU 0, vLLM: out of memory", "gpu_shared_or_not_free"),
        ("each test creates a new LLM with vllm, then CUDA OOM", "gpu_shared_or_not_free"),
        ("vLLM TP 16: NCCL says Cuda failure out of memory", "nccl_or_custom_allreduce_buffers"),
        ("vLLM on a 48 GB card: OOM while quantizing a 30B model", "quantization_kernel_workspace"),
        ("vLLM after 10k requests: VRAM 40 GB -> 44 GB -> 47 GB, finally OOM", "leak_over_time"),
        ("vLLM says 13.1 GiB KV cache is required for the 128k context, 11.8 are there", "kv_too_small_for_max_len"),
        ("a Medusa draft model makes vLLM run out of memory, removing it helps", "lora_or_spec_decode_extra"),
        ("custom all reduce: CUDA error out of memory in vLLM at 0.99", "nccl_or_custom_allreduce_buffers"),
        ("vLLM on an Orin: the board freezes, memory and swap are full", "unified_memory_or_wsl"),
        ("with --swap-space 40, TP 4 and 128 GB of RAM the vLLM server does not come up", "host_ram_oom"),
        ("the container with vLLM exits with code 137 while loading", "host_ram_oom"),
        ("a vLLM worker was killed because of memory pressure, says Ray", "host_ram_oom"),
        ("VRAM of our vLLM 0.9.2 server increases by 80 MB after every batch until it OOMs", "leak_over_time"),
        ("vllm: RSS grows about 2 GB per hour at constant load", "leak_over_time"),
        ("vllm: the KV cache holds only 9,000 tokens", "kv_too_small_for_max_len"),
        ("70 GB are used by a zombie python process, vllm fails with CUDA out of memory", "gpu_shared_or_not_free"),
        ("vLLM fails at startup, free memory is less than requested", "gpu_shared_or_not_free"),
        ("rerunning the cell that makes the vLLM engine ends in CUDA OOM", "gpu_shared_or_not_free"),
        ("vLLM only starts with --enforce-eager, else CUDA OOM", "cudagraph_capture_oom"),
        ("LLaVA with many images runs out of GPU memory in vLLM's vision tower", "multimodal_inputs"),
        ("vLLM: requests are often preempted, throughput is low", "kv_preemption_thrash"),
        ("NCCL init fails with out of memory in vLLM with TP 4", "nccl_or_custom_allreduce_buffers"),
        ("our vLLM server: VRAM is not freed after a request, each new request uses some more", "leak_over_time"),
        ("vllm 0.9.2 stops for lack of cache blocks", "no_cache_blocks"),
        ("NCCL ran out of memory with vLLM under load", "nccl_or_custom_allreduce_buffers"),
        (
            "vLLM CPU: available memory on node 1 (20.00/64.00 GiB) during KV cache allocation is less than requested "
            "for kv (30.00/32.00 GiB)",
            "host_ram_oom",
        ),
        (
            "vllm: OutOfMemoryError, wanted 96.00 MiB; the card has 23.57 GiB total with 20.00 MiB free, this process "
            "holds 23.40 GiB, PyTorch allocated 23.10 GiB and 4.00 MiB is reserved but unallocated",
            "weights_too_big",
        ),
        (
            "vLLM-ascend in _allocate_kv_cache_tensors: NPU out of memory, tried 2.00 GiB; 60.96 GiB total, 57.00 GiB "
            "allocated, 1.50 GiB free, 58.20 GiB reserved.",
            "profiling_activation_peak",
        ),
        (
            "vllm answers easily what fits. With max-model-len 32000 and echo=True, logprobs=1 it ends in CUDA OOM",
            "runtime_activation_burst",
        ),
        (
            "ValueError: The model's max seq len (40960) is larger than the maximum number of tokens\nthat can be "
            "stored in KV cache. Try increasing gpu_memory_utilization",
            "kv_too_small_for_max_len",
        ),
    ],
)
def test_prose_names_the_cause(text: str, cause: str) -> None:
    assert first(text).cause == cause


POD = """    Image:         vllm/vllm-openai:v0.10.2
    Args:
      --model
      meta-llama/Llama-3.3-70B-Instruct
      --tensor-parallel-size
      4
    Last State:     Terminated
      Reason:       OOMKilled
      Exit Code:    137
    Limits:
      memory:          32Gi
"""
PROBE = "  Warning  Unhealthy  3m  kubelet  Startup probe failed: connection refused\n"


def test_an_oom_killed_pod_is_told_its_limit_and_what_the_plan_asks_for() -> None:
    run = read_log([POD.encode()]).runs[0]
    assert run.case.startup.vllm == "0.10.2"
    why = run.findings[0].fixes[0].why
    assert "limit found is 32.00 GiB" in why and "checkpoint alone is 131.5" in why
    asked = re.search(r"holds ([\d.]+) GiB for good and recommends a limit of ([\d.]+) GiB", why)
    assert asked is not None and float(asked[2]) > 32 > float(asked[1]) > 16


def test_a_failed_probe_ends_a_container_unless_the_platform_names_memory() -> None:
    assert first(POD.replace("OOMKilled", "Error") + PROBE).cause == "not_memory"
    assert "failureThreshold" in fix(POD.replace("OOMKilled", "Error") + PROBE).steps[0]
    assert (
        first("Image: vllm/vllm-openai\nContainer vllm failed liveness probe, will be restarted").cause == "not_memory"
    )
    assert first(POD + PROBE).cause == "host_ram_oom"


def test_an_exit_code_alone_proves_no_cause() -> None:
    text = "Back-off restarting failed container\ncommand terminated with exit code 137\n"
    assert "find who sent it" in fix(text).steps[0]
    assert is_bare_kill(first(text).evidence) and not is_bare_kill(first(POD).evidence)
    shown = [diagnosis_text(read_log([each.encode()]).runs[0]).partition("\n")[0] for each in (text, POD)]
    assert "is not proven" in shown[0] and "the host ran out of memory" in shown[1]


@pytest.mark.parametrize(("model", "is_impossible"), [("Llama-3.1-8B-Instruct", True), ("Llama-3.2-1B", False)])
def test_a_lower_share_is_a_dead_end_where_the_weights_exceed_what_is_free(model: str, is_impossible: bool) -> None:
    text = (
        f"$ vllm serve meta-llama/{model}\nValueError: Free memory on device cuda:0 (10.1/79.1 GiB) on startup is less "
        "than desired GPU memory utilization (0.9, 71.19 GiB). Decrease GPU memory utilization or reduce GPU memory "
        "used by other processes."
    )
    run = read_log([text.encode()]).runs[0]
    ends = [end.why_fails for end in run.findings[0].dead_ends if end.action == "lower gpu_memory_utilization"]
    assert [re.findall(r"[\d.]+ GiB", why) for why in ends] == [["15.00 GiB", "10.10 GiB"]] * is_impossible
    assert "phase: start-up, before loading" in diagnosis_text(run)
    assert any("legroom doctor" in step for each in run.findings[0].fixes for step in each.steps)


@pytest.mark.parametrize(("free", "is_explained"), [("61.00 MiB", False), ("7.20 GiB", True)])
def test_memory_that_the_plan_does_not_explain_is_said_and_the_fix_is_less_sure(free: str, is_explained: bool) -> None:
    text = (
        "$ vllm serve meta-llama/Llama-3.1-8B-Instruct --gpu-memory-utilization 0.9\n"
        "INFO 09-20 10:00:00 [__init__.py:1] vLLM API server version 0.10.2\n"
        "INFO 09-20 10:00:40 [gpu_worker.py:298] Available KV cache memory: 54.00 GiB\n"
        '  File "/x/vllm/v1/worker/gpu_model_runner.py", line 2900, in capture_model\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of "
        f"79.10 GiB of which {free} is free. Of the allocated memory 70.00 GiB is allocated by PyTorch.\n"
    )
    found = first(text)
    assert found.cause == "cudagraph_capture_oom" and found.fixes[0].plan is not None
    assert ("The plan does not explain 7." in found.why) == (not is_explained)
    ground = "plan" if is_explained else "experience"
    assert found.fixes[0].confidence == first_fix_success_rate(ground)


def test_sizes_in_prose_are_the_shortage() -> None:
    text = "$ --kv-cache-memory-bytes 4GiB\nOutOfMemoryError on a 300 MiB buffer with 200 MiB free\nEngineDeadError"
    assert 3 * GIB < fix(text).flags["kv_cache_memory_bytes"] <= 4 * GIB - 100 * MIB


def test_a_small_share_grows_by_what_is_missing() -> None:
    share = fix("$ gpu_memory_utilization=0.4\nAvailable KV cache memory: -2.50 GiB").flags["gpu_memory_utilization"]
    assert 0.5 < share < 0.6


def test_a_share_that_cannot_give_what_is_missing_is_not_proposed_alone() -> None:
    text = "$ --gpu-memory-utilization 0.9\nAvailable KV cache memory: -2.20 GiB\nmodel weights 17.0 GiB"
    assert fix(text).flags == {"gpu_memory_utilization": 0.95, "max_num_batched_tokens": 1024}
    assert fix(f"vLLM version 0.21.0\n{text}").flags.get("enforce_eager")  # graphs are inside the budget


def test_steps_far_above_the_default_are_lowered_first() -> None:
    text = "$ --max-num-batched-tokens 65536\nAvailable KV cache memory: -6.50 GiB"
    assert fix(text).flags == {"max_num_batched_tokens": 2048}


def test_weights_that_loaded_are_split_before_they_are_rounded() -> None:
    text = "Model loading took 60.00 GiB\nAvailable KV cache memory: -20.00 GiB"
    assert fix(text).kind == "more_or_fewer_gpus_tp_pp"


def test_more_charged_than_a_server_holds_is_a_neighbour() -> None:
    text = "$ --gpu-memory-utilization 0.2\nModel loading took 15.00 GiB memory\nAvailable KV cache memory: -30.00 GiB"
    assert set(fix(text).flags) == {"kv_cache_memory_bytes"}


def test_an_override_below_the_measured_pool_is_raised() -> None:
    text = (
        "$ --max-model-len 200000 --num-gpu-blocks-override 300\nAvailable KV cache memory: 3.00 GiB\n"
        "To serve at least one request with the model's max seq len (200000), (0.90 GiB KV cache is needed, which is "
        "larger than the available KV cache memory (0.20 GiB)."
    )
    assert 300 * 0.9 / 0.2 < fix(text).flags["num_gpu_blocks_override"] < 300 * 3 / 0.2


def test_the_killed_process_and_whose_limit_it_was_are_read() -> None:
    text = (
        "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),global_oom,task=VLLM::EngineCor,pid=7,uid=0\n"
        "Out of memory: Killed process 7 (VLLM::EngineCor) total-vm:9kB, anon-rss:8388608kB"
    )
    assert "VLLM::EngineCor" in first(text).why
    assert "container" not in fix(text).steps[0]


def test_sleep_mode_keeps_weights_in_ram() -> None:
    text = "$ train --vllm_enable_sleep --vllm_num_engines 8\nTask was killed due to the node running low on memory."
    assert "sleep" in fix(text).steps[0]


def test_an_adapter_above_the_largest_rank_is_a_setting() -> None:
    text = "ValueError: LoRA rank 48 is greater than max_lora_rank 16."
    assert first(text).cause == "wrong_flag"
    assert fix(text).flags == {"max_lora_rank": 64}


@pytest.mark.parametrize(("asked", "taken"), [(100, 128), (1000, 512), (0, 1)])
def test_a_number_that_pydantic_refuses_becomes_the_next_that_it_lists(asked: int, taken: int) -> None:
    text = (
        f"vllm serve Qwen/Qwen3-8B --enable-lora --max-lora-rank {asked}\n"
        "(APIServer pid=9) pydantic_core._pydantic_core.ValidationError: 1 validation error for LoRAConfig\n"
        "(APIServer pid=9) max_lora_rank\n(APIServer pid=9)   Input should be 1, 8, 16, 32, 64, 128, 256, 320 or 512 "
        f"[type=literal_error, input_value={asked}, input_type=int]\n"
    )
    assert fix(text).flags == {"max_lora_rank": taken}
    assert fix(text).command[-1] == str(taken)


@pytest.mark.parametrize(
    ("gpus", "flags"), [(2, {"tensor_parallel_size": 2}), (3, {"tensor_parallel_size": 2}), (1, {})]
)
def test_with_fewer_gpus_than_ranks_the_plan_says_on_how_many_it_starts(gpus: int, flags: dict[str, int]) -> None:
    text = f"ValueError: World size (8) is larger than the number of available GPUs ({gpus}) in this node."
    command = "vllm serve Qwen/Qwen3-32B --tensor-parallel-size 8 --max-model-len 8192"
    hints = Hints(command=command, gpu="a100-40gb", gpus=gpus)
    told = read_log([text.encode()], "log", hints).runs[0].findings[0].fixes[0]
    assert (told.flags, "does not fit" in told.why) == (flags, not flags)


def test_a_share_that_holds_no_weights_quantized_at_load_is_told_beside_the_neighbour() -> None:
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 340.00 MiB. GPU 0 has a total capacity of "
        "139.80 GiB of which 120.00 MiB is free. Process 77 has 122.00 GiB memory in use. Including non-PyTorch "
        "memory, this process has 17.60 GiB memory in use. Of the allocated memory 16.90 GiB by PyTorch, and "
        '100.00 MiB is reserved by PyTorch but unallocated.\n  File "fp8.py", line 5, in process_weights_after_loading'
    )
    command = "vllm serve Qwen/Qwen3-14B --gpu-memory-utilization 0.1 --max-model-len 4096 --quantization fp8"
    found = read_log([text.encode()], "log", Hints(command=command, gpu="h200")).runs[0].findings[0]
    assert found.cause == "gpu_shared_or_not_free"
    assert re.search(r"--gpu-memory-utilization 0\.1[4-9] or more: the weights take 15", " ".join(found.fixes[0].steps))


def test_prompt_logits_in_chunks_do_not_follow_the_tokens_of_a_step() -> None:
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 304.00 MiB."
    text = f"compute_prompt_logprobs_with_chunking\n  -> Model.compute_logits\n{oom}\nEngineDeadError"
    assert [other.kind for other in first(text).fixes][:2] == ["request", "lower_util"]


def test_an_engine_that_wakes_in_a_rank_shares_its_card_with_a_trainer() -> None:
    text = (
        '[rank0]:   File "/x/vllm/device_allocator/cumem.py", line 230, in wake_up\n'
        "[rank0]: RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62"
    )
    assert set(fix(text).flags) == {"gpu_memory_utilization"}


@pytest.mark.parametrize(
    ("text", "cause", "kind"),
    [
        (
            "vllm serve unsloth/Qwen3-8B\nMemoryError: CUDA out of memory while serving, on the 3rd request",
            "runtime_activation_burst",
            "lower_util",
        ),
        (
            "It starts and reports its pool. Then a single 512K-token request:\ntorch.OutOfMemoryError: CUDA out of "
            "memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of 44.39 GiB of which 151 MiB is free.",
            "runtime_activation_burst",
            "lower_util",
        ),
        (
            "$ --gpu-memory-utilization 0.9\n'Free memory on device cuda:0 (11.18/31.36 GiB) is less than desired ...'",
            "gpu_shared_or_not_free",
            "free_gpu_or_kill_orphans",
        ),
        (
            "DGX Spark, --gpu-memory-utilization 0.55\nAvailable KV cache memory: -1.95 GiB\n"
            "ValueError: No available memory for the cache blocks",
            "no_cache_blocks",
            "raise_util",
        ),
        (
            "RTX 4080 16GB\nModel loading took 13.6 GiB\nAvailable KV cache memory: -3.44 GiB\n"
            "ValueError: No available memory for the cache blocks",
            "no_cache_blocks",
            "checkpoint_format",
        ),
        ("The vllm pod crashes now and then due to OOM", "host_ram_oom", "more_host_ram_or_shm"),
        (
            "AssertionError: Preemptions detected: 24\ngpu_memory_utilization 0.05 of a vllm benchmark",
            "kv_preemption_thrash",
            "raise_util",
        ),
    ],
)
def test_the_first_fix_moves_what_is_short(text: str, cause: str, kind: str) -> None:
    assert (first(text).cause, fix(text).kind) == (cause, kind)


def test_another_engine_is_named_and_not_diagnosed() -> None:
    text = "python -m sglang.launch_server\nGPU memory keeps increasing until cuda out of memory for the coming request"
    assert not read_log([text.encode()]).runs[0].findings


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("a 24GB GPU with 50% GPU utilization\nAvailable KV cache memory: -4.78 GiB", 0.75),
        (
            "DGX Spark\nValueError: Free memory on device cuda:0 (109.32/119.63 GiB) on startup is less than desired "
            "GPU memory utilization (0.92, 110.06 GiB)",
            0.9,
        ),
        (
            "Strix Halo\nValueError: Free memory on device cuda:0 (57.38/124.0 GiB) on startup is less than desired "
            "GPU memory utilization (0.8, 99.2 GiB)",
            0.45,
        ),
        (
            "DGX Spark\nvllm serve Qwen/Qwen3-14B-FP8 --max-model-len 32768 --gpu-memory-utilization 0.15\n"
            "Model loading took 15.2 GiB\nAvailable KV cache memory: -1.30 GiB",
            0.21,
        ),
        (
            "Free memory on device cuda:0 (4.99/6.0 GiB) ... less than desired GPU memory utilization (0.85, 5.1 GiB)",
            0.74,
        ),
    ],
)
def test_the_share_follows_from_the_figures(text: str, share: float) -> None:
    assert fix(text).flags["gpu_memory_utilization"] == share


def test_two_engines_in_one_text_are_no_ranks() -> None:
    line = "(EngineCore pid={}) INFO 05-25 15:28:40 [gpu_worker.py:462] Available KV cache memory: {} GiB\n"
    error = "(EngineCore pid=208) ValueError: No available memory for the cache blocks"
    assert first(line.format(475, 16.42) + line.format(208, -6.54) + error).cause == "no_cache_blocks"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of "
            "15.91 GiB of which 15.80 GiB is free.",
            "driver_or_cuda_mismatch",
        ),
        ("vLLM OOMs at startup on my A100; nvidia-smi shows train.py using 61 GiB there", "gpu_shared_or_not_free"),
        ("a 70B model on a 24 GB card with vLLM: CUDA out of memory", "weights_too_big"),
        ("用 vllm 在一张 24G 的 4090 上部署 Qwen2.5-32B-Instruct，启动时报 CUDA out of memory", "weights_too_big"),
        ("vllm 服务启动正常，第一次推理就报 CUDA out of memory", "runtime_activation_burst"),
        (
            "Model loading took 15 GiB\nvLLM: OOM on the first inference\nCUDA out of memory.",
            "runtime_activation_burst",
        ),
        ("killed vllm with ctrl-c, GPU memory is still occupied and the next start OOMs", "gpu_shared_or_not_free"),
        ("Sleep mode freed 0.00 GiB memory, 35.20 GiB memory is still in use.", "sleep_mode_or_rlhf_colocation"),
        ("vllm: the max seq len 131072 is larger than the KV cache can hold", "kv_too_small_for_max_len"),
        ("NvMapMemAllocInternalTagged: 1075072515 error 12 while vllm loads", "unified_memory_or_wsl"),
        ("vllm GPU memory grows slowly; after 3 days of serving it dies with CUDA OOM", "leak_over_time"),
        ("HSA_STATUS_ERROR_EXCEPTION: a hardware exception\nvllm serve Qwen/Qwen3-8B", "not_memory"),
        ("vllm 启动时 FlashInfer 采样算子编译报错，nvcc 版本和头文件不兼容", "not_memory"),
        ("TypeError: Dispatcher.dispatch() got an unexpected keyword argument 'n' (vllm 0.11.0)", "not_memory"),
        ("Capturing CUDA graphs (PIECEWISE):  88%|##| 59/67 CUDA out of memory. vllm", "cudagraph_capture_oom"),
        ("Mixtral 8x22B with vLLM: OOM at 78% of the shards", "weights_too_big"),
        ("vllm gaudi: Allocation failed for size::2147483648 (2048)MB during warmup", "profiling_activation_peak"),
        ("vLLM 拒绝启动：max_model_len=131072 需要 16 GiB 的 KV cache，只有 9.2 GiB 可用", "kv_too_small_for_max_len"),
        ("another tenant runs a notebook on the GPU, vllm ends in CUDA out of memory", "gpu_shared_or_not_free"),
        ("WSL2: vllm is Killed during loading", "host_ram_oom"),
        ("GPU: 3090, model: Qwen2.5-32B-Instruct (bf16), vllm: CUDA out of memory", "weights_too_big"),
        ("a 10 minute video ends the vllm server of Qwen2.5-VL with CUDA out of memory", "multimodal_inputs"),
        ("残留的 VLLM::EngineCore 进程占着显存，重启 vllm 报 OOM", "gpu_shared_or_not_free"),
        ("vllm num_preemptions_total rising, latency explodes", "kv_preemption_thrash"),
        ("vllm-ascend: EZ9999: Inner Error! AICORE kernel execute failed", "not_memory"),
        ("vllm 一直卡在 NCCL 初始化", "not_memory"),
        (
            "[Bug]: OOM when processing Marlin weights (vllm)\nStarting to load model X...",
            "quantization_kernel_workspace",
        ),
    ],
)
def test_what_ran_short_is_read_from_a_sentence_or_its_sizes(text: str, cause: str) -> None:
    assert first(text).cause == cause


@pytest.mark.parametrize(
    ("text", "cause", "step"),
    [
        (
            "vLLM on a g4dn.xlarge with an unknown-7b model, --dtype float, ends in CUDA OOM",
            "weights_too_big",
            "--dtype float",
        ),
        ("vllm: Foo-8x22B on one A100 80GB, CUDA out of memory at start", "weights_too_big", "twice as many"),
        (
            "vllm 0.3.2: two engines on one A10, each with utilization 0.4; the second stops, no cache blocks",
            "gpu_shared_or_not_free",
            "--gpu-memory-utilization 0.8 ",
        ),
        (
            "vLLM with 2 GPUs, but both, two engines, start on GPU 0 and OOM",
            "gpu_shared_or_not_free",
            "one card for each engine",
        ),
        (
            "vLLM OOMs in the sampler with NCCL 2.27.3, not with 2.26.2",
            "nccl_or_custom_allreduce_buffers",
            "nvidia-nccl-cu12==2.26.2",
        ),
        (
            "vLLM's CPU worker died (-9); it does run when VLLM_CPU_OMP_THREADS_BIND is not set",
            "host_ram_oom",
            "unset VLLM_CPU_OMP_THREADS_BIND",
        ),
        (
            "vLLM with LMCache, TP 2, 256 GB RAM: with max_local_cpu_size 60 it starts. With 160 it does not.",
            "host_ram_oom",
            "of 96 GB or less",
        ),
    ],
)
def test_what_the_text_tells_is_in_the_first_step(text: str, cause: str, step: str) -> None:
    assert first(text).cause == cause
    assert step in first(text).fixes[0].steps[0]


def test_the_bound_of_an_image_that_the_text_gives_is_kept() -> None:
    told = "vLLM with Qwen2.5-VL-7B OOMs while profiling images; our processor limits them to 512x28x28 pixels"
    assert fix(told).flags == {"mm_processor_kwargs": {"max_pixels": 401408}}


def test_each_of_several_engines_on_one_card_gets_its_share() -> None:
    told = "vLLM: three processes, each builds its own LLM on a 24 GB card: CUDA out of memory"
    assert fix(told).flags == {"gpu_memory_utilization": 0.3}


def test_what_a_failure_needs_to_stay_away_is_the_fix() -> None:
    told = "vLLM with Qwen2.5-72B-Instruct on 8 RTX 3090 exceeds memory unless enforce_eager is on"
    assert first(told).cause == "cudagraph_capture_oom"
    assert fix(told).flags == {"enforce_eager": True}


def test_a_model_that_is_not_split_fills_one_card_with_its_weights() -> None:
    text = (
        "NPU out of memory, tried to allocate 1.90 GiB on NPU 0 (60.97 GiB total, 58.90 GiB already allocated, "
        "1.60 GiB free)"
    )
    hints = Hints(command="vllm serve Qwen/Qwen2.5-32B-Instruct -tp 2 --gpu-memory-utilization 0.6")
    finding = read_log([text.encode()], hints=hints).runs[0].findings[0]
    assert finding.cause == "weights_too_big"
    assert "VLLM_DP_RANK" in finding.fixes[0].steps[1]


def test_a_retold_check_gives_the_length_that_fits() -> None:
    told = "vllm: max model len of 40000 is longer than the KV cache can hold (36000)"
    assert fix(told).flags == {"max_model_len": 34816}


def test_sleeping_engines_are_named_where_host_memory_is_short() -> None:
    assert fix("16 vLLM engines with enable_sleep, the node is out of memory").kind == "other_engine_feature_off"


def test_a_share_of_a_few_per_cent_is_doubled_not_raised_to_the_whole_card() -> None:
    assert fix("vllm_gpu_memory=0.05 on H100 80GB: No available memory for the cache blocks").flags == {
        "gpu_memory_utilization": 0.1
    }


def test_weights_of_a_named_size_beyond_the_card_are_not_planned_where_the_server_served() -> None:
    text = "vllm: a 27B model on a 24 GB card, CUDA out of memory while it answers requests"
    assert first(text).cause == "runtime_activation_burst"


@pytest.mark.parametrize("engine", ["lightllm.server.api_start", "mlx_lm.server", "tabbyAPI: exllamav3/model.py"])
def test_the_log_of_another_engine_is_named(engine: str) -> None:
    run = read_log([f"{engine}\ntorch.OutOfMemoryError: CUDA out of memory.".encode()]).runs[0]
    assert not run.findings
    assert "not vLLM's" in run.notes[0]


def test_a_start_up_check_that_is_wrapped_between_two_words_keeps_its_figures() -> None:
    text = (
        "Free memory on device cuda:0 (105.35/117.51 GiB) on startup is less than\n"
        "desired GPU memory utilization (0.9, 105.76 GiB)."
    )
    assert fix(text).flags == {"gpu_memory_utilization": 0.89}


def test_a_refused_value_that_the_message_names_is_taken_out() -> None:
    text = "vllm serve Qwen/Qwen3-8B --kv-cache-dtype fp8_e5m2\nValueError: fp8_e5m2 is not supported by this backend"
    assert fix(text).flags == {"kv_cache_dtype": None}


def test_preemption_told_without_counts_sets_no_limit_of_zero() -> None:
    told = "vLLM under load: a sequence group is preempted (total_num_cumulative_preemption=1), then the engine is dead"
    (run,) = read_log([told.encode()], "log").runs
    assert run.findings[0].cause == "kv_preemption_thrash"
    assert not any(fix.flags.get("max_num_seqs") == 0 for finding in run.findings for fix in finding.fixes)
