"""Failures that people tell in their own words, in the words of several people, models, cards and languages."""

from __future__ import annotations

import pytest

from legroom.diagnosis.log_diagnosis import read_log
from legroom.diagnosis.pasted_command import named_card
from legroom.diagnosis.verdict import Diagnosis


def diagnosed(text: str) -> Diagnosis:
    return read_log([text.encode()]).runs[0]


CAUSES = {
    "weights_too_big": (
        "I try to run Llama-3.3-70B-Instruct in bf16 with vLLM on two RTX 4090s (tensor parallel 2) and it runs out "
        "of GPU memory when the model is loading.",
        "一张 RTX 3090 24G 跑 Qwen2.5-32B-Instruct，没有量化，用 vLLM 启动就显存不足，怎么办？",
        "Can't get meta-llama/Llama-2-13b-chat-hf onto a T4: vllm is out of memory while loading the weights.",
        "OOM loading GLM-4.5-Air bf16 onto 4x RTX A6000 48GB with tp=4 in vllm, dies at shard 38/47",
        "OOM when starting vLLM with Mixtral-8x7B-Instruct on 2×A6000 (48GB each), tensor_parallel_size=1.",
    ),
    "no_cache_blocks": (
        "I serve Qwen/Qwen2.5-14B-Instruct on an A10G (24 GB) with vLLM. Even with max_model_len=2048 there is no "
        "memory left for the KV cache and it refuses to start.",
        "vllm won't come up on my L4 with Qwen3-14B: zero GiB available for the KV cache.",
        "vLLM 启动失败，没有显存留给 KV cache，模型 Qwen3-14B，显卡 L4",
    ),
    "kv_too_small_for_max_len": (
        "Serving mistralai/Mistral-7B-Instruct-v0.3 with vllm on one L4: the default context of 32k doesn't fit in the "
        "KV cache, the engine won't start.",
        "vllm, gemma-3-12b-it on a 4090: KV cache too small to hold one request of 131072 tokens",
        "vllm 部署 Qwen3-8B，KV cache 放不下 40960 长度，起不来",
    ),
    "runtime_activation_burst": (
        "vLLM 0.8.5, Qwen2.5-72B-Instruct-AWQ on 2x A100 40GB. It runs fine for an hour, but when somebody sends a 30k "
        "prompt it crashes with CUDA out of memory.",
        "Since our requests ask for prompt_logprobs the vLLM server goes OOM. Qwen3-8B, 0.95 on an L40S.",
        "vllm 部署 Qwen3-32B，压测并发 64 的时候显存溢出",
    ),
    "multimodal_inputs": (
        "Qwen2.5-VL-7B in vllm: sending a 4K image makes the server run out of CUDA memory; small images are fine.",
        "When users upload many images to Qwen3-VL-8B, vLLM is out of memory while processing the request.",
        "vLLM 部署 Qwen2.5-VL-7B，请求里的视频一长就爆显存",
    ),
    "leak_over_time": (
        "GPU memory of the vLLM server keeps creeping up by around 200 MB a day until it OOMs after a week. v0.9.1",
        "RAM of vllm grows steadily with every request until the box is out of memory.",
        "vllm 运行时内存持续增长，几天后 OOM",
    ),
    "cudagraph_capture_oom": (
        'vllm 0.19: it dies at "Capturing CUDA graphs (decode, FULL)" with torch.OutOfMemoryError; '
        "gpu-memory-utilization 0.97, RTX 3090. With --enforce-eager it starts.",
        "OOM during CUDA graph capture on an L40S with vLLM 0.15",
        "vLLM 捕获 CUDA 图的时候 OOM",
    ),
    "lora_or_spec_decode_extra": (
        "With speculative decoding (EAGLE3 draft) my Llama-3.1-8B server OOMs on startup on a 4090; without it, it "
        "starts.",
        "vLLM OOMs at startup when LoRA is on. Without LoRA, it starts.",
    ),
    "gpu_shared_or_not_free": (
        "My colleague runs a training job on the same A100. When I start vLLM there's not enough free GPU memory.",
        "After Ctrl+C the GPU memory isn't released; the next vllm serve fails: not enough memory.",
        "vllm 进程 kill 之后显存没有释放，再次启动就 OOM",
        "Two services on one RTX 4090: chat (vllm, --gpu-memory-utilization 0.75) and embeddings (vllm, "
        "--gpu-memory-utilization 0.4). The second restarts forever with out of memory.",
        "我在同一张A100上起了两个vllm服务，都设置 gpu_memory_utilization=0.6，第二个启动时报显存不足",
        "vLLM on GPU 0 with gpu_memory_utilization 0.9, then whisper and a reranker on GPU 0 too; the reranker fails "
        "with torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.",
        "The LLM is created again for every call of our function, and vllm is out of memory from the second on.",
    ),
    "sleep_mode_or_rlhf_colocation": (
        "训练 Qwen2-VL 的时候报 CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62",
        "Fine-tuning stops after 30 steps: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:119",
        "verl 0.6, async: Free memory on device cuda:0 (31.5/79.25 GiB) on startup is less than desired GPU memory "
        "utilization (0.5, 39.63 GiB). Decrease GPU memory utilization",
        "OpenRLHF: AssertionError: Error in memory profiling. Initial free memory 30.11 GiB, current free memory 41.72 "
        "GiB. This happens when other processes sharing the same container release GPU memory",
    ),
}


@pytest.mark.parametrize(("cause", "text"), [(cause, text) for cause, texts in CAUSES.items() for text in texts])
def test_a_failure_told_in_words_has_its_cause_first(cause: str, text: str) -> None:
    answer = diagnosed(text)
    assert answer.verdict == "cause found"
    assert answer.findings[0].cause == cause
    assert answer.findings[0].fixes


@pytest.mark.parametrize(
    "text",
    [
        "Why does vLLM use 90% of my VRAM? I load a 0.5B model on a 24GB 3090 and nvidia-smi shows 21.5GB used.",
        "VRAM usage too high with vllm: Qwen3-0.6B takes 72 GB on an A100 80GB. Is this a memory leak?",
        "为什么 vllm 部署 7B 模型占用了 70G 显存？A100 80G，模型本身只有 15G",
        "I deployed Llama-3.1-8B with vllm and memory usage is 73GB even when idle. How can I reduce it?",
        "[Bug]: 30GB VRAM usage for 1.7B model with vllm 0.11, L40S",
        "vllm 部署 0.5B 的模型，显存占用过高，24G 的卡几乎占满",
    ],
)
def test_a_card_that_is_full_from_the_start_is_the_share_that_was_asked_for(text: str) -> None:
    answer = diagnosed(text)
    assert answer.verdict == "not a memory problem"
    assert "--gpu-memory-utilization" in answer.findings[0].fixes[0].steps[0]


@pytest.mark.parametrize(
    "text",
    [
        "vLLM hangs with tensor parallel 2, no OOM in the logs, nothing happens.",
        "I lowered max_model_len to avoid running out of memory; now vllm says unrecognized arguments: --max-len",
        "vllm 没有 OOM，但是一直卡住",
    ],
)
def test_a_shortage_that_a_sentence_denies_is_none(text: str) -> None:
    answers = read_log([text.encode()]).runs
    assert not any(finding.cause.endswith("_oom") for run in answers for finding in run.proven_findings[:1])


STARTUP_CHECK = (
    "{machine}, vLLM {release}: ValueError: Free memory on device cuda:0 (34.34/121.63 GiB) on startup is less than "
    "desired GPU memory utilization (0.8, 97.3 GiB). {more}"
)


@pytest.mark.parametrize(
    ("machine", "release", "more", "cause"),
    [
        ("DGX Spark", "0.21.0", "", "gpu_shared_or_not_free"),  # since 0.11.1 cached files count as available
        ("Jetson AGX Thor", "0.14.0", "", "gpu_shared_or_not_free"),
        ("GB10", "0.11.0", "", "unified_memory_or_wsl"),
        ("GB10", "0.21.0", "After drop_caches it starts.", "unified_memory_or_wsl"),
        ("Strix Halo", "0.19.0", "", "unified_memory_or_wsl"),
    ],
)
def test_cached_files_take_free_memory_only_where_vllm_counts_them(
    machine: str, release: str, more: str, cause: str
) -> None:
    answer = diagnosed(STARTUP_CHECK.format(machine=machine, release=release, more=more))
    assert answer.findings[0].cause == cause


@pytest.mark.parametrize(("platform", "share"), [("NPU", 0.93), ("NPU", 0.85), ("CUDA", 0.9)])
def test_a_pool_that_is_too_large_for_a_card_of_its_own_is_no_neighbours_fault(platform: str, share: float) -> None:
    text = (
        f"vllm serve some/model --gpu-memory-utilization {share}\n"
        '  File "vllm/worker/model_runner_v1.py", line 9, in initialize_kv_cache\n'
        f"RuntimeError: {platform} out of memory. Tried to allocate 3.10 GiB ({platform} 0; 60.97 GiB total capacity; "
        "57.21 GiB already allocated; 57.21 GiB current active; 2.50 GiB free; 57.40 GiB reserved in total by PyTorch)"
    )
    finding = diagnosed(text).findings[0]
    assert finding.cause != "gpu_shared_or_not_free"
    assert finding.fixes[0].flags["gpu_memory_utilization"] < share - 0.1


def test_shares_of_one_card_that_add_up_to_more_than_one_are_named_with_their_sum() -> None:
    text = "Two engines on one 12GB card: vLLM asks for 0.80 of the GPU, the other 0.45. vLLM never gets past loading."
    finding = diagnosed(text).findings[0]
    assert finding.cause == "gpu_shared_or_not_free"
    assert "1.25" in finding.why


@pytest.mark.parametrize(
    ("told", "release"),
    [
        ("Works with vLLM 0.9.2, fails with 0.10.0 on the same machine.", "0.9.2"),
        ("On 0.18.0 everything was fine.", "0.18.0"),
        ("Downgrading to 0.19.1 helps.", "0.19.1"),
        ("Since we upgraded from 0.19.0 to 0.20.0 it does not start.", "0.19.0"),
        ("v0.19.1 起得来，升级之后就不行了。", "0.19.1"),
    ],
)
def test_a_release_that_is_told_to_work_is_a_fix(told: str, release: str) -> None:
    text = f"{told}\nValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
    finding = diagnosed(text).findings[0]
    assert finding.cause == "no_cache_blocks"
    assert f"vllm=={release}" in finding.fixes[0].steps[0]


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("2x A100 40GB", 2),
        ("4×RTX 3090", 4),
        ("two RTX 4090s", 2),
        ("8张A800", 8),
        ("tensor parallel 4", 4),
        ("an L4", 1),
    ],
)
def test_cards_that_are_counted_in_words_split_the_model(words: str, ranks: int) -> None:
    text = f"vLLM serves Qwen2.5-72B-Instruct-AWQ on {words}; after an hour of traffic it is out of memory."
    assert (diagnosed(text).case.startup.args.tensor_parallel_size or 1) == ranks


def test_torch_that_holds_more_than_all_weights_was_not_loading_them() -> None:
    text = (
        "vllm serve Qwen/Qwen3-14B-AWQ --max-model-len 16384\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of "
        "23.64 GiB of which 1.02 GiB is free. Including non-PyTorch memory, this process has 22.60 GiB memory in use. "
        "Of the allocated memory 21.80 GiB is allocated by PyTorch, and 210.00 MiB is reserved by PyTorch but "
        "unallocated."
    )
    assert "weights_too_big" not in {finding.cause for finding in diagnosed(text).findings}


def test_a_setting_that_is_told_to_work_is_the_first_fix() -> None:
    text = "vLLM runs out of memory while loading the weights, it works with --cpu-offload-gb 4"
    assert diagnosed(text).findings[0].fixes[0].flags == {"cpu_offload_gb": 4.0}


def test_a_script_s_variables_are_part_of_its_command() -> None:
    script = "export MODEL_PATH=Qwen/Qwen2.5-72B-Instruct\nTP=2\n"
    script += "vllm serve $MODEL_PATH -tp ${TP} --max-model-len ${LEN:-8192}\n"
    args = diagnosed(f"{script}2x A100 40GB. torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 462.00 MiB.")
    assert args.findings[0].cause == "weights_too_big"
    assert "Qwen/Qwen2.5-72B-Instruct" in " ".join(args.findings[0].fixes[0].command + args.findings[0].fixes[0].steps)


MLLAMA = (
    "vLLM 0.6.3 on an A100 80GB runs out of memory with this command, and a smaller model works:\n"
    "vllm serve meta-llama/Llama-3.2-11B-Vision-Instruct --max-model-len 2048"
)


def test_the_plan_of_the_command_tells_where_memory_runs_out_if_the_text_does_not() -> None:
    found = diagnosed(MLLAMA).findings[0]
    assert found.cause == "profiling_activation_peak"
    assert found.fixes[0].flags["max_num_seqs"] < 256
    assert "all their images" in found.fixes[0].why


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
        "It put the whole model on GPU 0 only.",
    ],
)
def test_the_plan_gives_way_to_what_the_text_shows(line: str) -> None:
    assert "this is where the plan" not in diagnosed(f"{MLLAMA}\n{line}").findings[0].why


def test_the_plan_gives_way_where_torch_held_little_of_a_full_card() -> None:
    text = (
        "Qwen2.5-72B-Instruct on one card of 24 GB, vLLM 0.8.5:\ntorch.OutOfMemoryError: CUDA out of memory. Tried to "
        "allocate 38.00 MiB. GPU 0 has a total capacity of 23.65 GiB of which 39.44 MiB is free. Process 21068 has "
        "21.12 GiB memory in use. Of the allocated memory 1.22 GiB is allocated by PyTorch, and 220.57 MiB is reserved "
        "by PyTorch but unallocated."
    )
    assert "this is where the plan" not in diagnosed(text).findings[0].why


@pytest.mark.parametrize(
    ("text", "card"), [("显卡是GTX4060ti (16G)，启动失败", "4060ti"), ("an RTX 8000 card", "RTX 8000")]
)
def test_cards_are_read_behind_any_character_and_series(text: str, card: str) -> None:
    assert named_card(text) == card


def test_the_size_of_ram_is_no_shortage_of_it() -> None:
    text = "vLLM fails on 8 cards.\n宿主机内存：1.0 TiB\nThe first request ends with CUDA out of memory."
    assert "host_ram_oom" not in {finding.cause for finding in diagnosed(text).findings}


@pytest.mark.parametrize(
    "text",
    [
        "With multiprocessing on one 16 GB card vLLM says CUDA out of memory; sequentially it runs fine.",
        "vLLM is not deallocating memory after the evaluation job is completed: 12 GB of an idle card are taken.",
        "vLLM with default settings does not start when the available GPU memory is below 90%.",
    ],
)
def test_a_card_that_others_hold_is_heard_in_many_words(text: str) -> None:
    assert diagnosed(text).findings[0].cause == "gpu_shared_or_not_free"
