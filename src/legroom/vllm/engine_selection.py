"""The engine (V0, V1) and model runner (V1, V2) that a release selects."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from legroom.facts.gpus import Gpu
from legroom.facts.model import Model
from legroom.facts.releases import Release
from legroom.vllm.args import ServeArgs, draft_method, env_flag, is_given, other_value
from legroom.vllm.traits import is_encoder_decoder, is_pooling, traits


def on_cpu(args: ServeArgs) -> ServeArgs:
    """The flags as vLLM's CPU platform completes them: blocks of 128 tokens, float32 states, no CUDA graphs."""
    state_dtype = args.mamba_ssm_cache_dtype or "float32"
    return replace(args, block_size=args.block_size or 128, mamba_ssm_cache_dtype=state_dtype, enforce_eager=True)


_V2_ARCHITECTURES = (
    ("0.22.0", "0.24.0", {"Qwen3ForCausalLM"}),
    ("0.23.0", "0.24.0", {"LlamaForCausalLM", "MistralForCausalLM"}),
    ("0.24.0", "0.28.0", {"DeepseekV2ForCausalLM", "GraniteMoeForCausalLM", "Qwen2MoeForCausalLM"}),
    ("0.26.0", "0.28.0", {"InklingForCausalLM", "InklingForConditionalGeneration", "LongcatFlashNgramForCausalLM"}),
    ("0.27.0", "0.28.0", {"KimiK3ForConditionalGeneration"}),
    ("0.28.0", "0.28.0", {"DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "GlmMoeDsaForCausalLM"}),
)
"""Architectures with model runner V2 by default in 0.22.0 - 0.28.0, and the first and last release that lists them."""

_V2_SPEC_METHODS = {"eagle", "eagle3", "mtp", "dflash", "dspark"}
_V2_REFUSED_SPEC_METHODS = {"suffix", "medusa", "mlp_speculator", "custom_class"}
_V2_REFUSED_FLAGS = ["--enable-dbo", "--logits-processors", "--enable-prompt-embeds", "--kv-sharing-fast-prefill"]
_V2_REFUSED_FLAGS += ["--ec-transfer-config", "--enable-return-routed-experts", "--enable-elastic-ep"]
"""Up to 0.28.0."""
_V1_REFUSED_FLAGS = (
    ("--logits-processor-pattern", "0.10.2"),
    ("--preemption-mode", "0.10.2"),
    ("--disable-async-output-proc", "0.10.2"),
    ("--scheduler-delay-factor", "0.10.2"),
    ("--scheduling-policy", "0.9.1"),
    ("--num-scheduler-steps", "0.10.0"),
    ("--worker-cls", "0.8.1"),
    ("--worker-extension-cls", "0.8.1"),
    ("--additional-config", "0.8.4"),
    ("--kv-transfer-config", "0.8.4"),
    ("--otlp-traces-endpoint", "0.10.1.1"),
    ("--collect-detailed-traces", "0.10.1.1"),
    ("--enable-prompt-adapter", "0.9.2"),
    ("--enable-prompt-embeds", "0.10.2"),
    ("--max-num-partial-prefills", "0.10.2"),
    ("--max-long-partial-prefills", "0.10.2"),
)
"""Flags with which 0.8.0 - 0.10.2 select the V0 engine, with the last release that does."""

_HARMLESS = {"--scheduling-policy": "fcfs", "--num-scheduler-steps": "1", "--scheduler-delay-factor": "0.0"}
_V0_ONLY = (
    ("BloomForCausalLM", "0.10.1.1"),
    ("GritLM", "0.10.1.1"),
    ("MllamaForConditionalGeneration", "0.10.2"),
    ("Phi4FlashForCausalLM", "0.10.2"),
    ("Plamo2ForCausalLM", "0.10.1.1"),
)
"""Architectures without a V1 implementation, with the last release that lacks it."""


def engine_of(args: ServeArgs, model: Model, gpu: Gpu, release: Release) -> tuple[Literal["V0", "V1"], str]:
    """(the engine, a sentence for the user on why the release falls back to V0, or an empty text)."""
    if release.at_least("0.11.0"):
        return "V1", ""
    asked = env_flag(args, "VLLM_USE_V1")
    if release.before("0.8.0") or asked is not None:
        return "V1" if asked and release.at_least("0.6.4") else "V0", ""
    reason = next(_v0_reasons(args, model, gpu, release), None)
    if reason is None:
        return "V1", ""
    return "V0", f"vLLM {release} falls back to its V0 engine because of {reason}"


def _v0_reasons(args: ServeArgs, model: Model, gpu: Gpu, release: Release) -> Iterator[str]:
    """Why 0.8.0 - 0.10.2 select the V0 engine, in the order of vLLM's checks."""
    load_format = other_value(args, "--load-format")
    if load_format == "sharded_state" or (load_format == "tensorizer" and release.before("0.9.0")):
        yield f"--load-format {load_format}"
    for name, last in _V1_REFUSED_FLAGS:
        harmless = name in _HARMLESS and other_value(args, name) == _HARMLESS[name]
        if is_given(args, name) and not release.after(last) and not harmless:
            yield name
    backend = (other_value(args, "--guided-decoding-backend") or "").partition(":")[0]
    if backend in ("outlines", "lm-format-enforcer") and release.before("0.10.0"):
        yield f"--guided-decoding-backend {backend}"
    if gpu.vendor == "nvidia" and (0, 0) < gpu.compute_capability < (8, 0) and release.before("0.10.2"):
        yield "a compute capability below 8.0"
    yield from _kv_dtype_reasons(args, gpu, release)
    if args.cpu_offload_gb and release.before("0.8.3"):
        yield "--cpu-offload-gb"
    if args.dtype in ("float", "float32") and release.before("0.9.2"):
        yield f"--dtype {args.dtype}"
    method = args.quantization or (model.quantization.method if model.quantization else None)
    if (method == "gguf" and release.before("0.9.0")) or (method == "bitsandbytes" and release.before("0.8.3")):
        yield f"{method} quantization"
    yield from _model_reasons(args, model, release)
    known = {"ngram", "eagle", "eagle3", "medusa", "deepseek_mtp"} if release.at_least("0.9.0") else set()
    if args.speculative_config and release.before("0.10.0") and draft_method(args.speculative_config) not in known:
        yield "speculative decoding"
    yield from _experimental_reasons(args, release)
    if gpu.vendor != "nvidia" and release.before("0.9.2"):
        yield f"a GPU that is not NVIDIA's ({gpu.name})"


def _kv_dtype_reasons(args: ServeArgs, gpu: Gpu, release: Release) -> Iterator[str]:
    """A reason for V0 where V1 of this release does not support the KV cache dtype on this card."""
    dtype = args.kv_cache_dtype
    if dtype is None or dtype == "auto":
        return
    # FlashAttention 3 reads an fp8 cache on Hopper alone; 0.10.x also took it on Blackwell (FlashInfer).
    supported = release.at_least("0.8.2") and dtype.startswith("fp8") and gpu.compute_capability[0] == 9
    supported = supported or (release.at_least("0.10.0") and gpu.compute_capability == (10, 0))
    supported = supported or (gpu.vendor == "amd" and release.at_least("0.9.0"))
    if not supported:
        yield f"--kv-cache-dtype {dtype}"


def _model_reasons(args: ServeArgs, model: Model, release: Release) -> Iterator[str]:
    """Reasons for V0: model properties that this release supports in the V0 engine only."""
    pooling = is_pooling(args, model)
    if pooling and release.before("0.9.2"):
        yield "a pooling model"
    if pooling and traits(model).bidirectional and release.before("0.10.1"):
        yield "an encoder-only model"
    if traits(model).has_state and release.before("0.10.2"):
        yield "recurrent (Mamba) layers"
    whisper = model.architecture.startswith("Whisper")
    if is_encoder_decoder(model) and (release.before("0.10.2") or (not whisper and release.before("0.11.0"))):
        yield "an encoder-decoder model"
    yield from (name for name, last in _V0_ONLY if model.architecture == name and not release.after(last))


def _experimental_reasons(args: ServeArgs, release: Release) -> Iterator[str]:
    """Reasons for V0: flags and variables whose V1 support is experimental or missing in this release."""
    if args.enable_lora and release.before("0.8.3"):
        yield "--enable-lora"
    pipeline = (args.pipeline_parallel_size or 1) > 1
    executor = other_value(args, "--distributed-executor-backend")
    # 0.8.3 needs Ray for it, 0.9.0 any given executor, 0.9.1 none.
    allowed = {"ray"} if release.before("0.9.0") else {"ray", "mp", "external_launcher"}
    if pipeline and (release.before("0.8.3") or (release.before("0.9.1") and executor not in allowed)):
        yield "pipeline parallelism"
    backend = args.env.get("VLLM_ATTENTION_BACKEND", "")
    if backend == "XFORMERS" or (backend == "FLASHINFER" and release.before("0.8.5")):
        yield f"VLLM_ATTENTION_BACKEND={backend}"


def runner_of(args: ServeArgs, model: Model, gpu: Gpu, release: Release) -> Literal["V1", "V2"]:
    """The model runner: as VLLM_USE_V2_MODEL_RUNNER says (0.22.0+), else V2 for some architectures and settings, and
    from 0.29.0 on unless a feature in use needs V1."""
    if release.before("0.22.0"):
        return "V1"
    asked = env_flag(args, "VLLM_USE_V2_MODEL_RUNNER")
    if asked is not None:
        return "V2" if asked else "V1"
    method = draft_method(args.speculative_config)
    if method == "dspark" or (release.at_least("0.27.0") and (args.prefill_context_parallel_size or 1) > 1):
        return "V2"
    if release.at_least("0.29.0"):
        return "V1" if _v2_refuses(args) else "V2"
    if is_pooling(args, model) or not _is_v2_model(model, release) or _v2_refuses_before_0_29(args, model, release):
        return "V1"
    return "V2"


def _is_v2_model(model: Model, release: Release) -> bool:
    """Whether 0.22.0 to 0.28.0 run this model on the V2 model runner by default."""
    listed = any(
        release.within(first, last) and model.architecture in names for first, last, names in _V2_ARCHITECTURES
    )
    if release.before("0.24.0"):
        return listed and not traits(model).moe and model.quantization is None
    if release.before("0.25.0"):
        return listed
    if traits(model).attention_free or traits(model).hybrid:
        return listed and release.at_least("0.27.0")
    return listed or not traits(model).moe


def _v2_refuses_before_0_29(args: ServeArgs, model: Model, release: Release) -> bool:
    """Whether the flags or the model use a feature that the V2 model runner lacks up to 0.28.0."""
    method = draft_method(args.speculative_config)
    pipeline = (args.pipeline_parallel_size or 1) > 1
    allowed = {"", *(_V2_SPEC_METHODS if release.at_least("0.26.0") else {"eagle", "eagle3", "mtp"})}
    return (
        (method not in allowed and not method.endswith("_mtp"))
        or (method == "eagle3" and pipeline)
        or ((args.prefill_context_parallel_size or 1) > 1 and not traits(model).mla)
        or (pipeline and other_value(args, "--distributed-executor-backend") == "external_launcher")
        or any(is_given(args, name) for name in _V2_REFUSED_FLAGS)
    )


def _v2_refuses(args: ServeArgs) -> bool:
    """Whether the flags use a feature that the V2 model runner lacks from 0.29.0 on."""
    spec = args.speculative_config or {}
    method = draft_method(spec)
    external = other_value(args, "--distributed-executor-backend") == "external_launcher"
    refused = method in _V2_REFUSED_SPEC_METHODS or bool(spec.get("use_heterogeneous_vocab"))
    refused = refused or (bool(spec.get("parallel_drafting")) and method not in ("dflash", "dspark"))
    return refused or (external and (args.pipeline_parallel_size or 1) > 1)
