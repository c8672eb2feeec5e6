"""What a text itself gives decides: pairs of sizes, the switch it names, the parts of one deployment, the program."""

from __future__ import annotations

import json

import pytest

from legroom.diagnosis.log_diagnosis import read_log
from legroom.diagnosis.verdict import Diagnosis


def diagnosed(text: str) -> Diagnosis:
    """The diagnosis of a text's last run."""
    return read_log([text.encode()]).runs[0]


def first(text: str) -> str:
    """The first cause of a text that was understood."""
    run = diagnosed(text)
    assert run.verdict in ("cause found", "not a memory problem"), run.verdict
    return run.findings[0].cause


def steps(text: str) -> str:
    """The steps of the first fix, joined."""
    return " ".join(diagnosed(text).findings[0].fixes[0].steps)


@pytest.mark.parametrize(
    "line",
    [
        "engine did not start: 20.1/23.5 GiB free, needs 21.15 GiB",
        "start-up: needs 21.15 GiB but only 20.1 of 23.5 GiB free",
        "Free memory on cuda:1 (20.1/23.5 GiB) on startup is less than desired (0.90, 21.15 GiB)",
    ],
)
def test_a_pair_of_free_and_total_beside_a_need_is_the_start_up_check_in_any_words(line: str) -> None:
    finding = diagnosed(line).findings[0]
    assert finding.cause == "gpu_shared_or_not_free"
    assert "20.10 GiB of 23.50 GiB were free" in finding.why and "1.05 GiB short" in finding.why
    assert finding.fixes[0].flags["gpu_memory_utilization"] < 0.86


def test_more_free_than_the_card_has_is_a_misread_pair() -> None:
    run = diagnosed("vllm says 40.0/23.5 GiB free, needs 21.15 GiB")
    assert not any("40.00 GiB of 23.50 GiB" in finding.why for finding in run.findings)


def test_a_request_larger_than_the_card_in_an_exchange_of_objects_is_no_shortage() -> None:
    text = """[rank1]:   File "torch/distributed/distributed_c10d.py", line 3042, in all_gather_object
[rank1]:     input_tensor.resize_(max_object_size)
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 310.00 GiB. GPU 1 has a total capacity of
 79.10 GiB of which 40.00 GiB is free. Including non-PyTorch memory, this process has 39.00 GiB memory in use."""
    assert first(text) == "not_memory"
    assert "skipped a collective" in steps(text)


def test_a_rank_that_outlived_its_head_is_told_to_start_with_the_others() -> None:
    text = "The worker kept running after the dead head's TCPStore was gone, and the new head waits for its rank."
    assert first(text) == "not_memory"
    assert "start all ranks together" in steps(text)


@pytest.mark.parametrize(
    "line", ["torch 报错：驱动版本太旧（12.1）", "vllm: your NVIDIA driver is too old for this wheel"]
)
def test_a_driver_that_is_too_old_is_named_in_any_language(line: str) -> None:
    assert first(line) == "driver_or_cuda_mismatch"


def test_an_image_that_asks_for_a_newer_cuda_needs_a_newer_driver_and_no_toolkit() -> None:
    text = "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.9, please update your driver"
    assert first(text) == "driver_or_cuda_mismatch"
    assert "12.9 or newer" in steps(text) and "toolkit" not in steps(text)


def test_input_and_output_together_are_held_against_the_limit() -> None:
    text = "A 131,072-token prompt plus 512 output tokens exceeds the limit of 131,072 of this vLLM server."
    finding = diagnosed(text).findings[0]
    assert finding.cause == "request_too_long"
    assert "131,072 + 512 tokens" in finding.why and "below 130,560 tokens" in " ".join(finding.fixes[0].steps)


@pytest.mark.parametrize(
    ("line", "cause", "step"),
    [
        (
            "api_server.py: error: unrecognized arguments: /bin/sh -c python3 -m vllm.entrypoints.openai.api_server",
            "wrong_flag",
            "--entrypoint /bin/bash",
        ),
        ("AttributeError: LlamaTokenizer has no attribute all_special_tokens_extended", "not_memory", "transformers<5"),
        ("OSError: [Errno 122] Disk quota exceeded: '/home/me/.triton/cache'", "not_memory", "quota -s"),
        (
            "AssertionError: Buffer size 1073741824 must be a multiple of align bytes 5242880",
            "wrong_flag",
            "1069547520 bytes (204 pieces) or 1074790400",
        ),
        ("RuntimeError: CUDA compiler and CUDA toolkit headers are incompatible", "not_memory", "of that release"),
    ],
)
def test_an_exception_gets_the_advice_that_mends_it(line: str, cause: str, step: str) -> None:
    assert first(line) == cause
    assert step in steps(line)


def test_a_cache_folder_that_could_not_be_made_explains_the_error_after_it() -> None:
    text = (
        "CUDA error: invalid argument while vLLM starts.\nBefore it: failed to create directories under ~/.cache/jit."
    )
    assert "TRITON_CACHE_DIR" in steps(text)
    assert diagnosed("failure to create directories under `.tensorrt_llm` in vLLM").other_engine == ""


def test_an_engine_that_is_only_compared_with_is_not_the_one_that_failed() -> None:
    text = "The vLLM container serving Qwen3 hangs after an hour.\nSGLang on the same machine ran for days without it."
    assert diagnosed(text).other_engine == ""


def test_the_feature_with_which_it_occurs_is_switched_off_first() -> None:
    text = "vLLM: CPU memory increases continuously until OOM.\n\nThe leak occurs with **prefix caching enabled**."
    assert diagnosed(text).findings[0].fixes[0].flags == {"enable_prefix_caching": False}


def test_without_eager_mode_it_fails_means_eager_mode_first() -> None:
    text = "Qwen/Qwen3-8B on a 24 GB card: without eager mode, vLLM OOMed during CUDA graph capture."
    assert diagnosed(text).findings[0].fixes[0].flags == {"enforce_eager": True}


def test_after_profiling_is_not_the_profile_run() -> None:
    text = "vLLM: a post-profiling OOM; the engine died at the first spec-decode traffic with 16 sequences."
    finding = diagnosed(text).findings[0]
    assert finding.cause == "lora_or_spec_decode_extra"
    assert not any("while the profile run fails" in end.action for end in finding.dead_ends)


def test_flags_of_a_draft_stay_beside_the_speculative_config() -> None:
    text = """vllm serve Qwen/Qwen3-8B --spec-model a/b --spec-method eagle3 --spec-tokens 5 \\
  --speculative-config '{"draft_tensor_parallel_size": 1}'

OOM while serving: CUDA out of memory. Tried to allocate 2.10 GiB."""
    command = " ".join(diagnosed(text).findings[0].fixes[0].command)
    assert "eagle3" in command and "draft_tensor_parallel_size" in command


def test_parts_of_one_deployment_are_not_ended() -> None:
    text = """PrefillWorker:
  model: a/b
DecodeWorker:
  model: a/b
ERROR 03-21 15:57:35 engine.py:518] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a
 total capacity of 79.20 GiB of which 87.06 MiB is free. Process 9171 has 54.89 GiB memory in use. Including non-PyTorch
 memory, this process has 24.20 GiB memory in use. Of the allocated memory 23.53 GiB is allocated by PyTorch."""
    assert first(text) == "gpu_shared_or_not_free"
    assert "card of its own" in steps(text) and "orphan" not in steps(text)


def test_cards_of_different_sizes_are_the_reason_where_the_smaller_one_is_full() -> None:
    text = """A 24 GB 3090 and an 8 GB 3070 with vLLM and --tensor-parallel-size 2.

torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 128.00 MiB. GPU 1 has a total capacity of 7.79 GiB of
 which 20.69 MiB is free. Of the allocated memory 7.45 GiB is allocated by PyTorch, and 8.61 MiB is reserved."""
    assert first(text) == "tp_kv_head_replication_or_pp_imbalance"
    assert "largest card alone" in steps(text)


def test_a_need_above_the_card_is_weights_that_do_not_fit() -> None:
    text = "My card is an RTX 3070 (8GB VRAM). The model needs at least 16GB of GPU memory. Can layers offload to RAM?"
    finding = diagnosed(text).findings[0]
    assert finding.cause == "weights_too_big"
    assert "16.00 GiB of GPU memory are needed, and the card has 7.66 GiB" in finding.why
    assert finding.fixes[0].flags == {"cpu_offload_gb": 13.0}


def test_a_process_list_that_adds_up_decides_for_a_program_that_is_not_named() -> None:
    text = """The training job of last night ended at once and left no result file behind in its folder, again.
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 18.00 MiB. GPU 0 has a total capacity of 79.25 GiB of
 which 15.75 MiB is free. Including non-PyTorch memory, this process has 9.92 GiB memory in use. Of the allocated memory
 9.41 GiB is allocated by PyTorch, and 9.30 MiB is reserved by PyTorch but unallocated."""
    assert first(text) == "gpu_shared_or_not_free"


def test_prompt_logits_of_an_echo_are_cut_by_smaller_steps_first() -> None:
    text = """[Bug]: OOM with echo=True
ERROR 11-23 18:54:13 engine.py:135] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.82 GiB. GPU 0 has a
 total capacity of 79.14 GiB of which 3.02 GiB is free. Of the allocated memory 75.34 GiB is allocated by PyTorch."""
    assert diagnosed(text).findings[0].fixes[0].flags["enable_chunked_prefill"] is True


def test_a_pool_that_one_request_cannot_fill_holds_blocks_of_ended_ones() -> None:
    line = "INFO 10-28 03:07:55 [loggers.py:123] Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation "
    line += "throughput: 2.0 tokens/s, Running: {} reqs, Waiting: 0 reqs, "
    line += "GPU KV cache usage: {}%, Prefix cache hit rate: 9%"
    finding = diagnosed("\n".join((line.format(10, 60.1), line.format(1, 99.1)))).findings[0]
    assert finding.cause == "prefix_cache_pressure" and "requests that ended" in finding.why
    growing = "\n".join((line.format(8, 93.9), line.format(8, 95.8)))
    assert diagnosed(growing).findings[0].cause == "kv_preemption_thrash"


def test_a_trainer_s_share_is_lowered_from_the_one_it_has_and_its_smallest_batch_not_halved() -> None:
    text = """verl ran out of memory (OOM) in `update_policy`:

- `actor_rollout_ref.actor.ppo_micro_batch_size = 1`
- `actor_rollout_ref.rollout.gpu_memory_utilization = 0.4`"""
    fixes = diagnosed(text).findings[0].fixes
    assert not any("halve" in step for fix in fixes for step in fix.steps)
    shares = [fix.flags["gpu_memory_utilization"] for fix in fixes if "gpu_memory_utilization" in fix.flags]
    assert shares and all(share < 0.4 for share in shares)


def test_a_driver_without_process_sizes_is_one_of_windows() -> None:
    text = """CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.99 GiB of which 7.72 GiB
 is free. Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use. Of the allocated memory
 14.41 GiB is allocated by PyTorch, and 257.93 MiB is reserved by PyTorch but unallocated."""
    finding = diagnosed(text).findings[0]
    assert finding.cause == "unified_memory_or_wsl"
    assert "page file" in " ".join(finding.fixes[0].steps)
    assert "drop_caches" not in json.dumps([fix.steps for fix in finding.fixes])
    assert not any("swap" in end.action for end in finding.dead_ends)


def test_a_host_shortage_names_the_card_that_is_too_small_for_the_weights_too() -> None:
    text = """vllm serve Qwen/Qwen3-32B --tensor-parallel-size 2

INFO 04-23 23:45:36 [loader.py:402] Loading weights onto GPU. This may take a few minutes...
Killed

Two RTX 4090 and 128 GB of RAM."""
    finding = diagnosed(text).findings[0]
    assert finding.cause == "host_ram_oom" and "More RAM alone is not enough" in finding.why


def test_a_server_of_xinference_gets_its_own_parameters() -> None:
    text = """  File "/envs/xinference1.6/vllm/worker/worker.py", line 229, in determine_num_available_blocks
    self.model_runner.profile_run()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."""
    assert "Xinference" in json.dumps([fix.steps for fix in diagnosed(text).findings[0].fixes])


def test_a_class_of_ray_points_to_ray_and_not_only_to_vllm() -> None:
    text = "(EngineCore) ERROR AttributeError: '_TorchTensorNcclChannel' object has no attribute '_nccl_group'"
    assert "Ray release" in steps(text)
