"""A fix of a server that served is one that `legroom plan` lets start."""

import json

import pytest

from legroom.cli.main import main
from legroom.diagnosis.finding import Finding
from legroom.diagnosis.fixes.failed_run import Hints
from legroom.diagnosis.log_diagnosis import read_log

FOUR_BIT = "Qwen/Qwen3-32B-AWQ"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 594.00 MiB. GPU 0 has a total capacity of 22.16 GiB "
    "of which 301.00 MiB is free. Including non-PyTorch memory, this process has 21.86 GiB memory in use. Of the "
    "allocated memory 21.21 GiB is allocated by PyTorch, and 120.10 MiB is reserved by PyTorch but unallocated.\n"
)
SERVED = (
    "(APIServer pid=1) INFO:     Application startup complete.\n"
    '(APIServer pid=1) INFO:     127.0.0.1:5555 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
    "(EngineCore_DP0 pid=120) ERROR 10-04 10:10:31 [core.py:708] EngineCore encountered a fatal error.\n"
    f"(EngineCore_DP0 pid=120) ERROR 10-04 10:10:31 [core.py:708] {OOM}"
)


def first(log: str, command: str | None = None, model: str | None = None) -> Finding:
    hints = Hints(command, model, "l4", None, "0.11.0", local_models=False)
    return read_log([log.encode()], "the log", hints).runs[0].findings[0]


@pytest.mark.parametrize(
    "flags", ["", " --max-model-len 4096", " --max-model-len 2048 --gpu-memory-utilization 0.93", " --enforce-eager"]
)
def test_no_share_is_offered_at_which_the_plan_does_not_start(flags, capsys):
    fixes = first(SERVED, f"vllm serve {FOUR_BIT}{flags}").fixes
    assert fixes
    for fix in (fix for fix in fixes if fix.command):
        main(["plan", "--json", "--vllm", "0.11.0", "--gpu", "l4", "--", *fix.command])
        assert json.loads(capsys.readouterr().out)["verdict"] != "does_not_fit", fix.flags


def test_a_command_that_cannot_have_served_is_said_with_what_starts():
    fix = first(SERVED, f"vllm serve {FOUR_BIT}").fixes[0]
    assert "By its plan this command does not start on this card, 10.00 GiB needed" in fix.why
    assert fix.plan is not None and fix.plan.starts and fix.command


def test_weights_that_fit_lead_to_no_smaller_model():
    said = " ".join((*(step for fix in first(OOM, model=FOUR_BIT).fixes for step in fix.steps), ""))
    assert "smaller model" not in said and "24 GiB or more" not in said


def test_a_larger_card_is_larger_than_the_one_at_hand():
    from legroom.diagnosis.fixes.fix_planner import FixPlanner
    from legroom.diagnosis.fixes.hardware_fixes import other_hardware

    log = "Model loading took 17.5 GiB and 5.1 seconds\n" + OOM
    run = read_log([log.encode()], "the log", Hints(None, None, "l4", None, "0.11.0")).runs[0]
    steps = " ".join(other_hardware(FixPlanner(run.case, Hints(None, None, "l4", None, "0.11.0"))).steps)
    assert "with 24 GiB or more" not in steps


def test_a_length_of_little_use_is_joined_by_a_larger_share_of_a_known_card():
    """The log's pool, and what the card has above the share in force, hold three times the length."""
    log = (
        "ValueError: To serve at least one request with the models's max seq len (32768), (8.00 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (0.62 GiB). Based on the available memory, the "
        "estimated maximum model length is 2528. Try increasing `gpu_memory_utilization` or decreasing "
        "`max_model_len` when initializing the engine.\n"
    )
    command = "vllm serve Qwen/Qwen2.5-32B-Instruct-AWQ --max-model-len 32768 --gpu-memory-utilization 0.85"
    fix = first(log, command).fixes[0]
    assert 0.85 < fix.flags["gpu_memory_utilization"] <= 0.95
    assert fix.flags["max_model_len"] > 2 * 2528
    assert fix.plan is not None and fix.plan.verdict == "fits"
