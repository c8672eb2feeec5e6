"""What people really paste: ends of logs, lines without their heads, builds without a number."""

from __future__ import annotations

import pytest
from diagnosis_logs import CAUSES, CORE, FULL_OF_WEIGHTS, IN_A_STEP, LOADED, READY, trace

from legroom.diagnosis.diagnosis_json import readings_json
from legroom.diagnosis.log_diagnosis import LogReading, read_log
from legroom.diagnosis.verdict import Diagnosis
from legroom.render.diagnosis_text import readings_text

START_FAILED = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {procs}"
ENGINE_DEAD = (
    "ERROR 01-02 03:04:06 [async_llm.py:480] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an "
    "issue. See stack trace (above) for the root cause."
)
RAY_LISTS_REASONS = (
    "(raylet) A worker died or was killed while executing a task by an unexpected system error. There are some "
    "potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop "
    "--force is called. (3) The worker is crashed unexpectedly due to SIGSEGV or other unexpected errors."
)
BANNER = "INFO 01-02 03:00:00 [core.py:58] Initializing a V1 LLM engine (v{version}) with config: model='org/model'"
NO_BLOCKS = CORE + "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`."
FATAL_SIGNAL = "CRITICAL 01-02 03:04:07 core_client.py:191] Got fatal signal from worker processes, shutting down."


def read(*lines: str) -> LogReading:
    return read_log(["\n".join(lines).encode()])


def run(*lines: str) -> Diagnosis:
    return read(*lines).runs[0]


def causes(*lines: str) -> list[str]:
    return [finding.cause for finding in run(*lines).findings]


@pytest.mark.parametrize("version", ["dev", "0.1.dev7008+g1a2b3c4", "0.0.0+unknown", "0.3.3", "None", "0.6.6.po", ""])
def test_a_build_without_a_known_release_is_diagnosed(version: str) -> None:
    assert "no_cache_blocks" in causes(BANNER.format(version=version), NO_BLOCKS)


def test_the_release_whose_facts_stand_in_is_named() -> None:
    reading = read(BANNER.format(version="dev"), NO_BLOCKS)
    assert "without a release number" in readings_json([reading])["deployment"]["vllm_note"]
    assert "vLLM dev (with the facts of " in readings_text([reading])


@pytest.mark.parametrize("procs", ["{}", "{'EngineCore_DP0': 1}"])
def test_an_engine_that_did_not_start_asserts_no_cause(procs: str) -> None:
    assert run(START_FAILED.format(procs=procs)).verdict == "cause above"


def test_the_exit_code_of_an_engine_tells_a_kill_from_a_crash() -> None:
    assert causes(START_FAILED.format(procs="{'EngineCore_DP0': -9}"))[0] == "host_ram_oom"
    assert causes(START_FAILED.format(procs="{'EngineCore_DP0': -11}"))[0] == "not_memory"


def test_a_text_without_the_cause_says_what_is_needed() -> None:
    reading = read(ENGINE_DEAD)
    document = readings_json([reading])
    assert document["verdict"] == "cause above"
    assert "the lines above line 1" in document["needed"][0]
    assert document["needed"][0][:30] in readings_text([reading])


def test_nothing_is_proven_by_a_text_without_the_cause() -> None:
    frames = trace("load_model", "create_weights", error="").rstrip()
    diagnosis = run(f"{CORE}Traceback (most recent call last):", frames)
    assert diagnosis.findings
    assert diagnosis.proven_findings == ()


def test_an_echo_below_the_error_changes_nothing() -> None:
    oom = trace("load_model", "create_weights", error=FULL_OF_WEIGHTS)
    assert causes(oom, START_FAILED.format(procs="{}"))[0] == "weights_too_big"


def test_a_traceback_that_is_cut_before_its_error_is_no_healthy_server() -> None:
    assert run(READY, f"{CORE}Traceback (most recent call last):", f'{CORE}  File "a.py", line 1').verdict == (
        "cause above"
    )


def test_a_log_that_ends_while_loading_is_one_of_vllm() -> None:
    loading = "INFO 01-02 03:00:01 [gpu_model_runner.py:1] Starting to load model org/model..."
    diagnosis = run(BANNER.format(version="0.11.0"), loading)
    assert diagnosis.verdict == "cause above"
    assert [finding.cause for finding in diagnosis.findings] == ["host_ram_oom"]


def test_the_list_of_reasons_that_ray_prints_is_only_a_possibility() -> None:
    assert run(RAY_LISTS_REASONS).verdict == "cause above"
    assert causes(CORE + "ValueError: unknown rope type", RAY_LISTS_REASONS) == ["not_memory"]


def test_workers_that_vllm_ends_itself_were_not_killed_for_memory() -> None:
    assert causes(CORE + "ValueError: unknown rope type", FATAL_SIGNAL, "Killed") == ["not_memory"]
    assert run(FATAL_SIGNAL, "Killed").verdict == "cause above"


def test_a_library_that_nccl_looks_for_in_vain_is_no_failure() -> None:
    looked_for = "node:7:7 [0] NCCL INFO NET/Plugin: libnccl-net.so: cannot open shared object file"
    assert causes(looked_for, trace("load_model", "create_weights", error=FULL_OF_WEIGHTS))[0] == "weights_too_big"


def test_an_exception_outranks_a_preemption_before_it() -> None:
    preempted = (
        "WARNING 01-02 03:04:05 scheduler.py:1057] Sequence group 7 is preempted by PreemptionMode.RECOMPUTE mode "
        "because there is not enough KV cache space. total_num_cumulative_preemption=1"
    )
    assert causes(preempted, "ERROR 01-02 03:16:05 engine.py:1] ValueError: min_p out of range")[0] == "not_memory"
    assert causes(preempted)[0] == "kv_preemption_thrash"


def test_no_draft_model_is_blamed_without_a_sign_of_one() -> None:
    frame = f'{CORE}  File "vllm/v1/sample/ops/topk_topp_sampler.py", line 83, in forward_native'
    outside = IN_A_STEP.replace("45.90 GiB", "43.90 GiB")
    assert causes(frame, CORE + outside)[0] in ("runtime_activation_burst", "profiling_activation_peak")


def test_an_out_of_memory_line_without_its_head_is_read() -> None:
    assert run(FULL_OF_WEIGHTS[FULL_OF_WEIGHTS.index("Tried") :]).case.oom is not None
    assert run(FULL_OF_WEIGHTS[FULL_OF_WEIGHTS.index("total capacity") :]).case.is_oom


@pytest.mark.parametrize(
    "line",
    [
        "Memory cgroup out of memory: Killed process (VLLM::Worker_TP)",
        "Out of memory: Killed process 4242 (VLLM::EngineCor) total-vm:9kB, anon-rss:33554432kB, shmem-rss:8kB",
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=a.scope,task=VLLM::EngineCor,pid=7,uid=0",
        "Memory on the node (IP: 10.0.0.2) where the task (name=Worker, pid=3, memory used=11.00GB) was running was "
        "12.40GB / 13.00GB (0.953846), which exceeds the memory usage threshold of 0.95. Ray killed this worker.",
    ],
)
def test_every_form_of_being_killed_for_ram_is_known(line: str) -> None:
    assert causes(line)[0] == "host_ram_oom"


def test_residue_that_grows_with_every_sleep_is_a_leak() -> None:
    left = [f"{amount} GiB memory is still in use." for amount in (4.1, 9.3, 20.2)]
    assert causes(*left)[0] in ("leak_over_time", "sleep_mode_or_rlhf_colocation")


def test_a_full_pool_is_seen_without_the_rest_of_its_line() -> None:
    assert causes("GPU KV cache usage: 100%") == ["kv_preemption_thrash"]


def test_memory_on_the_chip_of_a_tpu_is_no_memory_of_the_card() -> None:
    vmem = "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack"
    assert causes(vmem)[0] == "not_memory"


def test_the_settings_are_read_from_the_dump_of_a_failed_step() -> None:
    dumped = CORE + "Dumping input data for V1 LLM engine (v0.19.1) with config: model='org/model', max_seq_len=8192, "
    startup = run(dumped, CORE + IN_A_STEP).case.startup
    assert (startup.vllm, startup.args.model, startup.args.max_model_len) == ("0.19.1", "org/model", 8192)


def test_memory_that_was_in_use_before_the_start_is_the_neighbours() -> None:
    profile = "Memory profiling results: total_gpu_memory=79.15GiB initial_memory_usage=61.20GiB peak_torch_memory="
    assert causes(NO_BLOCKS, profile)[0] == "gpu_shared_or_not_free"


def test_ranks_that_speak_at_once_do_not_tear_a_message_apart() -> None:
    first, rest = FULL_OF_WEIGHTS.split(" GPU 0 has", 1)
    ranks = [f"(Worker_TP{rank} pid={40 + rank}) {text}" for text in (first, f"GPU 0 has{rest}") for rank in range(8)]
    assert run(LOADED, *ranks).case.oom.total_bytes == round(23.64 * 2**30)  # type: ignore[union-attr]


def test_a_run_that_says_why_is_told_before_a_later_one_that_does_not() -> None:
    earlier = [BANNER.format(version="0.9.2"), CAUSES["a context longer than the pool"][1]]
    later = [BANNER.format(version="0.9.2"), "Loading safetensors checkpoint shards:  10% Completed | 1/10"]
    assert run(*earlier, *later).findings[0].cause == "kv_too_small_for_max_len"


@pytest.mark.parametrize(
    "beginning",
    ["RuntimeError: CUDA ", "RuntimeError: CUDA error: ", "RuntimeError: NCCL error", "ValueError: The model's max"],
)
def test_the_beginning_of_several_messages_asserts_nothing(beginning: str) -> None:
    diagnosis = run(beginning)
    assert diagnosis.verdict == "cause above"
    assert diagnosis.needed[0].startswith("the rest of line 1")


@pytest.mark.parametrize(
    ("part", "cause", "facts"),
    [
        ("ValueError: Free memory on device cuda:0 (22.76/", "gpu_shared_or_not_free", {"free_bytes"}),
        (
            "ValueError: Free memory on device (3.1/23.6 GiB) on st",
            "gpu_shared_or_not_free",
            {"free_bytes", "total_bytes"},
        ),
        ("ValueError: The model's max seq len (32768)", "kv_too_small_for_max_len", {"max_model_len_count"}),
        ("ValueError: The model's max seq len (65536) is larger", "kv_too_small_for_max_len", {"max_model_len_count"}),
        ("ValueError: The model's max seq len (655", "kv_too_small_for_max_len", set()),
        ("ValueError: No available memory for the", "no_cache_blocks", set()),
        ("of tokens that can be stored in KV cache (1216). Try", "kv_too_small_for_max_len", {"fits_len_count"}),
        ("tokens that can be stored in KV cache (53200).", "kv_too_small_for_max_len", {"fits_len_count"}),
        ("is larger than the available KV cache memory (2.5 GiB)", "kv_too_small_for_max_len", {"available_bytes"}),
        ("memory for the cache blocks. Try increasing `gpu_mem", "no_cache_blocks", set()),
    ],
)
def test_a_part_of_one_message_only_is_that_message_with_the_figures_it_shows(
    part: str, cause: str, facts: set[str]
) -> None:
    for text in (part, f"{part}\n\nI have two cards of 24 GB, and this comes at every start."):
        found = run(*text.split("\n")).findings[0]
        assert found.cause == cause
        assert set(found.evidence[0].facts) - {"device"} == facts


def test_a_whole_message_at_the_end_of_a_text_is_no_broken_one() -> None:
    assert run("ValueError: min_p out of range").verdict == "not a memory problem"


def test_a_traceback_without_its_error_is_no_healthy_server() -> None:
    blocks = "INFO 06-28 06:11:45 gpu_executor.py:45] # GPU blocks: 378, # CPU blocks: 1638"
    error = "ERROR 06-28 06:11:45 worker_base.py:145] Error executing method initialize_cache."
    assert run(blocks, error).verdict == "cause above"


def test_an_out_of_memory_error_without_a_place_asks_for_the_lines_above_it() -> None:
    diagnosis = run("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 384.00 MiB.")
    assert diagnosis.verdict == "cause above"
    assert diagnosis.needed[0].startswith("the lines above the error")
    assert len(diagnosis.findings) > 1


def test_memory_that_runs_out_while_compiling_is_that_of_the_profile_run() -> None:
    frame = f'{CORE}  File "torch/_inductor/compile_fx.py", line 990, in _compile_fx_inner'
    assert causes(frame, CORE + IN_A_STEP)[0] == "profiling_activation_peak"
    assert causes(READY, frame, CORE + IN_A_STEP)[0] == "runtime_activation_burst"


def test_frames_of_a_model_being_built_tell_the_place() -> None:
    frame = f'{CORE}  File "vllm/model_executor/models/llama.py", line 254, in __init__'
    assert causes(frame, CORE + FULL_OF_WEIGHTS)[0] == "weights_too_big"


def test_tracebacks_of_eight_ranks_in_turn_keep_their_frames() -> None:
    frames = ['File "vllm/v1/worker/gpu_worker.py", line 99, in determine_available_memory']
    frames += [f'File "vllm/a.py", line {number}, in forward' for number in range(40)]
    lines = [*frames, IN_A_STEP]
    ranks = [f"(Worker_TP{rank} pid={40 + rank}) ERROR {line}" for line in lines for rank in range(8)]
    assert causes(LOADED, *ranks)[0] == "profiling_activation_peak"


def test_the_last_of_several_names_in_front_of_a_line_is_the_speaker() -> None:
    nested = f"(RayWorkerWrapper pid=4711, ip=10.0.0.7) {NO_BLOCKS}"
    assert run(nested).case.evidence[0].process == "EngineCore_DP0"


def test_lines_that_name_their_process_are_of_a_release_that_does_not_charge_neighbours() -> None:
    assert causes(NO_BLOCKS)[0] == "no_cache_blocks"


def test_a_text_that_ends_during_the_start_up_is_no_healthy_server() -> None:
    sized = "INFO 01-11 15:51:18 llm_engine.py:275] # GPU blocks: 229, # CPU blocks: 512"
    finished = "INFO 01-11 15:51:28 model_runner.py:1] Graph capturing finished in 9 secs."
    assert run(sized).verdict == "cause above"
    assert run(sized, finished).verdict == "no problem found"


def test_weights_that_are_shown_explain_an_empty_pool_before_neighbours_do() -> None:
    core = "ERROR 03-18 13:09:10 core.py:291] "
    error = NO_BLOCKS.removeprefix(CORE)
    weights = "INFO 03-18 13:05:21 gpu_model_runner.py:1060] Loading model weights took 14.2487 GB"
    assert causes(core + error)[0] == "gpu_shared_or_not_free"
    assert causes(weights, core + error)[0] == "no_cache_blocks"


def test_the_name_that_an_executor_puts_in_front_says_nothing_of_the_release() -> None:
    error = "ERROR 03-18 13:09:10 [core.py:291] " + NO_BLOCKS.removeprefix(CORE)
    assert causes(f"(RayWorkerWrapper pid=4711, ip=10.0.0.7) {error}") == causes(error)


def test_each_possibility_comes_with_what_to_do_about_it() -> None:
    message = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 86.00 MiB. GPU 0 has a total capacity of "
    shown = readings_text([read_log([f"{message}31.75 GiB of which 47.94 MiB is free.\n".encode()])])
    possible = shown.partition("it may be:")[2]
    assert possible.count("\n  - ") == possible.count("\n    fix: ") > 1
