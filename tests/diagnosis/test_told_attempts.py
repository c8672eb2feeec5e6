"""What a text says was tried, worked before, or belongs to the host changes the cause and the first fix."""

from __future__ import annotations

import pytest

from legroom.diagnosis.finding import Finding
from legroom.diagnosis.log_diagnosis import read_log
from legroom.diagnosis.verdict import Diagnosis


def diagnosed(text: str) -> Diagnosis:
    return read_log([text.encode()]).runs[0]


def first(text: str) -> Finding:
    return diagnosed(text).findings[0]


def test_a_change_that_did_not_help_is_no_fix() -> None:
    text = "On a DGX Spark vLLM runs out of memory before any weights are loaded."
    assert first(text).fixes[0].kind == "lower_util"
    tried = f"{text} Lowering gpu_memory_utilization makes no difference."
    assert all(fix.kind != "lower_util" for fix in first(tried).fixes)
    raised = f"{text} Raising gpu_memory_utilization makes no difference."
    assert first(raised).fixes[0].kind == "lower_util"


def test_joined_pieces_that_did_not_help_are_no_fragmentation() -> None:
    oom = (
        "vLLM: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 160.00 MiB. GPU 0 has a total capacity of "
        "11.61 GiB of which 87.00 MiB is free. Of the allocated memory 10.48 GiB is allocated by PyTorch, and 250.00 "
        "MiB is reserved by PyTorch but unallocated.\n"
    )
    assert first(oom).cause == "allocator_fragmentation"
    assert first(f"{oom}Setting expandable_segments did not help.").cause != "allocator_fragmentation"


@pytest.mark.parametrize(
    "text",
    [
        "After a reinstall the same start with TP 4 and eager mode stops with no memory left for cache blocks in vLLM.",
        "Some-Model served with vLLM 0.7.2: the server hits CUDA out of memory under load.",
    ],
)
def test_what_failed_is_never_called_a_cure(text: str) -> None:
    assert not any("itself says" in fix.why for finding in diagnosed(text).findings for fix in finding.fixes)


def test_a_release_that_worked_is_the_first_fix_of_a_fault_too() -> None:
    text = "vLLM, TP 2: CUDA error: an illegal memory access on 0.25.1 and 0.26.0, fine on 0.24.0."
    assert "vllm==0.24.0" in first(text).fixes[0].steps[0]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "CPU OOM when saving a checkpoint with megatron and vLLM; I see a spike of the memory, then OOM",
            "host_ram_oom",
        ),
        (
            "Ray OOM: the vllm memory usage rises in add_request and the increased memory is not released",
            "leak_over_time",
        ),
        (
            "The vLLM router pod is OOMKilled. With 16G its memory usage is unbounded and keeps ramping up",
            "leak_over_time",
        ),
    ],
)
def test_host_words_exclude_causes_of_the_card(text: str, cause: str) -> None:
    findings = diagnosed(text).findings
    assert findings[0].cause == cause
    assert not {finding.cause for finding in findings} & {"weights_too_big", "runtime_activation_burst"}


def test_a_kernels_workspace_is_fixed_by_another_kernel() -> None:
    text = (
        "vLLM fails in profile_run: torch.OutOfMemoryError: CUDA out of memory, when the FlashInfer MoE kernel "
        "attempts to allocate 26.21 GiB workspace memory"
    )
    found = first(text)
    assert found.cause == "quantization_kernel_workspace"
    assert "--moe-backend" in found.fixes[0].steps[0]


def test_only_the_first_of_several_cards_full_is_a_model_that_is_not_split() -> None:
    text = "vLLM on 4 GPUs, some 14B model: CUDA out of memory, and only GPU 0 is full, the other cards are empty."
    found = first(text)
    assert found.cause == "weights_too_big"
    assert found.fixes[0].flags == {"tensor_parallel_size": 4}


def test_a_new_engine_beside_the_old_one_takes_the_card_twice() -> None:
    text = "With vLLM I delete the llm, empty the cache and make a new LLM in the same script: CUDA out of memory."
    assert first(text).cause == "gpu_shared_or_not_free"


def test_a_size_of_the_embedding_is_a_weight_where_the_card_is_not_known() -> None:
    # 151,936 x 5,120 x 2 bytes
    text = (
        "Serving Qwen/Qwen3-32B with vLLM:\ntorch.OutOfMemoryError: Tried to allocate 1.45 GiB. GPU has 1.25 GiB free."
    )
    found = first(text)
    assert found.cause == "weights_too_big"
    assert "151,936" in found.why


def test_a_preemption_ends_no_engine() -> None:
    text = "vLLM: after a sequence group is preempted the async loop fails and the engine is dead"
    assert not any(finding.cause == "kv_preemption_thrash" for finding in diagnosed(text).proven_findings[:1])


def test_a_setting_that_vllm_itself_names_was_not_tried() -> None:
    line = (
        "RuntimeError: Worker failed with error 'max_num_seqs (512) exceeds available Mamba cache blocks (300). Each'"
    )
    assert first(line).fixes[0].flags == {"max_num_seqs": 296}
