from __future__ import annotations

import pytest
from diagnosis_logs import CAUSES, LOADED, TORCH, trace
from hypothesis import given
from hypothesis import strategies as st

from legroom.diagnosis.causes import causes
from legroom.diagnosis.diagnosis_json import readings_json
from legroom.diagnosis.finding import Finding, Fix
from legroom.diagnosis.fixes.failed_run import Hints
from legroom.diagnosis.log_diagnosis import read_log
from legroom.units import GIB

V0_ACCOUNTS = (
    "INFO 01-02 03:04:05 [worker.py:267] the current vLLM instance can use total_gpu_memory ({total}GiB) x "
    "gpu_memory_utilization ({share}) = {budget}GiB\n"
    "INFO 01-02 03:04:05 [worker.py:267] model weights take {weights}GiB; non_torch_memory takes 0.05GiB; PyTorch "
    "activation peak memory takes 1.40GiB; the rest of the memory reserved for KV Cache is {rest}GiB.\n"
)
LLAMA = (
    "(EngineCore_DP0 pid=7) INFO 01-02 03:04:00 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: "
    "model='meta-llama/Llama-3.1-8B-Instruct', max_seq_len=8192, tensor_parallel_size=1, dtype=torch.bfloat16\n"
)


def finding(log: str, **hints: str) -> Finding:
    return read_log([log.encode()], "log", Hints(**hints)).runs[0].findings[0]  # type: ignore[arg-type]


def fix_of(kind: str, cause: Finding) -> Fix:
    return next(fix for fix in cause.fixes if fix.kind == kind)


@pytest.mark.parametrize(
    ("before", "after", "length"),
    [
        ("", "", 40960),
        ("VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 ", "", 50176),
        ("", """ --hf-overrides '{"max_position_embeddings": 131072}'""", 50176),
    ],
)
def test_the_length_offered_is_at_most_the_limit_of_the_model_unless_that_was_lifted(
    before: str, after: str, length: int
) -> None:
    log = (
        "ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be stored "
        "in KV cache (51680)."
    )
    command = f"{before}vllm serve Qwen/Qwen3-32B --tensor-parallel-size 2 --max-model-len 131072{after}"
    fix = fix_of("max_model_len", finding(log, command=command))
    assert fix.flags["max_model_len"] == length
    assert ("131,072 is above the 40,960 tokens" in fix.why) == (length == 40960)


@given(st.integers(1, 2_000_000))
def test_the_length_offered_is_never_above_what_the_log_says_fits(fits: int) -> None:
    log = (
        "ValueError: The model's max seq len (2097152) is larger "
        "than the maximum number of tokens that can be stored in "
        f"KV cache ({fits})."
    )
    length = finding(log).fixes[0].flags["max_model_len"]
    assert 0 < length <= fits
    assert length >= fits * 0.5 or fits < 40


def test_without_an_estimate_the_length_follows_from_the_bytes_rounded_against_us() -> None:
    log = (
        "ValueError: To serve at least one request with the models's "
        "max seq len (100000), (4.26 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (4.25 GiB)."
    )
    assert 95_000 < finding(log).fixes[0].flags["max_model_len"] < 100_000


def _short_of_kv(needed: float, has: float, fits: int) -> str:
    return (
        f"ValueError: To serve at least one request with the model's max seq len (131072), ({needed} GiB KV cache is "
        f"needed, which is larger than the available KV cache memory ({has} GiB). Based on the available memory, the "
        f"estimated maximum model length is {fits}."
    )


def test_keys_and_values_in_8_bits_are_offered_where_half_a_request_fits() -> None:
    offered = [
        any(fix.flags == {"kv_cache_dtype": "fp8"} for fix in finding(_short_of_kv(16.0, has, fits)).fixes)
        for has, fits in ((5.06, 41472), (9.0, 73728))
    ]
    assert offered == [False, True]


def test_a_checkpoint_that_keeps_the_length_on_the_same_card_is_another_way() -> None:
    served = LLAMA.replace("v0.11.0", "v0.32.0").replace("8192", "131072") + _short_of_kv(16.0, 3.89, 31872)
    kept = fix_of("checkpoint_format", finding(served, gpu="rtx4090"))
    assert "FP8" in kept.flags["model"]
    assert "max_model_len" not in kept.flags
    assert kept.plan.settings.max_model_len == 131072
    assert kept.plan.settings.gpus_used == 1
    assert "another checkpoint" in kept.trades


def test_only_what_the_log_prints_is_measured_and_a_pool_beyond_the_planned_range_is_told() -> None:
    """One number of the log makes a sum come out: what it is a sum of was derived."""
    served = LLAMA.replace("v0.11.0", "v0.32.0").replace("8192", "131072")
    for has, told in ((3.89, True), (5.4, False)):
        fix = finding(served + _short_of_kv(16.0, has, int(has * 8192)), gpu="rtx4090").fixes[0]
        layout = fix.plan.layout
        parts = (layout.weights, layout.activation, layout.cuda_graph, layout.non_torch)
        assert {part.kind for part in parts} == {"derived"}
        assert layout.kv_cache.kind == "measured"
        assert round(layout.kv_cache.bytes / GIB, 2) == pytest.approx(has, abs=0.011)
        assert ("below what is planned for this server" in fix.why) is told
    loaded = served + LOADED + "\n" + _short_of_kv(16.0, 5.4, 44236)
    layout = finding(loaded, gpu="rtx4090").fixes[0].plan.layout
    assert (layout.weights.kind, layout.activation.kind) == ("measured", "derived")


def test_a_fix_that_fits_by_the_figures_of_the_log_says_where_a_plan_without_them_differs() -> None:
    sized = LLAMA.replace("v0.11.0", "v0.32.0").replace("8192", "131072") + LOADED + "\n"
    cause = finding(sized + _short_of_kv(16.0, 5.74, 47008), gpu="rtx4090")
    assert cause.fixes[0].flags["max_model_len"] > 45000
    assert "Without this log, legroom plan calls it tight" in cause.fixes[0].why
    assert "Without this log" not in fix_of("more_or_fewer_gpus_tp_pp", cause).why


@pytest.mark.parametrize(("has", "fits", "is_of_another_card"), [(9.37, 76752, True), (4.29, 35136, False)])
def test_a_log_that_the_named_card_cannot_have_written_says_so_and_is_not_planned_on_it(
    has: float, fits: int, is_of_another_card: bool
) -> None:
    sized = LLAMA.replace("8192", "131072") + LOADED + "\n"
    cause = finding(sized + _short_of_kv(16.0, has, fits), gpu="l4")
    assert ("another GPU" in cause.why) == is_of_another_card
    assert (cause.fixes[0].before is None) == is_of_another_card


def test_state_blocks_are_the_answer() -> None:
    assert finding(CAUSES["too few state blocks"][1]).fixes[0].flags == {"max_num_seqs": 296}


def test_less_of_a_busy_card_is_what_fits_into_its_free_memory() -> None:
    fix = fix_of("lower_util", finding(CAUSES["less free than asked for"][1]))
    share = fix.flags["gpu_memory_utilization"]
    assert share * 79.18 < 30.12 - 0.4
    assert share * 79.18 > 28


def test_utilization_is_raised_where_the_profile_lines_show_room() -> None:
    log = V0_ACCOUNTS.format(total="23.64", share="0.60", budget="14.18", weights="14.10", rest="-1.37")
    log += "ValueError: No available memory for the cache blocks."
    fix = finding(log).fixes[0]
    assert fix.kind == "raise_util"
    assert fix.flags["gpu_memory_utilization"] * 23.64 > 14.18 + 1.37


def test_utilization_is_lowered_where_capture_fails_after_the_pool_took_the_budget() -> None:
    log = V0_ACCOUNTS.format(total="44.53", share="0.98", budget="43.64", weights="20.64", rest="21.20")
    log += "INFO [model_runner.py:1442] Capturing cudagraphs for decoding.\n"
    log += TORCH.format(
        wanted="2.00 MiB", total="44.53 GiB", free="448.00 KiB", own="44 GiB", torch="42 GiB", unused="1 MiB"
    )
    first = finding(log)
    assert first.cause == "cudagraph_capture_oom"
    assert fix_of("lower_util", first).flags["gpu_memory_utilization"] <= 0.97


def test_no_cause_that_is_not_memory_offers_a_memory_flag() -> None:
    for what in ("an illegal address", "an index out of range", "NCCL without a shortage", "a driver too old"):
        flags = {name for fix in finding(CAUSES[what][1]).fixes for name in fix.flags}
        assert not flags & {"gpu_memory_utilization", "max_model_len", "max_num_seqs", "max_num_batched_tokens"}


def test_a_missing_module_is_installed_and_no_kernel_is_looked_for() -> None:
    (fix,) = finding("ModuleNotFoundError: No module named 'xgrammar'").fixes
    assert fix.steps[0] == "pip install xgrammar"
    assert fix.env == {}


def test_only_a_fault_in_a_kernel_is_looked_for_in_the_kernels() -> None:
    assert "report" in {fix.kind for fix in finding(CAUSES["an illegal address"][1]).fixes}
    assert "report" not in {fix.kind for fix in finding(CAUSES["any other bug"][1]).fixes}


def test_weights_too_big_is_answered_by_smaller_weights_or_more_gpus_with_their_layout() -> None:
    log = LLAMA + CAUSES["parameters that do not fit"][1].replace("23.64", "11.64").replace("23.21", "11.21")
    first = finding(log, gpu="12GiB")
    assert first.cause == "weights_too_big"
    assert {fix.kind for fix in first.fixes[:2]} <= {"checkpoint_format", "more_or_fewer_gpus_tp_pp"}
    assert all(fix.plan is not None and fix.plan.verdict != "does_not_fit" for fix in first.fixes if fix.flags)


def test_the_pool_of_the_failed_run_is_the_one_that_the_log_printed() -> None:
    log = LLAMA.replace("8192", "131072") + CAUSES["a context longer than the pool"][1]
    fix = fix_of("max_model_len", finding(log, gpu="rtx4090"))
    assert fix.before is not None
    assert abs(fix.before.kv_cache.bytes - 5.25 * GIB) < GIB // 50


def test_a_command_repeats_what_was_given_and_not_what_vllm_chose() -> None:
    fix = finding(LLAMA + CAUSES["a context longer than the pool"][1]).fixes[0]
    assert "--tensor-parallel-size" not in fix.command
    assert "--dtype" not in fix.command
    assert fix.command[:3] == ("vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct")


def test_a_refused_flag_is_named_with_the_right_one() -> None:
    log = "vllm: error: unrecognized arguments: --context-length 4096"
    assert "--max-model-len" in " ".join(finding(log).fixes[0].steps)


def test_every_cause_warns_of_something() -> None:
    warned = {cause for cause, log in CAUSES.values() if finding(log).dead_ends}
    assert warned == {cause.label for cause in causes()}


def test_weights_kept_on_the_host_come_with_what_else_it_takes_to_hold_beside_a_neighbour() -> None:
    oom = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 48.00 MiB. GPU 0 has a total capacity of 139.80 "
        "GiB of which 27.56 MiB is free. Process 4396 has 127.51 GiB memory in use. Including non-PyTorch memory, this "
        "process has 12.25 GiB memory in use. Of the allocated memory 11.59 GiB is allocated by PyTorch, and 1.24 MiB "
        "is reserved by PyTorch but unallocated."
    )
    command = "vllm serve meta-llama/Llama-3.1-8B --gpu-memory-utilization 0.08 --max-model-len 4096 --enforce-eager"
    log = trace("load_model", "initialize_model", "create_weights", error=oom)
    (run,) = read_log([log.encode()], "log", Hints(command, gpu="h200", vllm="0.26.0")).runs
    weights = next(item for item in run.findings if item.cause == "weights_too_big")
    fix = fix_of("cpu_offload", weights)
    assert fix.plan is not None and fix.plan.verdict == "fits"
    assert fix.flags.keys() > {"cpu_offload_gb"}


def test_the_total_that_a_log_prints_says_which_card_of_a_name_was_meant() -> None:
    log = LLAMA + (
        "(EngineCore_DP0 pid=7) ERROR 01-02 03:04:05 [core.py:708] ValueError: Free memory on device (20.10/79.25 GiB) "
        "on startup is less than desired GPU memory utilization (0.9, 71.33 GiB)."
    )
    run = read_log([log.encode()], "log", Hints(gpu="a100")).runs[0]
    plan = next(fix.plan for fix in run.findings[0].fixes if fix.plan)
    assert plan.target.gpu.name == "NVIDIA A100-SXM4-80GB"
    assert run.notes == ()


def test_a_modern_log_without_its_kv_line_is_not_taken_for_the_release_that_charged_neighbours() -> None:
    log = "(EngineCore pid=90) ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_...`"
    assert finding(log).cause == "no_cache_blocks"


def test_the_bare_error_comes_with_what_tells_its_reasons_apart() -> None:
    first = finding("ValueError: No available memory for the cache blocks.").fixes[0]
    assert "nvidia-smi" in first.steps[0]


def test_capture_gets_the_room_that_graphs_take_where_their_size_is_not_printed() -> None:
    log = V0_ACCOUNTS.format(total="44.53", share="0.98", budget="43.64", weights="20.64", rest="21.20")
    log += "INFO [model_runner.py:1442] Capturing cudagraphs for decoding.\n" + TORCH.format(
        wanted="2.00 MiB", total="44.53 GiB", free="448.00 KiB", own="44 GiB", torch="42 GiB", unused="1 MiB"
    )
    share = finding(log).fixes[0].flags["gpu_memory_utilization"]
    assert (1 - share) * 44.53 >= 3.0


def test_where_room_for_graphs_would_cost_most_of_the_pool_eager_mode_goes_first() -> None:
    log = V0_ACCOUNTS.format(total="23.58", share="0.99", budget="23.35", weights="21.21", rest="1.00")
    log += "INFO [model_runner.py:1442] Capturing cudagraphs for decoding.\n" + TORCH.format(
        wanted="256.00 MiB", total="23.58 GiB", free="128.00 MiB", own="23 GiB", torch="22 GiB", unused="1 MiB"
    )
    assert finding(log).fixes[0].flags == {"enforce_eager": True}


def test_a_smaller_pool_comes_with_the_length_that_it_still_holds() -> None:
    log = V0_ACCOUNTS.format(total="15.77", share="0.90", budget="14.20", weights="7.51", rest="3.76")
    log += "INFO 01-02 03:04:05 [executor_base.py:117] Maximum concurrency for 40000 tokens per request: 1.54x\n"
    log += "INFO:     Application startup complete.\nERROR [async_llm_engine.py:65] Engine background task failed\n"
    log += TORCH.format(
        wanted="2.00 GiB", total="15.77 GiB", free="0.20 GiB", own="15 GiB", torch="14 GiB", unused="1 MiB"
    )
    flags = fix_of("lower_util", finding(log)).flags
    pool = 3.76 - (0.90 - flags["gpu_memory_utilization"]) * 15.77
    assert flags["max_model_len"] <= 40000 * pool / (3.76 / 1.54)


def test_one_line_of_rank_2_does_not_say_how_many_ranks_there_are() -> None:
    log = CAUSES["a full card and nothing else known"][1].replace("GPU 0", "GPU 2")
    assert not any("tensor_parallel_size" in fix.flags for fix in finding(log).fixes)


def test_a_dummy_image_larger_than_the_card_is_not_answered_by_fewer_images() -> None:
    log = TORCH.format(
        wanted="256.00 GiB", total="15.98 GiB", free="8.07 GiB", own="7 GiB", torch="7.14 GiB", unused="1 MiB"
    )
    kernel, without = finding(log).fixes[:2]
    assert "flash" in kernel.steps[0]
    assert without.flags == {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    assert "max_pixels" in without.steps[0]


def test_the_variable_that_a_release_sets_itself_is_not_offered_for_it() -> None:
    log = "INFO 06-19 07:00:00 [api_server.py:1] vLLM API server version {}\nCuda failure 2 'out of memory'"
    assert finding(log.format("0.9.1")).fixes[0].kind == "lower_util"
    assert finding(log.format("0.12.0")).fixes[0].env == {"NCCL_CUMEM_ENABLE": "0"}


def test_buffers_that_the_network_card_does_not_register_are_no_shortage_of_ram() -> None:
    first = finding("node:318:3584 [5] NCCL WARN Call to ibv_reg_dmabuf_mr failed with error Cannot allocate memory")
    assert first.cause == "nccl_or_custom_allreduce_buffers"
    assert any("memlock" in step for step in first.fixes[0].steps)


def test_rays_memory_monitor_is_quoted_with_its_numbers() -> None:
    first = finding(
        "ray.exceptions.OutOfMemoryError: Task was killed. Memory on the node (IP: 10.0.0.1) was 12.49GB / 13.15GB "
        "(0.950003), which exceeds the memory usage threshold of 0.95."
    )
    assert "12.49 GiB" in first.why
    assert "RAY_memory_usage_threshold" in first.fixes[0].steps[1]


def test_an_integrated_amd_gpu_is_known_by_its_odd_total_and_given_more_of_the_ram() -> None:
    oom = TORCH.format(
        wanted="816 MiB", total="61.35 GiB", free="655 MiB", own="60 GiB", torch="57.83 GiB", unused="2 GiB"
    )
    first = finding(oom.replace("CUDA out of memory", "HIP out of memory"))
    assert first.cause == "unified_memory_or_wsl"
    assert "ttm.pages_limit" in first.fixes[0].steps[0]


def test_a_discrete_amd_card_is_not_taken_for_an_integrated_one() -> None:
    oom = TORCH.format(
        wanted="816 MiB", total="47.98 GiB", free="655 MiB", own="46 GiB", torch="46.83 GiB", unused="1 MiB"
    )
    assert finding(oom.replace("CUDA out of memory", "HIP out of memory")).cause != "unified_memory_or_wsl"


def test_no_expandable_segments_are_offered_on_rocm() -> None:
    oom = TORCH.format(
        wanted="816 MiB", total="47.98 GiB", free="655 MiB", own="46 GiB", torch="41 GiB", unused="5 GiB"
    )
    first = finding(oom.replace("CUDA out of memory", "HIP out of memory"))
    assert first.cause == "allocator_fragmentation"
    assert all(fix.kind != "allocator_conf" for fix in first.fixes)


def test_a_tpu_program_larger_than_its_memory_is_read_with_its_numbers() -> None:
    first = finding(
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 16.65G of "
        "15.48G hbm. Exceeded hbm capacity by 1.17G."
    )
    assert "16.65 GiB" in first.why
    assert first.fixes[0].steps[0].startswith("take 0.11 off")  # of 15.48 GiB: 1.70 GiB


def test_the_share_is_named_as_the_trainer_sets_it() -> None:
    log = (
        '  File "/verl/verl/workers/sharding_manager/fsdp_vllm.py", line 79, in __enter__\n'
        "    self.inference_engine.wake_up()\ncuda error: out of memory at /workspace/csrc/cumem_allocator.cpp:62"
    )
    assert "actor_rollout_ref.rollout.gpu_memory_utilization=0.4" in finding(log).fixes[0].steps[0]


def test_growing_residue_after_sleep_asks_first_whose_it_is() -> None:
    log = "\n".join(
        f"Sleep mode freed 43.82 GiB memory, {left} GiB memory is still in use." for left in (4.1, 11.6, 25.0)
    )
    first = finding(log).fixes[0]
    assert "nvidia-smi" in first.steps[0]
    assert not first.flags


def test_a_busy_card_is_freed_or_shared_with_the_number_that_fits() -> None:
    first = finding(CAUSES["less free than asked for"][1]).fixes[0]
    assert first.kind == "free_gpu_or_kill_orphans"
    assert any("--gpu-memory-utilization 0.37" in step for step in first.steps)


def test_a_model_without_its_flag_is_told_apart_from_a_misspelt_flag() -> None:
    log = "api_server.py: error: unrecognized arguments: /models/Qwen3-8B"
    assert "--model in front of /models/Qwen3-8B" in finding(log).fixes[0].steps[0]


ARGS = "(APIServer pid=1) INFO 01-02 03:00:00 [utils.py:233] non-default args: {args}\n"
ENGINE = (
    "(EngineCore_DP0 pid=7) INFO 01-02 03:00:01 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: "
    "model='Qwen/Qwen3-8B', max_seq_len=32768, tensor_parallel_size=1, dtype=torch.bfloat16\n"
    "(EngineCore_DP0 pid=7) INFO 01-02 03:00:05 [gpu_model_runner.py:2653] Model loading took 15.27 GiB and 9.1 s\n"
)


def test_a_card_that_the_log_does_not_name_follows_from_its_numbers() -> None:
    log = ARGS.format(args={"model": "Qwen/Qwen3-8B", "max_model_len": 32768}) + ENGINE
    log += "(EngineCore_DP0 pid=7) INFO 01-02 03:00:06 [gpu_worker.py:349] Available KV cache memory: 4.40 GiB\n"
    log += (
        "(EngineCore_DP0 pid=7) ERROR 01-02 03:00:09 [core.py:708] ValueError: To serve at least one request with the "
        "models's max seq len (32768), (4.50 GiB KV cache is needed, which is larger than the available KV cache "
        "memory (4.40 GiB)."
    )
    diagnosis = read_log([log.encode()]).runs[0]
    fix = diagnosis.findings[0].fixes[0]
    assert fix.plan is not None
    assert 21.5 * GIB < fix.plan.target.gpu.total_bytes < 24.1 * GIB
    assert "add up to a card of" in diagnosis.notes[0]


def test_a_length_of_little_use_is_not_offered_before_more_of_the_card() -> None:
    args = {"model": "Qwen/Qwen3-8B", "max_model_len": 32768, "gpu_memory_utilization": 0.71}
    log = ARGS.format(args=args) + ENGINE
    log += "(EngineCore_DP0 pid=7) INFO 01-02 03:00:06 [gpu_worker.py:349] Available KV cache memory: 0.05 GiB\n"
    log += (
        "(EngineCore_DP0 pid=7) ERROR 01-02 03:00:09 [core.py:708] ValueError: To serve at least one request with the "
        "models's max seq len (32768), (4.50 GiB KV cache is needed, which is larger than the available KV cache "
        "memory (0.05 GiB)."
    )
    first = finding(log).fixes[0]
    assert first.kind == "raise_util"
    assert first.flags.get("max_model_len", 32768) > 8192


POD = """Containers:
  vllm:
    Image: vllm/vllm-openai:v0.11.0
    Args:
      serve
      meta-llama/Llama-3.1-8B-Instruct
      --max-model-len
      {length}
      --cpu-offload-gb
      16
      --swap-space
      8
    Last State: Terminated
      Reason: OOMKilled
      Exit Code: 137
    Limits:
      memory: {limit}Gi
"""


@pytest.mark.parametrize(
    ("gpu", "length", "limit", "first", "offload_gb"),
    [
        ("h100", 131072, 24, "cpu_offload", 0),  # the card holds all of it
        ("rtx4090", 16384, 24, "cpu_offload", 0),
        ("rtx4090", 131072, 24, "more_host_ram_or_shm", 12),  # the card needs most of it elsewhere
        ("rtx4090", 131072, 64, "cpu_offload", 12),
        ("", 131072, 24, "cpu_offload", 8),
    ],
)
def test_a_container_killed_beside_offloaded_weights_offloads_less_or_gets_the_planned_limit(
    gpu: str, length: int, limit: int, first: str, offload_gb: float
) -> None:
    reading = read_log([POD.format(length=length, limit=limit).encode()], "log", Hints(gpu=gpu or None))
    assert readings_json([reading])["deployment"]["host_limit_bytes"] == limit * GIB
    found = reading.runs[0].findings[0]
    less, more = fix_of("cpu_offload", found), fix_of("more_host_ram_or_shm", found)
    assert (found.fixes[0].kind, less.flags) == (first, {"cpu_offload_gb": offload_gb})
    assert less.command.count("--swap-space") == less.command.count("--max-model-len") == 1
    assert "14.99 GiB" in more.why and ("38Gi" in more.steps[0]) == (limit < 38)
    assert not any("--swap-space" in step for step in more.steps)


@pytest.mark.parametrize(("printed", "told"), [("Capturing CUDA graphs (PIECEWISE): 40%| | 2/5\n", False), ("", True)])
def test_an_allocation_is_told_to_be_a_weight_only_while_weights_are_loaded(printed: str, told: bool) -> None:
    log = (
        "(APIServer pid=1) INFO 01-02 03:04:05 [api_server.py:1977] vLLM API server version 0.11.2\n"
        "(APIServer pid=1) INFO 01-02 03:04:05 [utils.py:253] non-default args: {'model': 'Qwen/Qwen3-14B'}\n"
        + printed
        + TORCH.format(
            wanted="1.45 GiB", total="22.05 GiB", free="1.40 GiB", own="20.60 GiB", torch="20.21 GiB", unused="9.10 MiB"
        )
    )
    assert ("embed_tokens" in finding(log).why) == told


def test_a_table_of_the_sampler_is_known_by_its_size_and_no_graphs_are_captured_in_eager_mode() -> None:
    oom = TORCH.format(
        wanted="250.00 GiB", total="139.80 GiB", free="126.57 GiB", own="13.21 GiB", torch="12.50 GiB", unused="47 MiB"
    )
    frame = '  File "/v/vllm/v1/worker/gpu/sample/penalties.py", line 45, in __init__\n'
    log = trace("load_model", error=oom).replace("torch.OutOfMemoryError", f"{frame}torch.OutOfMemoryError")
    command = "vllm serve google/gemma-2b --max-num-seqs 262144 --max-num-batched-tokens 262144 --enforce-eager"
    (run,) = read_log([log.encode()], "log", Hints(command, gpu="h200", vllm="0.32.0")).runs
    assert run.findings[0].cause == "profiling_activation_peak"
    assert "262,144 sequences x 256,000 vocabulary x 4 bytes" in run.findings[0].why
    assert run.findings[0].fixes[0].flags.keys() == {"max_num_seqs"}
    assert "cudagraph_capture_oom" not in [finding.cause for finding in run.findings]


def test_a_card_that_becomes_free_still_needs_a_share_that_holds_the_weights() -> None:
    oom = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 540.00 MiB. GPU 0 has a total capacity of "
        "139.80 GiB of which 321.56 MiB is free. Process 717 has 90.51 GiB memory in use. Including non-PyTorch "
        "memory, this process has 48.97 GiB memory in use. Of the allocated memory 48.30 GiB is allocated by PyTorch, "
        "and 1.24 MiB is reserved by PyTorch but unallocated."
    )
    command = "vllm serve allenai/OLMo-2-0325-32B --gpu-memory-utilization 0.34 --max-model-len 4096 --enforce-eager"
    log = trace("load_model", "initialize_model", "create_weights", error=oom)
    (run,) = read_log([log.encode()], "log", Hints(command, gpu="h200", vllm="0.32.0")).runs
    assert run.findings[0].cause == "gpu_shared_or_not_free"
    assert any("then --gpu-memory-utilization 0.4" in step for step in run.findings[0].fixes[0].steps)


@pytest.mark.parametrize("text", [text for cause, text in CAUSES.values() if cause != "multimodal_inputs"])
def test_a_step_that_is_small_already_is_not_made_larger(text: str) -> None:
    command = "vllm serve org/some-model --max-num-batched-tokens 256 --max-num-seqs 8"
    run = read_log([text.encode()], "log", Hints(command=command)).runs[0]
    fixes = [fix for found in run.findings if found.cause != "multimodal_inputs" for fix in found.fixes]
    assert all((fix.flags.get("max_num_batched_tokens") or 0) <= 256 for fix in fixes)


WEIGHTS = (
    "INFO 11-19 02:51:07 [utils.py:253] non-default args: {'model': 'Qwen/Qwen3-32B', 'max_model_len': 32768}\n"
    "(EngineCore_DP0 pid=96) INFO 11-19 02:51:21 [core.py:93] Initializing a V1 LLM engine (v0.11.2) with config: "
    "model='Qwen/Qwen3-32B', max_seq_len=32768, tensor_parallel_size=1, dtype=torch.bfloat16\n"
    "(EngineCore_DP0 pid=96) ERROR 11-19 02:51:34 [core.py:842] torch.OutOfMemoryError: CUDA out of memory. Tried to "
    "allocate 500.00 MiB. GPU 0 has a total capacity of 44.42 GiB of which 318.00 MiB is free. Including non-PyTorch "
    "memory, this process has 44.10 GiB memory in use. Of the allocated memory 43.55 GiB is allocated by PyTorch, and "
    "24.50 MiB is reserved by PyTorch but unallocated.\n"
)


def test_a_card_that_contradicts_the_log_is_named_and_not_computed_with() -> None:
    run = read_log([WEIGHTS.encode()], "log", Hints(gpu="h100")).runs[0]
    plans = [fix.plan for fix in run.findings[0].fixes if fix.plan]
    assert {round(plan.layout.total_bytes / GIB, 2) for plan in plans} == {44.42}
    assert "is of a card of 44.42 GiB, and NVIDIA H100 80GB HBM3 has 79.18 GiB" in run.notes[-1]


def test_more_gpus_than_might_do_are_proposed_with_the_reason() -> None:
    unnamed, named = (fix_of("more_or_fewer_gpus_tp_pp", finding(WEIGHTS, **hints)) for hints in ({}, {"gpu": "l40s"}))
    assert (unnamed.flags["tensor_parallel_size"], named.flags["tensor_parallel_size"]) == (4, 2)
    assert "--tensor-parallel-size 2 alone is tight:" in unnamed.why
    assert "--gpu NAME narrows it" in unnamed.why
    assert "alone is tight" not in named.why


def test_another_checkpoint_keeps_the_name_that_clients_ask_for() -> None:
    fix = fix_of("checkpoint_format", finding(WEIGHTS))
    assert " ".join(fix.command[-2:]) == "--served-model-name Qwen/Qwen3-32B"
    named = "vllm serve Qwen/Qwen3-32B --max-model-len 32768 --served-model-name chat"
    fix = fix_of("checkpoint_format", finding(WEIGHTS, command=named))
    assert fix.command.count("--served-model-name") == 1


def test_only_what_the_log_printed_of_an_unchanged_part_is_measured() -> None:
    fixes = readings_json([read_log([WEIGHTS.encode()], "log")])["findings"][0]["fixes"]
    assert fixes[0]["flags"].keys() == {"model"}
    assert fixes[0]["measured"] is None


@pytest.mark.parametrize(("frame", "copies"), [("compute_logits", 5), ("log_softmax", 2)])
def test_prompt_logprobs_need_every_copy_that_follows_the_one_that_failed(frame: str, copies: int) -> None:
    lines = [
        "INFO 11-19 06:17:49 [api_utils.py:286] non-default args: "
        "{'gpu_memory_utilization': 0.92, 'model': 'Qwen/Qwen3-8B'}",
        "INFO:     Application startup complete.",
        "Traceback (most recent call last):",
        '  File "/opt/vllm/v1/worker/gpu_model_runner.py", line 5375, in _get_prompt_logprobs_dict',
        f'  File "/opt/vllm/model_executor/models/gemma3.py", line 428, in {frame}',
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of "
        "139.80 GiB of which 3.00 GiB is free. Including non-PyTorch memory, this process has 136.80 GiB in use.",
    ]
    finding = read_log(["\n".join(lines).encode()], "log", Hints()).runs[0].findings[0]
    assert finding.cause == "runtime_activation_burst"
    share = next(fix.flags["gpu_memory_utilization"] for fix in finding.fixes if "gpu_memory_utilization" in fix.flags)
    assert share <= 0.92 - (copies * 4 - 3) / 139.8
