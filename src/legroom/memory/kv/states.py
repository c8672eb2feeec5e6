"""The state size of recurrent layers on one rank."""

from __future__ import annotations

from legroom.errors import LegroomError
from legroom.facts.model import Model, StateSpace
from legroom.facts.releases import release as known_release
from legroom.memory.dtypes import dtype_bytes
from legroom.vllm.args import EngineSettings


def state_bytes(mixer: StateSpace, model: Model, settings: EngineSettings) -> int:
    """Bytes of the convolution and recurrent state of one layer on one tensor-parallel rank."""
    conv_elements, recurrent_elements = _SHAPES[mixer.kind](mixer, settings)
    conv_dtype, recurrent_dtype = state_dtypes(mixer, model, settings)
    return conv_elements * dtype_bytes(conv_dtype) + recurrent_elements * dtype_bytes(recurrent_dtype)


def state_dtypes(mixer: StateSpace, model: Model, settings: EngineSettings) -> tuple[str, str]:
    """The dtypes of convolution and recurrent state: from flags, the checkpoint's config, or the model's dtype."""
    given_conv = settings.given.mamba_cache_dtype or "auto"
    conv = settings.dtype if given_conv == "auto" else given_conv
    given = settings.given.mamba_ssm_cache_dtype or "auto"
    if given != "auto":
        return conv, given
    configured = model.config.get("mamba_ssm_cache_dtype") or model.config.get("mamba_ssm_dtype")
    release = known_release(settings.release)
    if "NemotronH" in model.architecture and release.at_least("0.12.0"):
        # Nemotron-H: only float32 states are known to keep accuracy, so it is the default.
        return conv, configured if isinstance(configured, str) else "float32"
    if "Qwen3_5" in model.architecture and isinstance(configured, str):
        return conv, configured
    if mixer.kind == "kda":
        return conv, "float32"
    return conv, conv


def _share(total: int, settings: EngineSettings, what: str) -> int:
    ranks = settings.tensor_parallel_size
    if total % ranks:
        raise LegroomError(
            f"{what} {total} does not divide over {ranks} tensor-parallel ranks",
            "choose another --tensor-parallel-size",
        )
    return total // ranks


def _conv_tail(mixer: StateSpace, settings: EngineSettings) -> int:
    """Tokens in the convolution state, with speculative tokens until they are accepted."""
    return mixer.width("conv_kernel") - 1 + settings.num_speculative_tokens


def _mamba1(mixer: StateSpace, settings: EngineSettings) -> tuple[int, int]:
    inner = _share(mixer.width("intermediate_size"), settings, "the Mamba inner size")
    return inner * (mixer.width("conv_kernel") - 1), inner * mixer.width("state_size")


def _mamba2(mixer: StateSpace, settings: EngineSettings) -> tuple[int, int]:
    groups = mixer.width("n_groups")
    if groups % settings.tensor_parallel_size:
        groups = settings.tensor_parallel_size  # groups are replicated to every rank
    conv = _share(
        mixer.width("intermediate_size") + 2 * groups * mixer.width("state_size"), settings, "the Mamba width"
    )
    heads = _share(mixer.width("num_heads"), settings, "the number of Mamba heads")
    return conv * _conv_tail(mixer, settings), heads * mixer.width("head_dim") * mixer.width("state_size")


def _gdn(mixer: StateSpace, settings: EngineSettings) -> tuple[int, int]:
    key_width = mixer.width("head_k_dim") * mixer.width("num_k_heads")
    value_width = mixer.width("head_v_dim") * mixer.width("num_v_heads")
    conv = _share(2 * key_width + value_width, settings, "the linear-attention width")
    heads = _share(mixer.width("num_v_heads"), settings, "the number of linear-attention heads")
    return conv * _conv_tail(mixer, settings), heads * mixer.width("head_v_dim") * mixer.width("head_k_dim")


def _kda(mixer: StateSpace, settings: EngineSettings) -> tuple[int, int]:
    heads, head_dim = mixer.width("num_heads"), mixer.width("head_dim")
    conv = _share(3 * heads * head_dim, settings, "the linear-attention width")
    own = _share(heads, settings, "the number of linear-attention heads")
    return conv * _conv_tail(mixer, settings), own * head_dim * head_dim


def _lightning(mixer: StateSpace, settings: EngineSettings) -> tuple[int, int]:
    heads = mixer.width("num_heads") // settings.tensor_parallel_size
    return 0, heads * mixer.width("head_dim") ** 2


def _short_conv(mixer: StateSpace, settings: EngineSettings) -> tuple[int, int]:
    return _share(mixer.width("intermediate_size"), settings, "the convolution width") * _conv_tail(mixer, settings), 0


_SHAPES = {
    "mamba1": _mamba1,
    "mamba2": _mamba2,
    "gdn": _gdn,
    "kda": _kda,
    "lightning": _lightning,
    "short_conv": _short_conv,
}
