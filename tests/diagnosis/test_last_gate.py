"""The last gate before a fix is shown: no value that failed, no contradiction, the text's own amounts and forms."""

from __future__ import annotations

import pytest
from diagnosis_logs import TORCH, trace

from legroom.diagnosis.finding import Finding
from legroom.diagnosis.fixes.failed_run import Hints
from legroom.diagnosis.log_diagnosis import read_log
from legroom.facts.log_messages import launcher_in
from legroom.render.diagnosis_text import diagnosis_text

STEP = trace(
    "execute_model",
    error=TORCH.format(
        wanted="600.00 MiB",
        total="39.39 GiB",
        free="210.00 MiB",
        own="39.10 GiB",
        torch="38.20 GiB",
        unused="40.00 MiB",
    ),
)
LOGITS = STEP.replace("execute_model", "get_logprobs")
CHECK = (
    "ValueError: Free memory on device cuda:0 ({free}/79.2 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 71.28 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
BATCH = '[rank0]:   File "x/vllm/model_executor/layers/sampler.py", line 9, in get_logprobs\n[rank0]: '
BATCH += (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 5.10 GiB. GPU 0 has a total capacity of 79.15 GiB "
)
BATCH += "of which 4.20 GiB is free.\n"


def first(text: str, hints: Hints | None = None) -> Finding:
    return read_log([text.encode()], "log", hints or Hints()).runs[0].findings[0]


def shown(text: str) -> str:
    return " ".join(diagnosis_text(read_log([text.encode()]).runs[0]).split())


def test_a_share_that_is_not_shown_is_changed_by_a_difference() -> None:
    fix = next(fix for fix in first(STEP).fixes if fix.kind == "lower_util")
    assert "gpu_memory_utilization" not in fix.flags and fix.steps[0].startswith("take 0.")
    given = first(f"$ vllm serve org/own --gpu-memory-utilization 0.93\n{STEP}")
    assert next(fix for fix in given.fixes if fix.kind == "lower_util").flags["gpu_memory_utilization"] < 0.93


def test_a_share_between_values_that_failed_is_not_offered() -> None:
    tried = "What I tried:\n- `gpu_memory_utilization` in `[0.5, 0.7, 0.95]`\nNone of these helped.\n"
    text = f"lm_eval --model vllm --model_args pretrained=org/own,gpu_memory_utilization=0.9\n{{}}{BATCH}"
    assert any(fix.kind == "lower_util" for fix in first(text.format("")).fixes)
    assert all("gpu_memory_utilization" not in fix.flags for fix in first(text.format(tried)).fixes)


def test_the_change_that_somebody_had_to_make_is_the_first_fix() -> None:
    text = "With vLLM I get CUDA OOM under load. I had to lower max_num_seqs to 12 to avoid the OOM.\n"
    assert first(text).fixes[0].flags == {"max_num_seqs": 12}


def test_a_step_below_a_prompt_needs_chunked_prefill_where_the_engine_may_be_v0() -> None:
    fix = next(fix for fix in first(f"vllm serve org/own --max-model-len 16384\n{BATCH}").fixes if fix.flags)
    assert fix.flags["max_num_batched_tokens"] < 16384 and fix.flags["enable_chunked_prefill"] is True
    v1 = first(f"vllm serve org/own --max-model-len 16384\n{LOGITS}")
    assert all("enable_chunked_prefill" not in fix.flags for fix in v1.fixes)


def test_settings_of_one_list_stay_in_one_list() -> None:
    launcher = launcher_in("lm_eval --model vllm --model_args pretrained=org/own")
    assert launcher is not None
    assert launcher.words({"max_num_seqs": 4, "max_model_len": 1}) == "--model_args ...,max_num_seqs=4,max_model_len=1"


def test_a_compose_file_gets_its_flags_in_its_command() -> None:
    text = "services:\n  llm:\n    image: vllm/vllm-openai:v0.6.3\n    command: --model org/own\n"
    launcher = launcher_in(text)
    assert launcher is not None and "`command:`" in launcher.name
    assert launcher.words({"enforce_eager": True, "max_model_len": 4096}) == "--enforce-eager --max-model-len 4096"
    assert launcher_in("vllm serve org/own") is None


def test_a_named_holder_ends_or_moves_before_the_share_shrinks() -> None:
    oom = (
        "vLLM: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 900.00 MiB. GPU 0 has a total capacity of "
        "47.40 GiB of which 300.00 MiB is free. Process 411 has 30.00 GiB memory in use. Including non-PyTorch memory, "
        "this process has 17.00 GiB memory in use. Of the allocated memory 16.20 GiB is allocated by PyTorch, and "
        "100.00 MiB is reserved by PyTorch but unallocated."
    )
    fixes = first(oom).fixes
    assert fixes[0].kind == "free_gpu_or_kill_orphans" and "process 411 with 30.00 GiB" in fixes[0].why
    share = next(fix.flags["gpu_memory_utilization"] for fix in fixes if fix.flags)
    assert share * 47.4 <= 17.3 - 1.5  # the context, and a GiB for the neighbour that lives


def test_a_stage_of_the_same_launch_is_no_orphan() -> None:
    loaded = "[Stage-1] INFO 01-02 03:04:05 [runner.py:9] Model loading took 40.00 GiB and 9.1 seconds\n"
    fix = first(f"{loaded}[Stage-0] ERROR {CHECK.format(free='38.40')}").fixes[0]
    assert "Stage-1 of the same launch" in fix.why and "orphan" not in " ".join(fix.steps)


def test_cards_that_no_rank_uses_come_before_an_emptier_card() -> None:
    oom = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 768.00 MiB. GPU 0 has a total capacity of 39.39 "
        "GiB of which 500.00 MiB is free. Process 5 has 20.00 GiB memory in use. Including non-PyTorch memory, this "
        "process has 18.80 GiB memory in use. Of the allocated memory 18.00 GiB is allocated by PyTorch, and 12.00 MiB "
        "is reserved by PyTorch but unallocated."
    )
    fix = first(f"CUDA_VISIBLE_DEVICES=2,3,4,5,6 vllm serve Qwen/Qwen2.5-72B-Instruct\n{oom}").fixes[0]
    assert fix.flags == {"tensor_parallel_size": 4}


def test_the_sampler_s_own_lever_comes_first() -> None:
    text = "RuntimeError: CUDA out of memory occurred when warming up sampler with 512 dummy requests."
    assert first(f"vLLM: {text}").fixes[0].flags == {"max_num_seqs": 128}


def test_used_of_total_in_per_cent_is_no_share() -> None:
    text = "CUDA out of memory when warming up sampler with 1024 dummy requests. It shows 78GB/80GB (98% utilization)."
    assert all("0.98" not in fix.why for fix in first(f"vLLM: {text}").fixes)


def test_a_pool_gives_up_what_its_flag_takes() -> None:
    oom = TORCH.format(
        wanted="3.00 GiB", total="79.15 GiB", free="2.00 GiB", own="77.00 GiB", torch="71.00 GiB", unused="2.20 GiB"
    )
    fixes = first(f"vllm serve org/own --gpu-memory-utilization 0.9\n{trace('execute_model', error=oom)}").fixes
    fix = next((fix for fix in fixes if "gives up" in fix.why), None)
    assert fix is None or f"{(0.9 - fix.flags['gpu_memory_utilization']) * 79.15:.2f} GiB" in fix.why


def test_dead_ends_need_their_evidence() -> None:
    told = shown("vLLM: CUDA out of memory occurred when warming up sampler with 256 dummy requests.")
    assert "multimodal warning" not in told and "while the profile run fails" not in told


def test_no_dead_end_forbids_an_offered_fix() -> None:
    short = "ValueError: 1.20 GiB KV cache is needed, available 0.90 GiB\nGPU: A100 80GB, vLLM 0.11.0\n"
    found = first(short)
    offered = any(fix.kind == "raise_util" for fix in found.fixes)
    assert not (offered and any(end.action.startswith("raise gpu_memory_utilization") for end in found.dead_ends))


def test_a_driver_that_is_new_enough_is_not_upgraded() -> None:
    text = "vLLM 0.8.4: CUDA driver version is insufficient for CUDA runtime version\nNVIDIA Driver Version: 580.12"
    steps = " ".join(first(text).fixes[0].steps)
    assert "driver 580.12 serves CUDA 12.4" in steps and "upgrade the NVIDIA driver" not in steps
    assert "upgrade the NVIDIA driver" in " ".join(first(text.replace("580.12", "535.10")).fixes[0].steps)


def test_fp8_weights_keep_the_product_of_mla() -> None:
    line = 'ERROR 01-02 03:04:05 worker_base.py:581]   File "vllm/attention/backends/mla/utils.py", line 3, in {}\n'
    text = (
        line.format("process_weights_after_loading")
        + "$ vllm serve deepseek-ai/DeepSeek-V3 --tensor-parallel-size 16\n"
    )
    assert first(text).fixes[0].env == {"VLLM_MLA_DISABLE": "1"}


def test_a_request_that_asks_for_the_whole_context_asks_for_less() -> None:
    text = (
        "This model's maximum context length is 4096 tokens. However, you requested 4116 tokens (20 in the messages, "
        "4096 in the completion). Please reduce the length of the messages or completion."
    )
    assert "max_tokens of 4,076 at most" in first(text).fixes[0].steps[0]
    assert "send the request again" in shown(text) and "nvidia-smi" not in shown(text)


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("vLLM's RSS grows by 90 MiB an hour while it serves, until the pod is killed: a memory leak", "ps -o rss="),
        ("ValueError: placement group bundle index 9 is invalid. Valid placement group indexes: 0-3", "run it again"),
    ],
)
def test_what_grows_or_failed_is_what_is_verified(text: str, how: str) -> None:
    assert how in shown(text)


def test_a_refused_flag_has_no_phase_and_ends_at_its_backtick() -> None:
    run = read_log([b"`api_server.py: error: unrecognized arguments: --config` I quoted the path, too"]).runs[0]
    assert run.phase is None and "too" not in run.findings[0].why


def test_curly_quotes_of_a_page_are_quotes() -> None:
    line = "INFO 05-30 01:45:33 [utils.py:240] non-default args: {‘model’: ‘org/own’, ‘tensor_parallel_size’: 2}\n"
    run = read_log([line.encode()]).runs[0]
    assert run.case.startup.args.tensor_parallel_size == 2


def test_what_was_set_before_another_run_is_the_present_value() -> None:
    check = (
        "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in"
    )
    text = (
        'ROOT="/models"\nPLACE="${ROOT}/own"\n```sh\nvllm serve ${PLACE} --gpu-memory-utilization 0.9 --port 1\n```\n'
        f"It fails with no blocks. I set gpu_memory_utilization to 0.97 and ran it again:\n{check} KV cache (5000)."
    )
    command = " ".join(first(text).fixes[0].command)
    assert "/models/own" in command and "--gpu-memory-utilization 0.97" in command and "0.9 " not in command


def test_a_prompt_that_alone_exceeds_the_limit_is_to_be_shorter() -> None:
    refusal = (
        "This model's maximum context length is 4096 tokens. However, you requested 5200 tokens (5000 in the messages, "
        "200 in the completion)."
    )
    assert any("Shorten the prompt" in fix.why for fix in first(refusal).fixes)
