"""General knowledge that failures seen for the first time asked for: platforms, siblings, ranks and short texts."""

from __future__ import annotations

import pytest
from short_logs import diagnosis, first, oom

NO_BLOCKS = "Available KV cache memory: {} GiB\nValueError: No available memory for the cache blocks.\n"


LOADING = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 384.00 MiB. GPU 0 has a total capacity of 79.33 GiB "
    "of which 351.81 MiB is free. Of the allocated memory 78.33 GiB is allocated by PyTorch, and 12.36 MiB is reserved "
    "by PyTorch but unallocated.\n"
)


@pytest.mark.parametrize("available", [0, -1073741824])
def test_an_npu_prints_what_is_left_in_bytes(available: int) -> None:
    log = (
        f"(Worker_TP0 pid=7) INFO 10-28 21:14:48 [worker_v1.py:259] Available memory: {available}, total memory: "
        "65452113920\n(EngineCore_DP0 pid=4) ERROR 10-28 21:14:49 [core.py:708] EngineCore failed to start.\n"
    )
    assert first(log).cause == "no_cache_blocks"


def test_expandable_segments_of_an_npu_have_their_own_variable() -> None:
    smaller, join = first(oom(60.96, 2.0, 40.0, 12.0, "9.00 GiB")).fixes[:2]
    assert smaller.kind == "lower_util"
    assert join.env == {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}


def test_a_training_step_is_the_trainer_s() -> None:
    log = "  File 'x.py', line 4, in fit\n    loss.backward()\n" + oom(79.18, 1.0, 70.0, 1.0, "3.79 GiB", "CUDA")
    assert first(log).cause == "sleep_mode_or_rlhf_colocation"


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ('[rank1]:     assert camem_available, "camem allocator is not available"\n', "allocator"),
        ("AssertionError: cumem allocator is not available\n", "allocator"),
        (
            "[ERROR] HCCL(27,python3):2025-07-23 [hccl_socket.cc:100] socket type[1], listen on ip[10.0.0.1] and "
            "specific port[16666] fail.\n",
            "port 16666",
        ),
        ("[rank1]: EI0006: [PID: 12] Getting socket times out. Reason: Remote Rank did not send the data\n", "rank"),
    ],
)
def test_the_npus_messages_and_a_missing_allocator_are_named(line: str, word: str) -> None:
    found = diagnosis(line)
    assert found.verdict == "not a memory problem"
    assert word in found.findings[0].why


def test_torch_s_nvml_assertion_alone_is_not_sure() -> None:
    line = 'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":1154\n'
    assert first(line).confidence < 0.85
    assert first("NVIDIA Jetson AGX Orin\n" + line).cause == "unified_memory_or_wsl"


def test_media_larger_than_the_dummy_batch_are_a_possibility_where_the_text_ends() -> None:
    line = (
        "WARNING 03-31 16:53:11 [profiling.py:222] The sequence length used for profiling (max_num_batched_tokens / "
        "max_num_seqs = 16384) is too short to hold the multi-modal embeddings in the worst case (32768 tokens in "
        "total, out of which {'image': 16384} are reserved for multi-modal embeddings).\n"
    )
    found = diagnosis(line)
    assert (found.verdict, found.findings[0].cause) == ("cause above", "multimodal_inputs")
    assert not diagnosis(line + "INFO:     Application startup complete.\n").findings


def test_the_file_of_the_encoder_tells_that_images_can_be_bounded() -> None:
    frame = '  File "/x/vllm/model_executor/models/{}", line 84, in forward\n'
    log = oom(60.96, 1.0, 55.0, 1.0, "4.00 GiB")
    assert first(frame.format("qwen2_5_vl.py") + log).fixes[0].flags["mm_processor_kwargs"] == {"max_pixels": 1003520}
    assert "mm_processor_kwargs" not in first(frame.format("siglip.py") + log).fixes[0].flags


def test_a_variable_that_vllm_warns_of_is_no_cause_beside_an_exception() -> None:
    warning = (
        "(APIServer pid=1) WARNING 07-01 09:38:56 [envs.py:2088] Unknown vLLM environment variable detected: VLLM_FOO\n"
    )
    error = (
        "(Worker pid=2) ERROR 07-01 09:41:21 [multiproc_executor.py:888] ValueError: Free memory on device cuda:0 "
        "(54.34/79.18 GiB) on startup is less than desired GPU memory utilization (0.92, 72.84 GiB). Decrease GPU "
        "memory utilization or reduce GPU memory used by other processes.\n"
    )
    assert first(warning + error).cause == "gpu_shared_or_not_free"
    assert first(warning).cause == "wrong_flag"


def test_a_need_that_does_not_follow_the_length_is_met_by_a_larger_pool() -> None:
    log = (
        "ValueError: To serve at least one request with the model's max seq len (131072), {} GiB KV cache is needed, "
        "which is larger than the available KV cache memory (3.12 GiB). Based on the available memory, the estimated "
        "maximum model length is {}."
    )
    assert first(log.format(3.79, 7740)).fixes[0].kind == "raise_util"
    assert "whatever its length" in first(log.format(3.79, 7740)).why
    assert first(log.format(6.24, 65536)).fixes[0].flags == {"max_model_len": 64512}


def test_a_refused_pinned_buffer_is_host_memory() -> None:
    log = (
        '  File "memory_management.py", line 1285, in __init__\n'
        "    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)\nRuntimeError: CUDA error: {}\n"
    )
    assert first(log.format("invalid argument")).cause == "host_ram_oom"
    assert first(log.format("device-side assert triggered")).cause != "host_ram_oom"


def test_few_long_requests_need_a_larger_pool_and_many_fewer_at_once() -> None:
    line = "Running: {} reqs, Waiting: 36 reqs, GPU KV cache usage: 100.0%, Prefix cache hit rate: 0.0%\n"
    # Shorter and fewer at the door cost no precision, 8 bits hold twice the tokens, and a higher share adds a few.
    kinds = [fix.kind for fix in first(line.format(4)).fixes]
    assert kinds[:3] == ["max_model_len", "kv_cache_dtype", "raise_util"]
    assert first(line.format(40)).fixes[0].flags == {"max_num_seqs": 30}


def test_log_probabilities_follow_the_tokens_of_a_step() -> None:
    frame = '  File "/x/vllm/model_executor/layers/sampler.py", line 904, in get_logprobs\n'
    fix = first(frame + oom(79.19, 7.02, 70.0, 0.1, "7.04 GiB", "CUDA")).fixes[0]
    assert fix.flags == {"max_num_batched_tokens": 2048, "enable_chunked_prefill": True}


def test_pieces_that_hardly_cover_a_request_are_joined_and_the_pool_shrinks() -> None:
    scarce, plenty = (first(oom(23.6, 0.3, 21.9, unused, "380.00 MiB", "CUDA")).fixes[0] for unused in (0.35, 1.2))
    assert scarce.env and "--gpu-memory-utilization" in scarce.steps[0]
    assert plenty.env and not plenty.steps


def test_an_intel_gpu_has_its_own_tool() -> None:
    log = (
        "ValueError: Free memory on device xpu:1 (0.4/24.0 GiB) on startup is less than desired GPU memory utilization "
        "(0.9, 21.6 GiB)."
    )
    assert first(log).fixes[0].steps[0] == "xpu-smi ps"


def test_an_encoder_cache_grows_with_the_tokens_of_a_step() -> None:
    fix = first("ValueError: exceeds the pre-allocated encoder cache size 4096").fixes[0]
    assert fix.flags == {"max_num_batched_tokens": 8192} and "more than 4096" in fix.why
    fix = first("a video item with length 9000, which exceeds the pre-allocated encoder cache size 4096").fixes[0]
    assert fix.flags == {"max_num_batched_tokens": 9216}


def test_a_value_that_vllm_refuses_is_a_wrong_flag() -> None:
    assert first("all2all_backend='pplx' is not supported for this kernel").cause == "wrong_flag"


@pytest.mark.parametrize("is_stopped_first", [True, False])
def test_an_engine_that_dies_after_a_signal_was_stopped(is_stopped_first: bool) -> None:
    lines = [
        "(EngineCore pid=9) INFO 07-06 09:43:07 [core.py:1] [shutdown] EngineCore: trigger received signal=SIGTERM\n",
        "(APIServer pid=7) ERROR 07-06 09:43:07 [async_llm.py:7] vllm.v1.engine.exceptions.EngineDeadError: EngineCore "
        "encountered an issue. See stack trace (above) for the root cause.\n",
    ]
    ready = "(APIServer pid=7) INFO:     Application startup complete.\n"
    found = diagnosis(ready + "".join(lines if is_stopped_first else lines[::-1]))
    assert found.verdict == ("not a memory problem" if is_stopped_first else "cause above")


def test_a_kill_outranks_what_its_wrapper_says() -> None:
    found = first("Loading safetensors checkpoint shards\nEXIT 137\nRuntimeError: job ended before it registered\n")
    assert found.cause == "host_ram_oom" and found.confidence < 0.8


def test_shared_memory_and_adapters_are_named_only_with_a_sign() -> None:
    text = oom(15.87, 1.2, 12.8, 1.7, "768.00 MiB", "HIP")
    assert first(text).cause != "unified_memory_or_wsl"
    assert first("Running on WSL\n" + text).cause == "unified_memory_or_wsl"
    assert first(oom(79.2, 0.04, 71.0, 0.07, "60.00 MiB", "CUDA")).cause != "lora_or_spec_decode_extra"


def test_a_cpu_pool_of_nothing_is_given_a_size() -> None:
    log = (
        "(Worker pid=3) INFO 08-18 02:57:12 [cpu_worker.py:235] Explicitly set (0.0/12.5) GiB for KV cache on node 0.\n"
        "(EngineCore pid=2) ERROR 08-18 02:57:12 [core.py:1] ValueError: No available memory for the cache blocks.\n"
    )
    assert first(log).fixes[0].env == {"VLLM_CPU_KVCACHE_SPACE": "6"}


def test_weights_that_fill_the_smallest_card_are_the_lever() -> None:
    assert first("Model loading took 7.61 GiB\n" + NO_BLOCKS.format(-0.23)).fixes[0].kind == "checkpoint_format"


def test_steps_above_every_default_are_cut_first_and_no_flag_is_dropped() -> None:
    given = "$ --max-num-batched-tokens 16384 --limit-mm-per-prompt '{\"image\": 8}' --gpu-memory-utilization 0.78\n"
    fix = first(given + "Model loading took 21.5 GiB\n" + NO_BLOCKS.format(-1.62)).fixes[0]
    assert fix.flags["max_num_batched_tokens"] == 2048
    assert '{"image": 8}' in fix.command


def test_bytes_without_a_length_give_the_part_of_it_that_fits() -> None:
    log = "7.8 GiB KV cache is needed, which is larger than the available KV cache memory (7.08 GiB)"
    assert "--max-model-len to 0.9 of" in first(log).fixes[0].steps[0]


def test_a_setting_that_the_message_names_is_taken_out() -> None:
    assert first("ValueError: moe_backend='triton' is not supported for NvFP4 MoE").fixes[0].flags == {
        "moe_backend": None
    }


@pytest.mark.parametrize("word", ["a.", "a-", "a_"])
def test_a_long_word_does_not_hold_up_the_answer(word: str) -> None:
    assert diagnosis(word * 20_000 + "\nvllm runs out of memory").verdict == "cause above"


def test_heads_are_split_over_a_power_of_two_that_kv_heads_take_too() -> None:
    log = "ValueError: Total number of attention heads (28) must be divisible by tensor parallel size (8).\n"
    assert first(log).fixes[0].flags == {"tensor_parallel_size": 4}


@pytest.mark.parametrize(
    "message",
    [
        "OutOfMemoryError: Task was killed due to the node running low on memory.",
        "OutOfMemoryError: 3 worker(s) were killed due to the node running low on memory. Memory on the node was "
        "95.0GB / 100.0GB (0.950000)",
    ],
)
def test_ray_s_out_of_memory_error_is_of_the_node_also_under_a_trainer(message: str) -> None:
    found = first(f"python3 -m verl.trainer.main_ppo\n{message}\n")
    assert found.cause == "host_ram_oom"
    assert ("95.00 GiB of the node's 100.00 GiB" in found.why) == ("95.0GB" in message)


def test_vllm_s_own_summary_of_a_start_is_no_shortage() -> None:
    summary = (
        "Free memory on device (70.1/79.2 GiB) on startup. Desired GPU memory utilization is (0.8, 63.3 GiB). Actual"
    )
    assert not any(finding.cause == "gpu_shared_or_not_free" for finding in diagnosis(f"vLLM\n{summary}\n").findings)


def test_of_several_killed_processes_the_largest_is_named_with_its_shared_memory() -> None:
    line = "Memory cgroup out of memory: Killed process {} ({}) total-vm:9kB, anon-rss:{}kB, shmem-rss:{}kB\n"
    log = "memory: usage 4194304kB, limit 4194304kB, failcnt 9\n"
    log += line.format(7, "VLLM::Worker", 1 << 20, 2 << 20) + line.format(8, "python", 9, 0)
    found = first(log)
    assert "killed VLLM::Worker because the container's limit was used up. It held 3.00 GiB" in found.why
    assert "4.00 GiB" in found.fixes[0].why


def test_weights_of_32_bits_are_halved_before_anything_is_bought() -> None:
    log = "vllm serve Qwen/Qwen2.5-7B-Instruct --dtype float --max-model-len 4096\n" + LOADING.replace("79.33", "22.0")
    assert first(log.replace("78.33", "21.30")).fixes[0].flags == {"dtype": "half"}


def test_a_value_beside_the_default_that_fails_is_the_cure() -> None:
    text = '"--max-num-seqs", "16",  # the sampler is warmed up with max_num_seqs;\n  # the 256 default OOMs here.\n'
    assert first(text).fixes[0].flags == {"max_num_seqs": 16}


def test_nccl_that_has_no_memory_names_its_buffers_after_a_word_of_the_same_passage() -> None:
    text = "It OOMs on the first request, with\nncclUnhandledCudaError: Cuda failure 2 'out of memory'\n"
    assert first(text).cause == "nccl_or_custom_allreduce_buffers"


@pytest.mark.parametrize(
    ("weights", "flags"),
    [
        (14.1, {"max_num_seqs", "max_num_batched_tokens"}),
        (20.1, {"max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization"}),
        (21.2, set()),
    ],
)
def test_a_smaller_dummy_batch_is_a_fix_only_with_room_for_the_pool_after_it(weights: float, flags: set[str]) -> None:
    log = (
        f"INFO 11-02 10:11:12 [gpu_model_runner.py:2653] Model loading took {weights} GiB and 14.2 seconds\n"
        'File "/opt/vllm/v1/worker/gpu_worker.py", line 263, in determine_available_memory\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has a total capacity of 23.64 "
        "GiB of which 890.00 MiB is free. Including non-PyTorch memory, this process has 22.76 GiB memory in use. Of "
        "the allocated memory 22.31 GiB is allocated by PyTorch, and 60.00 MiB is reserved by PyTorch but "
        "unallocated.\n"
    )
    assert set(first(log).fixes[0].flags) == flags


def test_the_table_of_free_says_that_the_machine_s_ram_is_used_up() -> None:
    table = "Mem:    31Gi    30Gi    213Mi    1.0Mi    812Mi    401Mi\n"
    log = "Loading safetensors checkpoint shards:  40% Completed | 2/5 [00:20<00:30, 10.1s/it]\nKilled\n"
    found = first(table + log)
    assert found.cause == "host_ram_oom"
    assert "Of 31.00 GiB of RAM 0.39 GiB were available" in found.why
    assert "swap" in found.fixes[0].steps[0]


def test_a_pool_without_its_error_is_memory_that_was_no_longer_free() -> None:
    frame = 'ERROR 12-17 00:48:42 engine.py:366]   File "cache_engine.py", line 62, in _allocate_kv_cache\n'
    assert first(f"vLLM OOM\n{frame}").cause == "gpu_shared_or_not_free"


def test_a_pool_that_the_plan_has_and_the_text_has_not_is_no_reason_for_more_gpus() -> None:
    told = "No available memory for the cache blocks on a 32GB GPU\n"
    command = "python -m vllm.entrypoints.openai.api_server --model Qwen/Qwen1.5-14B-Chat --gpu-memory-utilization 0.95"
    assert dict(first(told + command).fixes[0].flags) == {"max_model_len": 8192}


def test_device_chooses_no_card() -> None:
    told = 'llm = LLM(model="allenai/OLMo-1B-hf", device="cuda:3")\nCUDA out of memory. Tried to allocate 4.43 GiB.'
    found = first(told)
    assert found.cause == "gpu_shared_or_not_free"
    assert any("CUDA_VISIBLE_DEVICES" in step for step in found.fixes[0].steps)


def test_a_server_that_was_ready_refutes_a_plan_that_does_not_start() -> None:
    command = "vllm serve Qwen/Qwen2.5-72B-Instruct --gpu-memory-utilization 0.97 --max-model-len 32768\n"
    ready = "INFO 02-14 08:40:00 api_server.py:1] Application startup complete.\n"
    step = 'ERROR 02-14 08:44:33 engine.py:1]   File "engine.py", line 3, in run_engine_loop\n'
    found = first(f"On one H100:\n{command}{ready}{step}torch.OutOfMemoryError: CUDA out of memory.\n")
    assert dict(found.fixes[0].flags).keys() == {"gpu_memory_utilization"}


def test_a_call_without_a_split_runs_on_one_of_the_cards() -> None:
    call = 'llm = LLM(\n    model="/models/Qwen2-VL-72B-Instruct",\n    limit_mm_per_prompt={"image": 10},\n)\n'
    found = first(f"from vllm import LLM\n{call}I have 4 H100-80G, and it always runs out of memory.")
    assert found.cause == "weights_too_big"
    assert found.fixes[0].flags["tensor_parallel_size"] == 4
