"""Settings that vLLM refuses before it touches the GPU, with its error messages."""

from legroom.errors import LegroomError
from legroom.facts.flags import flag_name
from legroom.facts.model import Model
from legroom.facts.releases import Release
from legroom.vllm.args import PARALLEL_SIZES, EngineSettings, ServeArgs, env_flag
from legroom.vllm.config_rules import config_refusals
from legroom.vllm.traits import traits


class RefusedByVllm(LegroomError):
    """vLLM exits with `vllm_message` at these settings."""

    def __init__(self, message: str, hint: str, vllm_message: str) -> None:
        super().__init__(message, hint)
        self.vllm_message = vllm_message


_POSITIVE = (
    *("max_num_seqs", "max_num_batched_tokens", "block_size"),
    *PARALLEL_SIZES,
    *("max_loras", "max_lora_rank", "kv_cache_memory_bytes"),
)
_LARGEST = 2**50  # Above every token count and byte size of a real server.


def check_given(args: ServeArgs, release: Release) -> None:
    """Raises LegroomError for given values that vLLM refuses whatever the model is, such as a size below 1."""
    for name in _POSITIVE:
        value = getattr(args, name)
        if value is not None and not 0 < value < _LARGEST:
            flag = flag_name(name)
            raise LegroomError(f"{flag} {value} is out of range", f"{flag} takes a whole number from 1 up")
    length = args.max_model_len
    if length is not None and not (0 < length < _LARGEST or (length == -1 and release.at_least("0.14.0"))):
        hint = "give a length in tokens like 8192" + (", or -1 to fit the memory" if release.at_least("0.14.0") else "")
        raise LegroomError(f"--max-model-len {length} is out of range for vLLM {release}", hint)
    utilization = args.gpu_memory_utilization
    if utilization is not None and not 0 < utilization <= 1:
        vllm_message = f"GPU memory utilization must be less than 1.0. Got {utilization}."
        if release.at_least("0.11.1"):
            bound = "less than or equal to 1" if utilization > 1 else "greater than 0"
            vllm_message = f"gpu_memory_utilization: Input should be {bound}"
        message = f"--gpu-memory-utilization {utilization} is not a share of the GPU"
        raise RefusedByVllm(message, "give a value above 0 and up to 1", vllm_message)
    if args.cpu_offload_gb is not None and args.cpu_offload_gb < 0:
        raise LegroomError(f"--cpu-offload-gb {args.cpu_offload_gb} is negative", "give a size in GiB, 0 for none")


def check_length(args: ServeArgs, limit: int, model: Model, release: Release) -> None:
    """Raise RefusedByVllm for a --max-model-len above `limit` tokens and the config's model_max_length; not with
    VLLM_ALLOW_LONG_MAX_MODEL_LEN, nor for a model whose config was not read."""
    length = args.max_model_len
    if length is None or length <= limit or model.named_alone or env_flag(args, "VLLM_ALLOW_LONG_MAX_MODEL_LEN"):
        return
    own = model.config.get("model_max_length")
    if isinstance(own, int) and length <= own:
        return
    vllm_message = (
        f"User-specified max_model_len ({length}) is greater than the derived max_model_len "
        f"(max_position_embeddings={limit} or model_max_length={own} in model's config.json)."
    )
    hint = f"lower --max-model-len to {limit}"
    if release.at_least("0.5.4"):
        hint += ", or stretch its positions: --hf-overrides with rope_parameters (YaRN) and max_position_embeddings"
    raise RefusedByVllm(f"--max-model-len {length} is above the {limit} tokens of the model", hint, vllm_message)


def check_settings(settings: EngineSettings, model: Model) -> None:
    """Raises LegroomError (RefusedByVllm with vLLM's message) for combinations that the release refuses."""
    for check in (_check_tokens, _check_heads, _check_sizes):
        check(settings, model)
    for vllm_message, hint in config_refusals(settings, model, settings.release):
        raise RefusedByVllm(vllm_message, hint, vllm_message)


def _check_tokens(settings: EngineSettings, model: Model) -> None:
    """Raises RefusedByVllm if max_num_batched_tokens is less than max_num_seqs, or unchunked than max_model_len."""
    tokens, seqs, length = settings.max_num_batched_tokens, settings.max_num_seqs, settings.max_model_len
    if tokens < length and not settings.enable_chunked_prefill:
        raise RefusedByVllm(
            f"without chunked prefill a step ({tokens} tokens) must hold a whole prompt ({length} tokens)",
            "raise --max-num-batched-tokens, lower --max-model-len, or leave chunked prefill on",
            f"max_num_batched_tokens ({tokens}) is smaller than max_model_len ({length}). This effectively limits the "
            "maximum sequence length to max_num_batched_tokens and makes vLLM reject longer sequences. Please increase "
            "max_num_batched_tokens or decrease max_model_len.",
        )
    if tokens < seqs:
        raise RefusedByVllm(
            f"--max-num-batched-tokens {tokens} is below --max-num-seqs {seqs}",
            "every running request needs a token a step: raise the first or lower the second",
            f"max_num_batched_tokens ({tokens}) must be greater than or equal to max_num_seqs ({seqs}).",
        )


def _check_heads(settings: EngineSettings, model: Model) -> None:
    """Raises RefusedByVllm where the heads do not divide by the TP size, or the TP size by the DCP size."""
    heads, ranks = traits(model).heads, settings.tensor_parallel_size
    if heads is not None and heads % ranks:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0 and n <= 64]
        raise RefusedByVllm(
            f"--tensor-parallel-size {ranks} does not divide the {heads} attention heads of "
            f"{model.name or 'the model'}",
            f"use one of {', '.join(map(str, fitting))}",
            f"Total number of attention heads ({heads}) must be divisible by tensor parallel size ({ranks}).",
        )
    context = settings.decode_context_parallel_size
    if context > 1 and ranks % context:
        raise RefusedByVllm(
            f"--decode-context-parallel-size {context} does not divide --tensor-parallel-size {ranks}",
            "it splits the tensor-parallel group: use a divisor of it",
            f"tp_size={ranks} must be divisible bydcp_size={context}.",
        )


def _check_sizes(settings: EngineSettings, model: Model) -> None:
    """Raises LegroomError for more stages than layers, for block sizes and numbers of blocks that vLLM refuses, and for
    --mamba-block-size without prefix caching."""
    stages, layers = settings.pipeline_parallel_size, len(model.layers)
    size, blocks = settings.block_size, settings.num_gpu_blocks_override
    if stages > layers:
        why = f"--pipeline-parallel-size {stages} is more than the {layers} layers of {model.name or 'the model'}"
        raise LegroomError(why, f"use {layers} stages or fewer")
    if size is not None and size % 16 and size not in (1, 8) and traits(model).heads is not None:
        raise LegroomError(f"--block-size {size} suits no attention backend", "use a multiple of 16")
    if blocks is not None and blocks < 1 and not traits(model).bidirectional:
        message = f"--num-gpu-blocks-override {blocks} is out of range"
        raise LegroomError(message, "--num-gpu-blocks-override takes a whole number from 1 up")
    state_size, release = settings.given.mamba_block_size, settings.release
    if state_size in (None, settings.max_model_len) or settings.enable_prefix_caching or release.before("0.11.1"):
        return
    raise RefusedByVllm(
        f"--mamba-block-size {state_size} needs prefix caching, which vLLM {release} leaves off here",
        "add --enable-prefix-caching, or leave --mamba-block-size out",
        "--mamba-block-size can only be set with --enable-prefix-caching",
    )
