"""Sizes, flags and the model exclude causes that the messages alone would suggest."""

from __future__ import annotations

import pytest

from legroom.diagnosis.fixes.failed_run import Hints
from legroom.diagnosis.fixes.fix_planner import FixPlanner
from legroom.diagnosis.log_diagnosis import read_log
from legroom.diagnosis.verdict import Diagnosis
from legroom.facts import read_data

FULL_CARD = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 2 has a total capacity of 14.62 GiB "
    "of which 3.31 MiB is free. Including non-PyTorch memory, this process has 14.61 GiB memory in use. Of the "
    "allocated memory 14.42 GiB is allocated by PyTorch, and 23.14 MiB is reserved by PyTorch but unallocated.\n"
)
WANTS_TERABYTE = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 GiB.\n"


def diagnosis(log: str, command: str = "") -> Diagnosis:
    return read_log([log.encode()], "log", Hints(command=command)).runs[0]


def causes(log: str, command: str = "") -> list[str]:
    return [finding.cause for finding in diagnosis(log, command).findings]


def test_pieces_that_rounding_leaves_while_weights_load_are_no_fragmentation() -> None:
    log = FULL_CARD + "ERROR 03-02 19:49:43 Exception in worker VllmWorkerProcess while processing method load_model.\n"
    assert causes(log)[0] == "weights_too_big"
    assert "allocator_fragmentation" not in causes(log)


def test_a_text_model_never_fails_by_its_images() -> None:
    assert causes(WANTS_TERABYTE)[0] == "multimodal_inputs"
    assert "multimodal_inputs" not in causes(WANTS_TERABYTE, "vllm serve Qwen/Qwen3-8B")
    assert "multimodal_inputs" in causes(WANTS_TERABYTE, "vllm serve Qwen/Qwen2.5-VL-7B-Instruct")


def test_an_oversized_block_override_is_named_and_taken_away() -> None:
    log = (
        "INFO 01-02 03:04:00 [utils.py:233] non-default args: {'model': 'Qwen/Qwen3-8B', "
        "'num_gpu_blocks_override': 1000000}\n"
        '  File "/x/vllm/v1/worker/gpu_model_runner.py", line 1, in _allocate_kv_cache_tensors\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 146.00 GiB. GPU 0 has a total capacity of "
        "79.15 GiB of which 60.00 GiB is free.\n"
    )
    finding = diagnosis(log).findings[0]
    assert finding.cause == "no_cache_blocks"
    assert "--num-gpu-blocks-override asks for a pool of 1,000,000 blocks" in finding.why
    assert finding.fixes[0].flags == {"num_gpu_blocks_override": None}
    assert "--num-gpu-blocks-override" not in finding.fixes[0].command


def test_a_pool_beyond_the_card_was_set_by_hand() -> None:
    tail = (
        '  File "/x/vllm/v1/worker/gpu_model_runner.py", line 1, in _allocate_kv_cache_tensors\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {} GiB. GPU 0 has a total capacity of 79.15 GiB "
        "of which 60.00 GiB is free. Including non-PyTorch memory, this process has 19.15 GiB memory in use. Of the "
        "allocated memory 18.00 GiB is allocated by PyTorch, and 0.10 GiB is reserved by PyTorch but unallocated.\n"
    )
    finding = diagnosis(tail.format("90.00")).findings[0]
    assert finding.cause == "no_cache_blocks"
    assert "--num-gpu-blocks-override" in " ".join(finding.fixes[0].steps)
    assert not finding.fixes[0].flags
    assert causes(tail.format("60.50"))[0] != "no_cache_blocks"  # a share can have given this one


@pytest.mark.parametrize("row", [row for row in read_data("kv_checks.json")["checks"] if row["check"] == "no_blocks"])
def test_a_traceback_without_log_lines_does_not_tell_of_neighbours(row: dict[str, str]) -> None:
    frame = '  File "/x/vllm/v1/core/kv_cache_utils.py", line 1, in _check_enough_kv_cache_memory\n'
    assert causes(f"{frame}ValueError: {row['text']}\n")[0] == "no_cache_blocks"


def test_free_memory_beside_a_trainer_is_not_shared_memory() -> None:
    free = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 7 has a total capacity of "
        "79.11 GiB of which 66.43 GiB is free. Of the allocated memory 8.51 GiB is allocated by PyTorch, and "
        "856.16 MiB is reserved by PyTorch but unallocated.\n"
    )
    assert causes(free)[0] == "unified_memory_or_wsl"
    assert causes('  File "/x/swift/llm/train/rlhf.py", line 200, in rlhf_main\n' + free)[0] != "unified_memory_or_wsl"


@pytest.mark.parametrize(
    "stop",
    ["(EngineCore pid=7) KeyboardInterrupt\n", "INFO 08-01 21:34:51 [core.py:1] trigger received signal=SIGTERM\n"],
)
def test_a_stop_from_outside_is_named_unless_something_failed_before(stop: str) -> None:
    after = "(APIServer pid=1) RuntimeError: Engine core initialization failed. Failed core proc(s): {}\n"
    stopped = diagnosis(stop + after)
    assert stopped.verdict == "not a memory problem"
    assert "stopped from outside" in stopped.findings[0].why
    assert causes(FULL_CARD + stop)[0] != "not_memory"
    assert "stopped" not in diagnosis("ValueError: no such thing\n" + stop + after).findings[0].why


def test_sigkill_without_the_kernels_word_says_so() -> None:
    assert "no line of the kernel's OOM killer" in diagnosis("process exited with code 137\n").findings[0].why
    assert "no line of" not in diagnosis("State: Terminated, Reason: OOMKilled, exit code 137\n").findings[0].why


@pytest.mark.parametrize(
    ("log", "engine"),
    [
        ('  File "/x/sglang/srt/managers/scheduler.py", line 1, in run\n' + FULL_CARD, "SGLang"),
        ("[TensorRT-LLM][ERROR] Assertion failed: out of memory\n", "TensorRT-LLM"),
        ("ggml_backend_cuda_buffer_type_alloc_buffer: cudaMalloc failed: out of memory\n", "llama.cpp"),
        ('level=INFO source=server.go:105 msg="system memory" total="62.7 GiB"\n' + WANTS_TERABYTE, "Ollama"),
    ],
)
def test_a_log_of_another_engine_is_named_and_not_judged(log: str, engine: str) -> None:
    named = diagnosis(log)
    assert (named.verdict, named.findings) == ("not understood", ())
    assert f"This is {engine}'s log" in named.notes[0]


def test_raylets_shared_memory_sentence_takes_a_line_break() -> None:
    log = (
        "System memory request exceeds memory available in /dev/shm.\n"
        "The request is for 10200547328 bytes, and the amount available is 9663676416 bytes.\n"
    )
    finding = diagnosis(log).findings[0]
    assert finding.cause == "host_ram_oom"
    assert "9.00 GiB" in finding.why


def test_a_message_broken_after_a_space_is_read_whole() -> None:
    log = (
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 \ndummy requests. Please try "
        "lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.\n"
    )
    assert causes(log)[0] in ("profiling_activation_peak", "cudagraph_capture_oom")
    assert diagnosis(log).verdict == "cause found"


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("ValueError: Cannot auto-fit max_model_len: not enough GPU memory available to serve", "no_cache_blocks"),
        (
            "RuntimeError: CUDA out of memory occurred when warming up pooler (task=embed) with 256 dummy requests.",
            "profiling_activation_peak",
        ),
    ],
)
def test_a_message_alone_is_enough(line: str, cause: str) -> None:
    assert causes(line + "\n")[0] == cause


@pytest.mark.parametrize(("utilization", "is_possible"), [(0.95, True), (0.5, False)])
def test_torch_above_the_budget_is_not_serving(utilization: float, is_possible: bool) -> None:
    log = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 300.00 MiB. GPU 0 has a total capacity of 23.64 "
        "GiB of which 100.00 MiB is free. Including non-PyTorch memory, this process has 23.54 GiB memory in use. Of "
        "the allocated memory 22.00 GiB is allocated by PyTorch, and 900.00 MiB is reserved by PyTorch but "
        "unallocated.\n"
    )
    found = causes(log, f"vllm serve Qwen/Qwen2.5-3B-Instruct --gpu-memory-utilization {utilization}")
    assert ("runtime_activation_burst" in found) == is_possible


def test_a_change_that_moves_no_byte_is_no_fix() -> None:
    log = "WARNING 10-01 10:00:00 [scheduler.py:1] Sequence group 1 is preempted by PreemptionMode.RECOMPUTE mode\n"
    command = "vllm serve Qwen/Qwen3-8B --max-model-len 8192"
    planner = FixPlanner(diagnosis(log, command).case, Hints(command=command, gpu="h100", vllm="0.32.0"))
    assert planner.failed_plan is not None
    assert planner.failed_plan.starts
    assert planner.plan_with({"enable_prefix_caching": True}) is None
    assert planner.plan_with({"max_num_seqs": planner.failed_plan.settings.max_num_seqs}) is None
    assert planner.plan_with({"max_num_seqs": 64}) is not None


NO_BLOCKS = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.\n"


def test_no_blocks_where_the_plan_leaves_a_pool_are_a_neighbours() -> None:
    hints = Hints(command="vllm serve openai/gpt-oss-20b --max-model-len 32768", gpu="rtx4090")
    findings = read_log([NO_BLOCKS.encode()], "log", hints).runs[0].findings
    assert findings[0].cause == "gpu_shared_or_not_free"
    assert not findings[0].fixes[0].flags


def test_no_fix_asks_for_more_gpus_than_the_machine_has() -> None:
    command = "vllm serve Qwen/Qwen3-32B-AWQ --max-model-len 32768"

    def first_fix(gpus: int | None) -> dict[str, object]:
        hints = Hints(command=command, gpu="rtx4090", gpus=gpus)
        return dict(read_log([NO_BLOCKS.encode()], "log", hints).runs[0].findings[0].fixes[0].flags)

    assert first_fix(None)["tensor_parallel_size"] == 2
    assert "tensor_parallel_size" not in first_fix(1)


KV_SHORT = (
    "INFO 11-18 09:14:00 [api_server.py:1839] vLLM API server version 0.11.0\n"
    "INFO 11-18 09:14:00 [utils.py:233] non-default args: {'model': 'Qwen/Qwen2.5-72B-Instruct', "
    "'max_model_len': 32768, 'gpu_memory_utilization': 0.95, 'tensor_parallel_size': 2}\n"
    "INFO 11-18 09:14:30 [gpu_model_runner.py:2653] Model loading took 67.8352 GiB and 31.2 seconds\n"
    "INFO 11-18 09:15:00 [gpu_worker.py:298] Available KV cache memory: 3.10 GiB\n"
    "ValueError: To serve at least one request with the models's max seq len (32768), (5.00 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (3.10 GiB). Based on the available memory, the estimated "
    "maximum model length is 20304.\n"
)


def test_what_a_profile_run_took_beyond_the_model_stays_with_other_flags() -> None:
    """A flag is not credited with the difference between the log and the model."""
    run = read_log([KV_SHORT.encode()], "log", Hints(gpu="a100-80gb", gpus=4)).runs[0]
    flags = [fix.flags for fix in run.findings[0].fixes]
    assert {"tensor_parallel_size": 4} in flags
    assert not any(changed.keys() & {"max_num_batched_tokens", "gpu_memory_utilization"} for changed in flags)
    assert not any((changed.get("tensor_parallel_size") or 1) > 4 for changed in flags)
