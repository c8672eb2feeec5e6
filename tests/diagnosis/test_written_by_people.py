"""Short texts that people wrote: what their words, commands and settings say."""

from __future__ import annotations

import pytest
from short_logs import diagnosis, first, oom

from legroom.diagnosis.log_diagnosis import read_log
from legroom.diagnosis.pasted_command import pasted_command
from legroom.facts.releases import release

NO_BLOCKS = "Available KV cache memory: {} GiB\nValueError: No available memory for the cache blocks.\n"


def listed_oom(others: str, own: float, torch: float, unused: str = "14.00 MiB") -> str:
    return (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 786.00 MiB. GPU 0 has a total capacity of "
        f"44.35 GiB of which 739.50 MiB is free. {others}Including non-PyTorch memory, this process has {own:.2f} GiB "
        f"memory in use. Of the allocated memory {torch:.2f} GiB is allocated by PyTorch, and {unused} is reserved by "
        "PyTorch but unallocated.\n"
    )


ALLOCATION = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {wanted} GiB. GPU 0 has a total capacity of "
    "21.98 GiB of which {free} GiB is free. Of the allocated memory {held} GiB is allocated by PyTorch, and "
    "{unused} GiB is reserved by PyTorch but unallocated."
)


def test_torch_s_own_hint_is_no_setting_even_where_it_is_wrapped() -> None:
    hint = "If reserved but unallocated memory is large try setting\nPYTORCH_ALLOC_CONF=expandable_segments:True{}\n"
    log = oom(79.18, 5.0, 64.7, 7.6, "6.00 GiB", "CUDA")
    assert first(log + hint.format(" to avoid fragmentation.")).fixes[0].kind == "allocator_conf"
    assert first(hint.format("") + log).fixes[0].kind != "allocator_conf"


def test_a_message_wrapped_after_a_comma_is_joined_with_a_blank() -> None:
    lines = (
        "ValueError: To serve at least one request with the model's max seq len (250000), 3.19 GiB KV cache is needed,",
        "which is larger than the available KV cache memory (0.01 GiB). Based on the available memory, the estimated l",
        "ength is 256.",
    )
    assert first("\n".join(lines)).cause == "kv_too_small_for_max_len"


def test_prose_that_begins_with_a_flag_is_no_command() -> None:
    told = "--gpu-memory-utilization to 0.8389. To disable it, set VLLM_X=0.\n--attention-backend FLASH_ATTN"
    _, args = pasted_command(f"vllm\n{told}", None, release("0.21.0"))
    assert (args.gpu_memory_utilization, args.attention_backend) == (None, "FLASH_ATTN")


def test_an_image_names_its_engine() -> None:
    log = "repack #9: torch.OutOfMemoryError\nimage {}:latest, TP2\n"
    assert diagnosis(log.format("lmsysorg/sglang")).verdict == "not understood"
    assert diagnosis(log.format("vllm/vllm-openai")).verdict != "not understood"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("vLLM runs out of memory during CUDA graph capture on L40S, 0.95 utilization", "cudagraph_capture_oom"),
        ("After about 200 requests vLLM crashes with CUDA OOM", "runtime_activation_burst"),
        ("vllm fails with out of memory while loading the weights", "weights_too_big"),
        ("vllm: loglikelihood tasks end in CUDA OOM", "runtime_activation_burst"),
        ("engine died (prompt_logprobs OOM ~7.5GiB / 2.8 free)", "runtime_activation_burst"),
        ("KV cache needed 12.5 GiB but only 3.1 GiB available, max_model_len 131072", "kv_too_small_for_max_len"),
        ("The RSS of the vLLM server keeps growing until the pod is OOMKilled", "leak_over_time"),
        ("显存一直在缓慢增长，两天之后 vLLM 容器重启", "leak_over_time"),
        ("systemd[1]: vllm.service: A process of this unit has been killed by the OOM killer.", "host_ram_oom"),
        ("vllm task: Container killed due to memory usage", "host_ram_oom"),
        ("Pod vllm-0 evicted: The node was low on resource: memory.", "host_ram_oom"),
        ("bash: line 1:  4242 Killed                  vllm serve Qwen/Qwen3-8B", "host_ram_oom"),
        ("The DGX Spark with vLLM froze: the machine is unresponsive", "unified_memory_or_wsl"),
        ("vLLM: a false OutOfMemoryError on the first tensor, the card is free", "driver_or_cuda_mismatch"),
        ("Training Progress: 100%\nRuntimeError: DataLoader worker is killed by signal: Killed.", "not_memory"),
        ("ncclInternalError: Internal check failed.\nFailed to initialize any NET plugin", "not_memory"),
        ("vllm serve dies at the KV-cache check: it leaves only 0.30 GiB for KV at 0.9", "kv_too_small_for_max_len"),
        ("vLLM cannot start because of low RAM on the host", "host_ram_oom"),
        ("Failed to allocate memory for tensor(torch.Size([2]), x) because no memory is available", "host_ram_oom"),
        ("kill -9 of the API server; after the restart vLLM runs out of memory", "gpu_shared_or_not_free"),
        ("OutOfMemoryError on the first tensor although 9 GiB are free", "driver_or_cuda_mismatch"),
        ("vLLM: the GPU doesn't support querying the available free memory", "driver_or_cuda_mismatch"),
        ("UR_RESULT_ERROR_DEVICE_LOST during determine_available_memory", "not_memory"),
        ("vLLM's worker exited with exit code 136", "not_memory"),
        ("vLLM 0.25.0 will hang if TP > 1", "not_memory"),
        (
            "ERROR 02-17 20:51:49 core.py:210]     assert self.rank\nERROR 02-17 20:51:49 core.py:210] AssertionError",
            "not_memory",
        ),
        ("The output_size of gate's weight = 192 is not divisible by weight quantization block_n = 128.", "wrong_flag"),
        (
            "vllm serve Qwen/Qwen2.5-72B-Instruct --tensor-parallel-size 2\non two A6000, but OOM happened",
            "weights_too_big",
        ),
        ("vllm: dies mid-request\nRuntimeError: Triton Error [CUDA]: out of memory", "runtime_activation_burst"),
        (
            "vLLM is up. Then you send your first request and it crashes:\nTriton Error [CUDA]: out of memory",
            "runtime_activation_burst",
        ),
        (
            "vLLM on WSL dies mid-request\ntorch.OutOfMemoryError: HIP out of memory. Tried to allocate 700.00 MiB. "
            "GPU 0 has a total capacity of 15.87 GiB of which 800.00 MiB is free. 12.8 GiB is allocated by PyTorch, "
            "and 1.80 GiB is reserved by PyTorch but unallocated.",
            "runtime_activation_burst",
        ),
        ("vllm: max seq len (65536) ... available KV cache memory (0.75 GiB)", "kv_too_small_for_max_len"),
        ("vllm: OutOfResources: shared memory, Required: 66000, Hardware limit: 65536", "not_memory"),
        (
            "vllm 0.7.3, 16 gpu (90G memory) but OOM happened\npython -m vllm.entrypoints.openai.api_server --model "
            "/models/DeepSeek-R1-BF16 --tensor-parallel-size 16 --gpu-memory-utilization 0.975 --max-model-len 80000",
            "weights_too_big",
        ),
        ("Vllm Version: 0.8.1, why are 4 cards not enough GPU memory?\nTypeError: 'x' is no tuple", "not_memory"),
    ],
)
def test_a_failure_told_in_prose_is_placed_by_its_words(text: str, cause: str) -> None:
    assert first(text).cause == cause


def test_the_last_of_several_attempts_decides() -> None:
    command = "vllm serve Qwen/Qwen3-8B --max-model-len {}\n"
    length = "ValueError: 3.00 GiB KV cache is needed, available 1.20 GiB\n"
    capture = '  File "/x/torch/cuda/graphs.py", line 84, in capture_end\nRuntimeError: CUDA error: out of memory\n'
    tried = read_log([(command.format(4096) + length + command.format(128) + capture).encode()]).runs
    assert [run.findings[0].cause for run in tried] == ["cudagraph_capture_oom", "kv_too_small_for_max_len"]
    assert len(read_log([(command.format(4096) + command.format(128) + capture).encode()]).runs) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vLLM: loglikelihood tasks end in CUDA OOM", "log-probabilities of the prompt"),
        (
            "TypeError: LLM.__init__() got an unexpected keyword argument 'gpu_memory_utilisation'",
            "gpu_memory_utilization",
        ),
        (
            "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-x (size 33)\nleftovers in /dev/shm",
            "earlier",
        ),
    ],
)
def test_the_explanation_names_what_the_text_tells(text: str, words: str) -> None:
    assert words in first(text).why


def test_a_server_is_not_well_where_the_text_says_that_it_fails() -> None:
    stats = (
        "INFO 01-23 06:33:37 metrics.py:396] Running: 6 reqs, Swapped: 0 reqs, Pending: 0 reqs, GPU KV cache usage: 9%"
    )
    assert diagnosis(stats).verdict == "no problem found"
    assert diagnosis(f"[Bug]: block table already exists\n{stats}").verdict == "cause above"


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve Qwen/Qwen3-8B --max-model-len 4096",
        "My program ends, and there was no OOM error",
        "lmdeploy serve api_server: RuntimeError: [TM][ERROR] CUDA runtime error: out of memory",
        "text_generation_server/models/flash_causal_lm.py: CUDA out of memory.",
    ],
)
def test_a_question_or_another_engine_is_no_failure_of_vllm(text: str) -> None:
    assert all(run.verdict == "not understood" for run in read_log([text.encode()], "log").runs)


def test_a_trainer_gets_its_own_keys_and_no_server_s_command() -> None:
    log = (
        "$ actor_rollout_ref.rollout.gpu_memory_utilization=0.6\nrollout.resume(tags=['weights']) -> wake_up\n"
        "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62\n"
    )
    fix = first(log).fixes[0]
    assert "actor_rollout_ref.rollout.gpu_memory_utilization=0.45" in fix.steps[0]
    assert "param_offload=True" in fix.steps[1]
    assert not fix.command


def test_a_card_and_a_model_in_prose_make_a_plan() -> None:
    log = "GPU: NVIDIA RTX 4090, model Qwen/Qwen2.5-14B-Instruct\n" + NO_BLOCKS.format(-4.02)
    assert first(log).fixes[0].plan is not None
    assert first(log.replace("4090", "4090 and an A100")).fixes[0].plan is None


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("On a DGX Spark the engine dies with\n`TimeoutError: RPC call to sample_tokens timed out`", "not_memory"),
        ("vllm says\n- `ValueError: Unknown quantization method: exl9. Must be one of ['awq']`", "not_memory"),
        ('vllm pod crashes with `assert t.is_pinned(), "CPU tensor must be pinned"`', "not_memory"),
        ('ERROR   File "vllm/worker/worker.py", line 9, in check_if_supports_dtype', "driver_or_cuda_mismatch"),
        ("vllm 0.26.0: the cold start fills 52 GB of RAM and gets OOM-killed", "host_ram_oom"),
        ("vllm: 12 images cause an OOM error during the profiling stage", "profiling_activation_peak"),
        ("vllm 0.25.1: host memory continuously increases until it runs out of memory", "leak_over_time"),
        (
            "rollout_gpu_mem_util 0.55, free_cache_engine=True\nCUDA Error: out of memory at cumem_allocator.cpp",
            "sleep_mode_or_rlhf_colocation",
        ),
        ("vLLM on a T4: after loading weights, only 110MB remained and it OOM'd", "weights_too_big"),
        ("vllm 0.25.1, 192k context: boots, then the 180K prompt OOMs", "runtime_activation_burst"),
        (
            'vllm fails: "Free memory on device cuda:N ... is less than desired GPU memory utilization"',
            "gpu_shared_or_not_free",
        ),
        (
            f"Crash under our agent workload, ~1 in flight.\n{oom(94.9, 1.2, 88.0, 0.5, '1.40 GiB')}",
            "runtime_activation_burst",
        ),
    ],
)
def test_words_of_a_person_place_the_failure(text: str, cause: str) -> None:
    assert first(text).cause == cause


@pytest.mark.parametrize(
    ("text", "flags", "step"),
    [
        (
            "ValueError: Too large swap space. 90.00 GiB out of the 100.00 GiB total CPU memory is allocated for it.",
            {"swap_space": 0},
            "",
        ),
        (
            "vllm serve /dev/shm/model\nOut of memory: Killed process 7 (VLLM::EngineCor) anon-rss:9999999kB",
            {},
            "put the checkpoint on a disk",
        ),
        (
            "--load-format runai_streamer\nOut of memory: Killed process 7 (VLLM::EngineCor) anon-rss:9999999kB",
            {"model_loader_extra_config": {"concurrency": 8, "memory_limit": 6 << 30}},
            "",
        ),
    ],
)
def test_what_the_text_names_of_host_memory_is_given_back_first(text: str, flags: dict[str, object], step: str) -> None:
    fix = first(f"{text}\n").fixes[0]
    assert fix.flags == flags
    assert any(step in given for given in (*fix.steps, ""))


def test_a_message_that_ends_with_a_comma_goes_on_in_the_next_line() -> None:
    text = "vllm\nRuntimeError: write_cache_kernel,\n  /src/cache.cu:86, width must be 64\n"
    assert "width must be 64" in first(text).fixes[0].why


def test_flags_of_other_programs_are_not_given_to_vllm() -> None:
    text = "--dtype half\n--num-prompts 100 --dataset /data/prompts.json\n"
    command, args = pasted_command(text, None, release("0.20.0"))
    assert command is None
    assert args.others == ()
    assert args.dtype == "half"


def test_a_command_shown_twice_is_of_one_server() -> None:
    command = "python -m vllm.entrypoints.openai.api_server --model lmsys/vicuna-7b-v1.3 --gpu-memory-utilization 0.98"
    told = f"It runs with another server, not here:\n```\n{command}\n```\nIt OOMs:\n```\n$ {command}\n```\n"
    assert not diagnosis(told).case.has("shares_told")


def test_a_printed_failure_below_its_sentence_is_no_later_one() -> None:
    told = "CUDA out of memory when serving images\n" + "one\n" * 20
    assert first(told + listed_oom("Process 7 has 28.14 GiB memory in use. ", 15.49, 7.0)).cause == (
        "gpu_shared_or_not_free"
    )


def test_the_newest_line_may_come_first() -> None:
    newest = "engine.py :190 2024-02-03 03:44:03,976 Error initializing vLLM engine: "
    sized = "INFO 02-03 03:43:48 llm_engine.py:316] # GPU blocks: 7754, # CPU blocks: 2048\n"
    graphs = "INFO 02-03 03:43:49 model_runner.py:625] Capturing the model for CUDA graphs.\n"
    found = first(newest + listed_oom("", 43.6, 37.38, "275.68 MiB") + graphs + sized)
    assert found.cause == "cudagraph_capture_oom"


def test_an_engine_without_eager_mode_has_no_graphs_to_capture() -> None:
    config = "INFO 07-20 19:23:49 llm_engine.py:60] Initializing an LLM engine with config: model='m', {}seed=0)\n"
    sized = "INFO 07-20 19:27:06 llm_engine.py:131] # GPU blocks: 37085, # CPU blocks: 2048\nThen it runs into OOM.\n"
    assert first(config.format("tokenizer_mode=auto, ") + sized).cause == "runtime_activation_burst"
    with_graphs = config.format("tokenizer_mode=auto, enforce_eager=False, ") + sized
    assert first(with_graphs).cause == "cudagraph_capture_oom"


@pytest.mark.parametrize(
    ("told", "cause", "flags"),
    [
        (
            "vLLM: --enable-sleep-mode OOMs loading the model\n4. Run the same script without `--enable-sleep-mode`\n"
            "5. Observe that it loads correctly.",
            "sleep_mode_or_rlhf_colocation",
            {"enable_sleep_mode": None},
        ),
        (
            "vLLM with pipeline parallelism runs out of memory. "
            "With --tensor-parallel-size 4 --pipeline-parallel-size 1 it works fine.",
            "tp_kv_head_replication_or_pp_imbalance",
            {"tensor_parallel_size": 4, "pipeline_parallel_size": 1},
        ),
        (
            "> vLLM without --enforce-eager: OOM.\n> After adding the --enforce-eager parameter, the program runs "
            "successfully.",
            "cudagraph_capture_oom",
            {"enforce_eager": True},
        ),
    ],
)
def test_what_the_text_says_cured_it_names_cause_and_fix(told: str, cause: str, flags: dict[str, object]) -> None:
    found = first(told)
    assert (found.cause, dict(found.fixes[0].flags)) == (cause, flags)


def test_an_error_pasted_above_its_log_belongs_to_the_steps_below_it() -> None:
    graphs = "INFO 12-18 21:44:36 model_runner.py:394] Capturing the model for CUDA graphs.\n"
    assert first(f"RuntimeError: CUDA error: out of memory\n{graphs}").cause == "cudagraph_capture_oom"


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        ("docker run --gpus all \\\n  vllm/vllm-openai:v0.10.0 --model {model} --max-model-len 32768", "docker line"),
        ("- image: vllm/vllm-openai:v0.10.0\n  args: ['--model', '{model}', '--max-model-len', '32768']", "`args:`"),
    ],
)
def test_a_container_takes_the_changed_flag_where_its_others_stand(lines: str, place: str) -> None:
    short = "The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in KV cache"
    text = f"{lines.format(model='Qwen/Qwen2.5-14B-Instruct')}\nValueError: {short} (10320). On an RTX 5090."
    fix = first(text).fixes[0]
    assert fix.flags == {"max_model_len": 9216}
    assert place in fix.comment
    assert "--max-model-len 9216" in fix.comment


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "- Zombie vLLM process was holding 13.9 GB GPU memory\n- The worker failed with OOM at the model load",
            "gpu_shared_or_not_free",
        ),
        (ALLOCATION.format(wanted="3.60", free="2.20", held="16.20", unused="3.20"), "allocator_fragmentation"),
        (ALLOCATION.format(wanted="41252.90", free="21.00", held="0.00", unused="0.00"), "not_memory"),
        ("262,144 KV cache OOM (need 8.33 GiB, only 8.29 GiB)", "kv_too_small_for_max_len"),
        (
            "CUDA out of memory\n\nOn an AWS g4dn.xlarge:\nvllm serve acme/chatty-7b-v1.4 --dtype float",
            "weights_too_big",
        ),
        ("**Symptom:** `RuntimeError: PTX compilation failed` while vLLM loads the model.", "not_memory"),
        (
            "- vLLM crashed at start (exit 1, NOT GPU OOM):\n  `AttributeError: 'X' object has no attribute 'weight'`",
            "not_memory",
        ),
        ("[vllm] got an unexpected keyword argument '--gpu-memory-utilization'", "wrong_flag"),
        (
            "(raylet) file_system_monitor.cc:111: /tmp/ray/x is over 95% full, available space: 60427313152. "
            "Object creation will fail if spilling is required.",
            "not_memory",
        ),
    ],
)
def test_what_a_text_says_in_its_own_words_decides(text: str, cause: str) -> None:
    assert first(text).cause == cause
