"""Which fix is tried: the first computed one that the user allows, and what is said where there is none."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from legroom.black_box import AllocatorState, BlackBox, CardMemory, FailedRequest, StackFrame, WorkerProcess
from legroom.run.expectation import Gpus
from legroom.run.healing import Bounds, Remedy, find_remedy
from legroom.run.server_command import read_command

SHORT = (
    "(APIServer pid=1) INFO 11-15 05:57:09 [api_utils.py:347]  version 0.32.0\n"
    "ValueError: To serve at least one request with the model's max seq len (4096), (4.0 GiB KV cache is needed, which "
    "is larger than the available KV cache memory (2.0 GiB). Based on the available memory, the estimated maximum "
    "model length is 2000. Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.\n"
)
PIECES = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.10 GiB "
    "of which 512.00 MiB is free. Including non-PyTorch memory, this process has 78.50 GiB memory in use. Of the "
    "allocated memory 40.00 GiB is allocated by PyTorch, and 36.00 GiB is reserved by PyTorch but unallocated.\n"
)
SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
REFUSALS = {
    "vllm: error: unrecognized arguments: --swap-space 4": ("--swap-space 4", "--swap-space"),
    "vllm serve: error: argument --kv-cache-dtype: invalid choice: 'fp4' (choose from 'auto', 'fp8')": (
        "--kv-cache-dtype fp4",
        "--kv-cache-dtype",
    ),
    "vllm serve: error: argument --max-model-len: expected one argument": ("--max-model-len", "--max-model-len"),
    "RuntimeError: Worker failed with error 'No common block size for 7 (CPU_ATTN: [MultipleOf(32)]).', please check": (
        "--block-size 7",
        "--block-size",
    ),
    "pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig\nmax_num_seqs\n  Input "
    "should be greater than or equal to 1 [type=greater_than_equal, input_value=0, input_type=int]": (
        "--max-num-seqs 0",
        "--max-num-seqs",
    ),
}


@pytest.fixture
def mend(tmp_path: Path):
    program = tmp_path / "vllm"
    program.write_text(f"#!{sys.executable}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def run(log: str, flags: str, environ: Mapping[str, str] = os.environ, tried=(), **bounds: object) -> Remedy:
        path = tmp_path / "log"
        path.write_text(log)
        command = read_command([str(program), "serve", "MODEL", *flags.split()], "0.32.0", os.environ)
        before = [((*command.words[:3], *words.split()), env) for words, env in tried]
        return find_remedy(path, command, Bounds(**bounds), Gpus(), environ, before)

    return run


@pytest.mark.parametrize("named", [1500, 2049, 3000])
def test_the_length_that_vllm_names_is_tried_as_it_is(mend, named):
    assert mend(SHORT.replace("2000", str(named)), "--max-model-len 4096").words[-1] == str(named)


def test_a_length_that_fits_is_tried(mend):
    remedy = mend(SHORT, "--max-model-len 4096")
    assert remedy.cause == "kv_too_small_for_max_len"
    assert remedy.words[-2:] == ("--max-model-len", "2000")
    assert remedy.changed == "--max-model-len 2000 (was 4096)"
    assert remedy.is_memory


def test_a_kept_flag_stays_and_is_named(mend):
    remedy = mend(SHORT, "--max-model-len 4096", keep=("max_model_len",))
    assert not remedy.words
    assert "--max-model-len 2000" in remedy.refused
    assert "--keep" in remedy.refused


def test_a_context_below_the_least_is_not_tried(mend):
    assert mend(SHORT, "--max-model-len 4096", min_context=2000).words
    remedy = mend(SHORT, "--max-model-len 4096", min_context=2100)
    assert not remedy.words
    assert "--min-context 2100" in remedy.refused


@pytest.mark.parametrize("message", REFUSALS)
def test_a_refused_flag_is_taken_out(mend, message):
    flags, gone = REFUSALS[message]
    remedy = mend(message + "\n", f"{flags} --seed 1" if flags != "--max-model-len" else f"--seed 1 {flags}")
    assert remedy.cause == "wrong_flag"
    assert gone not in remedy.words
    assert remedy.words[-2:] == ("--seed", "1")
    assert "taken out" in remedy.changed


def test_a_misspelt_flag_is_spelt_right(mend):
    remedy = mend("vllm: error: unrecognized arguments: --max-modle-len 2048\n", "--max-modle-len 2048")
    assert remedy.words[-2:] == ("--max-model-len", "2048")


def test_a_share_in_per_cent_becomes_a_share(mend):
    log = (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for CacheConfig\ngpu_memory_utilization\n"
        "  Input should be less than or equal to 1 [type=less_than_equal, input_value=90.0, input_type=float]\n"
    )
    assert mend(log, "--gpu-memory-utilization 90").words[-1] == "0.9"


def test_a_length_over_the_models_own_becomes_its_own(mend):
    log = (
        "ValidationError: 1 validation error for ModelConfig\n  Value error, User-specified max_model_len (8192) is "
        "greater than the derived max_model_len (max_position_embeddings=4096.0 or model_max_length=None).\n"
    )
    assert mend(log, "--max-model-len 8192").words[-2:] == ("--max-model-len", "4096")


def test_a_step_grows_to_hold_a_prompt(mend):
    log = "  Value error, max_num_batched_tokens (512) is smaller than max_model_len (2048). This effectively limits\n"
    remedy = mend(log, "--max-num-batched-tokens 512 --max-model-len 2048")
    assert remedy.words[-2:] == ("--max-num-batched-tokens", "2048")


def test_a_step_grows_to_hold_every_sequence(mend):
    log = "  Value error, max_num_batched_tokens (256) must be greater than or equal to max_num_seqs (512). [type=x]\n"
    assert mend(log, "--max-num-batched-tokens 256 --max-num-seqs 512").words[-1] == "512"


def test_ranks_become_a_power_of_two_that_divides_the_heads(mend):
    log = "  Value error, Total number of attention heads (40) must be divisible by tensor parallel size (6).\n"
    assert mend(log, "--tensor-parallel-size 6").words[-2:] == ("--tensor-parallel-size", "4")


def test_ram_that_is_not_there_is_not_asked_for(mend):
    log = (
        "RuntimeError: Worker failed with error 'Available memory on node 0 (21.07/23.54 GiB) on kv cache allocation "
        "is less than requested memory for kv (100.0 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, "
        "or reduce CPU memory used by other processes.'\n"
    )
    assert int(mend(log, "--kv-cache-memory-bytes 100G").words[-1]) < 21 << 30


def test_a_log_that_says_nothing_gives_nothing_to_try(mend):
    remedy = mend("hello\n", "")
    assert not remedy.words
    assert remedy.refused


def test_a_kernel_fault_is_told_and_not_tried(mend):
    remedy = mend("RuntimeError: CUDA error: an illegal memory access was encountered\n", "")
    assert not remedy.words
    assert not remedy.is_memory


def test_a_variable_that_is_set_already_is_no_fix_and_the_next_is_tried(mend):
    assert mend(PIECES, "").env == SEGMENTS
    remedy = mend(PIECES, "", environ={**os.environ, **SEGMENTS})
    assert remedy.changed.startswith("--gpu-memory-utilization")


def test_what_has_been_tried_is_not_tried_again(mend):
    remedy = mend(PIECES, "--seed 1", tried=[("--seed 1", SEGMENTS)])
    assert remedy.changed.startswith("--gpu-memory-utilization")


def test_the_same_flags_in_another_order_are_the_same_command(mend):
    remedy = mend(SHORT, "--seed 1 --max-model-len 4096", tried=[("--max-model-len 2000 --seed 1", {})])
    assert not remedy.words
    assert "--max-model-len 2000 (was 4096) (that has been tried)" in remedy.refused


def test_a_refused_flag_of_a_config_file_is_left_to_the_user(mend, tmp_path):
    file = tmp_path / "vllm.yaml"
    file.write_text("guided-decoding-backend: outlines\n")
    remedy = mend("vllm: error: unrecognized arguments: --guided-decoding-backend outlines\n", f"--config {file}")
    assert not remedy.words
    assert f"it stands in {file}: change it there" in remedy.refused


def test_where_no_plan_can_be_made_the_log_says_how_many_requests_fit(mend):
    remedy = mend(SHORT, "--max-model-len 4096", min_concurrency=4)
    assert not remedy.words
    assert "--min-concurrency 4" in remedy.refused
    assert mend(SHORT, "--max-model-len 4096", min_concurrency=1).words


def test_a_fix_that_may_undercut_the_requests_at_once_is_not_tried(mend):
    remedy = mend(PIECES, "", environ={**os.environ, **SEGMENTS}, min_concurrency=4)
    assert not remedy.words
    assert "cannot be told" in remedy.refused


@pytest.mark.parametrize("line", ["OSError: [Errno 98] Address already in use", "RuntimeError: some trouble"])
def test_a_failure_of_another_kind_is_not_announced_as_a_kernel_fault(mend, line):
    remedy = mend(f"Traceback (most recent call last):\n{line}\n", "")
    assert remedy.failed.startswith("It is not memory: ")
    assert line.partition(": ")[2] in remedy.failed


def test_a_log_that_does_not_say_why_is_told_with_its_last_line(mend):
    remedy = mend("INFO some lines\nmy_plugin: the moon is in the wrong phase, token=abcdef123456\n\n", "")
    assert "my_plugin: the moon" in remedy.failed
    assert "abcdef123456" not in remedy.failed


def test_an_exception_that_is_not_memory_is_told_in_its_own_words(mend):
    remedy = mend("(Worker pid=2) ERROR [x.py:1] AssertionError: CPU GDN attention requires BF16.\n", "")
    assert remedy.cause == "not_memory"
    assert remedy.failed.endswith("requires BF16.")


def test_what_is_logged_after_an_exception_is_none_of_its_words(mend):
    log = (
        "(Worker pid=2) ERROR 11-15 16:14:23 [multiproc_executor.py:953] ModuleNotFoundError: No module named 'numba'\n"
        "(EngineCore pid=1) INFO 11-15 16:14:23 [multiproc_executor.py:479] [shutdown] Executor: waiting for a worker\n"
        "(EngineCore pid=1) ERROR 11-15 16:14:25 [core.py:1510] EngineCore failed to start.\n"
    )
    assert mend(log, "").failed.endswith("'numba'")


def test_words_of_an_exception_that_stand_on_the_next_line_are_told(mend):
    failed = mend("my.StrangeError: this cannot be:\n  the moon is in the wrong phase\n", "").failed
    assert failed.endswith("It says: this cannot be: the moon is in the wrong phase")


def test_the_record_of_a_worker_that_the_log_names_decides(mend, tmp_path):
    frame = StackFrame("vllm/v1/worker/gpu_model_runner.py", 1, "execute_model")
    record = BlackBox(
        1_800_000_000.0,
        "out_of_memory",
        WorkerProcess(7, 0, "0.32.0"),
        FailedRequest(2 << 30, frames=(frame,)),
        CardMemory("0", None, 80 << 30, 512 << 20),
        AllocatorState(60 << 30, 78 << 30, largest_free_bytes=600 << 20),
    )
    path = tmp_path / "legroom-blackbox-1-7-1.json"
    path.write_text(json.dumps(record.to_json()))
    log = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    remedy = mend(f"{log}legroom black box written to {path}\n", "--max-model-len 4096")
    assert (remedy.cause, remedy.env) == ("allocator_fragmentation", SEGMENTS)
    assert "wanted 2.00 GiB" in remedy.evidence[0]
