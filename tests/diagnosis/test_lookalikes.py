from __future__ import annotations

from string import Formatter

import pytest

from legroom.diagnosis.finding import Finding
from legroom.diagnosis.fixes.failed_run import Hints
from legroom.diagnosis.log_diagnosis import read_log
from legroom.facts import read_data
from legroom.facts.diagnosis_texts import lookalikes, package_of
from legroom.facts.log_messages import message_patterns
from legroom.facts.release_support import build_of, last_build_with
from legroom.facts.releases import release

ENGINE = "INFO 01-02 03:04:00 [core.py:77] Initializing a V1 LLM engine (v{}) with config: model='{}'\n"

GROWING = "".join(
    f"root 77 1.0 2.0 999999999 {size} ? Sl 01:00 1:00 VLLM::EngineCore\n" for size in (10**7, 2 * 10**7, 3 * 10**7)
)


def finding(log: str, **hints: str) -> Finding:
    return read_log([log.encode()], "log", Hints(**hints)).runs[0].findings[0]  # type: ignore[arg-type]


FIRST_STEPS = {
    "a gated model": ("OSError: You are trying to access a gated repo.", "licence"),
    "a full disk": ("OSError: [Errno 28] No space left on device: '/root/.cache'", "df -h"),
    "a taken port": ("OSError: [Errno 98] error while attempting to bind on address ('0.0.0.0', 8123)", ":8123"),
    "a missing module": ("ModuleNotFoundError: No module named 'flash_attn'", "pip install flash-attn"),
    "a name that is no model": ("OSError: acme/no is not a valid model identifier", "spelling"),
    "a file without rights": ("PermissionError: [Errno 13] Permission denied: '/cache/hub'", "ls -ld"),
    "no GPU in the container": ("RuntimeError: No CUDA GPUs are available", "nvidia-smi"),
    "a compiler that is not there": ("RuntimeError: Failed to find C compiler.", "build-essential"),
    "a weight file cut short": ("safetensors_rust.SafetensorError: Error while deserializing header", "ls -lL"),
    "a dead peer": ("RuntimeError: [gloo/transport/tcp/pair.cc:5] Connection reset by peer", "earliest error"),
    "a late rank": ("[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=31)", "all ranks"),
    "a GGUF given as a config": (
        "OSError: It looks like the config file at '/models/granite-code:latest' is not a valid JSON file.",
        ".gguf",
    ),
    "a worker that Ray waits for": (
        "ray.exceptions.RayChannelTimeoutError: System error: If the execution is expected to take a long time, "
        "increase RAY_CGRAPH_get_timeout which is currently 10 seconds.",
        "RAY_CGRAPH_get_timeout=1200",
    ),
    "a kernel too large for a TPU core": (
        "ValueError: Ran out of memory in memory space vmem while allocating on stack for %name.32",
        "--block-size",
    ),
    "a ROCm build beside another torch": (
        "WARNING 02-28 20:57:36 _core_ext.py:180] Failed to import from vllm._core_C with "
        "ImportError('libtorch_hip.so: cannot open shared object file: No such file or directory')\n"
        "RuntimeError: Tried to instantiate class '_core_C.ScalarType', but it does not exist!",
        "rocm",
    ),
    "an operator of an NPU": ("RuntimeError: ACL stream synchronize failed, error code:507035", "kernelName="),
    "a compiler older than the card": (
        "ptxas /tmp/a.ptx, line 6; error : PTX .version 8.4 does not support .target sm_120a",
        "TRITON_PTXAS_PATH",
    ),
    "a peer that takes no KV cache": ("store_py.cpp:191] Failed to mount segment: UNKNOWN_ERROR", "nc -vz"),
    "a pod without a node": ("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.", "describe node"),
    "an image that is not there": ("Failed to pull image: manifest unknown", "docker pull"),
    "a torchvision of another torch": ("RuntimeError: operator torchvision::nms does not exist", "torchvision"),
    "a build from source": ("ERROR: Failed building wheel for vllm", "wheel"),
    "layers on two devices": (
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices",
        "one device",
    ),
    "a module of another vLLM": ("ModuleNotFoundError: No module named 'vllm.model_executor.old'", "pip show vllm"),
    "a job at its time limit": ("error: *** JOB 7 ON node CANCELLED AT 2026 DUE TO TIME LIMIT ***", ""),
    "a TPU that is held": ("RuntimeError: TPU initialization failed: Failed to get global TPU topology.", "lsof"),
    "versions that exclude each other": (
        "ImportError: acme>=0.4,<=0.6 is required for a normal functioning of this module, but found acme==0.7",
        "fresh environment",
    ),
    "a script without a main guard": (
        "RuntimeError: An attempt has been made to start a new process before the current process has finished its "
        "bootstrapping phase.",
        "__main__",
    ),
}


@pytest.mark.parametrize(("log", "words"), FIRST_STEPS.values(), ids=FIRST_STEPS)
def test_the_first_step_of_a_lookalike_is_about_what_failed(log: str, words: str) -> None:
    found = finding(log)
    assert found.cause in ("not_memory", "driver_or_cuda_mismatch")
    assert any(words in step for step in found.fixes[0].steps)
    assert not any("go back to the last release" in step for fix in found.fixes for step in fix.steps)


@pytest.mark.parametrize(
    "log",
    [
        "omegaconf.errors.ConfigAttributeError: Key 'cache' is not in struct",
        "ValueError: The global train batch size (8 x 1) must be evenly divisible by the number of generations (16)",
    ],
)
def test_what_a_trainer_refuses_is_a_setting(log: str) -> None:
    assert finding(log).cause == "wrong_flag"


def test_a_crash_in_the_sampling_kernel_is_answered_with_the_other_sampler() -> None:
    log = "RuntimeError: TopPSamplingFromProbs failed with error code an illegal memory access was encountered"
    assert finding(log).fixes[0].env == {"VLLM_USE_FLASHINFER_SAMPLER": "0"}


def test_a_graph_that_cannot_be_recorded_is_answered_with_eager_mode() -> None:
    log = (
        "node:1:1 [0] enqueue.cc:1 NCCL WARN Cuda failure 'dependency created on uncaptured work in another stream'\n"
        "RuntimeError: CUDA error: operation failed due to a previous error during capture"
    )
    assert finding(log).fixes[0].flags == {"enforce_eager": True}


def test_a_request_that_crashes_a_step_is_to_be_sent_alone() -> None:
    log = (
        "INFO:     Application startup complete.\n"
        "ERROR 06-25 14:27:21 async_llm_engine.py:52] AttributeError: 'NoneType' object has no attribute 'seed'"
    )
    assert "last request" in finding(log).fixes[0].steps[0]


def test_a_card_without_bfloat16_gets_the_flag() -> None:
    log = "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU"
    assert finding(log).fixes[0].flags == {"dtype": "half"}


def test_an_unknown_architecture_is_answered_with_the_first_release_that_has_it() -> None:
    log = ENGINE.format("0.6.0", "acme/m") + (
        "ValueError: Model architectures ['DeepseekV3ForCausalLM'] are not supported for now. Supported: []"
    )
    assert "vllm>=0.6.6" in finding(log).fixes[0].steps[0]


def test_remote_code_is_never_a_flag_that_could_be_set_unasked() -> None:
    log = "ValueError: acme/m contains custom code. Please pass the argument `trust_remote_code=True`"
    fix = finding(log).fixes[0]
    assert not fix.flags
    assert "--trust-remote-code" in fix.steps[0]


def test_what_a_warning_mentions_gives_way_to_what_an_error_says() -> None:
    log = (
        "WARNING 01-02 03:04:05 [_custom_ops.py:17] Failed to import from vllm._C with ImportError('libcuda.so.1: "
        "cannot open shared object file: No such file or directory')\n"
        "OSError: It looks like the config file at '/m/config.json' is not a valid JSON file.\n"
    )
    assert finding(log).cause == "not_memory"


def test_a_shortage_is_not_talked_away_by_a_missing_module() -> None:
    log = (
        "ModuleNotFoundError: No module named 'flashinfer'\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of "
        "23.64 GiB of which 100.00 MiB is free.\n"
    )
    assert finding(log).cause not in ("not_memory", "driver_or_cuda_mismatch")


def test_an_old_driver_is_told_which_one_the_release_needs() -> None:
    log = ENGINE.format("0.20.0", "acme/m") + (
        "torch.AcceleratorError: CUDA error: the provided PTX was compiled with an unsupported toolchain.\n"
    )
    assert "580.65.06" in finding(log).fixes[0].steps[0]


def test_a_card_that_lost_its_kernels_is_told_the_last_release_that_had_them() -> None:
    log = ENGINE.format("0.10.0", "acme/m") + "RuntimeError: CUDA error: no kernel image is available for execution\n"
    assert "vllm==0.8.5.post1" in finding(log, gpu="v100-16gb").fixes[0].steps[0]


def test_every_lookalike_names_evidence_that_exists_and_a_source() -> None:
    told = read_data("evidence.json")["told"]["questions"]
    known = {message.id for message in message_patterns()} | {row[0] for row in told}
    for kind in lookalikes():
        assert set(kind.evidence) <= known, kind.id
        assert kind.source and kind.fixes, kind.id


def test_every_text_of_a_lookalike_has_plain_gaps_only() -> None:
    for kind in lookalikes():
        for text in (kind.why, *(words for fix in kind.fixes for words in (fix.why, *fix.steps))):
            assert all(
                name is None or (name.isidentifier() and not spec) for _, name, spec, _ in Formatter().parse(text)
            )


def test_builds_follow_the_releases() -> None:
    assert build_of(release("0.8.5")).cuda == "12.4"
    assert build_of(release("0.11.0")).has_kernels_for((8, 6))
    volta = last_build_with((7, 0))
    assert volta is not None and volta[1] is not None and volta[1].since == "0.9.0"
    assert last_build_with((6, 0)) is None


def test_a_module_whose_package_has_another_name_is_known() -> None:
    assert package_of("PIL.Image") == "pillow"
    assert package_of("xgrammar") == "xgrammar"


def test_a_leak_that_the_release_is_known_for_is_named_with_the_release_that_fixed_it() -> None:
    found = finding(ENGINE.format("0.20.0", "acme/m") + GROWING)
    assert found.cause == "leak_over_time"
    assert "#44490" in found.why
    assert "vllm>=0.26.0" in found.fixes[0].steps[0]


def test_a_release_without_the_bug_is_not_accused() -> None:
    assert "known bug" not in finding(ENGINE.format("0.26.0", "acme/m") + GROWING).why


def test_a_warning_that_quotes_the_error_of_too_many_files_is_not_that_error():
    quoted = (
        "(APIServer pid=1) WARNING 11-16 06:21:52 [system_utils.py:255] Found ulimit of 20000 and failed to "
        "automatically increase with error. This can cause fd limit errors like `OSError: [Errno 24] Too many open "
        "files`. Consider increasing with ulimit -n\n"
    )
    died = (
        "(APIServer pid=1) ERROR 11-16 06:25:00 [async_llm.py:700] EngineDeadError: EngineCore encountered an issue\n"
    )
    named = [result.why for result in read_log([(quoted + died).encode()], "log", Hints()).runs[0].findings]
    assert not any("open files" in why for why in named)
