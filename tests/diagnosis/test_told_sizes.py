"""Numbers and places that sentences, cut lines and other engines' lines tell, each in several wordings."""

from __future__ import annotations

import pytest

from legroom.diagnosis.log_diagnosis import read_log
from legroom.diagnosis.verdict import Diagnosis

OOM = (
    "torch.OutOfMemoryError: {}CUDA out of memory. Tried to allocate {} GiB. GPU 0 has a total capacity of 23.60 GiB "
    "of which {} GiB is free. Of the allocated memory {} GiB is allocated by PyTorch, and 100.00 MiB is reserved by "
    "PyTorch but unallocated."
)


def run(text: str) -> Diagnosis:
    return read_log([text.encode()], "log").runs[0]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "Our hybrid Mamba model refuses to start with vLLM: the default is 512 sequences against 388 blocks.",
            "hybrid_state_cache_limit",
        ),
        (
            "vLLM does not start: there are only 96 Mamba cache blocks and max_num_seqs is 256 by default.",
            "hybrid_state_cache_limit",
        ),
        (
            "vLLM 0.11.0 fails to start and says the KV cache memory is not enough for one request at 64k.",
            "kv_too_small_for_max_len",
        ),
        (
            "vllm serve stops: insufficient KV cache for the max model length of 128k on my 24 GB card.",
            "kv_too_small_for_max_len",
        ),
        (
            "CUDA out of memory. Tried to allocate 96.00 MiB. My vLLM script does not release the GPU memory of the "
            "first model when the next model is built.",
            "gpu_shared_or_not_free",
        ),
        (
            "I evaluate several models in a loop with vLLM, and the third one ends with CUDA OOM.",
            "gpu_shared_or_not_free",
        ),
        ("vLLM 0.6.3: out of memory, I want to run a 13B model on an RTX 3090 24GB.", "weights_too_big"),
        ("Is a 8B model too much? vLLM goes out of memory on my RTX 4060 Ti 16GB.", "weights_too_big"),
        (
            "vLLM hits OOM with lm_eval on hellaswag. The peak that profile_run measures is below the real one, as it "
            "does not know the sampling parameters of the harness.",
            "runtime_activation_burst",
        ),
    ],
)
def test_a_sentence_with_its_numbers_names_the_cause(text: str, cause: str) -> None:
    assert run(text).findings[0].cause == cause


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("hybrid SSM model, vLLM refuses to start: 512 sequences against 388 blocks", {"max_num_seqs": 384}),
        ("vLLM: only 24 state blocks are there and max_num_seqs is 64", {"max_num_seqs": 24}),
        ("vLLM: the KV cache memory is insufficient for a single request of length 32k", {"max_model_len": 16384}),
    ],
)
def test_a_told_number_gives_the_value_of_the_fix(text: str, flags: dict[str, int]) -> None:
    assert run(text).findings[0].fixes[0].flags == flags


@pytest.mark.parametrize(
    ("text", "phase"),
    [
        (OOM.format("Error in model execution: ", "1.50", "0.40", "22.60"), "startup_profile"),
        (OOM.format("Error in model execution (input dumped to /tmp/e.pkl): ", "0.25", "0.10", "19.80"), "serving"),
        (
            "vLLM: GPU OOM\nERROR 05-20 10:42:56 [dump_input.py:81] Dumping scheduler stats: SchedulerStats(x=1",
            "serving",
        ),
        (
            "vLLM hits OOM in profile_run, at every start on this machine with two cards and the default flags",
            "startup_profile",
        ),
    ],
)
def test_a_model_step_is_placed_by_its_words_and_by_what_torch_held(text: str, phase: str) -> None:
    assert run(text).phase == phase


def test_a_number_of_samples_that_worked_is_no_length() -> None:
    error = "RuntimeError: Cannot get 12 free blocks from the pool"
    for told in ("With 40k samples vLLM works fine.", "20k prompts run fine with vLLM, 90k do not."):
        fixes = run(f"{told}\n{error}").findings[0].fixes
        assert not any("max_model_len" in fix.flags for fix in fixes)


@pytest.mark.parametrize(
    ("line", "engine"),
    [
        ("CUDA error 2 at /build/ollama/llm/llama.cpp/ggml-cuda.cu:812: out of memory", "Ollama"),
        ("2024/03/02 11:08:07 llama.go:455: 2 at ggml-cuda.cu:9132: out of memory", "Ollama"),
        ("GGML_ASSERT: ggml-cuda.cu:500: out of memory", "llama.cpp"),
        ("2024-02-07T17:55:43Z ERROR text_generation_launcher: CUDA out of memory", "Text Generation Inference"),
        ("thread 'main' panicked at 'Unable to warmup model: out of memory', router/src/main.rs:2", "Text Generation"),
    ],
)
def test_another_engine_s_log_is_named(line: str, engine: str) -> None:
    found = run(line)
    assert not found.findings
    assert engine in found.notes[0]


@pytest.mark.parametrize(
    ("text", "evidence"),
    [
        (
            'File "vllm/x.py", line 9, in f\n    assert param_data.shape == loaded_weight.shape\nAssertionError',
            "weight_shapes_differ",
        ),
        ("    assert self.data.shape == loaded_weight.shape\nAssertionError", "weight_shapes_differ"),
        ("    assert param.size() == loaded_weight.size()\nAssertionError", "weight_shapes_differ"),
        ("vLLM on gfx906: hipErrorInvalidImage", "arch_unsupported"),
        ("RuntimeError: HIP error: No compatible code objects found for: gfx1031", "arch_unsupported"),
        ("[1.5] [node:9] ib_md.c:11 UCX  ERROR mlx5_2: ibv_create_qp failed: No such device", "rdma_device"),
        ("nixlBackendError: NIXL_ERR_BACKEND\nvLLM's EngineCore failed to start.", "rdma_device"),
        ("RuntimeError: CUDA driver error: invalid argument\nvLLM worker, static_cuda_launcher", "stale_kernel"),
        (
            '{"file":"w.out","message":"(Worker pid=9) ERROR RuntimeError: CUDA driver error: file not found\\r"}',
            "stale_kernel",
        ),
    ],
)
def test_what_is_no_memory_is_named_by_its_line(text: str, evidence: str) -> None:
    found = run(text)
    assert found.verdict == "not a memory problem"
    assert found.findings[0].evidence[0].id == evidence


def test_free_memory_that_no_line_prints_is_not_told() -> None:
    frame = '  File "/a/vllm/worker/cache_engine.py", line 81, in _allocate_kv_cache\n'
    found = run(f"{frame}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 630.00 MiB. GPU 0 has a tot")
    assert "less was free" in found.findings[0].why


@pytest.mark.parametrize("name", ["frames of an old release", "an old release"])
def test_a_step_below_a_whole_prompt_comes_with_chunked_prefill_where_v0_may_run(name: str) -> None:
    frame = '  File "/a/vllm/entrypoints/llm.py", line 304, in generate\n    self._run_engine(use_tqdm=True)\n'
    text = "[Bug]: OOM with prompt_logprobs=1\n"
    text += frame if name == "frames of an old release" else "vllm 0.5.4\n"
    smaller = next(fix for fix in run(text).findings[0].fixes if fix.flags)
    assert smaller.flags == {"max_num_batched_tokens": 512, "enable_chunked_prefill": True}


SHORT = (
    "ValueError: The model's max seq len (8192) is larger than the maximum number of tokens that can be stored in KV "
    "cache (2064). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("llamafactory-cli chat --infer_backend vllm --template qwen", "--vllm_maxlen 2032"),
        ("python -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm", "rollout.max_model_len=2032"),
        ("swift infer --infer_backend vllm --model x/y", "--vllm_max_model_len 2032"),
        ('  File "/home/me/app/tts.py", line 5, in <module>\n    voice = Speaker("x")', "max_model_len=2032"),
        ('llm = LLM("x/y", dtype="half")', "max_model_len=2032"),
        ("TypeError: Speaker.__init__() got an unexpected keyword argument 'max_model_len'\nLLM(", "code of Speaker"),
    ],
)
def test_a_setting_is_given_as_the_program_of_the_text_takes_it(text: str, words: str) -> None:
    fix = next(fix for fix in run(f"{text}\n{SHORT}").findings[0].fixes if fix.flags.keys() == {"max_model_len"})
    assert words in fix.steps[0]
    assert fix.command == ()


def test_a_command_of_vllm_s_own_is_kept() -> None:
    for text in ("vllm serve x/y --dtype half", "python -m vllm.entrypoints.openai.api_server --model x/y", ""):
        fixes = run(f"{text}\n{SHORT}").findings[0].fixes
        assert next(fix for fix in fixes if "max_model_len" in fix.flags).command


V0_BLOCKS = """INFO 08-25 08:17:11 model_runner.py:175] Loading model weights took {} GB
INFO 08-25 08:17:12 gpu_executor.py:114] # GPU blocks: {}, # CPU blocks: {}
[rank0]: Traceback (most recent call last):
"""


@pytest.mark.parametrize(
    ("told", "weights", "blocks", "on_cpu", "pool", "share"),
    [
        ("推理时50g显存报错out of memory", 5.1039, 11749, 728, "64.55 GiB", 0.58),
        ("vLLM: out of memory during inference on a card with 24 GB VRAM", 13.5, 12000, 2048, "23.44 GiB", 0.52),
        ("vLLM is out of memory during inference", 4.0, 9000, 1024, "35.16 GiB", 0.67),
    ],
)
def test_cpu_blocks_tell_the_size_of_a_pool_that_could_not_be_allocated(
    told: str, weights: float, blocks: int, on_cpu: int, pool: str, share: float
) -> None:
    found = run(f"{told}\n{V0_BLOCKS.format(weights, blocks, on_cpu)}").findings[0]
    assert found.cause == "gpu_shared_or_not_free"
    assert pool in found.why
    assert found.fixes[0].flags == {"gpu_memory_utilization": share}


def test_a_card_s_name_with_a_smaller_size_is_a_slice_of_it() -> None:
    for card, size in (("H100 40GB (using MIG)", 40), ("an A100 20GB slice", 20), ("H100 80GB", 80)):
        text = f"vLLM on {card}: GPU OOM\nERROR 05-20 10:42:56 [dump_input.py:81] Dumping scheduler stats: x"
        step = run(text).findings[0].fixes[0].steps[0]
        assert 1 <= float(step.removeprefix("take ").split()[0]) * size < 4  # GiB


@pytest.mark.parametrize(
    ("text", "is_block"),
    [
        (
            "XPU out of memory. Tried to allocate 1.02 GiB (GPU 0; 15.56 GiB total capacity; 0 bytes already allocated",
            True,
        ),
        (
            "XPU out of memory. Tried to allocate 2.30 GiB (GPU 0; 11.60 GiB total capacity; 0 bytes already allocated",
            True,
        ),
        (
            "XPU out of memory. Tried to allocate 1.02 GiB (GPU 0; 15.56 GiB total capacity; 14 GiB already allocated",
            False,
        ),
    ],
)
def test_a_refusal_on_an_empty_intel_gpu_is_a_limit_of_one_block(text: str, is_block: bool) -> None:
    found = run(f"RuntimeError: {text}; 0 bytes reserved in total by PyTorch)").findings[0]
    assert (found.cause == "unified_memory_or_wsl") == is_block
    assert ("a block of" in found.why) == is_block


@pytest.mark.parametrize(
    ("model", "ranks", "wanted", "factors"),
    [
        ("Qwen/Qwen1.5-32B-Chat", 4, "40.00", "10 heads x 32,768 tokens x 32,768 tokens x 4 bytes"),
        ("Qwen/Qwen2.5-7B-Instruct", 2, "28.00", "14 heads x 32,768 tokens x 32,768 tokens x 2 bytes"),
    ],
)
def test_unfused_attention_asks_for_the_square_of_the_length(model: str, ranks: int, wanted: str, factors: str) -> None:
    frame = '  File "/a/vllm/attention/torch_sdpa.py", line 94, in forward\n    x = scaled_dot_product_attention(\n'
    error = f"RuntimeError: XPU out of memory. Tried to allocate {wanted} GiB (GPU 0; 15.11 GiB total capacity"
    flags = f"--tensor-parallel-size {ranks} --dtype float16 --load-in-low-bit sym_int4"
    found = run(f"vllm: 0.3.3\n$ --model {model} {flags}\n{frame}{error}").findings[0]
    assert factors in found.why
    assert found.fixes[0].flags["max_model_len"] == 4096
    assert not any("model" in fix.flags for fix in found.fixes)


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (
            "Lower max tokens of this vLLM model to 32k since 64k was causing OOM with short prompts",
            {"num_gpu_blocks_override": 2048},
        ),
        ("vLLM: reduced the KV cache to 16k as 48k goes out of memory in prefill", {"num_gpu_blocks_override": 1024}),
        ("vLLM: lowered the context to 8k because of OOM at the first request", {"max_model_len": 8192}),
    ],
)
def test_the_size_that_a_text_lowers_to_is_its_fix(text: str, flags: dict[str, int]) -> None:
    assert run(text).findings[0].fixes[0].flags == flags


def test_a_size_that_was_lowered_in_vain_is_no_fix() -> None:
    fixes = (
        run("vLLM: I lowered the context to 8k but it still runs out of memory at the first request").findings[0].fixes
    )
    assert not any(fix.flags.get("max_model_len") == 8192 for fix in fixes)
