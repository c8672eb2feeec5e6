"""Sizes, counts and switches that a text tells decide: over a platform's name, the words hang and load, and a rule."""

from __future__ import annotations

import pytest

from legroom.diagnosis.finding import Finding, Fix
from legroom.diagnosis.log_diagnosis import read_log
from legroom.diagnosis.pasted_command import named_card
from legroom.diagnosis.verdict import Diagnosis
from legroom.facts.gpus import gpu


def diagnosed(text: str) -> Diagnosis:
    return read_log([text.encode()]).runs[0]


def first(text: str) -> Finding:
    return diagnosed(text).findings[0]


def first_fix(text: str) -> Fix:
    return first(text).fixes[0]


def words(fix: Fix) -> str:
    return " ".join((fix.why, *fix.steps))


HELD_IN_WSL = (
    "Windows 10, WSL2, one 4080. vllm serve Qwen/Qwen2.5-7B-Instruct crashes as it starts.\n"
    "GPU 0 idle VRAM: 12.5 GiB, something is using it although I closed everything\n"
)


def test_memory_in_use_before_the_start_outweighs_the_platform_s_name() -> None:
    finding = first(HELD_IN_WSL)
    assert finding.cause == "gpu_shared_or_not_free" and "12.50 GiB" in finding.why


def test_under_wsl_the_processes_of_windows_are_looked_for_where_they_are_shown() -> None:
    assert "Task Manager" in words(first_fix(HELD_IN_WSL))


def test_wsl_alone_is_no_cause() -> None:
    run = diagnosed("I use vLLM 0.9.2 in WSL2 on Windows 11 with a 3060. Why does the start take four minutes here?")
    assert "unified_memory_or_wsl" not in [finding.cause for finding in run.findings]


def test_a_process_of_some_megabytes_is_not_what_fills_a_card() -> None:
    text = "vLLM on a 48 GB card. nvtop shows another process with 310 MB beside it. Under load it runs out of VRAM."
    assert first(text).cause != "gpu_shared_or_not_free"


def test_a_container_s_memory_is_looked_for_on_the_host() -> None:
    text = "vLLM does not release GPU memory after docker stop on an L4. New pods find 21 GB of 24 GB taken."
    assert "fuser" in words(first_fix(text))


def test_a_rest_of_an_ended_server_is_in_no_phase() -> None:
    assert diagnosed("After I killed vllm the GPU memory is still occupied on my L40S.").phase is None


NPU = """\
(Worker_TP1 pid=77) INFO 10-02 05:47:25 [model_runner_v1.py:2661] Loading model weights took 18.68 GB
(Worker_TP0 pid=76) ERROR 10-02 05:47:55 [multiproc_executor.py:671] RuntimeError: NPU out of memory
(Worker_TP0 pid=76) ERROR 10-02 05:47:55 [multiproc_executor.py:671]   File "/w/vllm/worker/worker_base.py", line 254, \
in initialize_from_config
"""


def test_an_npu_gets_its_own_tools() -> None:
    told = " ".join(words(fix) for fix in first(NPU).fixes)
    assert "nvidia-smi" not in told and "CUDA_VISIBLE_DEVICES" not in told and "npu-smi" in told


TWO_SERVERS = """\
The server does not start: the KV cache is not enough for one request of the maximum length (32k), on 2x A100 80GB.
vllm serve meta-llama/Llama-3.1-8B-Instruct --port 8001 --tensor-parallel-size 2 &
vllm serve Qwen/Qwen2.5-7B-Instruct --port 8002 --tensor-parallel-size 2{} &
"""


@pytest.mark.parametrize("share", [0.9, 0.8])
def test_servers_started_side_by_side_on_the_same_cards_share_them(share: float) -> None:
    finding = first(TWO_SERVERS.format(f" --gpu-memory-utilization {share:g}" if share != 0.9 else ""))
    assert finding.cause == "gpu_shared_or_not_free" and f"{0.9 + share:g} of the card" in finding.why


def test_servers_on_cards_of_their_own_share_none() -> None:
    text = TWO_SERVERS.format("").replace("vllm serve Q", "CUDA_VISIBLE_DEVICES=2,3 vllm serve Q")
    assert first(text).cause == "kv_too_small_for_max_len"


STAGES = """\
vllm serve Qwen/Qwen2.5-Omni-7B --omni --tensor-parallel-size 2
(Worker_TP0 pid=11) INFO 12-10 03:24:48 [gpu_worker.py:298] Available KV cache memory: 12.10 GiB
(Worker_TP1 pid=12) INFO 12-10 03:24:48 [gpu_worker.py:298] Available KV cache memory: -1.30 GiB
(Worker pid=19) WARNING 12-10 03:24:48 [cudagraph_dispatcher.py:106] cudagraph dispatching keys are not initialized.
(EngineCore_DP0 pid=9) ERROR 12-10 03:24:48 [core.py:708] EngineCore failed to start.
"""


def test_a_worker_without_a_rank_beside_ranks_is_another_stage_and_no_orphan() -> None:
    fix = first_fix(STAGES)
    assert "same launch" in fix.why and "orphan" not in words(fix)


def stats(generated: float, running: int, waiting: int, usage: float) -> str:
    return (
        "INFO 04-28 22:54:32 [loggers.py:257] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation "
        f"throughput: {generated} tokens/s, Running: {running} reqs, Waiting: {waiting} reqs, "
        f"GPU KV cache usage: {usage}%, Prefix cache hit rate: 0.0%\n"
    )


def test_one_long_request_that_holds_the_pool_is_no_hang() -> None:
    finding = first("Does the engine hang?\n" + stats(6.1, 1, 9, 71.0) + stats(6.0, 1, 9, 71.2))
    assert finding.cause == "kv_preemption_thrash" and "max_tokens" in words(finding.fixes[0])


def test_an_engine_that_generates_nothing_hangs() -> None:
    assert first("Does the engine hang?\n" + stats(0.0, 1, 9, 71.0) * 2).cause == "not_memory"


def test_a_clean_log_that_stands_still_is_a_problem() -> None:
    log = "INFO 04-09 01:52:46 [core.py:151] init engine (profile, create kv cache, warmup model) took 47.83 seconds\n"
    assert diagnosed(f"{log}and then it stands still, one of two cards idle").verdict != "no problem found"


@pytest.mark.parametrize(
    "told",
    [
        "GPU memory starts at 40 % and after two days it has grown to 66 %.",
        "Usage starts at 9 GB of VRAM, climbs to 21 GB within 6 hours, and no request is running.",
    ],
)
def test_two_levels_with_a_time_between_are_growth(told: str) -> None:
    assert first(f"vLLM 0.6.3 serves Llama-3-8B on an A10. {told}").cause == "leak_over_time"


UNPLACED = "(EngineCore_DP0 pid=5) INFO 12-23 23:34:23 [gpu_worker.py:298] Available KV cache memory: -{} GiB\n"


def test_a_deficit_without_card_and_share_gets_the_rule_for_usual_cards() -> None:
    fix = first_fix(UNPLACED.format("1.40"))
    assert "0.10 on 24.00 GiB" in words(fix) and "0.03 on 80.00 GiB" in words(fix)


def test_a_deficit_on_a_named_card_gets_its_number() -> None:
    fix = first_fix("I use one L40S.\n" + UNPLACED.format("2.10"))
    assert "/ the card: 0.07 on" in words(fix) or "add 0.07" in words(fix)


def test_eager_mode_is_no_saving_where_graphs_may_be_outside_the_budget() -> None:
    assert "enforce_eager" not in first_fix(UNPLACED.format("2.77")).flags


def test_a_pool_printed_as_zero_is_no_figure() -> None:
    text = "(Worker_TP0 pid=5) INFO 10-28 21:14:48 [worker_v1.py:259] Available memory: 0, total memory: 65452113920\n"
    finding = first(f"{text}(EngineCore_DP0 pid=4) ERROR 10-28 21:14:49 [core.py:708] EngineCore failed to start.\n")
    assert "0.00 GiB" not in finding.why and "npu-smi info" in words(finding.fixes[0])


def torch_oom(wanted: str, torch_gib: float) -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {wanted}. GPU 0 has a total capacity of "
        f"23.64 GiB of which 120.00 MiB is free. Of the allocated memory {torch_gib} GiB is allocated by "
        "PyTorch, and 3.00 MiB is reserved by PyTorch but unallocated.\n"
    )


def test_the_backend_that_a_flag_chose_is_taken_back_first() -> None:
    line = "vllm serve THUDM/GLM-4-32B-0414 --tensor-parallel-size 4 --model-impl transformers --enforce-eager\n"
    fixes = first(line + torch_oom("270.00 MiB", 22.9)).fixes
    assert fixes[0].flags == {"model_impl": None} and not any("cpu_offload_gb" in fix.flags for fix in fixes)


def test_weights_that_fit_by_the_told_parameters_are_not_given_twice_the_cards() -> None:
    text = (
        "8*A100 (80G), Nova 180B-A20B in bf16 with vllm 0.10.2 goes OOM.\n"
        "(Worker_TP7 pid=3) ERROR 09-24 17:49:13 [multiproc_executor.py:585] WorkerProc failed to start.\n"
        '(Worker_TP7 pid=3) ERROR 09-24 17:49:13 [multiproc_executor.py:585]   File "/x/vllm/v1/worker/gpu_worker.py", '
        "line 213, in load_model\n"
    )
    fix = first_fix(text)
    assert not fix.flags and "of each card, which has 79" in fix.why


@pytest.mark.parametrize("size", ["A100 (80G)", "A100*80GB", "A100-80", "A100 80GB"])
def test_the_size_beside_a_card_s_name_is_the_card_s(size: str) -> None:
    card = named_card(f"vllm on 8 {size}, tensor parallel 8")
    assert card is not None and gpu(card).name == "NVIDIA A100-SXM4-80GB"


def test_a_share_beside_a_neighbour_holds_the_weights_that_are_told() -> None:
    text = "llama 2 70b on 2*H100, tensor_parallel_size=2\n" + (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 448.00 MiB. GPU 0 has a total capacity of "
        "79.11 GiB of which 391.12 MiB is free. Process 7 has 50.52 GiB memory in use. Process 8 has 28.19 GiB memory "
        "in use. Of the allocated memory 27.48 GiB is allocated by PyTorch, and 1.98 MiB is reserved by PyTorch but "
        "unallocated."
    )
    assert not any("gpu_memory_utilization" in fix.flags for fix in first(text).fixes)


MANIFEST = """\
command: ["vllm", "serve", "Qwen/Qwen2.5-72B-Instruct-AWQ"]
args: ["--trust-remote-code"]
resources: {limits: {nvidia.com/gpu: 4}}
Four GPUs, and only one of them is used, then it says out of memory.
"""


def test_cards_of_a_manifest_that_no_flag_splits_over_are_used() -> None:
    assert first_fix(MANIFEST).flags == {"tensor_parallel_size": 4}


def test_a_python_call_gets_a_keyword() -> None:
    text = (
        "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in "
        "KV cache (16816). Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.\n"
        'engine = Writer("acme/tale-v1")\n'
    )
    fix = first_fix(text)
    assert not fix.command and "max_model_len=16384" in words(fix)


def test_a_folder_in_a_traceback_is_no_model() -> None:
    frame = '[rank0]:   File "Foo-OCR-7B/Foo-OCR/deepencoder/sam_vary.py", line 309, in forward\n'
    run = diagnosed(frame + "[rank0]: " + torch_oom("352.00 MiB", 22.0))
    assert not run.case.startup.args.model and run.findings[0].cause == "multimodal_inputs"


def test_media_while_serving_may_be_given_room_beside_the_pool() -> None:
    text = "Long chats with many images make Qwen2.5-VL-7B in vLLM run out of GPU memory while serving."
    assert not any(end.action.startswith("change gpu") for end in first(text).dead_ends)


def test_prompts_of_several_images_are_not_limited_to_one() -> None:
    text = "vLLM with Qwen2.5-VL-7B goes out of GPU memory when a request sends several images."
    assert first_fix(text).flags == {"mm_processor_kwargs": {"max_pixels": 1003520}}


def test_nccl_s_own_sizes_are_no_settings() -> None:
    args = diagnosed("a:1 [0] NCCL INFO P2P Chunksize set to 131072\nNCCL error: unhandled system error").case.startup
    assert args.args.max_num_batched_tokens is None and args.args.max_model_len is None


def test_a_quantizing_program_is_no_server() -> None:
    text = "GPTQ of Qwen2.5-32B with llm-compressor 0.6.0 on one A100*80GB: CUDA out of memory at layer 12."
    assert diagnosed(text).other_engine == "engine_llm_compressor"


def test_probes_that_restart_a_download_get_a_startup_probe() -> None:
    text = "vLLM on GKE: the probes of the chart restart the pod before it has downloaded the model."
    assert "startupProbe" in words(first_fix(text))


def test_a_switch_that_leaves_the_card_as_full_is_explained_by_the_pool() -> None:
    text = "vLLM on an L40S: I set --cpu-offload-gb 8 and expected less. nvidia-smi shows the same usage as before."
    run = diagnosed(text)
    assert run.verdict == "not a memory problem" and "share" in run.findings[0].why
