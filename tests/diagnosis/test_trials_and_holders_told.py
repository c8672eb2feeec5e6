"""A user's own trials, who holds the card, a number beside its unit, and the error that is printed decide first."""

from __future__ import annotations

import pytest
from short_logs import diagnosis, first

from legroom.diagnosis.pasted_command import pasted_command

COMMAND = 'vllm serve /models/coder --tensor-parallel-size 4 --speculative-config \'{"method":"quickdraft"}\'\n'


def steps_of(text: str) -> str:
    return " ".join(step for fix in first(text).fixes for step in fix.steps)


@pytest.mark.parametrize(
    "words",
    (
        "With it the start ends in CUDA out of memory. When quickdraft is disabled, the server starts normally.",
        "It dies with CUDA out of memory. But once quickdraft is turned off, the engine loads fine.",
        "启动时报 CUDA out of memory。关闭quickdraft后可以正常启动。",
    ),
)
def test_what_the_server_starts_without_is_left_out_first(words: str) -> None:
    fix = first(f"{words}\n\n{COMMAND}").fixes[0]
    assert fix.flags == {"speculative_config": None} and fix.proven


def test_a_method_that_is_only_named_is_not_left_out() -> None:
    text = f"With quickdraft the start ends in CUDA out of memory. The card is free.\n\n{COMMAND}"
    assert not first(text).fixes[0].proven


COLOCATED = "GRPO with vLLM on the trainer's card: CUDA out of memory at the weight sync."


@pytest.mark.parametrize(
    "words",
    (
        "降低 gpu_memory_utilization 无用。",
        "Lowering gpu_memory_utilization is useless.",
        "降 gpu_memory_utilization 无济于事。",
    ),
)
def test_a_change_called_useless_is_no_fix(words: str) -> None:
    assert any("gpu_memory_utilization" in fix.flags for fix in first(COLOCATED).fixes)
    assert all("gpu_memory_utilization" not in fix.flags for fix in first(f"{COLOCATED} {words}").fixes)


def test_a_sum_that_fills_the_card_asks_for_a_smaller_model() -> None:
    full = "At the weight sync vLLM runs out of memory: actor 29.2GB + vLLM 2.2GB = 31.4GB > 32GB."
    assert first(full).fixes[0].kind == "checkpoint_format"
    half = "At the weight sync vLLM runs out of memory: actor 9.2GB + vLLM 2.2GB = 11.4GB of 32GB."
    assert first(half).fixes[0].kind != "checkpoint_format"


FOREIGN = "On the card: PID 4711 (41.0 GiB) / 4712 (12.5 GiB). They do not belong to this container.\n"
NO_BLOCKS = "vLLM with --gpu-memory-utilization 0.5: ValueError: No available memory for the cache blocks.\n"


def test_foreign_processes_come_before_the_missing_blocks() -> None:
    assert first(NO_BLOCKS).cause == "no_cache_blocks"
    finding = first(NO_BLOCKS + FOREIGN)
    assert finding.cause == "gpu_shared_or_not_free" and "41.00 GiB" in finding.why
    assert "gpu_memory_utilization" not in finding.fixes[0].flags
    assert first(NO_BLOCKS + FOREIGN.replace("do not belong", "belong")).cause == "no_cache_blocks"


WARM_UP = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB.\n"
    "RuntimeError: CUDA out of memory occurred when warming up sampler with 512 dummy requests. Please try lowering "
    "`max_num_seqs` or `gpu_memory_utilization`.\n"
)


def test_cards_that_a_training_fills_are_not_free() -> None:
    assert first(WARM_UP).cause == "profiling_activation_peak"
    filled = f"{WARM_UP}nvidia-smi showed both GPUs dominated by `finetune.py` PIDs 811/812, leaving 0.7-0.8 GiB.\n"
    assert first(filled).cause == "gpu_shared_or_not_free"
    assert first(f"{WARM_UP}The GPU is filled by the KV cache of vLLM.").cause == "profiling_activation_peak"


@pytest.mark.parametrize("words", ("leaving 0.6-0.9 GiB", "which leaves 0.7 to 0.8 GiB", "0.5~0.9 GiB 可用"))
def test_a_range_with_a_unit_is_no_share(words: str) -> None:
    assert diagnosis(f"{WARM_UP}{words} at that point.\n").case.startup.args.gpu_memory_utilization is None


def test_starts_that_are_serialised_are_not_advised_to_be() -> None:
    text = "AssertionError: Error in memory profiling. Initial free memory 40.1 GiB, current free memory 41.5 GiB.\n"
    assert "start the next one" in steps_of(text)
    locked = f"{text}A lock already serializes the vLLM starts; a training on the card frees memory in between.\n"
    assert "start the next one" not in steps_of(locked)
    assert "--kv-cache-memory-bytes" in first(locked).fixes[0].steps[0]


def test_state_blocks_in_a_sentence_bound_the_sequences() -> None:
    text = "The hybrid model has only **310 Mamba cache blocks**, so the default `--max-num-seqs 512` of vLLM fails."
    assert first(text).fixes[0].flags == {"max_num_seqs": 304}


def test_what_the_failure_itself_is_told_with_is_in_force() -> None:
    text = (
        'vLLM at `gpu-memory-utilization 0.93` says *"2.00 GiB KV cache is needed, which is larger than the available '
        'KV cache memory (0.50 GiB)"* even at a 16k context.'
    )
    args = diagnosis(text).case.startup.args
    assert (args.gpu_memory_utilization, args.max_model_len) == (0.93, 16384)
    assert 0 < first(text).fixes[0].flags["max_model_len"] <= 4096


def test_the_ranks_of_the_failed_start_replace_those_of_the_command_above() -> None:
    above = "### One GPU\n\nvllm serve /models/coder --tensor-parallel-size 1 --gpu-memory-utilization 0.95\n\n"
    text = f"{above}首次以 TP=2 启动时，vLLM 在 `warming up sampler with 256 dummy requests` 阶段触发 CUDA OOM。"
    found = diagnosis(text)
    assert found.findings[0].cause == "profiling_activation_peak"
    assert found.case.startup.args.tensor_parallel_size == 2
    below = "首次以 TP=2 启动时，vLLM 触发 CUDA OOM。\n\nvllm serve /models/coder --tensor-parallel-size 1"
    assert diagnosis(below).case.startup.args.tensor_parallel_size == 1


def test_monotone_growth_is_a_leak_and_no_share_of_the_card_ends_it() -> None:
    finding = first("异步 GRPO 训练，几百步后显存单调上涨直到 OOM，减小 batch size 只能推迟。")
    assert finding.cause == "leak_over_time" and finding.fixes[0].kind == "engine_version_or_V0"


def test_an_attached_picture_is_no_sign_of_media() -> None:
    text = "Memory leak: the memory of the vLLM decode worker keeps growing until it is killed.\n"
    pictured = f'{text}![Image](https://example.com/assets/1)\n<img width=4 alt="Image" src=x>\n'
    assert all("mm_processor_cache_gb" not in fix.flags for fix in first(pictured).fixes)
    videos = f"{text}Every request has a video.\n"
    assert any("mm_processor_cache_gb" in fix.flags for fix in first(videos).fixes)


@pytest.mark.parametrize(
    "text",
    (
        "2基のGPUのサーバーでvLLMを動かすと「torch.OutOfMemoryError: CUDA out of memory.」になります。"
        "モデルの重みが単一GPUにロードされます。",
        "vLLM on a server with 2x A100: CUDA out of memory, the weights are loaded onto a single GPU although two "
        "GPUs are there.",
    ),
)
def test_weights_on_one_of_several_cards_are_split(text: str) -> None:
    finding = first(text)
    assert finding.cause == "weights_too_big" and finding.fixes[0].flags == {"tensor_parallel_size": 2}


def test_host_memory_that_spikes_decides_before_the_word_killed() -> None:
    finding = first("1. vLLM: host memory spikes by over 90GB and the machine goes OOM.\n2. Then the server is killed.")
    assert finding.cause == "host_ram_oom" and "RAM is used up" in finding.why


def test_a_crash_of_the_interpreter_is_the_error() -> None:
    text = (
        "GRPO training with vLLM ran for a day.\nINFO 08-02 23:48:05 [executor_base.py:227] It took 0.6 seconds to "
        "wake up tags ['weights'].\nFatal Python error: deallocating True: bug likely caused by a refcount error\n"
    )
    assert diagnosis(text).verdict == "not a memory problem"
    assert "Fatal Python error" in first(text).why


def test_a_printed_error_outweighs_garbage_answers() -> None:
    text = (
        "After wake-up vLLM's garbage output stays, and on the next request it crashes:\n"
        "NotImplementedError: my_ops::copy: attempted to run this operator with Meta tensors\n"
    )
    assert "NotImplementedError" in first(text).why


def test_more_ranks_than_gpus_in_a_warning_of_ray() -> None:
    said = "Tensor parallel size (8) exceeds available GPUs (4)."
    text = f"(EngineCore_DP0 pid=9) WARNING 03-30 14:11:45 [ray_utils.py:352] {said}"
    found = diagnosis(text)
    assert found.verdict == "not a memory problem"
    assert found.findings[0].fixes[0].flags == {"tensor_parallel_size": 4}


OOM = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 39.39 GiB of which 1.10 GiB is "
    "free. Of the allocated memory 35.80 GiB is allocated by PyTorch, and 1.20 GiB is reserved by PyTorch but "
    "unallocated.\n"
)


def test_a_model_and_torchs_line_alone_name_no_vllm() -> None:
    asked = diagnosis(f"Llama-3.2-3B gives an error\n\ntorch.OutOfMemoryError: {OOM}")
    assert asked.verdict == "cause above" and "nothing here names vLLM" in asked.needed[0]
    served = (
        f"Engine loop is not running. Inspect the stacktrace to find the original error: OutOfMemoryError('{OOM}').\n"
    )
    found = diagnosis(f"Model: Qwen3-235B-A22B\n{served}")
    assert found.verdict == "cause found" and found.findings[0].cause == "runtime_activation_burst"
    assert found.findings[0].fixes[0].kind == "lower_util"


def test_a_question_behind_the_command_is_no_part_of_the_model() -> None:
    asked = "vllm serve Qwen/Qwen2.5-7B-Instruct-AWQ到底需要多大显存？16G都不够"
    assert pasted_command(asked, None, None)[1].model == "Qwen/Qwen2.5-7B-Instruct-AWQ"
    assert pasted_command("vllm serve /data/模型/Qwen --port 1", None, None)[1].model == "/data/模型/Qwen"


def test_a_pods_name_is_no_model() -> None:
    args = pasted_command(
        "The pod llama3-8b-chat-6f9c7d8b54-x2x9k of the vLLM deployment is out of memory.", None, None
    )[1]
    assert "x2x9k" not in args.model


def test_as_many_cards_as_the_weights_fill_are_named() -> None:
    text = "vLLM with Llama-3.1-405B on TPU v5e: Ran out of memory in memory space hbm. Used 20.44G of 15.75G hbm."
    steps = steps_of(text)
    assert "64 of these GPUs" in steps and "on 2 of these GPUs" not in steps and "842 GiB" not in steps


@pytest.mark.parametrize("end", ("\n]", ""))
def test_a_json_list_of_arguments_is_a_command(end: str) -> None:
    given = '[\n  "serve", "/m",\n  "--served-model-name", "a", "b",\n  "--limit-mm-per-prompt", "{\\"image\\": 2}",\n'
    command, args = pasted_command(f'It crashed.\n{given}  "--max-num-seqs", "16"{end}\n', 1, None)
    assert args.model == "/m" and args.max_num_seqs == 16 and args.limit_mm_per_prompt == {"image": 2}
    assert command is not None and "--served-model-name a b" in command
