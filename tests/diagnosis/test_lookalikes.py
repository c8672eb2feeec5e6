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
    tables = read_data("evidence.json")["told"]
    told = [*tables["questions"], *tables["circumstances"]]
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


def test_a_story_that_names_no_vllm_is_asked_which_program_it_is_of() -> None:
    story = (
        "I run a desktop program that reads scanned pages on my laptop and since the last update every page that has "
        "a table ends with this message, what should I buy?\n"
        "Error: CUDA out of memory. Tried to allocate 730.00 MiB. GPU 0 has a total capacity of 7.57 GiB of which "
        "685.25 MiB is free.\n"
    )

    def asks(text: str) -> bool:
        return any("which program" in line for line in read_log([text.encode()], "log").runs[0].needed)

    assert asks(story)
    assert not asks(story.replace("a desktop program", "vLLM"))
    assert not asks(story.split("\n")[1]), "a line alone is taken for vLLM's"


NAMED_FAILURES = {
    "a route that is not there": (
        'my server logs "POST /v1/chat/complete HTTP/1.1" 404 Not Found',
        "/v1/chat/completions",
    ),
    "a name that is not served": (
        '{"message": "The model `gpt-x` does not exist.", "code": 404}',
        "--served-model-name",
    ),
    "too many log-probabilities": (
        "ValueError: Requested sample logprobs of 30, which is greater than max allowed: 20",
        "30",
    ),
    "an adapter of another kind": ("ValueError: AcmeForCausalLM does not support LoRA yet.", "merge"),
    "LoRA that is off": ("ValueError: Got lora_request but LoRA is not enabled!", "--enable-lora"),
    "a GGUF of a new family": ("GGUF model with architecture acme3 is not supported yet.", "safetensors"),
    "a method that is not known": (
        "ValueError: Unknown quantization method: nvfp9. Must be one of []",
        "pip install -U vllm",
    ),
    "weights that ranks cannot share": (
        "ValueError: The output_size of gate's weight = 296 is not divisible by weight quantization block_n = 128.",
        "--pipeline-parallel-size",
    ),
    "a parser of another family": ("KeyError: 'invalid tool call parser: acme2'", "list in the message"),
    "a second address": ("RuntimeError: Every node should have a unique IP address. Got 2 nodes", "VLLM_HOST_IP"),
    "a schema beyond the backend": (
        "ValueError: The JSON schema contains features not supported by xgrammar",
        "guidance",
    ),
    "a slice by its UUID": ("ValueError: invalid literal for int() with base 10: 'MIG-77aa'", "CUDA_VISIBLE_DEVICES=0"),
    "an image of another processor": ("exec /usr/bin/python3: exec format error", "--platform"),
    "a proxy's certificate": ("SSLError: CERTIFICATE_VERIFY_FAILED for host hub", "REQUESTS_CA_BUNDLE"),
    "an interface that leads nowhere": (
        "NCCL WARN socketStartConnect: Connect to 172.17.0.2 failed",
        "NCCL_SOCKET_IFNAME",
    ),
    "wrong words": (
        "With the fp8 cache the answers are gibberish, without it they are right. vLLM 0.9",
        "one at a time",
    ),
    "a compiler without RAM": ("c++: fatal error: Killed signal terminated program cc1plus", "MAX_JOBS"),
    "a read-only disk": ("OSError: [Errno 30] Read-only file system: '/root/.cache/x'", "HF_HOME"),
    "a daemon's child": ("AssertionError: daemonic processes are not allowed to have children", "vllm serve"),
    "roles in a row": ("TemplateError: Conversation roles must alternate user/assistant/user", "alternate"),
    "a volume that is not bound": ("0/2 nodes: pod has unbound immediate PersistentVolumeClaims.", "kubectl get pvc"),
    "a module of another system": ("ModuleNotFoundError: No module named 'fcntl'", "WSL2"),
    "a question about size": ("Which GPU do I need to serve a 70B with 16k context for 20 users?", "legroom size"),
    "a question": ("How do I turn prefix caching on in vllm serve, and what does it cost?", "legroom plan"),
    "a question in Chinese": ("请问 vLLM 如何开启前缀缓存？会多占用显存吗？", "legroom plan"),
    "a wish": ("Feature request: vLLM should report KV usage by request, would be nice to have.", "vllm-project/vllm"),
    "slowness": ("vLLM 0.10 on an H100 is very slow for one user, memory is fine. Ideas?", "every ten seconds"),
    "a proxy that gave up": ("vLLM behind nginx: long requests end in 504 Gateway Time-out", "proxy_read_timeout"),
    "a unit without a program": ("After a restart the vllm unit fails with status=203/EXEC", "ExecStart="),
    "a template that is no file": ("ValueError: Cannot use chat template that is not a file: ./a.jinja", "mount"),
    "code that is not compiled": ("torch._dynamo.exc.Unsupported: call_method UserDefinedObject", "--enforce-eager"),
    "a route in Chinese": ("vLLM 启动后 curl 返回 404", "/v1/chat/completions"),
    "a port in Chinese": ("启动 vllm 提示端口 8000 已被占用", "ss -ltnp"),
    "bfloat16 in Chinese": (
        "T4 上 vLLM 提示 Bfloat16 is only supported on GPUs with compute capability of at least 8.0，是不是显存不够？",
        "half",
    ),
}


@pytest.mark.parametrize(("log", "words"), NAMED_FAILURES.values(), ids=NAMED_FAILURES)
def test_what_failed_or_is_asked_has_a_way_out(log: str, words: str) -> None:
    found = finding(log)
    assert found.cause in ("not_memory", "driver_or_cuda_mismatch", "wrong_flag")
    assert words in " ".join((*found.fixes[0].steps, *found.fixes[0].command))


OWN_REMEDIES = {
    "advice": ("ValueError: X cannot go. Set VLLM_ACME=2 to use the other path.", "Set VLLM_ACME=2"),
    "a version with dots": (
        "ImportError: Please install acme>=0.46.1 by running `pip install acme>=0.46.1`",
        "acme>=0.46.1",
    ),
    "an extra": ("ImportError: Please install vllm[audio] for audio support.", "pip install 'vllm[audio]'"),
    "two features": ("NotImplementedError: Chunked prefill is not supported with sliding window", "Chunked prefill or"),
    "a platform": ("ValueError: Sleep mode is not supported on current platform.", "leave out Sleep mode"),
    "a bound": ("ValueError: acme_size must be a multiple of 16", "a multiple of 16"),
    "an unknown value": ("ValueError: Unknown prefix caching hash algorithm: md9", "md9"),
}


@pytest.mark.parametrize(("log", "words"), OWN_REMEDIES.values(), ids=OWN_REMEDIES)
def test_an_error_of_unknown_kind_is_answered_with_what_its_own_line_says(log: str, words: str) -> None:
    assert words in finding(log).fixes[0].steps[0]


def test_what_fails_outweighs_what_is_asked() -> None:
    log = "How do I fix this? vLLM: torch.OutOfMemoryError: CUDA out of memory while the weights are loaded."
    assert finding(log).cause != "not_memory"


def test_a_request_with_too_many_media_is_told_so() -> None:
    found = finding("ValueError: At most 2 image(s) may be provided in one request.")
    assert found.why.startswith("A request carries more media (image) than the server was told to expect: 2.")


def test_a_kill_on_one_shared_memory_is_of_that_memory() -> None:
    log = "GB10 with 128 GB: the box freezes once vLLM has loaded with 0.9, and the engine is Killed."
    assert finding(log).cause == "unified_memory_or_wsl"


def test_words_that_prove_nothing_are_not_quoted() -> None:
    text = (
        "The answer of our vLLM server comes late and we wonder about the setting, the client, the proxy and the disk"
    )
    found = finding(text)
    assert "usual of this" not in found.why
