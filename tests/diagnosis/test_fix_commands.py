"""The command of a fix is the user's own, changed only where it must be; and no fix is offered that cannot work."""

from __future__ import annotations

from pathlib import Path

from diagnosis_logs import CORE, TORCH, trace

from legroom.diagnosis.finding import Finding
from legroom.diagnosis.fixes.failed_run import Hints
from legroom.diagnosis.log_diagnosis import read_log

SHORT = (
    "ValueError: To serve at least one request with the models's max seq len (32768), (4.00 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (2.00 GiB). Based on the available memory, the estimated "
    "maximum model length is 16384.\n"
)
GIVEN = (
    "(APIServer pid=1) INFO 01-02 03:04:05 [utils.py:253] non-default args: {'model_tag': 'org/own', 'port': 8102, "
    "'model': 'org/own', 'trust_remote_code': True, 'max_model_len': 32768, 'served_model_name': ['chat'], "
    "'tool_call_parser': 'hermes', 'enable_auto_tool_choice': True}\n"
)
STEP = trace(
    "load_model",
    "create_weights",
    error=TORCH.format(
        wanted="1.00 GiB", total="79.14 GiB", free="0.40 GiB", own="78.70 GiB", torch="78.20 GiB", unused="20.00 MiB"
    ),
)


def first(log: str, hints: Hints | None = None) -> Finding:
    return read_log([log.encode()], "log", hints or Hints()).runs[0].findings[0]


def test_a_fix_keeps_every_flag_that_the_log_prints() -> None:
    fix = first(GIVEN + SHORT).fixes[0]
    assert fix.command == (
        "vllm",
        "serve",
        "org/own",
        "--max-model-len",
        "15360",
        "--port",
        "8102",
        "--trust-remote-code",
        "--served-model-name",
        "chat",
        "--tool-call-parser",
        "hermes",
        "--enable-auto-tool-choice",
    )
    assert fix.comment == ""


def test_a_fix_of_the_users_line_keeps_its_variables_and_words() -> None:
    line = "HF_HUB_OFFLINE=1 VLLM_LOGGING_LEVEL=DEBUG vllm serve org/own --port 9000 --reasoning-parser qwen3"
    fix = first(SHORT, Hints(command=line)).fixes[0]
    assert "VLLM_LOGGING_LEVEL=DEBUG" in fix.command
    assert fix.command[-4:] == ("--port", "9000", "--reasoning-parser", "qwen3")


def test_the_file_that_starts_the_server_may_stand_for_its_line(tmp_path: Path) -> None:
    script = tmp_path / "start.sh"
    script.write_text("#!/bin/sh\nexec vllm serve org/own --port 9000 --max-model-len 32768\n")
    fix = first(SHORT, Hints(command=str(script))).fixes[0]
    assert fix.command[-2:] == ("--port", "9000")


def test_a_file_is_not_read_where_only_the_log_may_be(tmp_path: Path) -> None:
    script = tmp_path / "vllm serve org"
    script.write_text("vllm serve other --port 9000\n")
    fix = first(SHORT, Hints(command=str(script), local_models=False)).fixes[0]
    assert "9000" not in fix.command


def test_a_command_that_the_log_does_not_show_says_what_alone_changes() -> None:
    fix = first(SHORT).fixes[0]
    assert fix.comment == "keep your command and change only: --max-model-len 15360"


def test_a_command_from_resolved_settings_asks_for_the_flags_that_were_given() -> None:
    log = "INFO 01-02 03:04:05 [core.py:7] Initializing a V1 LLM engine (v0.11.0) with config: model='org/own'\n"
    assert "keep your other flags" in first(log + SHORT).fixes[0].comment


def test_a_python_caller_is_told_that_flags_are_keyword_arguments() -> None:
    log = "INFO 01-02 03:04:05 [utils.py:253] non-default args: {'max_model_len': 32768, 'model': 'org/own'}\n"
    assert "LLM(...)" in first(log + SHORT).fixes[0].comment


def test_a_key_never_enters_a_command() -> None:
    log = GIVEN.replace("'port': 8102", "'port': 8102, 'api_key': ['sesame']")
    assert "sesame" not in " ".join(first(log + SHORT).fixes[0].command)


def test_more_gpus_means_more_than_those_that_speak_in_the_log() -> None:
    log = "\n".join(line.replace("EngineCore_DP0", "Worker_TP5") for line in STEP.splitlines())
    fix = next(fix for fix in first(log).fixes if "tensor_parallel_size" in fix.flags)
    assert fix.flags["tensor_parallel_size"] == 16


def test_ranks_that_the_log_does_not_show_are_not_doubled() -> None:
    fixes = first(STEP.replace("GPU 0 has", "GPU has")).fixes
    assert not any("tensor_parallel_size" in fix.flags for fix in fixes)
    assert "double --tensor-parallel-size" in fixes[0].steps[0]


def test_the_world_size_that_ranks_print_counts() -> None:
    ranks = "INFO 01-02 03:04:05 [parallel_state.py:9] rank 1 in world size 4 is assigned as DP rank 0, PP rank 0\n"
    fix = next(fix for fix in first(ranks + STEP).fixes if "tensor_parallel_size" in fix.flags)
    assert fix.flags["tensor_parallel_size"] == 8


def test_weights_above_the_budget_are_answered_by_hardware_not_by_batches() -> None:
    log = (
        GIVEN.replace("'max_model_len'", "'gpu_memory_utilization': 0.7, 'max_model_len'")
        + "(EngineCore_DP0 pid=7) INFO 01-02 03:04:05 [gpu_model_runner.py:9] Model loading took 14.20 GiB\n"
        + trace(
            "profile_run",
            error=TORCH.format(
                wanted="1.00 GiB",
                total="15.50 GiB",
                free="0.40 GiB",
                own="15.00 GiB",
                torch="14.60 GiB",
                unused="9.00 MiB",
            ),
        )
    )
    found = first(log)
    assert found.cause == "weights_too_big"
    assert "14.20 GiB" in found.why
    assert not any({"max_num_seqs", "max_num_batched_tokens"} & fix.flags.keys() for fix in found.fixes)
    assert "10.85 GiB" in found.why


def test_an_engine_that_is_gone_is_not_offered() -> None:
    log = "(APIServer pid=1) INFO 01-02 03:04:05 [api_server.py:9] vLLM API server version 0.13.0\n"
    capture = trace("capture_model", error="torch.OutOfMemoryError: CUDA out of memory.")
    for text in (log + capture, capture):
        assert not any("VLLM_USE_V1" in fix.env for fix in first(text).fixes)


def test_the_older_engine_is_offered_where_the_release_still_has_it() -> None:
    log = "(APIServer pid=1) INFO 01-02 03:04:05 [api_server.py:9] vLLM API server version 0.8.5\n"
    capture = trace("capture_model", error="torch.OutOfMemoryError: CUDA out of memory.")
    assert any(fix.env == {"VLLM_USE_V1": "0"} for fix in first(log + capture).fixes)


def test_an_upgrade_for_its_accounting_is_only_for_releases_before_it() -> None:
    log = CORE + "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`."
    assert not any("0.9.1" in step for fix in first(log).fixes for step in fix.steps)


def test_what_is_in_force_already_is_not_offered() -> None:
    given_eager = GIVEN.replace("'max_model_len'", "'enforce_eager': True, 'max_model_len'")
    capture = trace("capture_model", error="torch.OutOfMemoryError: CUDA out of memory.")
    assert not any(fix.flags == {"enforce_eager": True} for fix in first(given_eager + capture).fixes)


def test_a_smaller_step_in_the_first_engine_comes_with_chunked_prefill() -> None:
    log = (
        'ERROR 01-02 03:04:05 engine.py:9]   File "vllm/worker/model_runner.py", line 9, in profile_run\n'
        "ERROR 01-02 03:04:05 engine.py:9] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB.\n"
    )
    flags = first(log).fixes[0].flags
    assert flags["max_num_batched_tokens"] == 2048
    assert flags["enable_chunked_prefill"] is True


LONG_REQUEST = (
    "(EngineCore_0 pid=1) ERROR 10-01 10:00:00 [core.py:700] ValueError: To serve at least one request with the "
    "models's max seq len (131072), (16.00 GiB KV cache is needed, which is larger than the available KV cache memory "
    "(9.50 GiB). Based on the available memory, the estimated maximum model length is 77808.\n"
)
OLD_LINE = (
    "vllm serve Qwen/Qwen3-30B-A3B --calculate-kv-scales --enable-expert-parallel --rope-scaling "
    '\'{"rope_type":"yarn","factor":4.0}\''
)


def test_a_line_of_an_older_release_keeps_its_flags_where_no_release_is_known() -> None:
    fix = read_log([LONG_REQUEST.encode()], "log", Hints(command=OLD_LINE, gpu="h100")).runs[0].findings[0].fixes[0]
    assert {"--calculate-kv-scales", "--enable-expert-parallel", "--rope-scaling"} <= set(fix.command)
    assert fix.comment == ""


def test_a_flag_that_the_release_lacks_is_left_out_with_a_word() -> None:
    hints = Hints(command=OLD_LINE, gpu="h100", vllm="0.32.0")
    fix = read_log([LONG_REQUEST.encode()], "log", hints).runs[0].findings[0].fixes[0]
    assert "--rope-scaling" not in fix.command
    assert "--calculate-kv-scales, --rope-scaling" in fix.comment
