"""What a text tells of its situation decides: growth, own stages, sizes that worked, ports, templates, wrappers."""

import pytest

from legroom.diagnosis.log_diagnosis import read_log


def diagnosis_of(text):
    return read_log([text.encode()]).runs[0]


def first(text):
    return diagnosis_of(text).findings[0]


def steps_of(text):
    return " ".join(first(text).fixes[0].steps)


GROWTH = (
    "Training with vLLM rollouts dies: host RAM is exhausted in the fourth rollout. The node has 2 TB of RAM.",
    "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"
    "Episode:  12%|#2 | 25/200 [5:12:44<30:00:00, 700.1s/it]",
)


@pytest.mark.parametrize("text", GROWTH)
def test_ram_that_lasted_for_the_first_steps_grows(text):
    finding = first(text)
    assert finding.cause == "host_ram_oom"
    assert "grows" in finding.fixes[0].why and "--mm-processor-cache-gb 0" in " ".join(finding.fixes[0].steps)


def test_ram_that_ends_while_loading_does_not_grow():
    text = "vLLM: the host's RAM is exhausted while the weights are loaded, the machine has 32 GB."
    assert all("grows" not in fix.why for fix in first(text).fixes)


@pytest.mark.parametrize("word", ("often", "alot", "twice"))
def test_a_word_behind_oom_killed_is_no_process(word):
    text = f"My vLLM server was OOM-killed {word} on a machine with 48 GB of RAM."
    assert f"killed {word}" not in first(text).why


def test_a_process_behind_oom_killed_is_named():
    assert "killed python3 " in first("The kernel OOM-killed python3 while vLLM loaded the weights.").why


def test_a_limit_that_is_denied_is_no_limit():
    text = "vllm: oom-kill:constraint=CONSTRAINT_NONE, so this is not a cgroup limit. Killed process 77 (python3)"
    assert "the container's limit" not in first(text).why
    assert "the container's limit" in first(text.replace("not a cgroup", "a cgroup").replace("_NONE", "_MEMCG")).why


STAGES = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of 23.57 GiB "
    "of which 90.00 MiB is free. Process 11 has 190.00 MiB memory in use. Process 12 has {small} MiB memory in use. "
    "Process 40 has 14.20 GiB memory in use. Including non-PyTorch memory, this process has 8.90 GiB memory in use. "
    "Of the allocated memory 8.10 GiB is allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(("small", "is_own"), (("190.00", True), ("412.00", False)))
def test_contexts_of_one_size_are_of_one_program(small, is_own):
    assert ("stage or an engine of that program" in steps_of(STAGES.format(small=small))) is is_own


def test_shares_of_two_servers_that_hold_no_weights_are_no_fix():
    command = "vllm serve meta-llama/Llama-3.1-70B-Instruct --port {} --tensor-parallel-size 8 &\n"
    cards = "vLLM 0.11.0: both fail with CUDA out of memory.\n\nHardware: 8x A100 GPUs (40GB VRAM each)"
    text = f"{cards}\n\n{command.format(8001)}\n{command.format(8002)}"
    fixes = [step for item in diagnosis_of(text).findings for fix in item.fixes for step in fix.steps]
    assert any("no share is enough for 2 such servers" in step for step in fixes)
    small = text.replace("Llama-3.1-70B", "Llama-3.1-8B")
    fixes = [step for item in diagnosis_of(small).findings for fix in item.fixes for step in fix.steps]
    assert not any("no share is enough" in step for step in fixes)


def test_graphs_far_above_the_usual_are_what_a_request_lacks():
    text = (
        "The end result is that the service will be up, but it will be OOM when requested.\n\n"
        "INFO 12-24 06:17:49 model_runner.py:1527] Graph capturing finished in 71 secs, took {} GiB\n"
        "INFO:     Application startup complete.\n"
    )
    assert first(text.format("7.10")).cause == "cudagraph_capture_oom"
    assert first(text.format("1.10")).cause != "cudagraph_capture_oom"


@pytest.mark.parametrize("size", (12, 24))
def test_the_size_of_dev_shm_that_worked_is_the_number(size):
    text = (
        "vLLM with two ranks fails: /dev/shm has No space left on device. Setting the shm_size of the compose service "
        f"to 1gb did not help, but setting it to {size}gb did work."
    )
    assert f"shm_size: {size}gb" in steps_of(text)


def test_the_heading_of_a_template_asks_for_nothing():
    text = (
        "### Is your feature request related to a problem? Please describe\n"
        "用vllm跑模型失败后，把后台进程杀掉之后GPU并没有被释放\n"
    )
    assert first(text).cause == "gpu_shared_or_not_free"
    assert first("Feature request: please support the new cache format in vLLM").cause == "not_memory"


def test_a_leak_in_the_title_is_a_leak():
    finding = first("Memory leak observed with tool calls\n\nvLLM serves a 14B model on two cards, no thinking.\n")
    assert finding.cause == "leak_over_time"


LOOKALIKES = {
    "remaining_argv: ['--vllm_max_model_len', '4096']\nValueError: remaining_argv": ("wrong_flag", "--vllm_max_model"),
    "vllm behind a chat page: I get a 400 status code (no body) error": ("not_memory", "refused the request"),
    'APIConnectionError: Connection error. vllm base_url = "http//10.0.0.4:8000/v1"': ("not_memory", "misspelt"),
    "vllm: Error occurs, api_server.py does not have the function for 'v1/models'": ("not_memory", "no such path"),
    'vllm pod: Startup probe failed: Get "http://10.0.0.8:8000/health": connect: connection refused': (
        "not_memory",
        "Nothing listened on the port yet",
    ),
    "I managed to run vllm on a laptop with 6GB, with max_num_seqs 2 and a share of 0.93": ("not_memory", "that runs"),
}


@pytest.mark.parametrize(("text", "meant"), LOOKALIKES.items())
def test_what_is_no_shortage_is_named_for_what_it_is(text, meant):
    finding = first(text)
    assert finding.cause == meant[0] and meant[1] in finding.why


def test_a_warning_of_another_library_does_not_outweigh_the_sentence_of_vllm():
    text = "ValueError: No available memory for the cache blocks.\n2025 [W:onnxruntime:, copy.cc:74] 8 nodes are added"
    assert first(text).cause == "no_cache_blocks"


def test_an_engine_of_its_own_is_named_by_its_lines():
    text = (
        "With --max-num-seqs 4 --max-model-len 65536 it stops:\n"
        "WARN vllm_rs::utils::kvcache_allocator: GPU 0: total 47.5 GB, free 9.1 GB\n"
        "ERROR vllm_rs::core::engine: KVCache allocation failed. Available: 8000.00 MB, Required: 32000.00 MB"
    )
    assert diagnosis_of(text).other_engine == "engine_vllm_rs"


@pytest.mark.parametrize(("free", "is_false"), (("14.10", True), ("0.10", False)))
def test_a_free_amd_card_that_refuses_a_piece_is_no_shortage(free, is_false):
    text = (
        "vllm: torch.OutOfMemoryError: HIP out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of "
        f"15.92 GiB of which {free} GiB is free. Of the allocated memory 1.10 GiB is allocated by PyTorch, and "
        "10.00 MiB is reserved by PyTorch but unallocated."
    )
    assert (first(text).cause == "driver_or_cuda_mismatch") is is_false
