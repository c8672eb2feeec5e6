"""Once a server is up: its pool beside the plan, and what it measured kept for later."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from legroom import plan
from legroom.run.expectation import Expectation, Gpus, expected_pool, pool_comparison, store_calibration
from legroom.run.server_command import read_command

LOG = """\
(APIServer pid=1) INFO [api_utils.py:1] non-default args: {'model_tag': 'meta-llama/Llama-3.1-8B-Instruct', \
'model': 'meta-llama/Llama-3.1-8B-Instruct', 'max_model_len': 8192, 'max_num_seqs': 64}
(EngineCore pid=2) INFO [core.py:1] Initializing a V1 LLM engine (v0.26.0) with config: \
model='meta-llama/Llama-3.1-8B-Instruct', dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=1, \
pipeline_parallel_size=1, data_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=auto
(EngineCore pid=2) INFO [model_runner.py:1] Model loading took 15.0 GiB and 2.1 seconds
(EngineCore pid=2) INFO [gpu_worker.py:1] Available KV cache memory: 56.0 GiB
(EngineCore pid=2) INFO [kv_cache_utils.py:1] GPU KV cache size: 458,752 tokens
(EngineCore pid=2) INFO [kv_cache_utils.py:1] Maximum concurrency for 8,192 tokens per request: 56.00x
(EngineCore pid=2) INFO [gpu_worker.py:1] Free memory on device (78.6/79.18 GiB) on startup. Desired GPU memory \
utilization is (0.92, 72.85 GiB). Actual usage is 15.0 GiB for weight, 1.25 GiB for peak activation, 0.3 GiB for \
non-torch memory, and 0.4 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `x`
INFO:     Application startup complete.
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path / "home"))
    path = tmp_path / "log"
    path.write_text(LOG)
    return path


def test_a_pool_as_planned_is_said_to_be(log):
    assert pool_comparison(log, Expectation("", tokens=458752)).endswith("exactly as planned")
    assert pool_comparison(log, Expectation("", tokens=455000)).endswith("as planned")


def test_a_pool_is_not_as_planned_where_none_was_planned(log):
    assert "planned" not in pool_comparison(log, Expectation("", tokens=0))


def test_a_pool_off_the_plan_is_told_with_both_numbers(log):
    line = pool_comparison(log, Expectation("", tokens=500000))
    assert "458,752 tokens" in line
    assert "the plan said 500,000 (-8.2%)" in line


def test_a_log_without_a_pool_says_nothing(tmp_path):
    assert pool_comparison(tmp_path / "none", Expectation("", tokens=1)) == ""


def test_what_a_start_measured_is_in_the_next_plan(log):
    line = store_calibration(log, Gpus("h100", 1))
    assert "activation" in line
    planned = plan("llama-3.1-8b", "h100", vllm="0.26.0", max_model_len=8192, max_num_seqs=64)
    assert planned.json()["confidence"]["activation_bytes"]["kind"] == "measured"


def test_a_start_that_cannot_be_learnt_from_says_why(tmp_path):
    empty = tmp_path / "log"
    empty.write_text("hello\n")
    assert "holds no vLLM start-up" in store_calibration(empty, Gpus("h100", 1))
    assert "without a GPU" in store_calibration(empty, Gpus())


def test_a_plan_on_a_gpu_is_told_in_one_line(vllm):
    command = read_command([vllm, "serve", "llama-3.1-8b", "--max-model-len", "8192"], "0.26.0", os.environ)
    expected = expected_pool(command, {}, Gpus("NVIDIA H100 80GB HBM3", 1))
    assert expected.verdict == "fits"
    assert "15.00 GiB weights" in expected.text
    assert expected.max_model_len == 8192


def test_memory_that_others_hold_counts_in_the_plan(vllm):
    command = read_command([vllm, "serve", "llama-3.1-8b"], "0.26.0", os.environ)
    assert expected_pool(command, {}, Gpus("h100", 1, 40 << 30)).verdict == "does_not_fit"


@pytest.fixture
def vllm(tmp_path: Path) -> str:
    program = tmp_path / "vllm"
    program.write_text(f"#!{sys.executable}\n")
    program.chmod(0o755)
    return str(program)
