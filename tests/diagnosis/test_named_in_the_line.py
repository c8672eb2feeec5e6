"""What a line itself names: another engine, a signal, too few GPUs, NCCL's own cure, the setting that is in force."""

from __future__ import annotations

import re

import pytest

from legroom.diagnosis.finding import Finding
from legroom.diagnosis.fixes.failed_run import Hints
from legroom.diagnosis.log_diagnosis import read_log
from legroom.diagnosis.pasted_command import pasted_command
from legroom.diagnosis.verdict import Diagnosis

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {} GiB. GPU 0 has a total capacity of 47.50 GiB of "
    "which 1.25 GiB is free.\n"
)


def diagnosis(text: str, command: str = "", gpu: str = "h200") -> Diagnosis:
    return read_log([text.encode()], "log", Hints(command=command, gpu=gpu) if command else None).runs[0]


def first(text: str, command: str = "") -> Finding:
    return diagnosis(text, command).findings[0]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('  File "/opt/nanovllm/engine/model_runner.py", line 9, in run_model\n' + OOM.format("2.00"), "nano-vllm"),
        ('  File "nano_vllm/layers/linear.py", line 7, in forward\n' + OOM.format("5.10"), "nano-vllm"),
        ('  File "/srv/sglang/srt/model_executor/model_runner.py", line 4, in forward\n' + OOM.format("2.2"), "SGLang"),
        ('  File "/x/deepspeed/runtime/zero/stage3.py", line 4, in step\n' + OOM.format("2.20"), "training step"),
        ("Fine-tuning stopped. Micro-batch size per device: 16\n" + OOM.format("9.00"), "training step"),
    ],
)
def test_the_package_of_the_frames_names_the_engine(text: str, name: str) -> None:
    found = diagnosis(text)
    assert not found.findings
    assert name in found.notes[0]


@pytest.mark.parametrize(
    "text",
    [
        '  File "/p/vllm/v1/worker/gpu_model_runner.py", line 4, in execute_model\n  File "/x/nanovllm/a.py", line 1\n',
        "vllm serve beside a job with micro-batch size 4\n",
    ],
)
def test_a_frame_or_a_word_of_vllm_keeps_the_failure_its_own(text: str) -> None:
    assert diagnosis(text + OOM.format("2.00")).findings


@pytest.mark.parametrize(
    "text",
    [
        "It ran out in the optimizer step of GRPO.\n",
        "GRPO: the training forward pass of the actor OOMs, vLLM is idle.\n",
    ],
)
def test_a_training_step_told_in_words_is_answered_with_the_trainer_s_levers(text: str) -> None:
    found = first(text + OOM.format("8.00"))
    assert "training step" in found.why
    assert not found.fixes[0].flags


@pytest.mark.parametrize("after", ["\nAfter that the prompt was back.\n", "\n$ echo no more output\n"])
def test_a_shell_that_says_killed_tells_of_sigkill_and_who_may_have_sent_it(after: str) -> None:
    found = first("INFO 03-02 11:00:09 [loader.py:402] Loading weights onto the GPU\nKilled" + after)
    assert found.cause == "host_ram_oom"
    assert "SIGKILL" in found.why
    assert "kubectl describe pod" in found.fixes[0].steps[0]


@pytest.mark.parametrize(
    "words", ["The OOM killer terminated the engine", "kernel OOM-killer reports: vllm was killed"]
)
def test_the_oom_killer_told_in_words_is_the_oom_killer(words: str) -> None:
    found = first(f"the server exits with SIGKILL\n{words}\n")
    assert found.cause == "host_ram_oom"
    assert "no line of the kernel" not in found.why


@pytest.mark.parametrize(
    "line",
    [
        "AssertionError: DP adjusted local rank 3 is out of bounds for 2 devices.",
        "RuntimeError: device >= 0 && device < num_gpus INTERNAL ASSERT FAILED, device=3, num_gpus=2",
    ],
)
def test_a_rank_without_a_gpu_means_fewer_gpus_than_ranks(line: str) -> None:
    found = first(line)
    assert "More GPUs were asked for" in found.why
    assert found.fixes[0].flags == {"tensor_parallel_size": 2}


@pytest.mark.parametrize("error", ["RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO)\n", ""])
def test_the_cure_that_nccl_prints_is_the_fix(error: str) -> None:
    line = "nvls.cc:41 NCCL WARN Failed to bind NVLink SHARP (NVLS) Multicast memory of size 4194304 : CUDA error 401\n"
    assert first(error + line).fixes[0].env == {"NCCL_NVLS_ENABLE": "0"}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("The job died at step 4: NCCL watchdog timeout while gradients were reduced.", "collective operation"),
        ("It failed: NCCL's watchdog timed out on rank 3 during the update.", "collective operation"),
        ("RuntimeError: ACL stream synchronize failed, error code:507018", "AI CPU"),
        ("[ERROR] RTS_HWTS: Aicpu exception, slot_id=1, stream_id=2", "AI CPU"),
    ],
)
def test_a_code_or_a_watchdog_says_what_failed(text: str, word: str) -> None:
    found = diagnosis(text)
    assert found.verdict == "not a memory problem"
    assert word in found.findings[0].why


CHECK = (
    "ValueError: Free memory on device cuda:0 ({}/{} GiB) on startup is less than desired GPU memory utilization "
    "({}, {} GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)


@pytest.mark.parametrize(
    ("model", "length", "least"),
    [("ByteDance-Seed/Seed-OSS-36B-Instruct", 8192, 0.53), ("Qwen/Qwen3-32B", 32768, 0.52)],
)
def test_the_share_of_a_free_card_holds_weights_peak_and_one_request(model: str, length: int, least: float) -> None:
    command = f"vllm serve {model} --gpu-memory-utilization 0.48 --max-model-len {length}"
    steps = " ".join(first(CHECK.format(60.1, 139.8, 0.48, 67.1), command).fixes[0].steps)
    told = re.search(r"then --gpu-memory-utilization ([\d.]+) or more", steps)
    assert told is not None
    assert least <= float(told[1]) <= least + 0.04


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-72B-Instruct", "mistralai/Mixtral-8x22B-Instruct-v0.1"])
def test_a_card_that_is_too_small_even_when_it_is_free_is_said_first(model: str) -> None:
    found = diagnosis(CHECK.format(30.5, 79.11, 0.9, 71.2), f"vllm serve {model}", "h100").findings[0]
    assert found.fixes[0].steps[0].startswith("even free, this card is too small")


SHORT = (
    "ValueError: To serve at least one request with the model's max seq len ({}), {} GiB KV cache is needed, which is "
    "larger than the available KV cache memory ({} GiB).\n"
)


@pytest.mark.parametrize("words", ["with an override of 1,024 blocks\n", "override 1024 blocks was set\n"])
def test_a_pool_set_in_blocks_is_changed_in_blocks(words: str) -> None:
    fix = first(words + SHORT.format(20480, 2.5, 2.0)).fixes[0]
    assert set(fix.flags) == {"num_gpu_blocks_override"}
    assert 1280 <= fix.flags["num_gpu_blocks_override"] <= 1400


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("util 0.88 -> 0.62, then it failed", "gpu_memory_utilization", 0.62),
        ("gmu 0.91 → 0.77", "gpu_memory_utilization", 0.77),
        ("one row: `gmu=0.92`, `bt=49152`", "max_num_batched_tokens", 49152),
        ("MAX_NUM_BATCHED_TOKENS=32768 in its environment", "max_num_batched_tokens", 32768),
        ("it has batched tokens 24,576", "max_num_batched_tokens", 24576),
    ],
)
def test_a_note_names_the_setting_that_is_in_force(text: str, name: str, value: float) -> None:
    assert getattr(pasted_command(text, None, None)[1], name) == value


@pytest.mark.parametrize("tokens", [32768, 65536])
def test_steps_far_above_the_default_are_named_beside_a_pool_that_is_too_small(tokens: int) -> None:
    found = first(f"bt={tokens}\n" + SHORT.format(65536, 20.0, 12.0))
    assert f"{tokens:,} tokens a step" in found.why
    assert any(fix.flags == {"max_num_batched_tokens": 2048} for fix in found.fixes)


@pytest.mark.parametrize(
    "text", [SHORT.format(65536, 20.0, 1.0), "Model loading took 21.5 GiB\nAvailable KV cache memory: -3.5 GiB\n"]
)
def test_no_later_fix_is_surer_than_the_first(text: str) -> None:
    shares = [fix.confidence for fix in first(text).fixes]
    assert max(shares) == shares[0]


@pytest.mark.parametrize("told", ["It still fails at 0.62 utilization.\n", "Even with utilization 0.6 it fails.\n"])
def test_no_share_above_one_that_failed_is_proposed(told: str) -> None:
    command = "$ vllm serve Qwen/Qwen3-8B --gpu-memory-utilization 0.9 --max-model-len 32768\n"
    fixes = first(f"{command}{OOM.format('3.00')}EngineDeadError\n{told}").fixes
    assert fixes
    assert all(fix.flags.get("gpu_memory_utilization", 0) <= 0.62 for fix in fixes)


READY = (
    "(EngineCore pid=7) INFO 11-18 15:37:27 [gpu_worker.py:759] Available KV cache memory: 87.14 GiB\n"
    "(EngineCore pid=7) INFO 11-18 15:37:27 [kv_cache_utils.py:1733] GPU KV cache size: 237,560 tokens\n"
    "(EngineCore pid=7) INFO 11-18 15:37:28 [core.py:384] init engine (profile, create kv cache, warmup model) took 3.2"
    " seconds\n"
)
SURVIVED = (
    "(MainProcess pid=7) WARNING 11-18 15:37:28 [base.py:380] Traceback (most recent call last):\n"
    '(MainProcess pid=7) WARNING 11-18 15:37:28 [base.py:380]   File "/x/vllm/renderers/base.py", line 217, in get_it\n'
    "(MainProcess pid=7) WARNING 11-18 15:37:28 [base.py:380] ValueError: Tokenizer not available\n"
)


def test_a_traceback_in_warnings_of_a_server_that_became_ready_is_no_problem() -> None:
    assert diagnosis(READY + SURVIVED).verdict == "no problem found"
    assert diagnosis(READY + SURVIVED.replace("WARNING", "ERROR")).verdict != "no problem found"


VALIDATION = "pydantic_core._pydantic_core.ValidationError: 1 validation error for {}\n  Value error, {} [type=...]\n"
WORLD_SIZE = "World size (2) is larger than the number of available GPUs (1) in this node."
NO_BACKEND = (
    "ValueError: No valid attention backend found for cuda with AttentionSelectorConfig(head_size=128, "
    "kv_cache_dtype=fp8_inc, use_mla=False). Reasons: {FLASH_ATTN: [kv_cache_dtype not supported], TRITON_ATTN: "
    "[kv_cache_dtype not supported]}.\n"
)


@pytest.mark.parametrize(
    ("text", "given", "cause", "flags"),
    [
        (
            VALIDATION.format("ParallelConfig", WORLD_SIZE),
            "--tensor-parallel-size 2",
            "not_memory",
            {"tensor_parallel_size": 1},
        ),
        (
            VALIDATION.format("VllmConfig", "Cannot find the config file for awq"),
            "--quantization awq",
            "wrong_flag",
            {"quantization": None},
        ),
        (NO_BACKEND, "--kv-cache-dtype fp8_inc", "wrong_flag", {"kv_cache_dtype": "auto"}),
    ],
)
def test_the_message_itself_names_the_flag(text: str, given: str, cause: str, flags: dict[str, object]) -> None:
    found = first(text, f"vllm serve Qwen/Qwen3-8B {given}")
    assert (found.cause, dict(found.fixes[0].flags)) == (cause, flags)


def test_a_keyword_of_another_release_is_left_out() -> None:
    found = first("TypeError: EngineArgs.__init__() got an unexpected keyword argument 'swap_space'\n")
    assert found.cause == "wrong_flag"
    assert "swap_space" in found.fixes[0].steps[0]


def test_adapter_slots_are_halved_until_they_fit() -> None:
    text = (
        "INFO 11-18 15:39:50 [model_runner.py:392] Loading model from scratch...\n"
        '  File "/x/vllm/v1/worker/gpu_worker.py", line 526, in load_model\n'
        '  File "/x/vllm/lora/layers/column_parallel_linear.py", line 9, in create_lora_weights\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 139.80 "
        "GiB of which 45.12 MiB is free. Including non-PyTorch memory, this process has 139.75 GiB memory in use. Of "
        "the allocated memory 139.08 GiB is allocated by PyTorch, and 428.00 KiB is reserved but unallocated.\n"
    )
    line = "vllm serve meta-llama/Llama-3.1-8B --max-model-len 8192 --enforce-eager --enable-lora --max-loras 64 "
    found = first(text, line + "--max-lora-rank 512")
    assert (found.cause, dict(found.fixes[0].flags)) == ("lora_or_spec_decode_extra", {"max_loras": 32})


FULL_CARD = (
    "(EngineCore pid=9) ERROR 02-28 17:42:17 [core.py:1006] torch.OutOfMemoryError: CUDA out of "
    "memory. Tried to allocate "
    "698.00 MiB. GPU 0 has a total capacity of 23.56 GiB of which 559.00 MiB is free. Including "
    "non-PyTorch memory, this "
    "process has 22.99 GiB memory in use. Of the allocated memory 22.05 GiB is allocated by PyTorch, and 512.00 MiB is "
    "reserved by PyTorch but unallocated.\n"
)
FAILED_START = (
    "(EngineCore pid=9) ERROR 02-28 17:42:17 [core.py:1006] EngineCore failed to start.\n"
    '(EngineCore pid=9) ERROR 02-28 17:42:17 [core.py:1006]   File "/x/vllm/v1/engine/core.py", '
    "line 9, in run_busy_loop\n"
)


def test_an_engine_that_failed_to_start_was_not_serving() -> None:
    profiled = (
        "(EngineCore pid=9) INFO 02-28 17:42:14 [gpu_model_runner.py:5140] Encoder cache will be "
        "initialized with a budget "
        "of 18605 tokens, and profiled with 1 video items of the maximum feature size.\n"
    )
    assert diagnosis(profiled + FAILED_START + FULL_CARD).phase == "startup_profile"
    assert diagnosis(FAILED_START.replace("EngineCore failed to start.", "error") + FULL_CARD).phase == "serving"


def test_weights_above_the_budget_are_the_cause_in_whatever_step_it_fails() -> None:
    loaded = "(EngineCore pid=9) INFO 02-28 17:42:10 [gpu_model_runner.py:4210] Model loading took 22.40 GiB memory\n"
    assert first(loaded + FAILED_START + FULL_CARD).cause == "weights_too_big"
    fewer = loaded.replace("22.40", "14.20")
    assert first(fewer + FAILED_START + FULL_CARD).cause != "weights_too_big"


def test_the_limit_of_a_container_decides_on_shared_memory_too() -> None:
    killed = "VLLM::EngineCor invoked oom-killer: constraint=CONSTRAINT_{}\nKilled process 7 (VLLM::EngineCor)\n"
    killed += "on a DGX Spark\n"
    assert first(killed.format("MEMCG")).cause == "host_ram_oom"
    assert first(killed.format("NONE")).cause == "unified_memory_or_wsl"


def test_the_words_of_the_start_check_are_no_attempt() -> None:
    text = (
        "It fails with ValueError: Free memory on device cuda:0 (100.94/121.69 GiB) on startup is less "
        "than desired GPU "
        "memory utilization (0.835, 101.61 GiB).\n"
    )
    assert dict(first(text).fixes[0].flags) == {"gpu_memory_utilization": 0.82}


@pytest.mark.parametrize(
    ("stages", "gpu", "expected"),
    [(2, "h100", ""), (4, "a100-40gb", "19,21,21,19"), (8, "l4", "9,11,11,10,10,10,10,9")],
)
def test_layers_move_from_the_ends_to_all_inner_stages(stages: int, gpu: str, expected: str) -> None:
    text = (
        "(Worker_PP0 pid=1) INFO 01-02 03:04:05 [gpu_worker.py:9] Available KV cache memory: 0.20 GiB\n"
        "(Worker_PP1 pid=2) INFO 01-02 03:04:05 [gpu_worker.py:9] Available KV cache memory: 2.10 GiB\n"
        "ValueError: To serve at least one request with the models's max seq len (32768), (2.50 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (0.20 GiB).\n"
    )
    line = f"vllm serve meta-llama/Llama-3.1-70B --max-model-len 32768 --pipeline-parallel-size {stages}"
    found = diagnosis(text, line, gpu).findings
    fixes = next(item for item in found if item.cause == "tp_kv_head_replication_or_pp_imbalance").fixes
    assert "".join(fix.env.get("VLLM_PP_LAYER_PARTITION", "") for fix in fixes) == expected
