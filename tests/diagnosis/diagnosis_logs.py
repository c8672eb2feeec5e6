"""Logs written for the tests, one a failure, in the wording of vLLM, torch and their surroundings."""

from __future__ import annotations

TORCH = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {wanted}. GPU 0 has a total capacity of {total} of "
    "which {free} is free. Including non-PyTorch memory, this process has {own} memory in use. Of the allocated memory "
    "{torch} is allocated by PyTorch, and {unused} is reserved by PyTorch but unallocated. If reserved but unallocated "
    "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
FULL_OF_WEIGHTS = TORCH.format(
    wanted="224.00 MiB", total="23.64 GiB", free="101.00 MiB", own="23.53 GiB", torch="23.21 GiB", unused="9.10 MiB"
)
IN_A_STEP = TORCH.format(
    wanted="300.00 MiB", total="47.40 GiB", free="120.00 MiB", own="47.27 GiB", torch="45.90 GiB", unused="210.00 MiB"
)
CORE = "(EngineCore_DP0 pid=77) ERROR 01-02 03:04:05 [core.py:708] "
LOADED = (
    "(EngineCore_DP0 pid=77) INFO 01-02 03:03:05 [gpu_model_runner.py:2653] "
    "Model loading took 14.99 GiB and 9.1 seconds"
)
SIZED = "(EngineCore_DP0 pid=77) INFO 01-02 03:03:35 [kv_cache_utils.py:1087] GPU KV cache size: 98,304 tokens"
READY = "(APIServer pid=1) INFO:     Application startup complete."


def trace(*functions: str, error: str) -> str:
    """A traceback through these functions that ends in the error."""
    frames = [f'{CORE}  File "vllm/v1/worker/gpu_worker.py", line 99, in {function}' for function in functions]
    return "\n".join([*frames, CORE + error])


CAUSES: dict[str, tuple[str, str]] = {
    "parameters that do not fit": (
        "weights_too_big",
        trace("load_model", "initialize_model", "create_weights", error=FULL_OF_WEIGHTS),
    ),
    "a full card and nothing else known": ("weights_too_big", FULL_OF_WEIGHTS),
    "a loader that says so": (
        "weights_too_big",
        CORE + "Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization to free memory for "
        "weights, increasing --tensor-parallel-size, or using --quantization.\n" + FULL_OF_WEIGHTS,
    ),
    "repacking for a kernel": (
        "quantization_kernel_workspace",
        trace("load_model", "process_weights_after_loading", "gptq_marlin_repack", error=FULL_OF_WEIGHTS),
    ),
    "a failure between shards": (
        "quantization_kernel_workspace",
        "Loading safetensors checkpoint shards:  25% Completed | 5/20 [00:09<00:27,  1.8s/it]\n" + FULL_OF_WEIGHTS,
    ),
    "less free than asked for": (
        "gpu_shared_or_not_free",
        "ValueError: Free memory on device cuda:0 (30.12/79.18 GiB) "
        "on startup is less than desired GPU memory utilization "
        "(0.9, 71.26 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
    ),
    "a neighbour in torch's list": (
        "gpu_shared_or_not_free",
        FULL_OF_WEIGHTS.replace("Including", "Process 4242 has 15.00 GiB memory in use. Including").replace(
            "23.53", "8.53"
        ),
    ),
    "memory released while profiling": (
        "gpu_shared_or_not_free",
        "AssertionError: Error in memory profiling. Initial free memory 70.1 GiB, current free memory 74.9 GiB. This "
        "happens when other processes sharing the same container release GPU memory while vLLM is profiling.",
    ),
    "a budget below the weights": (
        "no_cache_blocks",
        "INFO 01-02 03:04:05 [worker.py:267] the current vLLM instance can use total_gpu_memory (15.73GiB) x "
        "gpu_memory_utilization (0.50) = 7.87GiB\n"
        "INFO 01-02 03:04:05 [worker.py:267] model weights take 7.51GiB; non_torch_memory takes 0.05GiB; PyTorch "
        "activation peak memory takes 1.42GiB; the rest of the memory reserved for KV Cache is -1.11GiB.\n"
        "ValueError: No available memory for the cache blocks. Try "
        "increasing `gpu_memory_utilization` when initializing "
        "the engine.",
    ),
    "a CPU backend with too small a share": (
        "no_cache_blocks",
        "ValueError: Available memory on node 0 (20.49/23.54 GiB) on kv cache allocation is less than requested memory "
        "for kv (-0.34/0.24 GiB). Reduce CPU memory used by other processes.",
    ),
    "a CPU backend with too large a share": (
        "host_ram_oom",
        "ValueError: Available memory on node 0 (10.10/23.54 GiB) on startup is less than desired CPU memory "
        "utilization (0.92, 21.66 GiB). On the CPU backend, the `--gpu-memory-utilization` flag controls it.",
    ),
    "a context longer than the pool": (
        "kv_too_small_for_max_len",
        "ValueError: To serve at least one request with the models's "
        "max seq len (65536), (8.00 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (5.25 GiB). Based on the available memory, the estimated "
        "maximum model length is 43008. Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.",
    ),
    "a context longer than the pool, wrapped": (
        "kv_too_small_for_max_len",
        "ValueError: To serve at least one request with the model's "
        "max\nseq len (65536), (8.00 GiB KV cache is needed, "
        "which is larger than the\navailable KV cache memory (5.25 GiB).",
    ),
    "a context longer than the pool, old words": (
        "kv_too_small_for_max_len",
        "ValueError: The model's max seq len (32768) is larger than "
        "the maximum number of tokens that can be stored in KV "
        "cache (20480). Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.",
    ),
    "too few state blocks": (
        "hybrid_state_cache_limit",
        "ValueError: max_num_seqs (512) exceeds available Mamba cache blocks (301). Please lower max_num_seqs.",
    ),
    "stages that differ": (
        "tp_kv_head_replication_or_pp_imbalance",
        "(Worker_PP0 pid=11) INFO 01-02 03:04:05 [gpu_worker.py:349] Available KV cache memory: 9.10 GiB\n"
        "(Worker_PP1 pid=12) INFO 01-02 03:04:05 [gpu_worker.py:349] Available KV cache memory: 1.20 GiB\n"
        + CORE
        + "ValueError: To serve at least one request with the model's "
        "max seq len (65536), (4.00 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (1.20 GiB).",
    ),
    "the profile run": (
        "profiling_activation_peak",
        LOADED + "\n" + trace("determine_available_memory", "profile_run", error=IN_A_STEP),
    ),
    "the sampler's warm-up": (
        "profiling_activation_peak",
        "RuntimeError: CUDA out of memory occurred when warming up "
        "sampler with 1024 dummy requests. Please try lowering "
        "`max_num_seqs` or `gpu_memory_utilization` when initializing the engine.",
    ),
    "capture": (
        "cudagraph_capture_oom",
        "\n".join([LOADED, SIZED, trace("compile_or_warm_up_model", "capture_model", error=IN_A_STEP)]),
    ),
    "capture, as the driver says it": (
        "cudagraph_capture_oom",
        trace("capture_model", "capture_end", error="torch.AcceleratorError: CUDA error: out of memory"),
    ),
    "a draft model in a step": (
        "lora_or_spec_decode_extra",
        READY + "\n" + trace("execute_model", "propose_draft_token_ids", error=IN_A_STEP),
    ),
    "NCCL without room": (
        "nccl_or_custom_allreduce_buffers",
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    ),
    "a step that fails beside a dump and a warning that name other features": (
        "runtime_activation_burst",
        "\n".join(
            [
                LOADED,
                SIZED,
                READY,
                "(EngineCore_DP0 pid=77) WARNING 01-02 03:04:04 [jit_monitor.py:135] Triton kernel JIT compilation "
                "during inference: _topk_log_softmax_kernel.",
                CORE.replace("core.py:708", "dump_input.py:79") + "Dumping scheduler output for model execution: "
                "SchedulerOutput(scheduled_new_reqs=[], scheduled_spec_decode_tokens={}, lora_request=None)",
                trace("run_busy_loop", "_process_engine_step", "execute_model", error=IN_A_STEP),
            ]
        ),
    ),
    "a step of real traffic": (
        "runtime_activation_burst",
        "\n".join([LOADED, SIZED, READY, trace("run_busy_loop", "execute_model", error=IN_A_STEP)]),
    ),
    "an image larger than the cache": (
        "multimodal_inputs",
        "ValueError: The decoder prompt contains a(n) image item "
        "with length 9216, which exceeds the pre-allocated encoder "
        "cache size 8192. Please reduce the input size or increase the encoder cache size.",
    ),
    "attention over every patch": ("multimodal_inputs", IN_A_STEP.replace("300.00 MiB", "410.00 GiB")),
    "preemption": (
        "kv_preemption_thrash",
        "WARNING 01-02 03:04:05 scheduler.py:1483] Sequence group cmpl-1 is preempted by PreemptionMode.RECOMPUTE mode "
        "because there is not enough KV cache space. total_num_cumulative_preemption=51",
    ),
    "a full pool and a queue": (
        "kv_preemption_thrash",
        "INFO 01-02 03:04:05 [loggers.py:118] Engine 000: Avg prompt "
        "throughput: 0.0 tokens/s, Avg generation throughput: "
        "9.1 tokens/s, Running: 20 reqs, Waiting: 31 reqs, GPU KV cache usage: 99.4%, Prefix cache hit rate: 3.0%",
    ),
    "a usage that only climbs": (
        "prefix_cache_pressure",
        'vllm:kv_cache_usage_perc{engine="0"} 0.61\nvllm:kv_cache_usage_perc{engine="0"} 0.97',
    ),
    "a process that grows": (
        "leak_over_time",
        "\n".join(f"root 812 9.0 {n}.5 90000000 {n}000000 ? Sl 10:00 {n}:00 VLLM::EngineCore" for n in (2, 3, 5)),
    ),
    "pieces too small": (
        "allocator_fragmentation",
        TORCH.format(
            wanted="2.00 GiB",
            total="79.18 GiB",
            free="300.00 MiB",
            own="78.88 GiB",
            torch="71.00 GiB",
            unused="7.10 GiB",
        ),
    ),
    "a wake-up": (
        "sleep_mode_or_rlhf_colocation",
        '  File "vllm/device_allocator/cumem.py", line 207, in wake_up\nRuntimeError: CUDA Error: out of memory at '
        "/workspace/csrc/cumem_allocator.cpp:62",
    ),
    "a trainer around it": (
        "sleep_mode_or_rlhf_colocation",
        '  File "/x/trl/trainer/grpo_trainer.py", line 5, in '
        "__init__\nAssertionError: Error in memory profiling. Initial "
        "free memory 20.1 GiB, current free memory 21.0 GiB.",
    ),
    "a prompt over the limit": (
        "request_too_long",
        "ValueError: This model's maximum context length is 8192 "
        "tokens. However, you requested 9000 tokens (8500 in the "
        "messages, 500 in the completion).",
    ),
    "the kernel's killer": (
        "host_ram_oom",
        "[ 99.1] Memory cgroup out of memory: Killed process 812 (VLLM::EngineCor) total-vm:98000000kB, "
        "anon-rss:60000000kB, file-rss:100kB, shmem-rss:20kB",
    ),
    "a small /dev/shm": (
        "host_ram_oom",
        "host:1:1 [0] misc/shmutils.cc:87 NCCL WARN Error: failed to "
        "extend /dev/shm/nccl-abc to 9637892 bytes, No space left",
    ),
    "free memory that cannot be had": (
        "unified_memory_or_wsl",
        IN_A_STEP.replace("120.00 MiB is free", "22.00 GiB is free").replace("45.90 GiB is", "20.90 GiB is"),
    ),
    "a driver without pages": ("unified_memory_or_wsl", "NVRM: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) returned"),
    "a driver too old": (
        "driver_or_cuda_mismatch",
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
    ),
    "a flag that is not there": ("wrong_flag", "vllm: error: unrecognized arguments: --max-num-on-the-fly-batches 4"),
    "an illegal address": (
        "not_memory",
        READY + "\n" + CORE + "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    ),
    "an index out of range": (
        "not_memory",
        "../aten/src/ATen/native/cuda/Indexing.cu:1: block: [0,0,0] Assertion `srcIndex < srcSelectDimSize` failed.",
    ),
    "a kernel that wants too much of the chip": (
        "not_memory",
        "triton.runtime.errors.OutOfResources: out of resource: "
        "shared memory, Required: 131072, Hardware limit: 101376.",
    ),
    "NCCL without a shortage": (
        "not_memory",
        "RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    ),
    "a check that is wrong": (
        "not_memory",
        "AssertionError: Error in memory profiling. Initial free memory 30.3 GiB, current free memory 30.3 GiB.",
    ),
    "any other bug": ("not_memory", CORE + "KeyError: 'model.layers.0.mlp.experts.w2_weight'"),
    "any other bug, and the engine that died of it": (
        "not_memory",
        CORE
        + '  File "vllm/model_executor/model_loader/utils.py", line 200, in process_weights_after_loading\n'
        + CORE
        + "RuntimeError: expect weight to be bfloat16, float16, int8, fp8_e4m3 or uint8(mxfp4 or int4).\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    ),
}
"""What happened -> the cause that a diagnosis must name first, and the log."""
