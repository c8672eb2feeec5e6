"""Short texts whose frames, steps and sizes say where it failed."""

from __future__ import annotations

import pytest
from short_logs import diagnosis, first, oom

LOADED = "INFO 01-02 02:07:12 model_runner.py:1099] Loading model weights took {} GB\n"


SORT = "    logits_sort, logits_idx = logits.sort(dim=-1, descending=False)\n"


LOADING = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 384.00 MiB. GPU 0 has a total capacity of 79.33 GiB "
    "of which 351.81 MiB is free. Of the allocated memory 78.33 GiB is allocated by PyTorch, and 12.36 MiB is reserved "
    "by PyTorch but unallocated.\n"
)


WORKER = "(VllmWorker rank=3 pid=7) ERROR 04-25 10:24:22 [multiproc_executor.py:380] "


def listed_oom(others: str, own: float, torch: float, unused: str = "14.00 MiB") -> str:
    return (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 786.00 MiB. GPU 0 has a total capacity of "
        f"44.35 GiB of which 739.50 MiB is free. {others}Including non-PyTorch memory, this process has {own:.2f} GiB "
        f"memory in use. Of the allocated memory {torch:.2f} GiB is allocated by PyTorch, and {unused} is reserved by "
        "PyTorch but unallocated.\n"
    )


ALLOCATION = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {wanted} GiB. GPU 0 has a total capacity of "
    "21.98 GiB of which {free} GiB is free. Of the allocated memory {held} GiB is allocated by PyTorch, and "
    "{unused} GiB is reserved by PyTorch but unallocated."
)


def test_parameters_are_created_under_a_device_context() -> None:
    frame = '  File "/x/torch/utils/_device.py", line 103, in __torch_function__\n    return func(*args)\n'
    assert first(frame + oom(60.96, 0.01, 59.36, 1.09)).cause == "weights_too_big"


def test_pytest_s_summary_is_no_traceback() -> None:
    line = "FAILED spec_decode/e2e/test_eagle.py::test_greedy[1] - torch.OutOfMemoryError: "
    assert first(line + oom(22.05, 0.1, 21.5, 0.1, device="CUDA")).cause != "lora_or_spec_decode_extra"


def test_flags_of_a_newer_release_are_not_put_in_place_of_each_other() -> None:
    steps = " ".join(
        first("vllm: error: unrecognized arguments: --enable-reasoning --reasoning-parser r1\n").fixes[0].steps
    )
    assert "in place of" not in steps
    assert "pip install -U vllm" in steps


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


def test_the_start_up_check_is_known_by_its_core() -> None:
    found = first("Free memory on device (18.0/31.4 GiB) is less than desired (22.0 GiB)")
    assert found.cause == "gpu_shared_or_not_free" and "0.7 x 31.4" in found.why
    among_others = first("Free memory on device (18.0-18.2 / 31.4 GiB) on startup is less than desired")
    assert among_others.cause == "gpu_shared_or_not_free"
    cut = first(
        "vllm serve m --gpu-memory-utilization 0.985\nValueError: Free memory on device cuda:0 (22.78/23.48 GiB)"
    )
    assert cut.fixes[0].flags == {"gpu_memory_utilization": 0.94} and "0.985 x 23.48" in cut.why


def test_the_second_half_of_the_length_check_is_enough() -> None:
    log = "{}8.0 GiB KV cache is needed, which is larger than the available KV cache memory (4.0 GiB)"
    assert first(log.format("")).cause == "kv_too_small_for_max_len"
    fix = first(log.format("vllm serve m --max-model-len 100000\n")).fixes[0]
    assert 48_000 < fix.flags["max_model_len"] < 50_000


def test_a_sampler_that_is_warmed_up_is_a_site() -> None:
    log = "RuntimeError: CUDA out of memory{} when warming up sampler with 512 dummy requests"
    assert {diagnosis(log.format(word)).case.site for word in ("", " occurred")} == {"sampler"}


def test_a_log_that_stops_after_counting_the_pool_stopped_in_the_check_of_its_size() -> None:
    log = (
        "(Worker pid=3) INFO 10-11 10:42:14 [gpu_worker.py:298] Available KV cache memory: {} GiB\n"
        "(EngineCore_DP0 pid=2) ERROR 10-11 10:42:14 [core.py:708] EngineCore failed to start.\n"
    )
    assert first(log.format(13.69)).cause == "kv_too_small_for_max_len"
    assert first(log.format(0)).cause == "no_cache_blocks"


def test_a_checkpoint_above_the_free_ram_that_ends_the_engine_is_host_memory() -> None:
    log = (
        "(EngineCore pid=5) INFO 08-24 16:26:46 [weight_utils.py:897] Auto-prefetch is disabled because the checkpoint "
        "size (15.87 GiB) exceeds 90% of available RAM (10.07 GiB).\n"
        "Loading safetensors checkpoint shards: 62% Completed | 5/8 [00:39<00:18, 6.04s/it]\n"
        "(EngineCore pid=5) ERROR 08-24 16:27:35 [core.py:1349] EngineCore failed to start.\n"
    )
    assert first(log).cause == "host_ram_oom"
    assert "with 10.07 GiB of RAM" in first(log).why


def test_pieces_of_steps_without_a_graph_pool_mean_that_steps_ran() -> None:
    log = "GPU KV cache size: 92,928 tokens\n" + oom(15.87, 0.84, 12.82, 1.78, "768.00 MiB", "HIP")
    found = first("$ --max-num-batched-tokens 16384 --gpu-memory-utilization 0.82\n" + log)
    assert found.cause == "runtime_activation_burst"
    assert found.fixes[0].flags == {"max_num_batched_tokens": 4096, "gpu_memory_utilization": 0.77}


def test_weights_above_the_card_s_total_place_a_failure_without_frames() -> None:
    log = "$ docker run vllm/vllm-openai:v0.11.0 --model Qwen/Qwen3-32B\nNVIDIA L40S\n"
    found = first(log + "CUDA out of memory. Tried to allocate 1.16 GiB.\n")
    assert found.cause == "weights_too_big"
    assert "log-probabilities" not in found.why


def test_a_place_without_its_usual_cause_is_not_sure() -> None:
    told = "vLLM ends with `XPU out of memory` while initializing the KV cache, --enforce-eager is on"
    assert first(told).confidence < 0.7


def test_a_request_of_the_size_of_a_whole_weight_is_one_of_loading() -> None:
    log = "vLLM v0.19.1 on an RTX 4090 with Qwen/Qwen3-14B\ntorch.OutOfMemoryError: Tried to allocate {}."
    whole, other = (first(log.format(size)) for size in ("1.45 GiB", "1.30 GiB"))
    assert whole.cause == "weights_too_big" and "lm_head (151,936 x 5,120 x 2 bytes)" in whole.why
    assert other.cause != "weights_too_big"


@pytest.mark.parametrize("seen", ["CUDA_VISIBLE_DEVICES=0,1,2,3", "# 4 GPUs\n", "GPU 3: NVIDIA A100-SXM4-80GB\n"])
def test_gpus_that_no_rank_uses_come_before_another_checkpoint(seen: str) -> None:
    split = first(f"{seen} vllm serve Qwen/Qwen2.5-72B-Instruct --max-model-len 8192\n{LOADING}").fixes[0]
    assert 2 <= split.flags["tensor_parallel_size"] <= 4


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


def test_graphs_with_a_pool_come_after_the_weights() -> None:
    command = "vllm serve Qwen/Qwen3-14B --gpu-memory-utilization 0.95 --max-model-len 40960\n"
    message = listed_oom("", 43.6, 43.0).replace("44.35", "31.36").replace("43.", "30.")
    pooled = message.replace("PyTorch, and", "PyTorch, with 300.00 MiB allocated in private pools, and")
    assert first(command + message).cause == "weights_too_big"
    assert first(command + pooled).cause != "weights_too_big"


def test_weights_that_are_rounded_as_they_load_are_taken_from_a_checkpoint_that_is() -> None:
    told = "vllm serve Qwen/Qwen2.5-14B-Instruct --quantization fp8 --max-model-len 8192 on a 4090: OOM while loading"
    flags = first(told).fixes[0].flags
    assert "Int8" in flags["model"] and flags["quantization"] is None


def test_a_rank_that_fails_while_the_others_print_their_profile_was_profiling() -> None:
    step = (
        "[rank0]: torch.OutOfMemoryError: Error in model execution (input dumped to /tmp/err_execute_model_input.pkl): "
    )
    others = "(RayWorkerWrapper pid=2) INFO 01-02 02:39:18 worker.py:241] Memory profiling takes 9.26 seconds\n"
    message = listed_oom("", 43.6, 38.0, "162.87 MiB").removeprefix("torch.OutOfMemoryError: ")
    assert first(step + message + others).cause == "profiling_activation_peak"
    assert first(step + message).cause == "runtime_activation_burst"


def test_the_last_stage_of_a_pipeline_is_the_smallest() -> None:
    told = "vLLM: the last GPU always OOMs when I only use pipeline parallelism"
    assert first(told).cause == "tp_kv_head_replication_or_pp_imbalance"


def test_a_capture_that_fails_while_profiling_is_a_capture() -> None:
    assert first("vLLM OOM: CUDA graph capture fails during profiling").cause == "cudagraph_capture_oom"


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
