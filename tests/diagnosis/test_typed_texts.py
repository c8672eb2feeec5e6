"""What people type: figures in their own spelling, other programs, errors that are only quoted."""

import pytest

from legroom.diagnosis.log_diagnosis import read_log


def diagnosis_of(text):
    return read_log([text.encode()]).runs[0]


KV_FIGURES = (
    "vLLM on a 4090, max-model-len 32k: the KV cache needed is 6,0 GiB, only ≈ 4,2 GiB are available.",
    "max_model_len ＝ ３２７６８，可用 KV cache 只有 ４.２ GiB，需要 ６.０ GiB，vLLM 启动失败",
    "vLLM, max_model_len 32 768: 需要 6.0 GiB KV cache，只有 4.2 GiB",
    "ValueError: To serve at least one request with the models's max seq len (32\u202f768), "
    "(6,00 Gio KV cache is needed, which is larger than the available KV cache memory (4,20 Gio).",
)


@pytest.mark.parametrize("text", KV_FIGURES)
def test_figures_are_read_in_the_spelling_of_people(text):
    finding = diagnosis_of(text).findings[0]
    assert finding.cause == "kv_too_small_for_max_len"
    assert "32,768 tokens needs 6.00 GiB of KV cache and 4.20 GiB are left" in finding.why


def test_cells_of_a_table_are_settings():
    text = "| **max_model_len** | 40 960 |\n| `gpu_memory_utilization` | 85% |\nvLLM v0.11+ dies: CUDA out of memory"
    startup = diagnosis_of(text).case.startup
    assert (startup.args.max_model_len, startup.args.gpu_memory_utilization) == (40960, 0.85)
    assert startup.vllm == "0.11"


def test_a_port_that_refuses_is_no_length():
    text = "curl: (7) Failed to connect to localhost port 8000 after 0 ms: Connection refused. vLLM runs."
    assert diagnosis_of(text).case.startup.args.max_model_len is None


OTHERS = {
    "engine_diffusers": "!!! Exception during processing !!! Allocation on device 0 (out of memory)\n"
    '  File "/ComfyUI/execution.py", line 323, in execute',
    "engine_lmstudio": "LM Studio: Failed to load the model, VRAM is 8 GB, CUDA out of memory.",
    "engine_trainer": "🦥 Unsloth: Will patch your computer.\ntorch.OutOfMemoryError: CUDA out of memory. "
    "Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 14.74 GiB of which 800.00 MiB is free.",
}


@pytest.mark.parametrize("engine", OTHERS)
def test_the_log_of_another_program_is_not_blamed_on_vllm(engine):
    diagnosis = diagnosis_of(OTHERS[engine])
    assert (diagnosis.other_engine, diagnosis.findings) == (engine, ())


def test_a_trainer_that_runs_vllm_inside_is_no_other_program():
    text = OTHERS["engine_trainer"].replace("Will patch your computer.", "vLLM loading model with gpu utilization 49 %")
    assert diagnosis_of(text).other_engine == ""


EARLIER = (
    "Earlier I got CUDA out of memory with vLLM. Now it says: OSError: [Errno 98] Address already in use",
    "CUDA out of memory was solved.\nNow vllm serve says: OSError: [Errno 98] Address already in use",
)


@pytest.mark.parametrize("text", EARLIER)
def test_the_failure_is_the_one_that_is_left(text):
    diagnosis = diagnosis_of(text)
    assert diagnosis.verdict == "not a memory problem"
    assert diagnosis.findings[0].why.startswith("The port is taken")


def test_an_earlier_failure_alone_is_the_one_that_is_asked_about():
    text = "Yesterday vLLM died with CUDA out of memory while loading the weights."
    assert diagnosis_of(text).findings[0].cause == "weights_too_big"


def test_a_guide_to_errors_tells_of_none():
    guide = "## vLLM\n- CUDA out of memory: lower the share\n- No available memory for the cache blocks: raise it\n"
    listed = diagnosis_of(f"{guide}- Address already in use: another port\n")
    assert not any(item.role in ("failure", "exception") for item in listed.case.evidence)
    assert diagnosis_of(guide).case.is_oom


def test_a_cause_whose_moment_no_line_shows_says_so():
    asked, placed = "vLLM: CUDA out of memory on my A10G.", "vLLM loads 6 of 8 shards and then CUDA out of memory."
    possible = [finding.why for finding in diagnosis_of(asked).findings]
    assert any(
        why.startswith("No line shows where memory ran out; this holds if it was while serving.") for why in possible
    )
    assert not diagnosis_of(placed).findings[0].why.startswith("No line shows")
    assert diagnosis_of(placed).findings[0].cause == "weights_too_big"


REFUSED = (
    (
        "curl: (7) Failed to connect to localhost port 8000: Connection refused. vLLM runs in a container.",
        "Nothing answers",
    ),
    ("NVVM Compilation Error: Target Architecture: sm_75", "A kernel or the build does not support"),
    ("RuntimeError: Did not receive response from front-end process within 5 minutes", "The processes did not find"),
    ("FileNotFoundError: [Errno 2] No such file or directory: 'ninja'", "The server starts the program ninja"),
)


@pytest.mark.parametrize(("line", "why"), REFUSED)
def test_what_is_not_memory_is_named(line, why):
    diagnosis = diagnosis_of(line)
    assert diagnosis.verdict == "not a memory problem"
    assert diagnosis.findings[0].why.startswith(why)


def test_a_refused_connection_is_an_echo_where_another_error_is_printed():
    text = "curl: (7) Failed to connect to localhost: Connection refused\nOSError: [Errno 28] No space left"
    assert diagnosis_of(text).findings[0].why.startswith("The disk is full")


def test_the_concurrency_line_names_the_length_in_force():
    log = "INFO 09-12 10:00:01 [kv_cache_utils.py:868] Maximum concurrency for 65,536 tokens per request: 0.83x\n"
    diagnosis = diagnosis_of(f"{log}vLLM 0.10.1, Gemma 3 27B on an A6000 48GB ends there.")
    assert diagnosis.findings[0].cause == "kv_too_small_for_max_len"
    assert diagnosis.case.startup.args.max_model_len == 65536
    alone = diagnosis_of(f"{log}the process exits here, and no more lines were printed by vLLM 0.10.1")
    assert alone.findings[0].fixes[0].flags == {"max_model_len": 53248}
