"""The check that every fix passes: it changes what is in force, is no dead end, and leads past the next step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from diagnosis_logs import TORCH, trace

from legroom.diagnosis.finding import Fix
from legroom.diagnosis.log_diagnosis import read_log

COMMAND = "$ vllm serve org/own {}\n"
PROFILE = TORCH.format(
    wanted="4.00 GiB", total="22.18 GiB", free="3.40 GiB", own="18.70 GiB", torch="18.30 GiB", unused="140.00 MiB"
)
LOGITS = trace("execute_model", "_get_prompt_logprobs_dict", "compute_logits", error=PROFILE)
KV_TOKENS = (
    "INFO 01-02 03:04:05 [worker.py:267] the current vLLM instance can use total_gpu_memory ({total}GiB) x "
    "gpu_memory_utilization ({share}) = 21.00GiB\nERROR 01-02 03:04:09 [engine.py:448] ValueError: The model's max seq "
    "len (4096) is larger than the maximum number of tokens that can be stored in KV cache (3584).\n"
)
KV_BYTES = (
    "ValueError: To serve at least one request with the model's max seq len (131072), ({needed} GiB KV cache is "
    "needed, which is larger than the available KV cache memory ({has} GiB). Based on the available memory, the "
    "estimated maximum model length is {fits}."
)
BLOCKS = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`."
CUMEM = "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62\n"
WAKE = 'File "vllm/entrypoints/llm.py", line 9, in wake_up\n'
MLA = 'ERROR 01-02 03:04:05 worker_base.py:581]   File "vllm/attention/backends/mla/utils.py", line 3, in {}\n'

FIRST_FIX: dict[str, tuple[str, Callable[[Fix], bool]]] = {
    "a step below the smallest default": (
        COMMAND.format("--max-num-seqs 1") + LOGITS,
        lambda fix: fix.flags["max_num_batched_tokens"] < 2048 and "prompt_logprobs" in fix.steps[0],
    ),
    "a step no smaller than the sequences": (
        COMMAND.format("--max-num-seqs 700 --max-num-batched-tokens 2048") + LOGITS,
        lambda fix: fix.flags["max_num_batched_tokens"] >= 700,
    ),
    "chunked prefill with a step below a prompt": (
        COMMAND.format("--no-enable-chunked-prefill --max-model-len 32768") + trace("profile_run", error=PROFILE),
        lambda fix: fix.flags["enable_chunked_prefill"] is True,
    ),
    "no change of the share alone while profiling": (
        COMMAND.format("--gpu-memory-utilization 1") + PROFILE,
        lambda fix: "max_num_seqs" in fix.flags and fix.kind == "max_num_seqs",
    ),
    "room for the graphs that come after the KV check": (
        COMMAND.format("--max-model-len 4096 --gpu-memory-utilization 0.98")
        + KV_TOKENS.format(total=21.99, share=0.98),
        lambda fix: fix.flags == {"max_model_len": 3536, "enforce_eager": True},
    ),
    "no eager mode where graphs have room": (
        COMMAND.format("--gpu-memory-utilization 0.9") + KV_TOKENS.format(total=21.99, share=0.9),
        lambda fix: fix.flags == {"max_model_len": 3536},
    ),
    "smaller steps before a length of 720 tokens": (
        COMMAND.format("--gpu-memory-utilization 0.97") + KV_BYTES.format(needed=1.34, has=0.3, fits=720),
        lambda fix: fix.flags == {"max_num_batched_tokens": 1024} and fix.confidence < 0.6,
    ),
    "a difference where the share is not shown": (
        "on an RTX 4090: ValueError: 1.75 GiB KV cache is needed, available 0.13 GiB",
        lambda fix: not fix.flags and "add 0.07" in fix.steps[0],
    ),
    "variables of the command": (
        COMMAND.replace("vllm", "VLLM_USE_V1=0 vllm").format("") + KV_TOKENS.format(total=79.1, share=0.9),
        lambda fix: fix.command[0] == "VLLM_USE_V1=0",
    ),
    "the share that the sleeping engine gave back": (
        f"RTX 3090\nSleep mode freed 9.19 GiB memory, 7.66 GiB memory is still in use.\n{CUMEM}"
        f'File "unsloth_compiled_cache/UnslothGRPOTrainer.py", line 1, in _prepare_inputs\n{WAKE}',
        lambda fix: fix.flags == {"gpu_memory_utilization": 0.29} and "from_pretrained" in fix.steps[0],
    ),
    "a trainer's offload, and no command of a server": (
        f"colocate mode\n{CUMEM}swift rlhf \\\n  --rlhf_type grpo \\\n  --model Qwen/Qwen3-32B \\\n"
        "  --vllm_gpu_memory_utilization 0.3 \\\n  --deepspeed zero3",
        lambda fix: not fix.command and "--offload_optimizer" in fix.steps[0],
    ),
    "the switch of a second copy of MLA weights": (
        MLA.format("process_weights_after_loading") + "torch.OutOfMemoryError: CUDA out of memory.",
        lambda fix: fix.env == {"VLLM_MLA_PERFORM_MATRIX_ABSORPTION": "0"},
    ),
    "smaller steps where a pool below zero is printed as 0": (
        "(Worker_TP0 pid=7) INFO 01-02 03:04:05 [worker_v1.py:259] Available memory: 0, total memory: 65452113920\n"
        "(EngineCore_DP0 pid=1) ERROR 01-02 03:04:09 [core.py:708] EngineCore failed to start.\n",
        lambda fix: fix.flags == {"max_num_batched_tokens": 1024, "max_num_seqs": 64},
    ),
    "what the text says worked": (
        "CUDA out of memory while serving. I have to lower max_num_seqs to 4 to avoid it.\n" + LOGITS,
        lambda fix: fix.flags == {"max_num_seqs": 4} and fix.kind == "max_num_seqs" and fix.confidence > 0.6,
    ),
    "a share below the one that the text says failed": (
        f"colocated Megatron policy: lowering gpu_memory_utilization to 0.3 still fails\n{CUMEM}{WAKE}",
        lambda fix: not fix.flags,
    ),
    "fewer sequences where 1,024 are the default": (
        "vLLM 0.8.1 on two RTX 3090\n$ vllm serve Qwen/Qwen2.5-32B-Instruct-GPTQ-Int8 --tensor-parallel-size 2 "
        f"--gpu-memory-utilization 0.9 --max-model-len 4096 --enforce-eager\nERROR 01-02 03:04:05 [core.py:3] {BLOCKS}",
        lambda fix: fix.flags["max_num_seqs"] <= 512,
    ),
    "fewer bits before a second card": (
        f"one RTX 5090\n$ vllm serve Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8 --max-model-len 16384\n{BLOCKS}",
        lambda fix: fix.kind == "checkpoint_format",
    ),
    "more than the share that was set, not the one that vLLM compares it with": (
        "0.07 GiB are left for the KV cache at mem_util=0.92, which fails the KV-cache check for 8K on a 24 GB card.\n"
        "vLLM prints: --gpu-memory-utilization=0.95 is equivalent to 0.9325 without CUDA graph profiling.\n",
        lambda fix: fix.flags == {"gpu_memory_utilization": 0.95},
    ),
    "no graphs where the capture failed": (
        COMMAND.format("--gpu-memory-utilization 0.98") + trace("capture_model", error=PROFILE.replace("4.00", "9.00")),
        lambda fix: "enforce_eager" in fix.flags or fix.flags["gpu_memory_utilization"] < 0.98,
    ),
    "the length that its writer needs stays": (
        "We need the full 32k context on an A100 40GB.\n$ vllm serve Qwen/Qwen2.5-14B-Instruct --max-model-len 32768 "
        "--gpu-memory-utilization 0.85\n"
        + KV_BYTES.replace("131072", "32768").format(needed=6.0, has=4.61, fits=25168),
        lambda fix: fix.kind == "raise_util" and "max_model_len" not in fix.flags,
    ),
    "graphs stay where eager mode is too slow": (
        "--enforce-eager works, but it is too slow for us.\n"
        + COMMAND.format("--gpu-memory-utilization 0.95")
        + trace("capture_model", error=PROFILE.replace("4.00", "0.10").replace("3.40", "0.04")),
        lambda fix: fix.kind == "lower_util" and "enforce_eager" not in fix.flags,
    ),
    "no rounded weights for who does not want them": (
        "I don't want to quantize Qwen/Qwen2.5-14B-Instruct.\nLoading the model on my RTX 3090 ends with CUDA out of "
        "memory.",
        lambda fix: fix.kind != "checkpoint_format",
    ),
    "the other cards of the machine": (
        "A workstation with 4x RTX 3090, and vllm only uses the first card.\n$ vllm serve Qwen/Qwen2.5-32B-Instruct\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 270.00 MiB. GPU 0 has a total capacity of 23.58 "
        "GiB of which 209.00 MiB is free.",
        lambda fix: fix.flags["tensor_parallel_size"] == 4,
    ),
    "the second card where LLM() uses one": (
        "Two A6000 48G in the box, and llm = LLM('Qwen/Qwen2.5-32B-Instruct') fails.\nCUDA out of memory. Tried to "
        "allocate 270.00 MiB. GPU 0 has a total capacity of 47.44 GiB of which 150.31 MiB is free. 47.10 GiB is "
        "allocated by PyTorch.",
        lambda fix: fix.flags == {"tensor_parallel_size": 2},
    ),
    "no second card for a laptop": (
        "My laptop has an RTX 4060 8GB.\n$ vllm serve mistralai/Mistral-7B-Instruct-v0.3\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 112.00 MiB. GPU 0 has a total capacity of 7.75 "
        "GiB of which 54.00 MiB is free. 7.20 GiB is allocated by PyTorch.",
        lambda fix: fix.kind == "checkpoint_format" and "tensor_parallel_size" not in fix.flags,
    ),
    "a quantized checkpoint with the context that it leaves": (
        "$ vllm serve Qwen/Qwen3-32B\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 100.00 MiB. GPU 0 "
        "has a total capacity of 23.64 GiB of which 58.81 MiB is free. Of the allocated memory 22.37 GiB is allocated "
        "by PyTorch, and 18.93 MiB is reserved by PyTorch but unallocated.",
        lambda fix: {"model", "max_model_len"} == {*fix.flags},
    ),
    "no share that gives less than is missing": (
        "INFO 05-25 15:29:28 [gpu_worker.py:462] Available KV cache memory: -6.54 GiB\n"
        "INFO 05-25 15:29:28 [gpu_worker.py:477] CUDA graph memory profiling is enabled (default since v0.21.0). The "
        "current --gpu-memory-utilization=0.1500 is equivalent to --gpu-memory-utilization=0.1480 without CUDA "
        "graph memory profiling. To maintain the same effective KV cache size as before, increase "
        f"--gpu-memory-utilization to 0.1520.\n{BLOCKS}",
        lambda fix: fix.flags.get("gpu_memory_utilization") != 0.152,
    ),
    "the neighbour goes before a larger share": (
        f"A colleague's training job holds 60 GB of the A100 80GB.\nvLLM 0.8.5 stops with it:\n{BLOCKS}",
        lambda fix: fix.kind == "free_gpu_or_kill_orphans",
    ),
    "shares for two servers on one card": (
        "I want to run two vllm instances on one A100-80GB, a chat model and an embedding model.\nValueError: Free "
        "memory on device (6.80/79.25 GiB) on startup is less than desired GPU memory utilization (0.9, 71.33 GiB).",
        lambda fix: fix.flags == {"gpu_memory_utilization": 0.45},
    ),
    "shared memory of a pod": (
        "The pod crashes with tensor parallelism on Kubernetes.\nncclSystemError: Error while creating shared memory "
        "segment /dev/shm/nccl-Xk2p1S (size 9637888), error: No space left on device (28)",
        lambda fix: fix.steps[0].startswith("Kubernetes: an emptyDir"),
    ),
    "memory of a Slurm job": (
        "#SBATCH --mem=32G\n$ vllm serve Qwen/Qwen2.5-72B-Instruct-AWQ --tensor-parallel-size 2\n"
        "Loading safetensors checkpoint shards:  55% Completed | 6/11 [01:12<01:02, 12.5s/it]\n"
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=881203.batch.",
        lambda fix: "#SBATCH --mem" in fix.steps[0] and "GiB or more" in fix.steps[0],
    ),
    "memory of the virtual machine": (
        "In WSL2 on Windows 11, while it loads:\nOut of memory: Killed process 1422 (python3) total-vm:61235648kB, "
        "anon-rss:14822340kB",
        lambda fix: ".wslconfig" in fix.steps[0],
    ),
}


@pytest.mark.parametrize("name", FIRST_FIX)
def test_the_first_fix_is(name: str) -> None:
    text, is_right = FIRST_FIX[name]
    fix = read_log([text.encode()]).runs[0].findings[0].fixes[0]
    assert is_right(fix), fix


def test_no_fix_repeats_a_value_in_force_or_halves_bytes_that_need_a_third() -> None:
    text = COMMAND.format("--kv-cache-dtype auto") + KV_BYTES.format(needed=16.0, has=5.0, fits=40960)
    fixes = read_log([text.encode()]).runs[0].findings[0].fixes
    assert not any(fix.flags.keys() == {"kv_cache_dtype"} for fix in fixes)
