"""The numbers of fixes: each follows from what the text prints or tells, by vLLM's own arithmetic."""

from __future__ import annotations

from short_logs import first

from legroom.diagnosis.finding import Fix

TRACE = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {} MiB. GPU 0 has a total capacity of {} GiB of "


def fix(text: str, number: int = 0) -> Fix:
    return first(text).fixes[number]


def test_a_pool_printed_in_tokens_says_how_much_larger_the_share_has_to_be() -> None:
    told = (
        "vllm 0.8.5 with VLLM_USE_V1=0 serves Qwen/Qwen2.5-7B-Instruct --max-model-len {} on an RTX 3090\n"
        "ERROR 05-02 10:10:09 [engine.py:448] ValueError: The model's max seq len ({}) is larger than the maximum "
        "number of tokens that can be stored in KV cache ({}). Try increasing `gpu_memory_utilization`"
    )
    near = fix(told.format(16384, 16384, 2800))
    assert 0.9 < near.flags["gpu_memory_utilization"] <= 0.95
    usable = fix(told.format(16384, 16384, 12000))
    assert usable.flags == {"max_model_len": 11264}


def test_a_4_bit_model_that_leaves_an_unusable_length_is_too_large() -> None:
    told = (
        "vllm 0.11.0 on two RTX 3080 Ti: vllm serve Qwen/Qwen3-32B-AWQ --tensor-parallel-size 2 --max-model-len 16384\n"
        "ValueError: To serve at least one request with the models's max seq len (16384), (2.00 GiB KV cache is "
        "needed, which is larger than the available KV cache memory ({} GiB). the estimated maximum model length is {}."
    )
    short = fix(told.format(0.15, 1200))
    assert short.kind == "checkpoint_format" and "a smaller model" in short.steps[0]
    assert "max_model_len" in fix(told.format(1.2, 9800)).flags


def test_the_length_in_vllm_s_own_estimate_gives_the_pool_that_is_not_printed() -> None:
    told = (
        "RTX 4090, Qwen/Qwen2.5-7B-Instruct, --gpu-memory-utilization 0.8, 32768 tokens need 1.75 GiB of KV cache. "
        "ValueError: ... estimated maximum model length is 24576"
    )
    assert "1.31 GiB are left" in first(told).why


def test_a_step_that_shrinks_below_the_free_bytes_needs_no_smaller_share() -> None:
    failed = TRACE.format(480, 47.4) + "which {} MiB is free. 45.10 GiB is allocated by PyTorch.\n"
    text = "EngineDeadError\n$ --gpu-memory-utilization 0.92 --max-num-batched-tokens 32768\n" + failed
    assert fix(text.format(300)).flags == {"max_num_batched_tokens": 8192}
    assert "gpu_memory_utilization" in fix(text.format(60)).flags


def test_a_share_that_may_not_hold_the_told_length_says_what_to_do_then() -> None:
    failed = TRACE.format(300, 79.1) + "which 20.00 MiB is free. 75.10 GiB is allocated by PyTorch.\n"
    step = "if vLLM then refuses 120,000 tokens: the --max-model-len that its error names"
    text = "EngineDeadError\n$ --gpu-memory-utilization 0.95 --max-model-len {}\n" + failed
    assert step in fix(text.format(120000)).steps
    assert not fix(text.format(512)).steps


def test_cards_that_nvidia_smi_shows_in_use_before_the_start_are_not_free() -> None:
    row = "| 30%   41C    P2              60W / 300W |  {}MiB / 46068MiB |     57%      Default |\n"
    told = "CodeLlama-13b on two L40S with vllm runs out of GPU memory at the start\nnvidia-smi\n"
    found = first(told + row.format(12034))
    assert found.cause == "gpu_shared_or_not_free"
    assert "0.71 " in found.fixes[0].steps[0]
    assert "in other hands" not in first(told + row.format(41200)).why


def test_a_checkpoint_that_keeps_16_bits_is_not_told_to_become_4_bits() -> None:
    text = (
        "It runs out of GPU memory at the start on two RTX 5060 Ti of 16GB each, what is wrong?\n"
        "vllm serve nvidia/Gemma-4-31B-IT-NVFP4 --tensor-parallel-size 2 --max-model-len 2048 --max-num-seqs 2\n"
    )
    assert "keeps some in 16" in fix(text).steps[0]


def test_mla_stays_where_the_weights_leave_its_larger_cache_no_room() -> None:
    text = (
        "vllm serve deepseek-ai/DeepSeek-V3 --tensor-parallel-size 8 --pipeline-parallel-size 2 on {}\n"
        'File "/opt/vllm/attention/backends/mla/utils.py", line 400, in process_weights_after_loading\n'
        "    W_UV_O = scaled_quantize(w)\ntorch.OutOfMemoryError: CUDA out of memory\n"
    )
    assert not fix(text.format("L40")).env
    assert fix(text.format("H100")).env == {"VLLM_MLA_DISABLE": "1"}


def test_a_share_lies_between_the_one_that_holds_no_request_and_the_one_that_does_not_fit() -> None:
    text = (
        "verl with a vllm rollout on the same card. With gpu_memory_utilization 0.5 the actor's step is out of memory. "
        "{} the KV cache is too small for one request."
    )
    assert fix(text.format("At 0.4")).flags["gpu_memory_utilization"] == 0.45
    assert fix(text.format("On another model")).flags["gpu_memory_utilization"] < 0.45


def test_an_engine_for_each_training_process_is_split_over_their_cards() -> None:
    text = (
        "GRPO of a 7B model with ms-swift on 4 A10 runs out of memory\n"
        "torchrun --nproc_per_node 4 swift/cli/rlhf.py --rlhf_type grpo --use_vllm true --vllm_mode colocate "
        "--vllm_gpu_memory_utilization 0.5\ntorch.OutOfMemoryError: CUDA out of memory.\n"
    )
    assert fix(text).flags == {"tensor_parallel_size": 4}
    assert "vllm_tensor_parallel_size 4" in fix(text).steps[0]
    small = text.replace("7B", "1.5B")
    assert "tensor_parallel_size" not in fix(small).flags


def test_a_nearly_empty_pool_on_one_memory_points_to_the_step() -> None:
    text = (
        "DGX Spark: vllm serve while serving long prompts the kernel logs NVRM: NV_ERR_NO_MEMORY and the host freezes, "
        "with the KV cache at only {}%."
    )
    assert "max_num_batched_tokens" in fix(text.format("3")).flags
    assert "max_num_batched_tokens" not in fix(text.format("93")).flags
