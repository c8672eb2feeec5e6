"""What a text plainly states decides: its own negations, its one-line errors, its addresses, its numbers."""

import pytest

from legroom.diagnosis.log_diagnosis import read_log


def diagnosis_of(text):
    return read_log([text.encode()]).runs[0]


def first_cause(text):
    return diagnosis_of(text).findings[0].cause


LOADING = "INFO 11-02 10:00:01 [loader.py:402] Loading weights on cuda:0, this takes a while\n"
UNSAID = (
    "vllm serve Qwen/Qwen2.5-14B-Instruct ends every evening without any hint that it was out of memory.\n",
    "vLLM just vanishes. There was never a line in the log about CUDA out of memory, the shell has one word.\n",
    "用 vllm 启动模型，没有任何提示显存不足，进程就没了。\n",
)


@pytest.mark.parametrize("sentence", UNSAID)
def test_a_message_that_was_missed_is_no_failed_allocation(sentence):
    assert first_cause(f"{sentence}{LOADING}Killed\n") == "host_ram_oom"


def test_an_error_that_was_printed_counts_beside_one_that_was_missed():
    text = "vLLM gave no warning while it loaded. When serving, requests end with CUDA out of memory."
    assert first_cause(text) == "runtime_activation_burst"


CHECKS = (
    "ValueError: Available memory on device xpu:1 (9.50/15.9 GiB) is below required GPU memory utilization "
    "(0.9, 14.31 GiB). Stop other programs.",
    "RuntimeError: Free memory on GPU 0 (9.50/15.9 GiB) is insufficient for the requested utilization (0.9, 14.31 GiB)",
    "ValueError: Remaining memory on card hpu:0 9.50 of 15.9 GiB is lower than the configured memory utilization "
    "(0.9 = 14.31 GiB)",
)


@pytest.mark.parametrize("line", CHECKS)
def test_the_check_at_start_is_read_in_the_words_of_other_platforms(line):
    diagnosis = diagnosis_of(f"vllm serve on my box stops at once:\n{line}\n")
    assert diagnosis.findings[0].cause == "gpu_shared_or_not_free"
    assert "4.81 GiB" in diagnosis.findings[0].why


@pytest.mark.parametrize(
    "sentence",
    (
        "[Bug]: vLLM with 8 ranks runs out of /dev/shm after some restarts",
        "vLLM 0.10.0: the /dev/shm space is exhausted, then every rank ends",
        "vLLM 报错，容器的 /dev/shm 不足",
    ),
)
def test_shared_memory_of_the_host_that_ran_out_is_memory(sentence):
    log = "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)"
    assert first_cause(f"{sentence}\n\n{log}\n") == "host_ram_oom"


@pytest.mark.parametrize(
    "text",
    (
        "My gateway answers litellm.BadRequestError: OpenAIException - This model's maximum context length is 8192 "
        "tokens. However, you requested 9000 tokens (8000 in the messages, 1000 in the completion).",
        "proxy-1 | LiteLLM.Info: turn on debug\nproxy-1 | ERROR: litellm.ContextWindowExceededError: This model's "
        "maximum context length is 8192 tokens. However, you requested 9000 tokens (8000 in the messages, 1000 in "
        "the completion).",
    ),
)
def test_what_a_gateway_passes_on_is_of_the_server_behind_it(text):
    finding = diagnosis_of(text).findings[0]
    assert finding.cause == "request_too_long"
    assert "max_tokens of 192 at most" in finding.fixes[0].steps[0]


def test_a_gateway_that_grows_is_no_server():
    assert diagnosis_of("LiteLLM proxy: its RAM grows until the pod is OOMKilled").other_engine == "engine_litellm"


HEADS = (
    "'FusedMoE' object has no attribute 'w13_scale'",
    "load_model() got an unexpected keyword argument 'draft'",
    "'NoneType' object is not subscriptable",
)


@pytest.mark.parametrize("message", HEADS)
def test_the_error_that_a_logger_prints_above_its_traceback_is_read(message):
    line = "ERROR 03-04 05:06:07 [engine.py:400] "
    log = f"{line}{message}\n{line}Traceback (most recent call last):\n"
    log += f'{line}  File "/opt/vllm/engine/multiprocessing/engine.py", line 400, in run_mp_engine\n'
    text = f"vllm 0.8.1 does not load my model, it is fixed in 0.8.4 I was told.\n\n{log}"
    finding = diagnosis_of(text).findings[0]
    assert finding.cause == "not_memory"
    assert "vllm==0.8.4" in finding.fixes[0].steps[0]


def test_a_client_in_a_container_that_asks_localhost_is_told_where_to_ask():
    text = (
        "Open WebUI in Docker, vLLM runs on the host.\nAPI base: http://127.0.0.1:8000/v1\n\nIt says Connection error."
    )
    finding = diagnosis_of(text).findings[0]
    assert (finding.cause, "host.docker.internal" in finding.fixes[0].steps[0]) == ("not_memory", True)


@pytest.mark.parametrize(
    "sentence",
    (
        "Ray and vLLM: the inner placement group is never scheduled, the outer one has all GPUs.",
        "vLLM on Ray Serve stops, the placement groups of the two conflict over the same GPUs.",
    ),
)
def test_placement_groups_that_wait_for_each_other_are_no_memory(sentence):
    finding = diagnosis_of(sentence).findings[0]
    assert (finding.cause, "ray status" in finding.fixes[0].steps[0]) == ("not_memory", True)


def test_the_version_of_a_driver_in_a_report_is_no_complaint_about_it():
    head = "If the VRAM is larger than the system RAM every GPU program fails under WSL 2, vLLM too.\n\n"
    text = f"{head}NVIDIA-SMI 570.10.01   Driver Version: 572.16   CUDA Version: 12.8\n\n$ nvcc --version\n"
    assert first_cause(text) in ("unified_memory_or_wsl", "host_ram_oom")


KEPT = (
    "vllm 服务停掉之后显存仍然占着，nvidia-smi 看不到进程",
    "用 kill 结束 vllm 后显卡依旧被占用，怎么办",
    "vLLM を終了しても VRAM が解放されない",
    "vLLM을 종료해도 GPU 메모리가 해제되지 않아요",
)


@pytest.mark.parametrize("text", KEPT)
def test_memory_that_an_ended_server_keeps_is_told_in_any_language(text):
    assert first_cause(text) == "gpu_shared_or_not_free"


NEIGHBOURS = (
    "先启动了 bge 向量模型之后再启动 vllm 就报 CUDA out of memory",
    "显卡已经被别人占了一部分，vllm 启动显存不足",
    "vllm 部署好 rerank 服务后再部署大模型，显存不够",
)


@pytest.mark.parametrize("text", NEIGHBOURS)
def test_another_model_that_was_loaded_first_is_a_neighbour(text):
    assert first_cause(text) == "gpu_shared_or_not_free"


PERPLEXITY = (
    "vllm 计算困惑度的时候显存直接爆了，普通对话没事",
    "vLLM 0.6.3: evaluating perplexity of long texts runs out of GPU memory, chat is fine",
    "用 vllm 做 PPL 评测时显存占用最后溢出",
)


@pytest.mark.parametrize("text", PERPLEXITY)
def test_a_perplexity_needs_the_log_probabilities_of_the_prompt(text):
    finding = diagnosis_of(text).findings[0]
    assert finding.cause == "runtime_activation_burst"
    assert "prompt_logprobs" in " ".join(finding.fixes[0].steps)


@pytest.mark.parametrize(
    ("sentence", "share"),
    (
        ("Two parallel processes that each build an LLM on one 4090 give CUDA out of memory, one alone works.", 0.45),
        ("vLLM with a Pool(3) on a single card: CUDA out of memory. One after the other works.", 0.3),
    ),
)
def test_own_processes_on_one_card_each_get_their_share(sentence, share):
    finding = diagnosis_of(f"vllm question\n\n{sentence}").findings[0]
    assert finding.cause == "gpu_shared_or_not_free"
    assert finding.fixes[0].flags == {"gpu_memory_utilization": share}


def test_no_fix_lies_between_the_values_of_a_list_that_was_tried():
    text = (
        "vllm serve Qwen/Qwen2.5-32B-Instruct --tensor-parallel-size 4 --gpu-memory-utilization 0.85\n\n"
        "### What I tried\n- setting `gpu_memory_utilization` to `[0.5, 0.7, 0.95]`\n- `max_num_seqs` of 4\n\n"
        "Nothing changes, requests with prompt_logprobs end with:\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 6.50 GiB. GPU 0 has a total capacity of "
        '79.19 GiB of which 6.10 GiB is free.\n  File "/x/vllm/model_executor/layers/sampler.py", line 900, in '
        "get_logprobs\n"
    )
    shares = [fix.flags.get("gpu_memory_utilization") for fix in diagnosis_of(text).findings[0].fixes]
    assert shares
    assert not any(share and 0.5 <= share <= 0.95 for share in shares)


APPS = (
    '  File "/home/me/FramePack/app.py", line 80, in run\n    raise gr.Error(err)\ntorch.OutOfMemoryError: CUDA out of '
    "memory. Tried to allocate 1.20 GiB. GPU 0 has a total capacity of 23.52 GiB of which 300.00 MiB is free.",
    "Wan2GP loads the prompt enhancer: CUDA out of memory. Tried to allocate 900.00 MiB.",
)


@pytest.mark.parametrize("text", APPS)
def test_a_program_with_an_interface_of_its_own_is_named_and_not_sold_flags(text):
    diagnosis = diagnosis_of(text)
    assert (diagnosis.other_engine, diagnosis.findings) == ("engine_app", ())


GROWTH = (
    ("vLLM serves Qwen2-7B-Instruct on an A100 80GB, VRAM grows day by day until restart.", True),
    ("vLLM serves Qwen2-7B-Instruct on an A100 80GB, the RAM of the process grows day by day until restart.", False),
)


@pytest.mark.parametrize(("text", "is_of_card"), GROWTH)
def test_what_grows_is_told_by_the_sentence(text, is_of_card):
    finding = diagnosis_of(text).findings[0]
    assert finding.cause == "leak_over_time"
    assert any(fix.kind == "lower_util" for fix in finding.fixes) == is_of_card
    assert not any("mm_processor_cache_gb" in fix.flags for fix in finding.fixes)


def test_an_undefined_symbol_is_of_another_torch():
    text = "ImportError from vllm: `_moe_C.abi3.so` has an undefined symbol after I updated torch"
    finding = diagnosis_of(text).findings[0]
    assert (finding.cause, "built against another version of torch" in finding.why) == ("driver_or_cuda_mismatch", True)


def test_32_bits_of_a_named_size_are_counted():
    text = (
        'CUDA out of memory on a Tesla T4\n\npython3 serve_it.py --model "acme/writer-7b-v2" --dtype float32 '
        "--gpu-memory-utilization 0.6\nINFO 11-26 12:46:09 llm_engine.py:72] Initializing an LLM engine with config: "
        "model='acme/writer-7b-v2', dtype=torch.float32, max_seq_len=4096, tensor_parallel_size=1, quantization=None)\n"
        "Traceback (most recent call last):\n"
    )
    finding = diagnosis_of(text).findings[0]
    assert (finding.cause, "In 32 bits the weights take 26.08 GiB" in finding.why) == ("weights_too_big", True)
    assert finding.fixes[0].flags != {"dtype": "half"}
