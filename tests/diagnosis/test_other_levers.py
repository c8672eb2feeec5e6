"""Where the failure's place, machine or text forbids the usual lever, the first fix is another one."""

from __future__ import annotations

import pytest

from legroom.diagnosis.finding import Fix
from legroom.diagnosis.log_diagnosis import read_log
from legroom.diagnosis.verdict import Diagnosis

KILLED = "Out of memory: Killed process 771 (VLLM::EngineCor) total-vm:300000000kB, anon-rss:{}kB, shmem-rss:{}kB\n"


def run_of(text: str) -> Diagnosis:
    return read_log([text.encode()]).runs[0]


def first_fix(text: str) -> Fix:
    return run_of(text).findings[0].fixes[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (KILLED.format(1200000, 98000000), "tmpfs"),
        (KILLED.format(41812352, 0) + "It had read about 30% of 1200 tensors when that happened.", "buffer"),
        (KILLED.format(28812352, 0) + "The box is multi-tenant, other tenants lost processes, too.", "available"),
    ],
)
def test_what_held_the_ram_of_the_host_names_the_first_step(text: str, words: str):
    run = run_of(text)
    assert run.findings[0].cause == "host_ram_oom"
    assert words in " ".join(run.findings[0].fixes[0].steps)


def test_mapped_gpu_memory_is_one_memory_and_the_pool_in_bytes_is_the_lever():
    kill = "the host OOM killer: `Out of memory: Killed process (VLLM::Worker_TP)`."
    pinned = first_fix(f"Booted vLLM with the 14 GiB KV pin (`15032385536`); vision warm-up was too much for {kill}")
    assert pinned.flags["kv_cache_memory_bytes"] < 15032385536
    run = run_of(f"121 GB mapped on a 119 GiB box, and GPU-mapped memory is not swappable. vLLM died, {kill}")
    assert run.findings[0].cause == "unified_memory_or_wsl" and run.findings[0].fixes[0].kind == "lower_util"


def test_a_pool_that_an_override_sets_is_changed_by_the_override():
    refused = (
        "To serve at least one request with the model's max seq len (131072), (0.60 GiB KV cache is needed, which is "
        "larger than the available KV cache memory (0.20 GiB). num_gpu_blocks_override was 400 there."
    )
    assert first_fix(refused).flags["num_gpu_blocks_override"] >= 1200
    text = "With num-gpu-blocks-override 1600 vLLM's start ends in ncclUnhandledCudaError in the pipeline's broadcast."
    run = run_of(text)
    assert run.findings[0].cause == "nccl_or_custom_allreduce_buffers"
    assert run.findings[0].fixes[0].flags["num_gpu_blocks_override"] < 1600


def test_weights_on_a_card_are_not_divided_by_the_ranks():
    text = (
        "With tensor parallel 2 that is about 88 GiB of weights on an 80 GiB card. Loading stops with\n"
        "ERROR [gpu_model_runner.py:5403] Failed to load model - not enough GPU memory. (original error: CUDA out of "
        "memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 79.18 GiB of which 210.31 MiB is free. "
        "Including non-PyTorch memory, this process has 78.9 GiB memory in use.)"
    )
    assert first_fix(text).flags.get("tensor_parallel_size") == 4


@pytest.mark.parametrize(
    "text",
    [
        "OOM on the 10-layer stage (29.1 GiB of weights on a 32 GB V100), pipeline parallel 4; util 0.95 fails, too.",
        "vLLM: Launch-OOM auf der 9-Layer-Stufe (27,9 GiB Gewichte), PP=5",
    ],
)
def test_a_stage_named_by_its_layers_gets_fewer_of_them(text: str):
    run = run_of(text)
    assert run.findings[0].cause == "tp_kv_head_replication_or_pp_imbalance"
    assert "VLLM_PP_LAYER_PARTITION" in run.findings[0].fixes[0].steps[0]


def test_a_draft_that_does_not_load_is_left_out():
    text = "vLLM with MTP, TP1, 0.95 util: `gptq_marlin_repack` OOM in `llm_base_proposer.load_model`."
    assert "gpu_memory_utilization" not in first_fix(text).flags and "speculative_config" in first_fix(text).flags


def test_words_that_stick_to_a_size_are_read():
    run = run_of(
        "vLLM at step 12: OOM, external process881276 held12.50GiB, own28.10GiB,210.81MiBfree;512MiBallocation failed."
    )
    assert run.findings[0].cause == "gpu_shared_or_not_free" and "12.50 GiB" in run.findings[0].why


def test_a_message_broken_by_comment_marks_is_whole():
    for text in ("6.25 GiB KV cache is needed, which\n# is", "6.25 GiB KV\n# cache is needed, which is"):
        why = run_of(f'# vLLM said "{text} larger than the available KV cache\n# memory (5.91 GiB)"').findings[0].why
        assert "6.25 GiB" in why and "5.91 GiB" in why


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("PMPI_Init_thread\natl_mpi_comm::init_transport\nRuntimeError: Engine core initialization failed", "mpirun"),
        ("torch.AcceleratorError: HIP error: invalid kernel file", "gfx"),
        ("docker run vllm/vllm-openai --model a/b --device cpu\nTypeError: unsupported operand type(s)", "CPU image"),
        ("vllm: error: unrecognized arguments:\n--lora-modules a=b/c", "two words"),
        ("NameError: name 'layer_norm' is not defined\n  File \"/v/vllm/models/qwen2.py\", line 33", "line that"),
        ("RuntimeError: CUDA error 802: system not yet initialized", "fabricmanager"),
        ("AssertionError: Sinks are only supported in FlashAttention 3", "TRITON_ATTN"),
        ('RuntimeError: [1:1:1] /project/cpp/json_schema_converter.cc:800: Unsupported type "money"', "request that"),
    ],
)
def test_what_is_no_memory_failure_has_its_own_first_step(text: str, words: str):
    run = run_of(text)
    assert not any(finding.cause.endswith(("_oom", "_burst", "_big")) for finding in run.findings)
    assert words in " ".join(run.findings[0].fixes[0].steps)
    assert "TORCH_CUDA_ARCH_LIST" not in " ".join(run.findings[0].fixes[0].steps)
