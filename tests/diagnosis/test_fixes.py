from __future__ import annotations

from diagnosis_logs import CAUSES, TORCH, trace
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.diagnosis.causes import causes
from legroom.diagnosis.diagnose import read_log
from legroom.diagnosis.finding import Finding, Fix
from legroom.diagnosis.starting_plan import Hints
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


@given(st.integers(1, 2_000_000))
@settings(max_examples=40, deadline=None)
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
