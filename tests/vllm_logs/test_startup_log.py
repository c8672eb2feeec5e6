"""Start-up logs of every era, as vLLM words them, become one `Startup` each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.facts.log_messages import startup_lines
from legroom.units import GIB
from legroom.vllm_logs.startup_log import Startup, plain_line, read_events, read_startups

LOGS = Path(__file__).parent.parent / "fixtures" / "logs"


def gib(number: float) -> int:
    return round(number * GIB)


ENGINE = (
    "INFO 01-02 03:04:05 [core.py:58] Initializing a V1 LLM engine (v{version}) with config: model='org/some-7b', "
    "speculative_config=None, tokenizer='org/some-7b', dtype=torch.bfloat16, max_seq_len=8192, "
    "tensor_parallel_size={tp}, pipeline_parallel_size=1, data_parallel_size=1, quantization=None, "
    "enforce_eager=False, kv_cache_dtype=auto, "
    "compilation_config={{'mode': 3, 'cudagraph_capture_sizes': [1, 2, 4, 8]}}"
)


def one(text: str) -> Startup:
    startups = read_startups(text)
    assert len(startups) == 1
    return startups[0]


def test_a_v0_log_gives_weights_blocks_and_concurrency() -> None:
    startup = one(
        "INFO 05-01 10:00:00 api_server.py:150] vLLM API server version 0.5.4\n"
        "INFO 05-01 10:00:00 api_server.py:151] args: Namespace(host=None, port=8000, model='org/some-7b', "
        "dtype='auto', max_model_len=4096, tensor_parallel_size=1, gpu_memory_utilization=0.85, "
        "max_num_batched_tokens=None, max_num_seqs=128, enforce_eager=True, limit_mm_per_prompt=None)\n"
        "INFO 05-01 10:00:01 llm_engine.py:98] Initializing an LLM engine (v0.5.4) with config: model='org/some-7b', "
        "tokenizer='org/some-7b', dtype=torch.float16, max_seq_len=4096, tensor_parallel_size=1, quantization=None, "
        "enforce_eager=True, kv_cache_dtype=auto)\n"
        "INFO 05-01 10:00:09 model_runner.py:680] Loading model weights took 12.5523 GB\n"
        "INFO 05-01 10:00:12 gpu_executor.py:102] # GPU blocks: 27878, # CPU blocks: 2048\n"
        "INFO:     Application startup complete.\n"
    )
    assert startup.vllm == "0.5.4"
    assert startup.args.gpu_memory_utilization == 0.85
    assert startup.args.max_num_seqs == 128
    assert startup.args.enforce_eager is True
    assert startup.args.dtype == "float16"
    assert startup.args.usage == "serve"
    assert startup.weights_bytes == gib(12.5523)
    assert startup.blocks == 27878
    assert startup.outcome == "started"


def test_the_two_line_profile_of_v0_gives_every_term() -> None:
    startup = one(
        ENGINE.format(version="0.7.3", tp=1) + "\n"
        "INFO 02-01 10:00:12 worker.py:267] Memory profiling takes 3.92 seconds\n"
        "INFO 02-01 10:00:12 worker.py:267] the current vLLM instance can use total_gpu_memory (79.10GiB) x "
        "gpu_memory_utilization (0.90) = 71.19GiB\n"
        "INFO 02-01 10:00:12 worker.py:267] model weights take 14.99GiB; non_torch_memory takes 0.16GiB; PyTorch "
        "activation peak memory takes 1.26GiB; the rest of the memory reserved for KV Cache is 54.78GiB.\n"
        "INFO 02-01 10:00:13 executor_base.py:111] # cuda blocks: 28048, # CPU blocks: 2048\n"
        "INFO 02-01 10:00:13 executor_base.py:116] Maximum concurrency for 8192 tokens per request: 54.78x\n"
    )
    assert startup.gpu_total_bytes == gib(79.10)
    assert startup.weights_bytes == gib(14.99)
    assert startup.non_torch_bytes == gib(0.16)
    assert startup.activation_bytes == gib(1.26)
    assert startup.available_kv_bytes == gib(54.78)
    assert (startup.blocks, startup.max_concurrency, startup.concurrency_len) == (28048, 54.78, 8192)


def test_the_largest_weights_and_the_smallest_cache_of_all_ranks_count() -> None:
    startup = one(
        ENGINE.format(version="0.10.2", tp=2) + "\n"
        "(Worker_TP0 pid=11) INFO [gpu_model_runner.py:2392] Model loading took 7.5123 GiB and 3.1 seconds\n"
        "(Worker_TP1 pid=12) INFO [gpu_model_runner.py:2392] Model loading took 7.6001 GiB and 3.1 seconds\n"
        "(Worker_TP0 pid=11) INFO [gpu_worker.py:298] Available KV cache memory: 60.11 GiB\n"
        "(Worker_TP1 pid=12) INFO [gpu_worker.py:298] Available KV cache memory: 59.90 GiB\n"
        "(EngineCore_DP0 pid=9) INFO [kv_cache_utils.py:864] GPU KV cache size: 982,432 tokens\n"
        "(EngineCore_DP0 pid=9) INFO [kv.py:868] Maximum concurrency for 8,192 tokens per request: 119.93x\n"
        "(EngineCore_DP0 pid=9) INFO [core.py:218] init engine (profile, create kv cache, warmup model) took 30.1 s\n"
    )
    assert startup.weights_bytes == gib(7.6001)
    assert startup.available_kv_bytes == gib(59.90)
    assert startup.tokens == 982432
    assert startup.args.tensor_parallel_size == 2


def test_a_summary_of_0_26_gives_the_terms_without_the_graphs() -> None:
    startup = one(
        ENGINE.format(version="0.26.0", tp=1) + "\n"
        "INFO [gpu_model_runner.py:1] Estimated CUDA graph memory: 0.50 GiB total\n"
        "INFO [gpu_worker.py:1] Free memory on device (139.29/139.8 GiB) on startup. Desired GPU memory utilization is "
        "(0.92, 128.62 GiB). Actual usage is 15.0 GiB for weight, 1.89 GiB for peak activation, 0.23 GiB for "
        "non-torch memory, and 0.61 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `...`\n"
    )
    assert startup.activation_bytes == gib(1.89)
    assert startup.non_torch_bytes == gib(0.23)
    assert startup.graph_bytes == gib(0.61)
    assert startup.graph_estimate_bytes == gib(0.50)
    assert startup.gpu_total_bytes == gib(139.8)


def test_a_summary_of_0_27_is_freed_of_its_graph_estimate_and_its_weights() -> None:
    startup = one(
        ENGINE.format(version="0.27.1", tp=1) + "\n"
        "INFO [model_runner.py:1] Model loading took 15.0 GiB and 2.1 seconds\n"
        "INFO [gpu_model_runner.py:1] Estimated CUDA graph memory: 0.50 GiB total\n"
        "INFO [gpu_worker.py:1] Free memory on device (139.29/139.8 GiB) on startup. Desired GPU memory utilization is "
        "(0.92, 128.62 GiB). Actual usage is 15.3 GiB for consumed memory (weights + non-torch), 2.4 GiB for peak "
        "activation, and 0.61 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `...`\n"
    )
    assert startup.activation_bytes == gib(2.4) - gib(0.50)
    assert startup.non_torch_bytes == gib(15.3) - gib(15.0)


def test_an_estimate_that_the_release_does_not_apply_counts_as_nothing() -> None:
    startup = one(
        ENGINE.format(version="0.19.0", tp=1) + "\nINFO [x.py:1] Estimated CUDA graph memory: 0.50 GiB total\n"
    )
    assert startup.graph_estimate_bytes == 0


@pytest.mark.parametrize(
    ("line", "id_", "needed", "available", "longest"),
    [
        (
            "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (5.50 GiB). Based on the available memory, the "
            "estimated maximum model length is 45040. Try increasing",
            "kv_too_small_for_max_len",
            16.0,
            5.5,
            45040,
        ),
        (
            "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be "
            "stored in KV cache (8176). Try increasing",
            "kv_too_small_for_max_len",
            None,
            None,
            8176,
        ),
        ("ValueError: No available memory for the cache blocks. Try increasing", "no_cache_blocks", None, None, None),
        (
            "ValueError: Free memory on device cuda:0 (60.10/79.1 GiB) on startup is less than desired GPU memory "
            "utilization (0.9, 71.19 GiB). Decrease GPU",
            "free_memory_lt_requested",
            71.19,
            60.10,
            None,
        ),
    ],
)
def test_an_error_is_named_with_its_numbers(
    line: str, id_: str, needed: float | None, available: float | None, longest: int | None
) -> None:
    failure = one(ENGINE.format(version="0.14.0", tp=1) + "\n" + line).failure
    assert failure is not None
    assert failure.id == id_
    assert failure.needed_bytes == (None if needed is None else gib(needed))
    assert failure.available_bytes == (None if available is None else gib(available))
    assert failure.estimated_max_len == longest


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 48.00 MiB. GPU 0 has a total capacity of 23.64 GiB"


@pytest.mark.parametrize(
    ("before", "id_"),
    [
        ("", "weights_too_big"),
        ("Model loading took 15.0 GiB and 2.1 seconds", "profiling_activation_peak"),
        ("Model loading took 15.0 GiB and 2 s\nAvailable KV cache memory: 5.50 GiB", "kv_allocation_oom"),
        ("Model loading took 15.0 GiB and 2 s\nGPU KV cache size: 5,500 tokens", "cudagraph_capture_oom"),
    ],
)
def test_an_out_of_memory_error_is_told_by_when_it_came(before: str, id_: str) -> None:
    startup = one(f"{ENGINE.format(version='0.14.0', tp=1)}\n{before}\n{OOM}\n")
    assert startup.failure is not None
    assert startup.failure.id == id_
    assert startup.gpu_total_bytes == gib(23.64)


def test_an_error_after_the_server_was_ready_is_no_failed_start() -> None:
    startup = one(ENGINE.format(version="0.14.0", tp=1) + f"\nINFO:     Application startup complete.\n{OOM}")
    assert startup.outcome == "started"
    assert startup.failure is None


def test_a_log_that_stops_in_the_middle_is_incomplete() -> None:
    assert one(ENGINE.format(version="0.14.0", tp=1)).outcome == "incomplete"


def test_a_restarting_server_gives_one_startup_each_time() -> None:
    attempt = (
        "(APIServer pid={pid}) INFO [api.py:1] non-default args: {{'model': 'org/some-7b', 'max_num_seqs': {seqs}}}\n"
        "(EngineCore pid={pid}1) " + ENGINE.format(version="0.26.0", tp=1).replace("{", "{{").replace("}", "}}") + "\n"
    )
    startups = read_startups(attempt.format(pid=7, seqs=256) + OOM + "\n" + attempt.format(pid=8, seqs=64))
    assert [startup.args.max_num_seqs for startup in startups] == [256, 64]
    assert [startup.outcome for startup in startups] == ["failed", "incomplete"]


def test_data_parallel_engines_of_one_server_are_one_startup() -> None:
    line = ENGINE.format(version="0.26.0", tp=1)
    assert len(read_startups(f"(EngineCore_DP0 pid=4) {line}\n(EngineCore_DP1 pid=5) {line}\n")) == 1


def test_args_that_hold_an_objects_repr_still_give_their_plain_values() -> None:
    startup = one(
        "non-default args: {'model': 'org/some-7b', 'max_model_len': 4096, 'attention_config': "
        "AttentionConfig(backend=None, flash_attn_version=2), 'gpu_memory_utilization': 0.8, 'enforce_eager': True}"
    )
    assert startup.args_known
    assert startup.args.max_model_len == 4096
    assert startup.args.gpu_memory_utilization == 0.8
    assert startup.args.enforce_eager is True


def test_a_gpu_named_by_a_kernel_config_is_found() -> None:
    startup = one(
        ENGINE.format(version="0.26.0", tp=1)
        + "\nConfig file not found at x/configs/E=64,N=1408,device_name=NVIDIA_H100_80GB_HBM3.json"
    )
    assert startup.gpu_name == "NVIDIA H100 80GB HBM3"


LINE = "INFO [gpu_worker.py:298] Available KV cache memory: 60.11 GiB"


@pytest.mark.parametrize(
    "wrapped",
    [
        f"vllm-1  | {LINE}",
        f"2026-01-02T03:04:05.678Z stdout F {LINE}",
        f"Jan 02 03:04:05 host vllm[812]: {LINE}",
        f"\x1b[1;36m(EngineCore_DP0 pid=5)\x1b[0;0m {LINE}",
        f"(VllmWorker rank=0 pid=99) {LINE}",
        json.dumps({"timestamp": "2026-01-02", "level": "INFO", "message": LINE}),
        json.dumps({"log": LINE + "\n", "stream": "stderr"}),
    ],
)
def test_prefixes_colours_and_json_envelopes_do_not_hide_a_line(wrapped: str) -> None:
    (event,) = read_events(wrapped)
    assert event.fields == {"available_kv_bytes": gib(60.11)}


@pytest.mark.parametrize(
    ("line", "process"),
    [
        ("(EngineCore_DP0 pid=5) " + LINE, "EngineCore_DP0"),
        ("(Worker_PP0_TP1 pid=5) " + LINE, "Worker_PP0_TP1"),
        ("(VllmWorker rank=1 pid=99) " + LINE, "VllmWorker rank=1"),
        ("(RayWorkerWrapper pid=99, ip=10.0.0.2) " + LINE, "RayWorkerWrapper"),
        (LINE, ""),
    ],
)
def test_a_process_is_known_by_its_label_without_the_pid(line: str, process: str) -> None:
    (event,) = read_events(line)
    assert event.process == process


@pytest.mark.parametrize("name", ["started", "tp2"])
def test_a_real_start_on_the_cpu_is_read(name: str) -> None:
    startup = one((LOGS / f"cpu-0.32.0-{name}.log").read_text("utf-8"))
    assert startup.vllm == "0.32.0"
    assert startup.outcome == "started"
    assert startup.args_known
    assert startup.args.enforce_eager is True
    assert startup.args.kv_cache_memory_bytes == 16 * 10**6 or startup.args.kv_cache_memory_bytes == 16 * 2**20
    assert startup.max_concurrency is not None
    assert startup.tokens == round(startup.max_concurrency * (startup.concurrency_len or 0))


def test_a_real_failed_start_on_the_cpu_is_read() -> None:
    startup = one((LOGS / "cpu-0.32.0-kv_too_small.log").read_text("utf-8"))
    assert startup.outcome == "failed"
    assert startup.failure is not None
    assert startup.failure.id == "kv_too_small_for_max_len"
    assert startup.failure.estimated_max_len == 1920


def test_every_form_of_line_is_marked_by_text_that_it_holds() -> None:
    for line in startup_lines():
        assert line.mark, line.id


@given(st.text(max_size=400))
def test_any_text_is_read_without_complaint(text: str) -> None:
    read_startups(text)
    read_startups(ENGINE.format(version="0.26.0", tp=1) + text)


@given(st.text(max_size=80).map(lambda text: "{" + text + "}"))
def test_a_line_in_braces_that_is_no_json_stays_as_it_is(text: str) -> None:
    assert isinstance(plain_line(text), str)


@given(st.integers(1, 10**7), st.integers(1, 10**6), st.floats(0.01, 9999).map(lambda number: round(number, 2)))
def test_capacity_lines_come_back_as_they_were_printed(tokens: int, length: int, concurrency: float) -> None:
    startup = one(
        f"GPU KV cache size: {tokens:,} tokens, "
        f"Maximum concurrency for {length:,} tokens per request: {concurrency:.2f}x"
    )
    assert (startup.tokens, startup.concurrency_len, startup.max_concurrency) == (tokens, length, concurrency)
