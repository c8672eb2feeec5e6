"""Which cause comes first where a text says the moment, the sizes or the program in words."""

from __future__ import annotations

import pytest

from legroom.diagnosis.log_diagnosis import read_log
from legroom.diagnosis.verdict import Diagnosis


def diagnosed(text: str) -> Diagnosis:
    return read_log([text.encode()]).runs[0]


def first_cause(text: str) -> str:
    run = diagnosed(text)
    assert run.verdict not in ("cause above", "not understood"), text
    return run.findings[0].cause


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (
            "weights_too_big",
            "torch.OutOfMemoryError: CUDA out of memory while the weights of Qwen2.5-72B are being read, vllm, A100.",
        ),
        (
            "cudagraph_capture_oom",
            "vLLM prints GPU KV cache size: 210,432 tokens, Maximum concurrency for 32,768 tokens per request: 6.42x "
            "and is then OOM in the graph/compile workspace: NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; "
            "61.2 GiB total capacity; 58.1 GiB already allocated; 700.00 MiB free)",
        ),
        ("cudagraph_capture_oom", "KV cache 初始化成功之后，vllm 在图模式阶段报 NPU out of memory。"),
        ("runtime_activation_burst", "vllm 服务启动成功后，长上下文一来就 OOM，短的没事。A800 80G"),
        ("runtime_activation_burst", "When a request reaches the prefill path vllm dies of OutOfMemoryError."),
        (
            "runtime_activation_burst",
            "torch.OutOfMemoryError\n\nfrom\n\nvllm/_custom_ops.py\n\nTried to allocate ~64 MiB\n"
            "GPU total ~15.9 GiB\nonly ~30 MiB free\n\n\n\n\nThe server runs vllm.\n\n\n\nThen a longer request "
            "arrived on the prefill path.\nOnce more:\n\ntorch.OutOfMemoryError\n",
        ),
        ("weights_too_big", "vllm: OutOfMemoryError while creating weights of DeepSeek-V3 on 8xA100-40GB"),
    ],
)
def test_words_and_milestones_place_a_failed_allocation(cause: str, text: str) -> None:
    assert first_cause(text) == cause


def test_a_failed_allocation_without_a_moment_is_not_said_to_be_of_serving_for_vllms_own_phrase() -> None:
    run = diagnosed("Maximum concurrency for 8,192 tokens per request was fine.\nThen vllm: CUDA out of memory.")
    assert run.verdict == "cause above"


@pytest.mark.parametrize(
    "text",
    [
        "A 40 GiB model on a 32 GiB card with vllm: out of memory.",
        "vLLM 单机部署 (模型 720G), 8 卡 64G NPU, TP=8 OOM",
        "vLLM, 300G 权重 + 4×80GB, TP=4 OOM",
        "With TP=2 vllm needs ~23 GB per GPU, my GPUs have 24 GB each: CUDA out of memory.",
    ],
)
def test_weights_told_in_words_are_set_against_the_card_that_is_told(text: str) -> None:
    assert first_cause(text) == "weights_too_big"


def test_settings_that_are_commented_out_are_not_in_force() -> None:
    run = diagnosed(
        'vllm args: [\n  # "--quantization=awq", # not now\n  "--tensor-parallel-size=2",\n]\n'
        "torch.OutOfMemoryError: CUDA out of memory."
    )
    assert (run.case.startup.args.quantization, run.case.startup.args.tensor_parallel_size) == (None, 2)


def test_free_and_attempted_sizes_in_a_sentence_are_a_failed_allocation() -> None:
    run = diagnosed(
        "With 180 MiB left on the card a request for prompt_logprobs made our vLLM service ask for 512 MiB. "
        "The engine was gone."
    )
    assert run.case.oom is not None and run.case.oom.wanted_bytes == 512 << 20
    assert run.findings[0].cause == "runtime_activation_burst"


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: cudagraph_capture_sizes [3, 5] must be multiples of 2 for sequence parallelism",
        "vllm: AssertionError: max_num_batched_tokens 2048 must be divisible by block size 528",
        "ValueError: num_speculative_tokens must be positive",
    ],
)
def test_a_check_of_a_settings_value_is_configuration(line: str) -> None:
    assert first_cause(line) == "wrong_flag"


def test_a_time_out_that_hides_an_out_of_memory_error_is_one() -> None:
    text = (
        "Sending a huge picture to Gemma-3 on vllm: the client only sees TimeoutError, yet on the worker the GPU ran "
        "out of memory."
    )
    assert first_cause(text) == "multimodal_inputs"


def test_not_memory_is_not_stated_by_words_where_the_text_speaks_of_memory() -> None:
    assert (
        diagnosed("vllm serve was OK; it now says something about memory and exits. RTX 3090").verdict == "cause above"
    )


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        ("host_ram_oom", "Loading a 14B model in vllm on a PC whose CPU memory of 16GB is not enough."),
        ("host_ram_oom", "Can vllm start Mistral 24B using less host memory? My box has little of it."),
        ("leak_over_time", "Device memory of our vllm pods shows a steady increase all week until they are OOM."),
        ("leak_over_time", "VRAM of my vLLM server climbs every hour; after a day it hits OOM."),
    ],
)
def test_host_memory_and_growth_are_known_by_their_words(cause: str, text: str) -> None:
    assert first_cause(text) == cause


@pytest.mark.parametrize(
    "text",
    [
        "We run sglang 0.5.2 with Llama-3.1-70B on L4s. torch.OutOfMemoryError: CUDA out of memory. Tried to "
        "allocate 90.00 MiB. GPU 0 has a total capacity of 22.03 GiB of which 12.00 MiB is free.",
        "lm_eval --model hf --model_args pretrained=meta-llama/Llama-2-70b-hf: torch.OutOfMemoryError: CUDA out of "
        "memory. Tried to allocate 448.00 MiB",
    ],
)
def test_another_program_is_named_before_anything_is_said_of_vllm(text: str) -> None:
    assert diagnosed(text).other_engine


def test_a_server_that_moved_from_another_engine_is_still_vllms() -> None:
    assert not diagnosed("I was using sglang, now vllm serve Qwen/Qwen3-8B is OOM on a T4.").other_engine


def test_a_shut_down_server_had_no_failure() -> None:
    log = (
        "(EngineCore pid=9) INFO 02-03 04:05:06 [core.py:1201] Shutdown initiated (timeout=0)\n"
        "(EngineCore pid=9) INFO 02-03 04:05:06 [core.py:1224] Shutdown complete\n"
        "ERROR 02-03 04:05:07 [core_client.py:704] Engine core proc EngineCore died unexpectedly, shutting down.\n"
    )
    assert first_cause(log) == "not_memory"


@pytest.mark.parametrize(
    ("cause", "line"),
    [
        ("not_memory", "subprocess.CalledProcessError: Command '['ninja', '-v', '-C', '/x']' returned exit status 1."),
        ("driver_or_cuda_mismatch", "RuntimeError: Only SM 90 and SM 100 are supported by this kernel"),
        ("driver_or_cuda_mismatch", "vllm: RuntimeError: current CANN version do not support this op"),
    ],
)
def test_builds_and_architectures_are_called_what_they_are(cause: str, line: str) -> None:
    assert first_cause(line) == cause


def test_a_draft_head_that_no_longer_fits_is_no_weight_of_the_model() -> None:
    text = (
        "vLLM on a 32GB card: the main model is in, the draft head no longer fits.\n"
        "torch.OutOfMemoryError: Tried to allocate 1.90 GiB. GPU has 1.10 GiB free."
    )
    assert first_cause(text) == "lora_or_spec_decode_extra"
    assert diagnosed(text).case.phase == "startup_load"


@pytest.mark.parametrize(
    "text",
    [
        "One vllm container runs with 0.9, and I want to start another. Then CUDA is insufficient.",
        "I want more than one vllm engine on one card.\nThe second engine never comes up, it fails.\n"
        "INFO 03-02 08:00:01 [monitor.py:33] torch.compile takes 9.00 s in total\n"
        "ERROR 03-02 08:00:02 [core.py:396] EngineCore failed to start.\n"
        "ERROR 03-02 08:00:02 [core.py:396] Traceback (most recent call last):\n",
    ],
)
def test_two_servers_on_one_card_share_it(text: str) -> None:
    assert first_cause(text) == "gpu_shared_or_not_free"


def test_memory_that_sleep_does_not_give_back_is_of_sleep_mode() -> None:
    assert first_cause("vllm 调用 sleep 之后显存没有释放 LLM(enable_sleep_mode=True)") == (
        "sleep_mode_or_rlhf_colocation"
    )
    assert first_cause("A vllm worker is OOM in\ncumem_allocator.cpp:99, though much is free.") == (
        "sleep_mode_or_rlhf_colocation"
    )


def test_wsl_that_refuses_memory_of_a_free_card_is_the_cause() -> None:
    text = 'In WSL2 my vllm ends in "CUDA error: out of memory" although the card is nearly free.'
    assert first_cause(text) == "unified_memory_or_wsl"


def test_a_draft_model_that_loads_is_not_the_main_model() -> None:
    assert first_cause("The EAGLE draft model loading goes OOM in vllm after the main one took 70 of 80 GB.") == (
        "lora_or_spec_decode_extra"
    )


def test_a_moment_that_nothing_tells_is_not_said_and_no_amount_is_invented() -> None:
    run = diagnosed("vllm serve Qwen/Qwen3-8B\ntorch.OutOfMemoryError: CUDA out of memory.")
    assert (run.verdict, run.phase) == ("cause above", None)
    served = diagnosed("The vllm server was up for six hours, then it was OOM.").findings[0]
    assert served.cause == "runtime_activation_burst"
    assert not any("1.00 GiB" in fix.why for fix in served.fixes)


def test_images_that_fail_since_an_upgrade_to_the_v1_engine_fail_in_its_profile_run() -> None:
    text = "vllm 0.6.6 started our VL model. Since updating to 0.9.2 the VL model is OOM at every start, text is not."
    assert diagnosed(text).case.site == "profile"
