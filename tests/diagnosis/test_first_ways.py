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


def test_where_nothing_is_left_for_the_pool_the_draft_goes_first_and_no_way_exceeds_the_printed_length() -> None:
    found = first(
        'vllm serve some/model --max-model-len 250000 --speculative-config \'{"method": "mtp"}\'\nAvailable KV cache '
        "memory: 0.01 GiB\nValueError: To serve at least one request with the models's max seq len (250000), 3.19 GiB "
        "KV cache is needed, which is larger than the available KV cache memory (0.01 GiB). Based on the available "
        "memory, the estimated maximum model length is 256.\n"
    )
    assert found.fixes[0].flags == {"speculative_config": None}
    assert all(fix.flags.get("max_model_len", 0) <= 256 for fix in found.fixes)
    assert "KiB a token" not in found.why


def test_the_draft_that_does_not_fit_is_taken_out() -> None:
    text = "vLLM v0.19.1: the model loaded fine, then the MTP head does not fit.\n"
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.37 GiB. GPU has 2.25 GiB free.\n"
    frame = '  File "/x/vllm/model_executor/model_loader/base_loader.py", line 9, in load_model\n'
    assert way(text + frame + error).flags == {"speculative_config": None}


def test_requests_that_survive_a_preemption_are_what_the_pool_holds() -> None:
    text = (
        "vllm serve some/model --gpu-memory-utilization 0.27\nGPU KV cache size: 23,680 tokens\n"
        "Running: 6 reqs, Waiting: 0 reqs, GPU KV cache usage: 100.0%\n"
        "Running: 3 reqs, Waiting: 3 reqs, GPU KV cache usage: 99.5%\n"
    )
    assert way(text).flags == {"max_num_seqs": 3}


def test_trl_s_config_takes_its_own_names_and_no_others() -> None:
    text = (
        "GRPOConfig(vllm_gpu_memory_utilization=0.20): ValueError: To serve at least one request with the models's max "
        "seq len (12288), 1.69 GiB KV cache is needed, which is larger than the available KV cache memory (0.87 GiB)\n"
    )
    fixes = first(text).fixes
    assert "vllm_max_model_length=6144" in fixes[0].steps[0]
    assert not any("kv_cache_dtype" in step for fix in fixes for step in fix.steps)


def test_no_number_is_told_that_the_text_does_not_give() -> None:
    found = first("vLLM serves a 7B model on an A100 80GB; under load a request ends with CUDA out of memory.")
    assert not any("1.00 GiB" in fix.why for fix in found.fixes)


def test_a_step_names_no_flag_that_the_release_lacks() -> None:
    text = "Jetson AGX Orin, vllm==0.7.0, --gpu-memory-utilization 0.8: NvMapMemAlloc error 12, out of memory"
    assert not any("--kv-cache-memory-bytes" in step for fix in first(text).fixes for step in fix.steps)


def test_the_share_of_one_memory_is_never_raised() -> None:
    text = "Jetson AGX Orin, vLLM with --gpu-memory-utilization 0.2: NvMapMemAlloc error 12, out of memory"
    assert not any(fix.flags.get("gpu_memory_utilization", 0) > 0.2 for fix in first(text).fixes)


def test_what_a_message_advises_is_the_first_step() -> None:
    error = (
        "RuntimeError: Worker failed with error 'Format of weight is not supported. {}', please check the stack trace"
    )
    log = f"ERROR 10-11 11:37:35 [core.py:708] {error} above for the root cause\n"
    found = way(log.format("Please try to update the version of CANN"))
    assert found.steps[0] == "as the message says: Please try to update the version of CANN"
    assert "Worker failed" not in found.why


def test_a_fix_by_a_printed_limit_is_surer_than_what_helped_others() -> None:
    printed = "ValueError: max_num_seqs (256) exceeds available Mamba cache blocks (196). Each decode sequence requires"
    told = "vLLM serves a 7B model on an A100 80GB; under load a request ends with CUDA out of memory."
    assert way(printed).confidence > 0.8 > way(told).confidence


def test_the_pool_of_the_cpu_backend_is_enlarged_by_the_variable_that_the_message_names() -> None:
    found = first(
        "ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be stored "
        "in KV cache (21840). Try increasing `VLLM_CPU_KVCACHE_SPACE` or decreasing `max_model_len` at start.\n"
    )
    assert any("VLLM_CPU_KVCACHE_SPACE: 6.1 times" in step for fix in found.fixes for step in fix.steps)


def test_a_setting_that_was_left_to_its_default_is_given() -> None:
    text = "vLLM with a model of 128k, without explicitly setting [--max-model-len]: CUDA out of memory in warm-up."
    assert "--max-model-len" in way(text).steps[0]


def test_cards_that_stand_idle_beside_the_first_one_are_used() -> None:
    text = "vLLM on 4x NVIDIA L4 GPUs: CUDA out of memory, it loads the entire some-30B model on GPU 0 only."
    assert way(text).flags["tensor_parallel_size"] == 4


OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {wanted} GiB. GPU 0 has a total capacity of "
    "22.00 GiB of which {free} GiB is free. Of the allocated memory {torch} GiB is allocated by PyTorch, and "
    "{unused} GiB is reserved by PyTorch but unallocated."
)


def test_eager_mode_is_first_where_vllm_names_it_and_no_share_is_known() -> None:
    notice = "INFO 03-04 05:06:07 model_runner.py:600] Capturing the model for CUDA graphs. To run the model in eager"
    log = f"{notice} mode, use '--enforce-eager'.\n{OOM.format(wanted=0.1, free=0.05, torch=18, unused=0.2)}\n"
    assert way(log).flags == {"enforce_eager": True}


def test_a_full_share_of_an_unnamed_card_is_lowered_to_the_default() -> None:
    text = "vllm serve some/model --gpu-memory-utilization 1.0\nvLLM runs out of memory while it captures CUDA graphs."
    assert way(text).flags["gpu_memory_utilization"] == 0.9


def test_a_capture_of_graphs_is_no_cure_and_its_share_is_the_failed_one() -> None:
    text = "vLLM OOMs during CUDA graph capture with `--gpu-memory-utilization ≥ 0.88`."
    assert way(text).flags["gpu_memory_utilization"] < 0.85


def test_of_a_working_and_a_failed_command_the_failed_one_is_changed() -> None:
    working, failed = (f"```\nvllm serve some/model --tensor-parallel-size {size}\n```\n" for size in (8, 2))
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    text = f"CUDA out of memory with vLLM\nWorking start command:\n{working}Failed start command:\n{failed}{error}\n"
    assert ("--tensor-parallel-size", "2") in zip(way(text).command, way(text).command[1:], strict=False)


def test_sequences_are_never_raised_to_shrink_a_step() -> None:
    oom = OOM.format(wanted=3, free=1, torch=20, unused=0.01)
    fixes = first(f'"OPTION_MAX_ROLLING_BATCH_SIZE": "8",\nvLLM: {oom}\n').fixes
    assert all(fix.flags.get("max_num_seqs", 1) < 8 for fix in fixes)


def test_a_dummy_step_without_chunked_prefill_becomes_shorter_with_the_length() -> None:
    oom = OOM.format(wanted=6, free=3, torch=18, unused=0.01)
    found = way(f'"OPTION_ENABLE_CHUNKED_PREFILL": "false",\nvLLM: {oom}\n')
    assert found.flags == {"max_model_len": 8192}


def test_unused_pieces_that_cover_a_step_are_joined_by_its_first_fix() -> None:
    found = way(OOM.format(wanted=3.4, free=2, torch=17.5, unused=2))
    assert "expandable_segments:True" in found.env.values()
    assert found.flags["max_num_batched_tokens"]
    assert not way(OOM.format(wanted=3.4, free=1.9, torch=19.5, unused=0.3)).env


def test_a_smaller_step_of_an_unknown_release_turns_chunked_prefill_on() -> None:
    text = "With vLLM `# GPU blocks: 0` and `No available memory for the cache blocks`, at 0.95 as well."
    smaller = next(fix for fix in first(text).fixes if "max_num_batched_tokens" in fix.flags)
    assert smaller.flags["enable_chunked_prefill"] is True


def test_a_request_that_names_prompt_logprobs_is_sent_without_them() -> None:
    text = "vLLM serves well; with prompt_logprobs=5 in a request it gets CUDA out of memory at once."
    assert "without prompt_logprobs" in way(text).steps[0]
    assert (
        way(f"{text} gpu_memory_utilization=0.97").flags["gpu_memory_utilization"] <= 0.9
    )  # here a share can give way


def test_a_step_of_logits_is_as_small_as_its_printed_bytes_ask_for() -> None:
    frames = (
        '  File "/vllm/v1/worker/gpu_model_runner.py", line 3, in _get_prompt_logprobs_dict\n'
        "    logits = self.model.compute_logits(hidden)\n"
    )
    fixes = first(frames + OOM.format(wanted=2, free=1, torch=20, unused=0.1)).fixes
    smaller = next(fix.flags["max_num_batched_tokens"] for fix in fixes if "max_num_batched_tokens" in fix.flags)
    assert smaller * 10 <= 2048 or smaller == 512  # 1 GiB of 10


def test_a_share_that_holds_no_block_beside_a_trainer_is_raised() -> None:
    text = (
        "python -m verl.trainer.main_ppo actor_rollout_ref.rollout.gpu_memory_utilization=0.15\n"
        '  File "/venv/verl/workers/rollout/vllm_rollout.py", line 8, in __init__\n'
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.\n"
    )
    assert way(text).flags == {"gpu_memory_utilization": 0.4}
    assert not way(text).trades


def test_a_pool_below_zero_on_shared_memory_asks_for_the_page_cache_first() -> None:
    text = "DGX Spark, vLLM: at the first start `Available KV cache memory: -1.20 GiB` with utilization 0.6."
    assert "drop_caches" in way(text).steps[0]


def test_growth_on_the_card_is_no_matter_of_host_caches() -> None:
    text = "vLLM: VRAM usage keeps growing for hours while it serves, until it ends with CUDA out of memory."
    found = first(text)
    assert found.fixes[0].kind == "lower_util"
    assert not any("mm_processor_cache_gb" in fix.flags for fix in found.fixes)
    assert not any("lower gpu_memory_utilization" in end.action for end in found.dead_ends)


def test_a_draft_model_on_one_rank_is_split_like_the_main_model() -> None:
    text = (
        "In spec_decode/spec_decode_worker.py the memory of the draft model is not counted. With tensor-parallel-size "
        "2 and `speculative-draft-tensor-parallel-size` as 1 vLLM throws an OOM error after the profile run."
    )
    assert "--speculative-draft-tensor-parallel-size" in way(text).steps[0]


def test_a_pool_below_zero_names_its_size_and_the_draft() -> None:
    text = (
        'vLLM with\n--speculative-config {"method":"ngram","num_speculative_tokens":3}\nfails: '
        "Available KV cache memory: -0.4 GiB\nValueError: No available memory for the cache blocks\n"
    )
    found = first(text)
    assert "0.40 GiB below zero" in found.fixes[0].why
    assert any("speculative_config" in fix.flags for fix in found.fixes)


def test_a_cache_in_8_bits_is_not_for_cards_without_it() -> None:
    log = "INFO [loggers.py:1] Running: 9 reqs, Waiting: 4 reqs, GPU KV cache usage: 99.0%\n"
    turing, ascend = (
        first(f"vLLM on a {card}, preempted\n{log}") for card in ("Tesla T4", "vllm-ascend server with Ascend NPU")
    )
    assert not any("kv_cache_dtype" in fix.flags for fix in (*turing.fixes, *ascend.fixes))


def test_a_draft_head_that_comes_after_the_loaded_model_is_left_out_first() -> None:
    text = "vLLM: some-8B-MTP loaded fine, but then: torch.OutOfMemoryError: Tried to allocate 2.00 GiB. 1.90 GiB free."
    assert first(text).cause != "weights_too_big" or "speculative_config" in way(text).flags


def test_a_swap_space_that_is_refused_becomes_none() -> None:
    # The default of 4 GiB a GPU may be what was refused.
    assert way("ValueError: Too large swap space.\n").flags == {"swap_space": 0}


def test_sleep_that_frees_a_hundredth_of_what_stays_keeps_the_memory() -> None:
    found = first("Sleep mode freed 1.10 GiB memory, 140.00 GiB memory is still in use.\n")
    assert found.cause == "sleep_mode_or_rlhf_colocation"
    assert [fix.kind for fix in found.fixes[:2]] == ["engine_version_or_V0", "other_engine_feature_off"]
    freed_most = "Sleep mode freed 120.00 GiB memory, 2.10 GiB memory is still in use.\n"
    assert not read_log([freed_most.encode()], "log").runs[0].findings


def test_a_small_shared_memory_comes_before_the_buffers_that_do_not_fit_there() -> None:
    text = (
        "NCCL WARN Cuda failure 'out of memory'\nncclSystemError: System call (e.g. socket, malloc) failed.\n"
        "NCCL WARN Error: failed to open shared memory segment (/dev/shm too small: 64MB)\n"
    )
    assert first(text).cause == "host_ram_oom"
    assert "shm" in way(text).steps[0]


def test_a_shorter_length_on_v0_keeps_the_split_of_prompts_that_the_longer_one_had() -> None:
    text = (
        "ValueError: The model's max seq len ({}) is larger than the maximum number of tokens that can be stored in "
        "KV cache (21776). Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.\n"
    )
    assert way(text.format(131072)).flags == {"max_model_len": 21504, "enable_chunked_prefill": True}
    assert way(text.format(32768)).flags == {"max_model_len": 21504}


def test_a_setting_that_is_off_by_default_on_amd_is_no_first_way() -> None:
    text = "Llama 405B on 8 MI355X, vLLM 0.10.2, --tensor-parallel-size 8\nNCCL WARN Cuda failure 'out of memory'\n"
    assert "NCCL_CUMEM_ENABLE" not in way(text).env
    assert way(text.replace("MI355X", "H200")).env == {"NCCL_CUMEM_ENABLE": "0"}


def test_a_title_that_says_what_failed_counts_more_than_the_environment_below_it() -> None:
    text = (
        "LoRA requests raise a CUDA OutOfMemoryError in vLLM when the input is longer than 8k tokens\n"
        "PyTorch version: 2.6.0+cu124\nOS: Ubuntu 22.04\nNvidia driver version: 535.183.06\n"
    )
    assert first(text).cause != "driver_or_cuda_mismatch"


def test_after_graphs_have_memory_the_profile_run_is_over() -> None:
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.10 GiB. GPU 0 has a total capacity of 79.25 "
        "GiB of which 1.01 GiB is free. Of the allocated memory 76.8 GiB is allocated by PyTorch, with 1.1 "
        "GiB allocated in private pools (e.g., CUDA Graphs), and 300.00 MiB is reserved by PyTorch but unallocated.\n"
    )
    assert first(text).cause == "runtime_activation_burst"


def test_an_engine_that_died_was_serving_when_a_load_began() -> None:
    text = (
        "vLLM 0.7.1, 16 x H100: CUDA OOM a minute after the load started.\nAsyncEngineDeadError: Task finished "
        "unexpectedly.\nCUDA out of memory. Tried to allocate 1.60 GiB. GPU 0 has a total capacity of 79.11 GiB of "
        "which 1.30 GiB is free.\n"
    )
    assert first(text).cause == "runtime_activation_burst"


def test_a_note_of_another_library_is_no_refused_flag() -> None:
    text = "The argument `trust_remote_code` is to be used with Auto classes. It has no effect here and is ignored.\n"
    found = [finding.cause for run in read_log([text.encode()], "log").runs for finding in run.findings]
    assert "wrong_flag" not in found
