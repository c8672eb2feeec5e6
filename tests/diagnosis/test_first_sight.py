"""General knowledge that failures seen for the first time asked for: platforms, siblings, ranks and short texts."""

from __future__ import annotations

import pytest

from legroom.diagnosis.finding import Finding
from legroom.diagnosis.log_diagnosis import read_log
from legroom.diagnosis.pasted_command import pasted_command
from legroom.diagnosis.verdict import Diagnosis
from legroom.facts.releases import release


def diagnosis(log: str) -> Diagnosis:
    return read_log([log.encode()], "log").runs[0]


def first(log: str) -> Finding:
    return diagnosis(log).findings[0]


def oom(
    total: float, free: float, allocated: float, unused: float, wanted: str = "60.00 MiB", device: str = "NPU"
) -> str:
    return (
        f"RuntimeError: {device} out of memory. Tried to allocate {wanted} ({device} 0; {total:.2f} GiB total "
        f"capacity; {allocated:.2f} GiB already allocated; {free:.2f} GiB free; {allocated + unused:.2f} GiB reserved "
        "in total by PyTorch)\n"
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


def test_torch_s_own_hint_is_no_setting_even_where_it_is_wrapped() -> None:
    hint = "If reserved but unallocated memory is large try setting\nPYTORCH_ALLOC_CONF=expandable_segments:True{}\n"
    log = oom(79.18, 5.0, 64.7, 7.6, "6.00 GiB", "CUDA")
    assert first(log + hint.format(" to avoid fragmentation.")).fixes[0].kind == "allocator_conf"
    assert first(hint.format("") + log).fixes[0].kind != "allocator_conf"


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


def test_a_training_step_is_the_trainer_s() -> None:
    log = "  File 'x.py', line 4, in fit\n    loss.backward()\n" + oom(79.18, 1.0, 70.0, 1.0, "3.79 GiB", "CUDA")
    assert first(log).cause == "sleep_mode_or_rlhf_colocation"


def test_parameters_are_created_under_a_device_context() -> None:
    frame = '  File "/x/torch/utils/_device.py", line 103, in __torch_function__\n    return func(*args)\n'
    assert first(frame + oom(60.96, 0.01, 59.36, 1.09)).cause == "weights_too_big"


def test_pytest_s_summary_is_no_traceback() -> None:
    line = "FAILED spec_decode/e2e/test_eagle.py::test_greedy[1] - torch.OutOfMemoryError: "
    assert first(line + oom(22.05, 0.1, 21.5, 0.1, device="CUDA")).cause != "lora_or_spec_decode_extra"


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


def test_flags_of_a_newer_release_are_not_put_in_place_of_each_other() -> None:
    steps = " ".join(
        first("vllm: error: unrecognized arguments: --enable-reasoning --reasoning-parser r1\n").fixes[0].steps
    )
    assert "in place of" not in steps
    assert "pip install -U vllm" in steps


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


def test_a_message_wrapped_after_a_comma_is_joined_with_a_blank() -> None:
    lines = (
        "ValueError: To serve at least one request with the model's max seq len (250000), 3.19 GiB KV cache is needed,",
        "which is larger than the available KV cache memory (0.01 GiB). Based on the available memory, the estimated l",
        "ength is 256.",
    )
    assert first("\n".join(lines)).cause == "kv_too_small_for_max_len"


LOADED = "INFO 01-02 02:07:12 model_runner.py:1099] Loading model weights took {} GB\n"
SORT = "    logits_sort, logits_idx = logits.sort(dim=-1, descending=False)\n"


def test_the_last_milestone_places_a_sampler_that_runs_in_every_phase() -> None:
    failed = SORT + oom(23.64, 0.01, 22.8, 0.1, "380.00 MiB", "CUDA")
    assert first(LOADED.format(16.96) + failed).cause == "profiling_activation_peak"
    assert (
        first('INFO: 1.2.3.4 - "POST /v1/completions HTTP/1.1" 200 OK\n' + failed).cause == "runtime_activation_burst"
    )


def test_an_error_after_capture_is_the_sampler_s_warm_up() -> None:
    log = "INFO 08-25 09:42:24 [{}:2708] Graph capturing finished in 4 secs, took 0.39 GiB\n"
    failed = oom(23.64, 0.01, 22.8, 0.1, "136.00 MiB", "CUDA")
    assert diagnosis(log.format("gpu_model_runner.py") + failed).case.site == "sampler"
    assert diagnosis(log.format("model_runner.py") + failed).case.site == "graph"


@pytest.mark.parametrize(("weights", "pool", "kind"), [(17.66, -0.99, "checkpoint_format"), (34.0, -0.3, "raise_util")])
def test_a_higher_share_is_a_fix_only_where_it_brings_what_is_missing(weights: float, pool: float, kind: str) -> None:
    log = f"Model loading took {weights} GiB\nAvailable KV cache memory: {pool} GiB\n"
    assert first(log).fixes[0].kind == kind


@pytest.mark.parametrize(("estimate", "kind"), [(4.79, "eager_or_fewer_graphs"), (0.4, "checkpoint_format")])
def test_graphs_that_outweigh_the_shortage_give_way(estimate: float, kind: str) -> None:
    log = (
        f"INFO 02-03 04:05:06 [gpu_model_runner.py:1] Estimated CUDA graph memory: {estimate} GiB total\n"
        "INFO 02-03 04:05:06 [gpu_worker.py:1] CUDA graph memory profiling is enabled\n"
        "Model loading took 17.66 GiB\nAvailable KV cache memory: -1.42 GiB\n"
    )
    assert first(log).fixes[0].kind == kind


def test_no_length_fits_where_a_rank_has_no_pool() -> None:
    short = (
        "ValueError: To serve at least one request with the model's max seq len\n(1000000), 3.09 GiB KV cache is "
        "needed, which is larger than the available\nKV cache memory (0.24 GiB). Estimated maximum model length is "
        "57344."
    )
    assert first(short).fixes[0].flags == {"max_model_len": 56320}
    profiled = "Profiling CUDA graph memory: FULL=4 (largest=16)\nAvailable KV cache memory: -1.42 GiB\n"
    assert first(profiled + short).fixes[0].flags == {"enforce_eager": True}


def test_a_need_that_does_not_follow_the_length_is_met_by_a_larger_pool() -> None:
    log = (
        "ValueError: To serve at least one request with the model's max seq len (131072), {} GiB KV cache is needed, "
        "which is larger than the available KV cache memory (3.12 GiB). Based on the available memory, the estimated "
        "maximum model length is {}."
    )
    assert first(log.format(3.79, 7740)).fixes[0].kind == "raise_util"
    assert "whatever its length" in first(log.format(3.79, 7740)).why
    assert first(log.format(6.24, 65536)).fixes[0].flags == {"max_model_len": 64512}


def test_a_wake_up_without_a_trainer_waits_for_the_other_server() -> None:
    wake = "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:139"
    assert first(f"Exception: Call to wake_up method failed: {wake}").fixes[0].kind == "sequence_starts_or_wait"
    assert first(f"(ActorModelRayActor pid=3) RuntimeError: {wake}").fixes[0].kind == "lower_util"


def test_a_refused_pinned_buffer_is_host_memory() -> None:
    log = (
        '  File "memory_management.py", line 1285, in __init__\n'
        "    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)\nRuntimeError: CUDA error: {}\n"
    )
    assert first(log.format("invalid argument")).cause == "host_ram_oom"
    assert first(log.format("device-side assert triggered")).cause != "host_ram_oom"


def test_few_long_requests_need_a_larger_pool_and_many_fewer_at_once() -> None:
    line = "Running: {} reqs, Waiting: 36 reqs, GPU KV cache usage: 100.0%, Prefix cache hit rate: 0.0%\n"
    assert first(line.format(4)).fixes[0].kind == "kv_cache_dtype"  # twice the tokens; a higher share adds a few
    assert first(line.format(40)).fixes[0].flags == {"max_num_seqs": 30}


def test_log_probabilities_follow_the_tokens_of_a_step() -> None:
    frame = '  File "/x/vllm/model_executor/layers/sampler.py", line 904, in get_logprobs\n'
    fix = first(frame + oom(79.19, 7.02, 70.0, 0.1, "7.04 GiB", "CUDA")).fixes[0]
    assert fix.flags == {"max_num_batched_tokens": 2048, "enable_chunked_prefill": True}


def test_a_small_share_means_a_second_server() -> None:
    log = (
        "ValueError: Free memory on device cuda:0 (2.6/79.2 GiB) on startup is less than desired GPU memory "
        "utilization (0.08, 6.3 GiB)."
    )
    assert "--gpu-memory-utilization 0.82 or less" in first(log).fixes[0].steps[1]


def test_pieces_that_hardly_cover_a_request_are_joined_and_the_pool_shrinks() -> None:
    scarce, plenty = (first(oom(23.6, 0.3, 21.9, unused, "380.00 MiB", "CUDA")).fixes[0] for unused in (0.35, 1.2))
    assert scarce.env and "--gpu-memory-utilization" in scarce.steps[0]
    assert plenty.env and not plenty.steps


def test_the_start_up_check_is_known_by_its_core() -> None:
    found = first("Free memory on device (18.0/31.4 GiB) is less than desired (22.0 GiB)")
    assert found.cause == "gpu_shared_or_not_free" and "0.7 x 31.4" in found.why
    among_others = first("Free memory on device (18.0-18.2 / 31.4 GiB) on startup is less than desired")
    assert among_others.cause == "gpu_shared_or_not_free"
    cut = first(
        "vllm serve m --gpu-memory-utilization 0.985\nValueError: Free memory on device cuda:0 (22.78/23.48 GiB)"
    )
    assert cut.fixes[0].flags == {"gpu_memory_utilization": 0.94} and "0.985 x 23.48" in cut.why


def test_prose_that_begins_with_a_flag_is_no_command() -> None:
    told = "--gpu-memory-utilization to 0.8389. To disable it, set VLLM_X=0.\n--attention-backend FLASH_ATTN"
    _, args = pasted_command(f"vllm\n{told}", None, release("0.21.0"))
    assert (args.gpu_memory_utilization, args.attention_backend) == (None, "FLASH_ATTN")


def test_an_intel_gpu_has_its_own_tool() -> None:
    log = (
        "ValueError: Free memory on device xpu:1 (0.4/24.0 GiB) on startup is less than desired GPU memory utilization "
        "(0.9, 21.6 GiB)."
    )
    assert first(log).fixes[0].steps[0] == "xpu-smi ps"


def test_the_second_half_of_the_length_check_is_enough() -> None:
    log = "{}8.0 GiB KV cache is needed, which is larger than the available KV cache memory (4.0 GiB)"
    assert first(log.format("")).cause == "kv_too_small_for_max_len"
    fix = first(log.format("vllm serve m --max-model-len 100000\n")).fixes[0]
    assert 48_000 < fix.flags["max_model_len"] < 50_000


def test_a_sampler_that_is_warmed_up_is_a_site() -> None:
    log = "RuntimeError: CUDA out of memory{} when warming up sampler with 512 dummy requests"
    assert {diagnosis(log.format(word)).case.site for word in ("", " occurred")} == {"sampler"}


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


def test_an_image_names_its_engine() -> None:
    log = "repack #9: torch.OutOfMemoryError\nimage {}:latest, TP2\n"
    assert diagnosis(log.format("lmsysorg/sglang")).verdict == "not understood"
    assert diagnosis(log.format("vllm/vllm-openai")).verdict != "not understood"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("vLLM runs out of memory during CUDA graph capture on L40S, 0.95 utilization", "cudagraph_capture_oom"),
        ("After about 200 requests vLLM crashes with CUDA OOM", "runtime_activation_burst"),
        ("vllm fails with out of memory while loading the weights", "weights_too_big"),
        ("vllm: loglikelihood tasks end in CUDA OOM", "runtime_activation_burst"),
        ("engine died (prompt_logprobs OOM ~7.5GiB / 2.8 free)", "runtime_activation_burst"),
        ("KV cache needed 12.5 GiB but only 3.1 GiB available, max_model_len 131072", "kv_too_small_for_max_len"),
        ("The RSS of the vLLM server keeps growing until the pod is OOMKilled", "leak_over_time"),
        ("显存一直在缓慢增长，两天之后 vLLM 容器重启", "leak_over_time"),
        ("systemd[1]: vllm.service: A process of this unit has been killed by the OOM killer.", "host_ram_oom"),
        ("vllm task: Container killed due to memory usage", "host_ram_oom"),
        ("Pod vllm-0 evicted: The node was low on resource: memory.", "host_ram_oom"),
        ("bash: line 1:  4242 Killed                  vllm serve Qwen/Qwen3-8B", "host_ram_oom"),
        ("The DGX Spark with vLLM froze: the machine is unresponsive", "unified_memory_or_wsl"),
        ("vLLM: a false OutOfMemoryError on the first tensor, the card is free", "driver_or_cuda_mismatch"),
        ("Training Progress: 100%\nRuntimeError: DataLoader worker is killed by signal: Killed.", "not_memory"),
        ("ncclInternalError: Internal check failed.\nFailed to initialize any NET plugin", "not_memory"),
        ("vllm serve dies at the KV-cache check: it leaves only 0.30 GiB for KV at 0.9", "kv_too_small_for_max_len"),
        ("vLLM cannot start because of low RAM on the host", "host_ram_oom"),
        ("Failed to allocate memory for tensor(torch.Size([2]), x) because no memory is available", "host_ram_oom"),
        ("kill -9 of the API server; after the restart vLLM runs out of memory", "gpu_shared_or_not_free"),
        ("OutOfMemoryError on the first tensor although 9 GiB are free", "driver_or_cuda_mismatch"),
        ("vLLM: the GPU doesn't support querying the available free memory", "driver_or_cuda_mismatch"),
        ("UR_RESULT_ERROR_DEVICE_LOST during determine_available_memory", "not_memory"),
        ("vLLM's worker exited with exit code 136", "not_memory"),
        ("vLLM 0.25.0 will hang if TP > 1", "not_memory"),
        (
            "ERROR 02-17 20:51:49 core.py:210]     assert self.rank\nERROR 02-17 20:51:49 core.py:210] AssertionError",
            "not_memory",
        ),
        ("The output_size of gate's weight = 192 is not divisible by weight quantization block_n = 128.", "wrong_flag"),
        (
            "vllm serve Qwen/Qwen2.5-72B-Instruct --tensor-parallel-size 2\non two A6000, but OOM happened",
            "weights_too_big",
        ),
        ("vllm: dies mid-request\nRuntimeError: Triton Error [CUDA]: out of memory", "runtime_activation_burst"),
        (
            "vLLM is up. Then you send your first request and it crashes:\nTriton Error [CUDA]: out of memory",
            "runtime_activation_burst",
        ),
        (
            "vLLM on WSL dies mid-request\ntorch.OutOfMemoryError: HIP out of memory. Tried to allocate 700.00 MiB. "
            "GPU 0 has a total capacity of 15.87 GiB of which 800.00 MiB is free. 12.8 GiB is allocated by PyTorch, "
            "and 1.80 GiB is reserved by PyTorch but unallocated.",
            "runtime_activation_burst",
        ),
        ("vllm: max seq len (65536) ... available KV cache memory (0.75 GiB)", "kv_too_small_for_max_len"),
        ("vllm: OutOfResources: shared memory, Required: 66000, Hardware limit: 65536", "not_memory"),
        (
            "vllm 0.7.3, 16 gpu (90G memory) but OOM happened\npython -m vllm.entrypoints.openai.api_server --model "
            "/models/DeepSeek-R1-BF16 --tensor-parallel-size 16 --gpu-memory-utilization 0.975 --max-model-len 80000",
            "weights_too_big",
        ),
        ("Vllm Version: 0.8.1, why are 4 cards not enough GPU memory?\nTypeError: 'x' is no tuple", "not_memory"),
    ],
)
def test_a_failure_told_in_prose_is_placed_by_its_words(text: str, cause: str) -> None:
    assert first(text).cause == cause


def test_a_log_that_stops_after_counting_the_pool_stopped_in_the_check_of_its_size() -> None:
    log = (
        "(Worker pid=3) INFO 10-11 10:42:14 [gpu_worker.py:298] Available KV cache memory: {} GiB\n"
        "(EngineCore_DP0 pid=2) ERROR 10-11 10:42:14 [core.py:708] EngineCore failed to start.\n"
    )
    assert first(log.format(13.69)).cause == "kv_too_small_for_max_len"
    assert first(log.format(0)).cause == "no_cache_blocks"


def test_the_last_of_several_attempts_decides() -> None:
    command = "vllm serve Qwen/Qwen3-8B --max-model-len {}\n"
    length = "ValueError: 3.00 GiB KV cache is needed, available 1.20 GiB\n"
    capture = '  File "/x/torch/cuda/graphs.py", line 84, in capture_end\nRuntimeError: CUDA error: out of memory\n'
    tried = read_log([(command.format(4096) + length + command.format(128) + capture).encode()]).runs
    assert [run.findings[0].cause for run in tried] == ["cudagraph_capture_oom", "kv_too_small_for_max_len"]
    assert len(read_log([(command.format(4096) + command.format(128) + capture).encode()]).runs) == 1


def test_the_own_process_holds_what_torch_holds() -> None:
    oom = (
        "CUDA out of memory. Tried to allocate 260.00 MiB. GPU 0 has a total capacity of 23.64 GiB of which 77.12 MiB "
        "is free. Process 7 has 19.19 GiB memory in use. Process 8 has 4.36 GiB memory in use. Of the allocated memory "
        "3.82 GiB is allocated by PyTorch, and 102.20 MiB is reserved by PyTorch but unallocated."
    )
    assert "(process 7 19.19 GiB; this one 4.36 GiB)" in first(oom).why


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vLLM: loglikelihood tasks end in CUDA OOM", "log-probabilities of the prompt"),
        (
            "TypeError: LLM.__init__() got an unexpected keyword argument 'gpu_memory_utilisation'",
            "gpu_memory_utilization",
        ),
        (
            "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-x (size 33)\nleftovers in /dev/shm",
            "earlier",
        ),
    ],
)
def test_the_explanation_names_what_the_text_tells(text: str, words: str) -> None:
    assert words in first(text).why


def test_a_checkpoint_above_the_free_ram_that_ends_the_engine_is_host_memory() -> None:
    log = (
        "(EngineCore pid=5) INFO 08-24 16:26:46 [weight_utils.py:897] Auto-prefetch is disabled because the checkpoint "
        "size (15.87 GiB) exceeds 90% of available RAM (10.07 GiB).\n"
        "Loading safetensors checkpoint shards: 62% Completed | 5/8 [00:39<00:18, 6.04s/it]\n"
        "(EngineCore pid=5) ERROR 08-24 16:27:35 [core.py:1349] EngineCore failed to start.\n"
    )
    assert first(log).cause == "host_ram_oom"
    assert "with 10.07 GiB of RAM" in first(log).why


def test_an_empty_pool_beside_large_weights_needs_no_neighbour() -> None:
    log = "vllm {}\nERROR 04-27 11:08:32 [core.py:340] ValueError: No available memory for the cache blocks.\n"
    assert first(log.format("serve ...")).cause == "gpu_shared_or_not_free"
    large = first(
        log.format("Version: 0.8.1, two RTX 3090.\nvllm serve Qwen/Qwen2.5-32B-Instruct -tp 4 --enforce-eager")
    )
    assert large.cause == "no_cache_blocks"
    assert "the weights take" in large.why


def test_a_server_is_not_well_where_the_text_says_that_it_fails() -> None:
    stats = (
        "INFO 01-23 06:33:37 metrics.py:396] Running: 6 reqs, Swapped: 0 reqs, Pending: 0 reqs, GPU KV cache usage: 9%"
    )
    assert diagnosis(stats).verdict == "no problem found"
    assert diagnosis(f"[Bug]: block table already exists\n{stats}").verdict == "cause above"


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve Qwen/Qwen3-8B --max-model-len 4096",
        "My program ends, and there was no OOM error",
        "lmdeploy serve api_server: RuntimeError: [TM][ERROR] CUDA runtime error: out of memory",
        "text_generation_server/models/flash_causal_lm.py: CUDA out of memory.",
    ],
)
def test_a_question_or_another_engine_is_no_failure_of_vllm(text: str) -> None:
    assert all(run.verdict == "not understood" for run in read_log([text.encode()], "log").runs)


NO_BLOCKS = "Available KV cache memory: {} GiB\nValueError: No available memory for the cache blocks.\n"


def test_a_share_is_raised_for_the_smallest_card_that_the_figures_allow() -> None:
    log = "$ -tp 2 --gpu-memory-utilization 0.10\nLoading model weights took 28.4767 GB\n" + NO_BLOCKS.format(-23.55)
    fix = first(log).fixes[0]
    # 28.48 - 23.55 + 0.5 GiB are a tenth of 54.3 GiB at least, of which 24.55 GiB are 0.453.
    assert fix.flags == {"gpu_memory_utilization": 0.56}
    assert fix.command[-2:] == ("--tensor-parallel-size", "2")


def test_weights_that_fill_the_smallest_card_are_the_lever() -> None:
    assert first("Model loading took 7.61 GiB\n" + NO_BLOCKS.format(-0.23)).fixes[0].kind == "checkpoint_format"


def test_steps_above_every_default_are_cut_first_and_no_flag_is_dropped() -> None:
    given = "$ --max-num-batched-tokens 16384 --limit-mm-per-prompt '{\"image\": 8}' --gpu-memory-utilization 0.78\n"
    fix = first(given + "Model loading took 21.5 GiB\n" + NO_BLOCKS.format(-1.62)).fixes[0]
    assert fix.flags["max_num_batched_tokens"] == 2048
    assert '{"image": 8}' in fix.command


@pytest.mark.parametrize("before", ["", "# two containers on the same GPU\n"])
def test_a_pool_far_below_zero_is_a_neighbour_s_first(before: str) -> None:
    missing = -6.5 if before else -30.18
    assert first(before + NO_BLOCKS.format(missing)).fixes[0].kind == "sequence_starts_or_wait"


def test_a_trainer_gets_its_own_keys_and_no_server_s_command() -> None:
    log = (
        "$ actor_rollout_ref.rollout.gpu_memory_utilization=0.6\nrollout.resume(tags=['weights']) -> wake_up\n"
        "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62\n"
    )
    fix = first(log).fixes[0]
    assert "actor_rollout_ref.rollout.gpu_memory_utilization=0.45" in fix.steps[0]
    assert "param_offload=True" in fix.steps[1]
    assert not fix.command


def test_what_neither_torch_nor_this_process_holds_is_another_container_s() -> None:
    log = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 768.00 MiB. GPU 0 has a total capacity of 83.05 "
        "GiB of which 140.38 MiB is free. Including non-PyTorch memory, this process has 23.33 GiB memory in use. Of "
        "the allocated memory 21.92 GiB is allocated by PyTorch.\n"
    )
    assert first(log).cause == "gpu_shared_or_not_free"
    assert diagnosis("sglang.launch_server\n" + log).notes[0].startswith("59.58 GiB of the card belong to another")


def test_pieces_of_steps_without_a_graph_pool_mean_that_steps_ran() -> None:
    log = "GPU KV cache size: 92,928 tokens\n" + oom(15.87, 0.84, 12.82, 1.78, "768.00 MiB", "HIP")
    found = first("$ --max-num-batched-tokens 16384 --gpu-memory-utilization 0.82\n" + log)
    assert found.cause == "runtime_activation_burst"
    assert found.fixes[0].flags == {"max_num_batched_tokens": 4096, "gpu_memory_utilization": 0.77}


def test_a_card_and_a_model_in_prose_make_a_plan() -> None:
    log = "GPU: NVIDIA RTX 4090, model Qwen/Qwen2.5-14B-Instruct\n" + NO_BLOCKS.format(-4.02)
    assert first(log).fixes[0].plan is not None
    assert first(log.replace("4090", "4090 and an A100")).fixes[0].plan is None


def test_weights_above_the_card_s_total_place_a_failure_without_frames() -> None:
    log = "$ docker run vllm/vllm-openai:v0.11.0 --model Qwen/Qwen3-32B\nNVIDIA L40S\n"
    found = first(log + "CUDA out of memory. Tried to allocate 1.16 GiB.\n")
    assert found.cause == "weights_too_big"
    assert "log-probabilities" not in found.why


def test_bytes_without_a_length_give_the_part_of_it_that_fits() -> None:
    log = "7.8 GiB KV cache is needed, which is larger than the available KV cache memory (7.08 GiB)"
    assert "--max-model-len to 0.9 of" in first(log).fixes[0].steps[0]


def test_a_setting_that_the_message_names_is_taken_out() -> None:
    assert first("ValueError: moe_backend='triton' is not supported for NvFP4 MoE").fixes[0].flags == {
        "moe_backend": None
    }


def test_a_place_without_its_usual_cause_is_not_sure() -> None:
    told = "vLLM ends with `XPU out of memory` while initializing the KV cache, --enforce-eager is on"
    assert first(told).confidence < 0.7


def test_a_request_of_the_size_of_a_whole_weight_is_one_of_loading() -> None:
    log = "vLLM v0.19.1 on an RTX 4090 with Qwen/Qwen3-14B\ntorch.OutOfMemoryError: Tried to allocate {}."
    whole, other = (first(log.format(size)) for size in ("1.45 GiB", "1.30 GiB"))
    assert whole.cause == "weights_too_big" and "lm_head (151,936 x 5,120 x 2 bytes)" in whole.why
    assert other.cause != "weights_too_big"


@pytest.mark.parametrize("word", ["a.", "a-", "a_"])
def test_a_long_word_does_not_hold_up_the_answer(word: str) -> None:
    assert diagnosis(word * 20_000 + "\nvllm runs out of memory").verdict == "cause above"


def test_a_neighbour_that_torch_does_not_name_bounds_the_share_beside_it() -> None:
    steps = " ".join(first(oom(44.0, 0.5, 27.5, 0.0, "1.60 GiB", "CUDA")).fixes[0].steps)
    assert "--gpu-memory-utilization 0.62" in steps  # 16 GiB of 44 are another process's


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("On a DGX Spark the engine dies with\n`TimeoutError: RPC call to sample_tokens timed out`", "not_memory"),
        ("vllm says\n- `ValueError: Unknown quantization method: exl9. Must be one of ['awq']`", "not_memory"),
        ('vllm pod crashes with `assert t.is_pinned(), "CPU tensor must be pinned"`', "not_memory"),
        ('ERROR   File "vllm/worker/worker.py", line 9, in check_if_supports_dtype', "driver_or_cuda_mismatch"),
        ("vllm 0.26.0: the cold start fills 52 GB of RAM and gets OOM-killed", "host_ram_oom"),
        ("vllm: 12 images cause an OOM error during the profiling stage", "profiling_activation_peak"),
        ("vllm 0.25.1: host memory continuously increases until it runs out of memory", "leak_over_time"),
        (
            "rollout_gpu_mem_util 0.55, free_cache_engine=True\nCUDA Error: out of memory at cumem_allocator.cpp",
            "sleep_mode_or_rlhf_colocation",
        ),
        ("vLLM on a T4: after loading weights, only 110MB remained and it OOM'd", "weights_too_big"),
        ("vllm 0.25.1, 192k context: boots, then the 180K prompt OOMs", "runtime_activation_burst"),
        (
            'vllm fails: "Free memory on device cuda:N ... is less than desired GPU memory utilization"',
            "gpu_shared_or_not_free",
        ),
        (
            f"Crash under our agent workload, ~1 in flight.\n{oom(94.9, 1.2, 88.0, 0.5, '1.40 GiB')}",
            "runtime_activation_burst",
        ),
    ],
)
def test_words_of_a_person_place_the_failure(text: str, cause: str) -> None:
    assert first(text).cause == cause


def test_heads_are_split_over_a_power_of_two_that_kv_heads_take_too() -> None:
    log = "ValueError: Total number of attention heads (28) must be divisible by tensor parallel size (8).\n"
    assert first(log).fixes[0].flags == {"tensor_parallel_size": 4}


SERVING = 'File "/opt/vllm/v1/engine/core.py", line 700, in run_busy_loop\n'


def served_oom(own: float, total: float = 80.0) -> str:
    """A step of a server that holds `own` of the card fails for lack of 100 MiB."""
    return (
        f"{SERVING}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 200.00 MiB. GPU 0 has a total "
        f"capacity of {total:.2f} GiB of which 100.00 MiB is free. Process 7 has {total - own - 0.1:.2f} GiB memory in "
        f"use. Including non-PyTorch memory, this process has {own:.2f} GiB memory in use. Of the allocated memory "
        f"{own - 1:.2f} GiB is allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated.\n"
    )


@pytest.mark.parametrize(("own", "highest"), [(76.0, 0.9), (40.0, 0.5), (24.0, 0.3)])
def test_a_share_that_is_not_shown_is_at_most_what_the_server_holds(own: float, highest: float) -> None:
    fixes = [fix for finding in diagnosis(served_oom(own)).findings for fix in finding.fixes]
    shares = [fix.flags["gpu_memory_utilization"] for fix in fixes if fix.kind == "lower_util"]
    assert shares
    assert max(shares) < highest


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


@pytest.mark.parametrize(
    ("text", "flags", "step"),
    [
        (
            "ValueError: Too large swap space. 90.00 GiB out of the 100.00 GiB total CPU memory is allocated for it.",
            {"swap_space": 0},
            "",
        ),
        (
            "vllm serve /dev/shm/model\nOut of memory: Killed process 7 (VLLM::EngineCor) anon-rss:9999999kB",
            {},
            "put the checkpoint on a disk",
        ),
        (
            "--load-format runai_streamer\nOut of memory: Killed process 7 (VLLM::EngineCor) anon-rss:9999999kB",
            {"model_loader_extra_config": {"concurrency": 8, "memory_limit": 6 << 30}},
            "",
        ),
    ],
)
def test_what_the_text_names_of_host_memory_is_given_back_first(text: str, flags: dict[str, object], step: str) -> None:
    fix = first(f"{text}\n").fixes[0]
    assert fix.flags == flags
    assert any(step in given for given in (*fix.steps, ""))


LOADING = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 384.00 MiB. GPU 0 has a total capacity of 79.33 GiB "
    "of which 351.81 MiB is free. Of the allocated memory 78.33 GiB is allocated by PyTorch, and 12.36 MiB is reserved "
    "by PyTorch but unallocated.\n"
)


@pytest.mark.parametrize("seen", ["CUDA_VISIBLE_DEVICES=0,1,2,3", "# 4 GPUs\n", "GPU 3: NVIDIA A100-SXM4-80GB\n"])
def test_gpus_that_no_rank_uses_come_before_another_checkpoint(seen: str) -> None:
    split = first(f"{seen} vllm serve Qwen/Qwen2.5-72B-Instruct --max-model-len 8192\n{LOADING}").fixes[0]
    assert 2 <= split.flags["tensor_parallel_size"] <= 4


def test_weights_of_32_bits_are_halved_before_anything_is_bought() -> None:
    log = "vllm serve Qwen/Qwen2.5-7B-Instruct --dtype float --max-model-len 4096\n" + LOADING.replace("79.33", "22.0")
    assert first(log.replace("78.33", "21.30")).fixes[0].flags == {"dtype": "half"}


def test_a_forward_pass_is_no_loading() -> None:
    frame = (
        'File "/opt/vllm/model_executor/layers/linear.py", line 135, in apply\n    return F.linear(x, layer.weight)\n'
    )
    findings = diagnosis(frame + LOADING).findings
    assert all(finding.cause != "weights_too_big" for finding in findings)


@pytest.mark.parametrize(("largest", "smaller"), [(512, 128), (64, 16)])
def test_the_largest_captured_batch_shrinks_from_what_the_log_prints(largest: int, smaller: int) -> None:
    log = (
        f"INFO 04-19 09:36:56 [gpu_model_runner.py:5000] Profiling CUDA graph memory: PIECEWISE=9 (largest={largest})\n"
        'File "/opt/vllm/v1/worker/gpu_worker.py", line 9, in profile_cudagraph_memory\n'
        "torch.AcceleratorError: CUDA error: out of memory\n"
    )
    assert first(log).fixes[0].flags == {"max_cudagraph_capture_size": smaller}


def test_a_value_beside_the_default_that_fails_is_the_cure() -> None:
    text = '"--max-num-seqs", "16",  # the sampler is warmed up with max_num_seqs;\n  # the 256 default OOMs here.\n'
    assert first(text).fixes[0].flags == {"max_num_seqs": 16}


def test_nccl_that_has_no_memory_names_its_buffers_after_a_word_of_the_same_passage() -> None:
    text = "It OOMs on the first request, with\nncclUnhandledCudaError: Cuda failure 2 'out of memory'\n"
    assert first(text).cause == "nccl_or_custom_allreduce_buffers"


def test_a_message_that_ends_with_a_comma_goes_on_in_the_next_line() -> None:
    text = "vllm\nRuntimeError: write_cache_kernel,\n  /src/cache.cu:86, width must be 64\n"
    assert "width must be 64" in first(text).fixes[0].why


def test_flags_of_other_programs_are_not_given_to_vllm() -> None:
    text = "--dtype half\n--num-prompts 100 --dataset /data/prompts.json\n"
    command, args = pasted_command(text, None, release("0.20.0"))
    assert command is None
    assert args.others == ()
    assert args.dtype == "half"


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


WORKER = "(VllmWorker rank=3 pid=7) ERROR 04-25 10:24:22 [multiproc_executor.py:380] "


def listed_oom(others: str, own: float, torch: float, unused: str = "14.00 MiB") -> str:
    return (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 786.00 MiB. GPU 0 has a total capacity of "
        f"44.35 GiB of which 739.50 MiB is free. {others}Including non-PyTorch memory, this process has {own:.2f} GiB "
        f"memory in use. Of the allocated memory {torch:.2f} GiB is allocated by PyTorch, and {unused} is reserved by "
        "PyTorch but unallocated.\n"
    )


def test_the_share_beside_listed_processes_is_what_they_leave() -> None:
    frame = '  File "vllm/worker/cache_engine.py", line 103, in _allocate_kv_cache\n'
    found = first(frame + listed_oom("Process 7 has 28.14 GiB memory in use. ", 15.49, 15.0))
    assert found.cause == "gpu_shared_or_not_free" and "process 7" in found.fixes[0].why
    assert {"gpu_memory_utilization": 0.3} in [
        dict(fix.flags) for fix in found.fixes
    ]  # the graphs and a live neighbour


def test_the_process_s_own_memory_is_no_neighbour_s() -> None:
    assert not diagnosis(listed_oom("", 43.6, 43.0)).case.has("neighbour_holds")


def test_an_engine_that_failed_to_start_on_a_card_full_of_parameters_was_loading() -> None:
    failed = "ERROR 07-07 15:19:51 [core.py:515] EngineCore failed to start.\n"
    read = diagnosis(WORKER + listed_oom("", 43.6, 42.6) + failed)
    assert (read.verdict, read.findings[0].cause) == ("cause found", "weights_too_big")


def test_a_model_step_of_a_server_that_can_t_start_is_the_profile_run() -> None:
    frame = f'{WORKER}  File "vllm/model_executor/models/llama.py", line 341, in forward\n'
    assert first(f"The 70B can't start, out of memory\n{frame}").cause == "profiling_activation_peak"


def test_the_caller_of_profile_run_and_pool_is_not_the_pool() -> None:
    loaded = "INFO 10-15 01:20:52 model_runner.py:1071] Loading model weights took 19.9073 GB\n"
    frame = 'Traceback (most recent call last):\n  File "llm_engine.py", line 349, in __init__\n    self.{}()\n'
    assert diagnosis(loaded + frame.format("_initialize_kv_caches")).case.site == "profile"
    assert diagnosis(loaded + frame.format("initialize_kv_cache")).case.site == "kv"


def test_a_pool_without_its_error_is_memory_that_was_no_longer_free() -> None:
    frame = 'ERROR 12-17 00:48:42 engine.py:366]   File "cache_engine.py", line 62, in _allocate_kv_cache\n'
    assert first(f"vLLM OOM\n{frame}").cause == "gpu_shared_or_not_free"


def test_orphans_that_a_failed_step_left_are_not_its_cause() -> None:
    frame = '  File "vllm/v1/sample/sampler.py", line 207, in compute_logprobs\n    return logits.log_softmax(dim=-1)\n'
    told = "vLLM leaves orphan processes when the parent dies of OOM\n"
    assert first(told).cause == "gpu_shared_or_not_free"
    assert first(told + frame).cause == "runtime_activation_burst"


def test_a_command_shown_twice_is_of_one_server() -> None:
    command = "python -m vllm.entrypoints.openai.api_server --model lmsys/vicuna-7b-v1.3 --gpu-memory-utilization 0.98"
    told = f"It runs with another server, not here:\n```\n{command}\n```\nIt OOMs:\n```\n$ {command}\n```\n"
    assert not diagnosis(told).case.has("shares_told")


def test_a_printed_failure_below_its_sentence_is_no_later_one() -> None:
    told = "CUDA out of memory when serving images\n" + "one\n" * 20
    assert first(told + listed_oom("Process 7 has 28.14 GiB memory in use. ", 15.49, 7.0)).cause == (
        "gpu_shared_or_not_free"
    )


def test_what_fills_an_integrated_gpu_is_limited_by_its_share_of_the_ram() -> None:
    frame = '  File "torch/utils/_device.py", line 109, in __torch_function__\n'
    found = first(frame + oom(62.47, 0.75, 61.41, 0.13, "1.08 GiB", "HIP"))
    assert (found.cause, found.fixes[0].kind) == ("unified_memory_or_wsl", "more_host_ram_or_shm")


def test_graphs_with_a_pool_come_after_the_weights() -> None:
    command = "vllm serve Qwen/Qwen3-14B --gpu-memory-utilization 0.95 --max-model-len 40960\n"
    message = listed_oom("", 43.6, 43.0).replace("44.35", "31.36").replace("43.", "30.")
    pooled = message.replace("PyTorch, and", "PyTorch, with 300.00 MiB allocated in private pools, and")
    assert first(command + message).cause == "weights_too_big"
    assert first(command + pooled).cause != "weights_too_big"


def test_a_pool_that_the_plan_has_and_the_text_has_not_is_no_reason_for_more_gpus() -> None:
    told = "No available memory for the cache blocks on a 32GB GPU\n"
    command = "python -m vllm.entrypoints.openai.api_server --model Qwen/Qwen1.5-14B-Chat --gpu-memory-utilization 0.95"
    assert dict(first(told + command).fixes[0].flags) == {"max_model_len": 8192}


def test_weights_that_are_rounded_as_they_load_are_taken_from_a_checkpoint_that_is() -> None:
    told = "vllm serve Qwen/Qwen2.5-14B-Instruct --quantization fp8 --max-model-len 8192 on a 4090: OOM while loading"
    flags = first(told).fixes[0].flags
    assert "Int8" in flags["model"] and flags["quantization"] is None


def test_the_newest_line_may_come_first() -> None:
    newest = "engine.py :190 2024-02-03 03:44:03,976 Error initializing vLLM engine: "
    sized = "INFO 02-03 03:43:48 llm_engine.py:316] # GPU blocks: 7754, # CPU blocks: 2048\n"
    graphs = "INFO 02-03 03:43:49 model_runner.py:625] Capturing the model for CUDA graphs.\n"
    found = first(newest + listed_oom("", 43.6, 37.38, "275.68 MiB") + graphs + sized)
    assert found.cause == "cudagraph_capture_oom"


def test_an_engine_without_eager_mode_has_no_graphs_to_capture() -> None:
    config = "INFO 07-20 19:23:49 llm_engine.py:60] Initializing an LLM engine with config: model='m', {}seed=0)\n"
    sized = "INFO 07-20 19:27:06 llm_engine.py:131] # GPU blocks: 37085, # CPU blocks: 2048\nThen it runs into OOM.\n"
    assert first(config.format("tokenizer_mode=auto, ") + sized).cause == "runtime_activation_burst"
    with_graphs = config.format("tokenizer_mode=auto, enforce_eager=False, ") + sized
    assert first(with_graphs).cause == "cudagraph_capture_oom"


def test_a_rank_that_fails_while_the_others_print_their_profile_was_profiling() -> None:
    step = (
        "[rank0]: torch.OutOfMemoryError: Error in model execution (input dumped to /tmp/err_execute_model_input.pkl): "
    )
    others = "(RayWorkerWrapper pid=2) INFO 01-02 02:39:18 worker.py:241] Memory profiling takes 9.26 seconds\n"
    message = listed_oom("", 43.6, 38.0, "162.87 MiB").removeprefix("torch.OutOfMemoryError: ")
    assert first(step + message + others).cause == "profiling_activation_peak"
    assert first(step + message).cause == "runtime_activation_burst"


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


def test_device_chooses_no_card() -> None:
    told = 'llm = LLM(model="allenai/OLMo-1B-hf", device="cuda:3")\nCUDA out of memory. Tried to allocate 4.43 GiB.'
    found = first(told)
    assert found.cause == "gpu_shared_or_not_free"
    assert any("CUDA_VISIBLE_DEVICES" in step for step in found.fixes[0].steps)


@pytest.mark.parametrize(
    ("told", "cause", "flags"),
    [
        (
            "vLLM: --enable-sleep-mode OOMs loading the model\n4. Run the same script without `--enable-sleep-mode`\n"
            "5. Observe that it loads correctly.",
            "sleep_mode_or_rlhf_colocation",
            {"enable_sleep_mode": None},
        ),
        (
            "vLLM with pipeline parallelism runs out of memory. "
            "With --tensor-parallel-size 4 --pipeline-parallel-size 1 it works fine.",
            "tp_kv_head_replication_or_pp_imbalance",
            {"tensor_parallel_size": 4, "pipeline_parallel_size": 1},
        ),
        (
            "> vLLM without --enforce-eager: OOM.\n> After adding the --enforce-eager parameter, the program runs "
            "successfully.",
            "cudagraph_capture_oom",
            {"enforce_eager": True},
        ),
    ],
)
def test_what_the_text_says_cured_it_names_cause_and_fix(told: str, cause: str, flags: dict[str, object]) -> None:
    found = first(told)
    assert (found.cause, dict(found.fixes[0].flags)) == (cause, flags)


def test_the_last_stage_of_a_pipeline_is_the_smallest() -> None:
    told = "vLLM: the last GPU always OOMs when I only use pipeline parallelism"
    assert first(told).cause == "tp_kv_head_replication_or_pp_imbalance"


def test_an_error_pasted_above_its_log_belongs_to_the_steps_below_it() -> None:
    graphs = "INFO 12-18 21:44:36 model_runner.py:394] Capturing the model for CUDA graphs.\n"
    assert first(f"RuntimeError: CUDA error: out of memory\n{graphs}").cause == "cudagraph_capture_oom"


def test_a_capture_that_fails_while_profiling_is_a_capture() -> None:
    assert first("vLLM OOM: CUDA graph capture fails during profiling").cause == "cudagraph_capture_oom"


def test_a_server_that_was_ready_refutes_a_plan_that_does_not_start() -> None:
    command = "vllm serve Qwen/Qwen2.5-72B-Instruct --gpu-memory-utilization 0.97 --max-model-len 32768\n"
    ready = "INFO 02-14 08:40:00 api_server.py:1] Application startup complete.\n"
    step = 'ERROR 02-14 08:44:33 engine.py:1]   File "engine.py", line 3, in run_engine_loop\n'
    found = first(f"On one H100:\n{command}{ready}{step}torch.OutOfMemoryError: CUDA out of memory.\n")
    assert dict(found.fixes[0].flags).keys() == {"gpu_memory_utilization"}


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


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        ("docker run --gpus all \\\n  vllm/vllm-openai:v0.10.0 --model {model} --max-model-len 32768", "docker line"),
        ("- image: vllm/vllm-openai:v0.10.0\n  args: ['--model', '{model}', '--max-model-len', '32768']", "`args:`"),
    ],
)
def test_a_container_takes_the_changed_flag_where_its_others_stand(lines: str, place: str) -> None:
    short = "The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in KV cache"
    text = f"{lines.format(model='Qwen/Qwen2.5-14B-Instruct')}\nValueError: {short} (10320). On an RTX 5090."
    fix = first(text).fixes[0]
    assert fix.flags == {"max_model_len": 9216}
    assert place in fix.comment
    assert "--max-model-len 9216" in fix.comment


def test_a_share_with_a_decimal_comma_is_read() -> None:
    text = "Qwen2.5-7B on an RTX 4090, gpu_memory_utilization 0,35: No available memory for the cache blocks."
    assert "8.27 GiB" in first(text).why


ALLOCATION = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {wanted} GiB. GPU 0 has a total capacity of "
    "21.98 GiB of which {free} GiB is free. Of the allocated memory {held} GiB is allocated by PyTorch, and "
    "{unused} GiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "- Zombie vLLM process was holding 13.9 GB GPU memory\n- The worker failed with OOM at the model load",
            "gpu_shared_or_not_free",
        ),
        (ALLOCATION.format(wanted="3.60", free="2.20", held="16.20", unused="3.20"), "allocator_fragmentation"),
        (ALLOCATION.format(wanted="41252.90", free="21.00", held="0.00", unused="0.00"), "not_memory"),
        ("262,144 KV cache OOM (need 8.33 GiB, only 8.29 GiB)", "kv_too_small_for_max_len"),
        (
            "CUDA out of memory\n\nOn an AWS g4dn.xlarge:\nvllm serve acme/chatty-7b-v1.4 --dtype float",
            "weights_too_big",
        ),
        ("**Symptom:** `RuntimeError: PTX compilation failed` while vLLM loads the model.", "not_memory"),
        (
            "- vLLM crashed at start (exit 1, NOT GPU OOM):\n  `AttributeError: 'X' object has no attribute 'weight'`",
            "not_memory",
        ),
        ("[vllm] got an unexpected keyword argument '--gpu-memory-utilization'", "wrong_flag"),
        (
            "(raylet) file_system_monitor.cc:111: /tmp/ray/x is over 95% full, available space: 60427313152. "
            "Object creation will fail if spilling is required.",
            "not_memory",
        ),
    ],
)
def test_what_a_text_says_in_its_own_words_decides(text: str, cause: str) -> None:
    assert first(text).cause == cause


@pytest.mark.parametrize(
    ("line", "engine"),
    [
        ("    return Variable._execution_engine.run_backward(", "engine_trainer"),
        (
            '  File "/x/site-packages/transformers/modeling_utils.py", line 900, in _load_state_dict',
            "engine_transformers",
        ),
        ('pipe = DiffusionPipeline.from_pretrained("x/y").to("cuda")', "engine_diffusers"),
    ],
)
def test_a_frame_of_another_program_names_it(line: str, engine: str) -> None:
    allocation = ALLOCATION.format(wanted="1.50", free="0.90", held="19.00", unused="0.20")
    assert diagnosis(f"{line}\n{allocation}").other_engine == engine


def test_a_share_behind_a_comparison_sign_is_the_failed_one() -> None:
    text = "Llama-3.1-8B on an L4 runs out of memory while capturing graphs with `--gpu-memory-utilization ≥ 0.85`."
    assert first(text).fixes[0].flags["gpu_memory_utilization"] < 0.85


def test_a_call_without_a_split_runs_on_one_of_the_cards() -> None:
    call = 'llm = LLM(\n    model="/models/Qwen2-VL-72B-Instruct",\n    limit_mm_per_prompt={"image": 10},\n)\n'
    found = first(f"from vllm import LLM\n{call}I have 4 H100-80G, and it always runs out of memory.")
    assert found.cause == "weights_too_big"
    assert found.fixes[0].flags["tensor_parallel_size"] == 4
