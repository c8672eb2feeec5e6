"""vLLM's own messages in other words, in another program's words, or cut before the error."""

from __future__ import annotations

import pytest

from legroom.diagnosis.finding import Finding
from legroom.diagnosis.log_diagnosis import read_log
from legroom.diagnosis.verdict import Diagnosis


def diagnosed(text: str) -> Diagnosis:
    return read_log([text.encode()]).runs[0]


def first(text: str) -> Finding:
    return diagnosed(text).findings[0]


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("vLLM: 65536 tokens need 8.00 GiB of KV cache, 6.00 GiB available, 49152 estimated", 49152),
        ("engine stops: one request of 65536 tokens needs 8.00 GiB of KV and 6.00 GiB is available", 49070),
        ("for a max seq len of 65536 it wants 8.0 GiB of KV cache but has 6.0 GiB; it estimates 49152", 49070),
        ("ValueError: max seq len 65536 exceeds the 49152 tokens the KV cache can hold", 49152),
        ("needs more: 65536 tokens needing 8.00 GiB of KV cache against 6.00 GiB (49152 estimated)", 49152),
    ],
)
def test_a_retold_kv_check_names_the_length_that_fits(text: str, fits: int) -> None:
    found = first(text)
    assert found.cause == "kv_too_small_for_max_len"
    assert 0.9 * fits < found.fixes[0].flags["max_model_len"] <= fits


def test_blocks_that_hold_less_than_the_length_are_the_check_that_a_cut_traceback_hides() -> None:
    log = (
        "INFO 01-02 10:00:00 llm_engine.py:72] Initializing an LLM engine with config: model='/m/some-4b', "
        "dtype=torch.bfloat16, max_seq_len=16384, tensor_parallel_size=1, enforce_eager=True, seed=0)\n"
        "INFO 01-02 10:00:09 llm_engine.py:322] # GPU blocks: 700, # CPU blocks: 512\n"
        "Traceback (most recent call last):\n"
        '  File "serve.py", line 9, in <module>\n'
    )
    found = first(log)
    assert found.cause == "kv_too_small_for_max_len"
    assert found.fixes[0].flags["max_model_len"] <= 700 * 16
    assert not read_log([log.replace("blocks: 700", "blocks: 7000").encode()]).runs[0].proven_findings


def test_the_largest_free_piece_below_the_request_is_fragmentation() -> None:
    text = (
        "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 3.00G. That was not possible. "
        "There are 5.00G free.{} vLLM on TPU"
    )
    pieces = " The largest contiguous region of free memory is 2.00G due to fragmentation."
    found = first(text.format(pieces))
    assert found.cause == "allocator_fragmentation"
    assert not found.fixes[0].env, "no variable of CUDA's allocator on a TPU"


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("ValueError, max_model_len 8192 is greater than the derived 4096", {"max_model_len": 4096}),
        ("stops: rank 64 is above max_lora_rank 16 in vllm", {"max_lora_rank": 64}),
        ("vLLM says max_num_seqs 512 is more than the 300 Mamba cache blocks it has", {"max_num_seqs": 296}),
    ],
)
def test_numbers_of_a_retold_refusal_are_the_fix(text: str, flags: dict[str, int]) -> None:
    assert first(text).fixes[0].flags == flags


@pytest.mark.parametrize(
    "text",
    [
        "vLLM refuses it: a prompt of 35000 tokens exceeds 32768",
        "openai.BadRequestError: maximum context length is 8192 tokens. However, you requested 25000 tokens",
        "max_model_len(40960) - num_tokens(90000) < max_tokens(1024)",
    ],
)
def test_a_retold_refusal_of_a_long_request_is_no_memory(text: str) -> None:
    assert first(text).cause == "request_too_long"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("vLLM on a CPU host: ZeroDivisionError: integer modulo by zero", "driver_or_cuda_mismatch"),
        ("vllm cpu image: get_mempolicy: Operation not permitted", "not_memory"),
        ("RuntimeError: numa_migrate_pages failed. errno: 1", "not_memory"),
        ('exec: "vllm": executable file not found in $PATH', "not_memory"),
        ("AssertionError: Sinks are only supported in FlashAttention 3", "driver_or_cuda_mismatch"),
        ("ValueError: not enough resources to allocate 2 placement groups, only created 1", "not_memory"),
        ("vLLM dies at start with an AssertionError in some_backend.py line 26", "not_memory"),
    ],
)
def test_errors_of_rights_images_and_code_are_no_memory(text: str, cause: str) -> None:
    assert first(text).cause == cause


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("python -m fastchat.serve.model_worker: CUDA out of memory. Tried to allocate 42.00 MiB", "transformers"),
        ("tensorrt_llm is UNAVAILABLE, cudaMallocAsync out of memory (tllmBuffers.h:112)", "tensorrt_llm"),
        ("mistralrs-server: DriverError(CUDA_ERROR_OUT_OF_MEMORY)", "mistralrs"),
        ("llamafactory-cli train my.yaml: torch.cuda.OutOfMemoryError: CUDA out of memory.", "trainer"),
    ],
)
def test_another_engine_or_a_trainer_is_named_as_such(text: str, engine: str) -> None:
    assert diagnosed(text).other_engine == f"engine_{engine}"


def test_a_story_that_names_vllm_is_asked_for_its_log() -> None:
    story = (
        "We run the vLLM production stack from its chart with the default values, and one of its pods goes straight "
        "into CrashLoopBackOff. The only line in its log is a debug message."
    )
    assert diagnosed(story).verdict == "cause above"


def test_a_printed_error_outweighs_a_guess_at_memory() -> None:
    log = (
        "KeyError: 'mm_limits'\n"
        "RuntimeError: The error occurred during profile run. This might be due to insufficient GPU memory."
    )
    assert first(log).cause == "not_memory"


def test_host_memory_that_could_not_be_pinned_is_the_hosts() -> None:
    text = "vLLM with LMCACHE_MAX_LOCAL_CPU_SIZE=72: RuntimeError, memory registration failed"
    assert first(text).cause == "host_ram_oom"
    pool = "LMCache: failed to allocate a 2x24x256x128 tensor, no memory available, and vLLM dies"
    assert first(pool).cause == "host_ram_oom"
