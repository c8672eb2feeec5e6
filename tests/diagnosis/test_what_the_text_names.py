"""What a text names beside its error: neighbours on the card, the last line, what was tried, a missing program."""

from __future__ import annotations

import pytest

from legroom.diagnosis.finding import Finding, Fix
from legroom.diagnosis.log_diagnosis import read_log

_ECHO = "(EngineCore pid=5) RuntimeError: Engine core initialization failed. See root cause above.\n"


def first(text: str) -> Finding:
    return read_log([text.encode()], "log").runs[0].findings[0]


def way(text: str) -> Fix:
    return first(text).fixes[0]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("CCL_ERROR| fd_table.cpp:77 init_device_fds: condition fd failed\n" + _ECHO, "/dev/dri"),
        ("vllm on an Arc card in docker: could not open /dev/dri/renderD130, then\n" + _ECHO, "/dev/dri"),
        (
            "My Service is called vllm, so the pod sees VLLM_PORT=tcp://10.9.8.7:9000 and vllm dies.",
            "enableServiceLinks",
        ),
        ("ValueError: VLLM_PORT 'tcp://10.0.0.9:80' appears to be a URI.", "enableServiceLinks"),
        (
            "    self._semlock = _multiprocessing.SemLock._rebuild(*state)\n"
            "FileNotFoundError: [Errno 2] No such file or directory\n" + _ECHO,
            "enable-linger",
        ),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/psm_77aa01bb'\n" + _ECHO, "enable-linger"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'ninja'\n" + _ECHO, "install ninja where"),
        ("RuntimeError: Ninja is required to load C++ extensions\n" + _ECHO, "install ninja where"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'numactl'\n" + _ECHO, "install numactl where"),
    ],
)
def test_the_line_above_the_wrapper_decides(text: str, word: str) -> None:
    found = first(text)
    assert found.cause == "not_memory"
    assert word in " ".join(found.fixes[0].steps)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("MPI_ERROR| fabric.cc:77 open_provider: no provider named psm9\n" + _ECHO, "no provider named psm9"),
        (
            "terminate called after throwing an instance of 'std::runtime_error'\n"
            "  what():  topology file could not be parsed\n" + _ECHO,
            "topology file could not be parsed",
        ),
    ],
)
def test_the_error_of_a_native_library_is_named_where_only_a_wrapper_follows(text: str, word: str) -> None:
    found = first(text)
    assert found.cause == "not_memory"
    assert word in found.fixes[0].why


def test_an_engine_that_goes_as_its_program_ends_has_not_failed() -> None:
    died = "ERROR 03-02 10:00:00 [core_client.py:600] Engine core proc EngineCore_DP0 died unexpectedly.\n"
    for told in ("My batch script prints all outputs, but as the script exits I get\n", "Once all results are saved\n"):
        text = f"vllm: {told}:\n{died}"
        assert "Nothing failed" in first(text).why
    assert not any(
        "Nothing failed" in found.why
        for found in read_log([f"vllm: after the first request the engine died:\n{died}".encode()], "log")
        .runs[0]
        .findings
    )


def test_a_share_leaves_what_other_programs_hold_by_the_text() -> None:
    text = (
        "vllm on an A10G, --gpu-memory-utilization 0.6, with a reranker (~3.5 GB VRAM) and a TTS model (900 MB) "
        "already loaded: ValueError: No available memory for the cache blocks."
    )
    assert way(text).flags == {"gpu_memory_utilization": 0.75}
    assert "leaves 0.75" in way(text).why
    full = text.replace("3.5 GB", "12 GB")
    assert all(fix.flags.get("gpu_memory_utilization", 0) <= 0.6 for fix in first(full).fixes)


def test_a_share_of_the_cpu_backend_holds_one_request_of_the_model() -> None:
    text = (
        "vllm serve Qwen/Qwen2.5-7B-Instruct --gpu-memory-utilization 0.4\n"
        "(Worker pid=9) ERROR 06-13 19:57:36 [multiproc_executor.py:989] ValueError: Available memory on node 0 "
        "(30.0/62.0 GiB) on kv cache allocation is less than requested memory for kv (-1.50/24.8 GiB).\n"
    )
    fix = way(text)
    assert fix.flags["gpu_memory_utilization"] * 62 - 26.3 >= 1.75  # 32,768 tokens x 56 KiB
    tight = way(text.replace("30.0/62.0", "1.0/62.0"))
    assert 0 < tight.flags["max_model_len"] < 32768


def test_where_the_log_stops_tells_that_the_share_has_no_part() -> None:
    killed = "On a DGX Spark vllm is killed: dmesg says oom-kill: task=VLLM::EngineCor.\n"
    for told in ("The log ends right after the fused_moe warning.", "The output stops at torch.compile, no profiling."):
        assert "max_num_batched_tokens" in way(killed + told).flags
    assert "max_num_batched_tokens" not in way(killed + "It was serving requests for an hour.").flags


def test_a_sum_beyond_the_card_asks_for_another_model_not_for_an_offload_that_is_on() -> None:
    text = (
        "verl GRPO with vllm: even with param_offload the actor keeps 14 GB, the rollout wants 17 GB of weights: "
        "together 31 GB > 24 GB of the card, at 0.3 there is no available memory for the cache blocks."
    )
    assert "smaller model" in way(text).steps[0]
    below = text.replace("31 GB > 24 GB of the card", "19 GB")
    assert not any("smaller model" in step for fix in first(below).fixes for step in fix.steps)
    assert not any("param_offload=True" in step for fix in first(below).fixes for step in fix.steps)


def test_weights_that_no_card_holds_go_before_a_burst() -> None:
    text = "vllm with {} on one node, TP=8: torch.OutOfMemoryError: NPU out of memory. Tried to allocate 512.00 MiB"
    assert first(text.format("Kimi-K2 W4A8")).cause == "weights_too_big"
    assert "--pipeline-parallel-size 2" in way(text.format("Kimi-K2 W4A8")).steps[0]
    assert first(text.format("Qwen3-32B")).cause != "weights_too_big"


def test_a_full_node_of_a_memory_policy_is_no_lack_of_ram() -> None:
    kernel = "oom-kill: constraint=CONSTRAINT_MEMORY_POLICY, nodemask=2, task=VLLM::Worker\n"
    found = first(kernel + "Out of memory: Killed process 9 (VLLM::Worker) anon-rss:9000000kB\n")
    assert "interleave" in found.fixes[0].steps[0]
    assert "memory policy" in found.why


@pytest.mark.parametrize("machine", ["our Thor", "an AGX Orin", "the DGX Spark"])
def test_on_one_memory_a_pool_below_zero_that_no_size_explains_is_the_page_cache(machine: str) -> None:
    text = (
        f"vllm on {machine} at --gpu-memory-utilization 0.76: `Available KV cache memory: -1.20 GiB`, after a rebuild."
    )
    assert "drop_caches" in way(text).steps[0]
    assert "--kv-cache-memory-bytes" in way(text).steps[1]


def test_a_virtual_machine_that_is_full_is_host_memory() -> None:
    for told in ("the load test filled up the WSL VM", "under load the VM ran out of memory (WSL)"):
        found = first(f"vllm in Docker Desktop on WSL: {told} and the engine got OOM-killed.")
        assert found.cause in ("unified_memory_or_wsl", "host_ram_oom")
        assert any(".wslconfig" in step for step in found.fixes[0].steps)


@pytest.mark.parametrize(
    "told", ["leaves just 0.4 GiB for KV cache (one request needs 6.0 GiB)", "left about 0.4 GiB for KV, needed 6.0"]
)
def test_a_gain_that_does_not_cover_the_need_is_combined(told: str) -> None:
    text = f"vllm, 40 GiB of weights at `0.9` util and `32768` ctx: that {told}, so it refuses to start."
    found = first(text)
    assert found.cause == "kv_too_small_for_max_len"
    flags = found.fixes[0].flags
    assert flags["gpu_memory_utilization"] == 0.95
    assert 8192 < flags["max_model_len"] < 32768 / 2
    assert flags["enforce_eager"]


def test_with_many_waiting_and_few_running_admission_goes_before_a_lossy_cache() -> None:
    line = "Running: 3 reqs, Waiting: 50 reqs, GPU KV cache usage: 99.8%, Prefix cache hit rate: 0.0%\n"
    found = first(f"INFO 07-24 12:06:25 [loggers.py:100] Avg generation throughput: 8.0 tokens/s, {line}")
    assert found.cause == "kv_preemption_thrash"
    kinds = [fix.kind for fix in found.fixes]
    assert kinds.index("max_model_len") < kinds.index("kv_cache_dtype")


def test_a_leak_of_host_memory_with_images_is_looked_for_in_the_caches_first() -> None:
    text = "vllm serves {}: system RAM usage keeps growing over days until the container is OOM-killed."
    with_images = way(text.format("Qwen2-VL-7B with images"))
    assert with_images.flags == {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
    assert any("newest release" in step for step in with_images.steps)
    assert "enable_prefix_caching" not in way(text.format("Llama-3.1-8B, text only")).flags


def test_an_end_without_an_error_is_not_said_beside_a_traceback() -> None:
    log = (
        "INFO 04-03 17:36:41 [gpu_worker.py:436] Available KV cache memory: 6.00 GiB\n"
        "ERROR 04-03 17:36:41 [core.py:1108] Traceback (most recent call last):\n"
        'ERROR 04-03 17:36:41 [core.py:1108]   File "/x/vllm/v1/worker/gpu_model_runner.py", line 5, '
        "in _dummy_sampler_run\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    )
    causes = [found.cause for found in read_log([log.encode()], "log").runs[0].findings]
    assert "host_ram_oom" not in causes


def test_a_told_pair_shortens_the_length_where_the_plan_knows_it() -> None:
    text = "vLLM 0.15 with Qwen/Qwen3-8B on a 16 GB card at 0.90: only 0.9 GiB for KV cache, needs 5.6 GiB."
    assert 4096 < way(text).flags["max_model_len"] < 40960 * 0.9 / 5.6


def test_programs_that_are_no_vllm_bound_the_share_whoever_lists_them() -> None:
    text = (
        "vllm on a RTX 4090 with ComfyUI (6 GB) and Ollama at 3.5 GB, --gpu-memory-utilization 0.5: "
        "ValueError: No available memory for the cache blocks."
    )
    assert 0.5 < way(text).flags["gpu_memory_utilization"] < (24 - 9.5) / 24
