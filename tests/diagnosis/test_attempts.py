"""What a text says was tried in vain is no first fix, nor is a step further in the same direction."""

from __future__ import annotations

from typing import Any

import pytest

from legroom.diagnosis.contrasts import attempts_in_vain
from legroom.diagnosis.finding import Fix
from legroom.diagnosis.log_diagnosis import read_log

WARM_UP = (
    "RuntimeError: CUDA out of memory occurred when warming up sampler with 16 dummy requests. Please try lowering "
    "`max_num_seqs` or `gpu_memory_utilization` when initializing the engine."
)
STEP = (
    '  File "/opt/vllm/v1/worker/gpu_model_runner.py", line 2000, in execute_model\n'
    '  File "/opt/vllm/model_executor/models/qwen2.py", line 97, in forward\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 260.00 MiB. GPU 0 has a total capacity of 23.64 GiB "
    "of which 100.00 MiB is free."
)
PREEMPTED = (
    "WARNING 03-06 17:12:30 scheduler.py:1754] Sequence group 3 is preempted by PreemptionMode.RECOMPUTE mode because "
    "there is not enough KV cache space. total_num_cumulative_preemption=51"
)


def fixes(text: str) -> tuple[Fix, ...]:
    return read_log([text.encode()]).runs[0].findings[0].fixes


@pytest.mark.parametrize(
    ("text", "tried"),
    [
        ("I already tried --max-num-seqs 16, same error:", {"max_num_seqs": 16}),
        ("It crashes although I lowered gpu_memory_utilization from 0.95 to 0.88.", {"gpu_memory_utilization": 0.88}),
        ("已经把 max_model_len 调到 4096，还是报错", {"max_model_len": 4096}),
        ("I set --max-model-len 2048. Same error.", {"max_model_len": 2048}),
        ("What I tried:\n- `--enforce-eager`\n", {"enforce_eager": True}),
        ("It fails no matter what I set gpu_memory_utilization to", {"tried gpu_memory_utilization": ""}),
        ("Lowering the utilization did not help.", {"tried gpu_memory_utilization": "lower"}),
        ("Upgrading to 0.11.1 did not help", {"tried release": "0.11.1"}),
        ("I tried a utilization of 0.5, 0.7, 0.95, nothing works", {"gpu_memory_utilization": 0.95}),
    ],
)
def test_a_trial_in_vain_is_read_with_its_value_or_its_direction(text: str, tried: dict[str, Any]) -> None:
    assert tried in list(attempts_in_vain(text))


@pytest.mark.parametrize(
    "text",
    ["I lowered max_num_seqs to 16 and it works.", "vllm serve some/model --max-num-seqs 16", "已调到 0.8，可以启动"],
)
def test_what_helped_or_was_only_set_was_not_in_vain(text: str) -> None:
    assert not list(attempts_in_vain(text))


def test_a_step_further_in_a_direction_that_did_not_help_is_not_the_first_fix() -> None:
    text = f"I already tried --max-num-seqs 16, same error:\n{WARM_UP}"
    assert (fixes(text)[0].kind, fixes(text)[-1].kind) == ("lower_util", "max_num_seqs")
    text = f"It crashes under load although I lowered --gpu-memory-utilization from 0.95 to 0.88.\n{STEP}"
    assert [fix.kind for fix in fixes(text)[:2]] == ["max_num_batched_tokens", "lower_util"]


def test_a_share_that_was_raised_in_vain_is_not_offered_again() -> None:
    text = f"Already raised gpu-memory-utilization to 0.97 and still get\n{PREEMPTED}"
    assert "raise_util" not in {fix.kind for fix in fixes(text)}


def test_trials_beside_a_log_that_prints_its_flags_count_too() -> None:
    flags = "INFO 05-02 13:34:14 [utils.py:233] non-default args: {'model': 'some/model', 'max_num_seqs': 512}\n"
    text = f"I tried --max-num-seqs 64, no difference.\n{flags}{WARM_UP.replace('16 dummy', '512 dummy')}"
    assert fixes(text)[0].flags.get("max_num_seqs") is None
