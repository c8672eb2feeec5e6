"""The feed-forward block of every layer, from a config.json: dense, experts or none."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from legroom.facts.config.fields import int_field
from legroom.facts.model import Dense, Experts, FeedForward
from legroom.units import round_up

Config = Mapping[str, Any]

_BIASED = frozenset(
    {"gpt2", "gpt_bigcode", "gptj", "gpt_neox", "opt", "bloom", "phi", "phi-msft", "persimmon", "starcoder2", "codegen"}
    | {"bert", "roberta", "xlm-roberta", "deberta-v2", "whisper", "bart", "mbart", "gpt_oss", "fuyu"}
)
"""Model types whose linear layers have biases without a config field."""
_UNGATED = (_BIASED - {"gpt_oss"}) | frozenset(
    {"mpt", "falcon", "RefinedWeb", "RefinedWebModel", "nemotron", "nemotron_h", "nemotron_h_puzzle", "arcee"}
    | {"apertus", "nomic_bert_plain"}
)
"""Model types with an ungated block: up, activation, down."""
_EXPERT_COUNT = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "num_moe_experts")
_EXPERTS_PER_TOKEN = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"),
    *("num_selected_experts", "top_k", "moe_router_topk"),
)
_EXPERT_WIDTH = (
    *("moe_intermediate_size", "expert_hidden_dim", "expert_ffn_hidden_size", "moe_ffn_hidden_size", "ffn_hidden_size"),
)
_SHARED_COUNT = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_SHARED_WIDTH = (
    *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"),
    *("share_expert_dim", "moe_shared_expert_size"),
)


def feedforwards(config: Config, architecture: str) -> tuple[FeedForward | None, ...]:
    """The feed-forward block of every layer; None for layers without one (Mamba, attention-only)."""
    count = int_field(config, "num_hidden_layers")
    special = _SPECIAL.get(_model_type(config, architecture))
    if special:
        return special(config, count)
    dense, experts = _dense_block(config, architecture), _expert_block(config, architecture)
    if experts is None:
        return (dense,) * count
    shared = {sparse: experts if sparse else dense for sparse in (True, False)}
    return tuple(shared[sparse] for sparse in _sparse_layers(config, count))


def _model_type(config: Config, architecture: str) -> str:
    """The model type that the architecture implies, else the config's without `_text`."""
    return _BY_ARCHITECTURE.get(architecture, str(config.get("model_type") or "").removesuffix("_text"))


_BY_ARCHITECTURE = {
    "NemotronHForCausalLM": "nemotron_h",
    "DeciLMForCausalLM": "nemotron-nas",
    "JambaForCausalLM": "jamba",
    "MambaForCausalLM": "mamba",
    "Mamba2ForCausalLM": "mamba2",
    "FalconMambaForCausalLM": "falcon_mamba",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4ForCausalLM": "gemma4",
    "Llama4ForConditionalGeneration": "llama4",
    "Llama4ForCausalLM": "llama4",
    "OPTForCausalLM": "opt",
    "GPT2LMHeadModel": "gpt2",
    "PhiForCausalLM": "phi",
    "QWenLMHeadModel": "qwen",
    "GptOssForCausalLM": "gpt_oss",
    "NemotronForCausalLM": "nemotron",
}


def _first_int(config: Config, names: Sequence[str]) -> int:
    """The first of the config's fields `names` that is positive, or the largest item of a list; 0 where none is."""
    for name in names:
        value = config.get(name)
        if isinstance(value, (list, tuple)):
            value = max((size for size in value if isinstance(size, (int, float))), default=None)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
            return int(value)
    return 0


def _mlp_width(config: Config, model_type: str) -> int:
    """The intermediate size of a dense MLP; four times the hidden size where the config gives none."""
    hidden = int_field(config, "hidden_size")
    if model_type in ("falcon", "RefinedWeb", "RefinedWebModel"):
        return _first_int(config, ("ffn_hidden_size",)) or 4 * hidden
    if model_type == "mpt":
        return int(float(config.get("expansion_ratio") or 4) * hidden)
    names = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "inner_hidden_size", "encoder_ffn_dim")
    width = _first_int(config, names)
    if model_type == "qwen" and width >= 4 * hidden:
        # Qwen-1's config gives gate and up together, and its code halves it; some copies give one half.
        return width // 2
    return width or 4 * hidden


def _mlp_has_bias(config: Config, model_type: str) -> bool:
    """Whether the family's MLP layers have biases, by its config or its default."""
    if model_type in _BIASED:
        return config.get("use_bias", True) is not False
    if model_type == "mpt":
        return not config.get("no_bias", False)
    if model_type in ("falcon", "RefinedWeb", "RefinedWebModel"):
        return bool(config.get("bias", False))
    return bool(config.get("mlp_bias", False))


def _dense_block(config: Config, architecture: str) -> Dense:
    """The dense MLP that the config describes: its width, gating and biases."""
    kind = _model_type(config, architecture)
    width = _first_int(config, ("dense_intermediate_size",)) or _mlp_width(config, kind)
    return Dense(int_field(config, "hidden_size"), width, kind not in _UNGATED, _mlp_has_bias(config, kind))


def _expert_block(config: Config, architecture: str) -> Experts | None:
    """The mixture-of-experts block that the config describes; None with fewer than two experts."""
    inner = config.get("ffn_config")
    if isinstance(inner, Mapping) and _first_int(inner, _EXPERT_COUNT) > 1:
        config = {**config, **inner}
    count = _first_int(config, _EXPERT_COUNT)
    if count <= 1:
        return None
    kind = _model_type(config, architecture)
    width = _first_int(config, _EXPERT_WIDTH) or _mlp_width(config, kind)
    shared = _shared_expert_width(config, kind, width)
    return Experts(
        int_field(config, "hidden_size"),
        width,
        count,
        _first_int(config, _EXPERTS_PER_TOKEN) or 1,
        gated=kind not in _UNGATED,
        bias=kind == "gpt_oss",
        shared_intermediate_size=shared,
        shared_gate=bool(shared) and kind in _SHARED_GATES,
        router_bias=kind == "gpt_oss",
        correction_bias=kind in _CORRECTED
        or config.get("topk_method") == "noaux_tc"
        or any(config.get(f"{name}_expert_bias") for name in ("use", "moe_router_enable"))
        or bool(config.get("use_moe_router_bias")),
        router_fp32=kind in _FLOAT_ROUTERS,
        latent_size=_first_int(config, ("moe_latent_size", "routed_expert_hidden_size")),
    )


_SHARED_GATES = frozenset({"qwen2_moe", "qwen3_next", "qwen3_5_moe"})
_FLOAT_ROUTERS = frozenset(
    {"minimax_m2", "minimax_m3", "minimax_m3_vl", "step3p5", "step3p7", "glm4_moe", "ernie4_5_moe", "grok-1", "afmoe"}
    | {"mimo_v2_flash"}
)
"""Model types whose router weight is float32."""
_CORRECTED = frozenset(
    {"minimax_m2", "minimax_m3", "minimax_m3_vl", "nemotron_h", "ernie4_5_moe", "glm4_moe", "dots1", "kimi_linear"}
    | {"afmoe"}
)
"""Model types with e_score_correction_bias and no config field for it."""


def _shared_expert_width(config: Config, kind: str, width: int) -> int:
    """The intermediate size of all shared experts together; `kind`: model type, `width`: of one expert; 0 without."""
    stated = _first_int(config, _SHARED_WIDTH)
    if kind == "llama4":
        return stated or width
    if kind == "granitemoe":
        return 0
    if kind.startswith("hunyuan"):
        return _mlp_width(config, kind) * _first_int(config, _SHARED_COUNT) if config.get("use_mixed_mlp_moe") else 0
    if stated:
        return stated * (_first_int(config, _SHARED_COUNT) or 1) if kind.startswith("minimax_m3") else stated
    return width * _first_int(config, _SHARED_COUNT)


def _sparse_layers(config: Config, count: int) -> list[bool]:
    """Whether each of `count` layers has experts: by a list in the config, by first layer and step, else all."""
    types = config.get("mlp_layer_types")
    if isinstance(types, (list, tuple)) and len(types) >= count:
        return [kind == "sparse" for kind in types[:count]]
    frequency = config.get("moe_layer_freq")
    if isinstance(frequency, (list, tuple)):
        return [bool(x) for x in frequency[:count]] + [True] * (count - len(frequency))
    named = config.get("moe_layers_enum") or config.get("moe_layers")
    if isinstance(named, str):
        named = [int(x) for x in named.split(",") if x.strip()]
    if isinstance(named, (list, tuple)) and named:
        return [i in set(named) for i in range(count)]
    first = _first_int(config, ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"))
    step = max(_first_int(config, ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")), 1)
    step = max(step, frequency if isinstance(frequency, int) and first == 0 else 1)
    last = config.get("moe_layer_end_index")
    only = set(config.get("mlp_only_layers") or ())
    return [
        i >= first and i not in only and (i + 1) % step == 0 and (not isinstance(last, int) or last < 0 or i <= last)
        for i in range(count)
    ]


def _nemotron_h_blocks(config: Config, count: int) -> tuple[FeedForward | None, ...]:
    """The blocks of `count` layers by hybrid_override_pattern; None for a Mamba or attention layer."""
    pattern = config.get("hybrid_override_pattern")
    letters = (
        pattern.replace("|", "")
        if isinstance(pattern, str)
        else [_BLOCK_LETTERS.get(str(x), "M") for x in config.get("layers_block_type") or ()]
    )
    hidden = int_field(config, "hidden_size")
    widths = config.get("intermediate_size")
    widths = list(widths) if isinstance(widths, (list, tuple)) else [widths or 4 * hidden]
    experts = _expert_block(config, "NemotronHForCausalLM")
    out: list[FeedForward | None] = []
    for letter in letters:
        if letter == "E" and experts:
            out.append(experts)
        elif letter == "-":
            dense = sum(1 for x in out if isinstance(x, Dense))
            out.append(Dense(hidden, int(widths[min(dense, len(widths) - 1)]), False, bool(config.get("mlp_bias"))))
        else:
            out.append(None)
    return tuple(out[:count]) + (None,) * (count - len(out))


_BLOCK_LETTERS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}


def _deci_blocks(config: Config, count: int) -> tuple[FeedForward | None, ...]:
    """The MLPs of `count` layers by `block_configs`; None where it omits one or replaces it by a linear layer."""
    hidden = int_field(config, "hidden_size")
    out: list[FeedForward | None] = []
    for block in config.get("block_configs") or ():
        ffn = (block.get("ffn") if isinstance(block, Mapping) else None) or {}
        if ffn.get("no_op") or ffn.get("replace_with_linear"):
            out.append(None)
            continue
        stated = ffn.get("intermediate_size")
        width = int(stated) if stated else round_up(int(2 * float(ffn.get("ffn_mult") or 1) * hidden / 3), 256)
        out.append(Dense(hidden, width))
    return tuple(out[:count]) if out else (_dense_block(config, ""),) * count


def _jamba_blocks(config: Config, count: int) -> tuple[FeedForward | None, ...]:
    """The blocks of `count` layers: experts at every `expert_layer_period`-th one, a dense MLP at the others."""
    dense, experts = _dense_block(config, ""), _expert_block(config, "")
    period = int_field(config, "expert_layer_period", default=2)
    offset = int_field(config, "expert_layer_offset", low=0, default=1)
    return tuple(experts if experts and i % period == offset else dense for i in range(count))


def _granite_hybrid_blocks(config: Config, count: int) -> tuple[FeedForward | None, ...]:
    """The same block for all `count` layers: experts with a shared MLP, a shared MLP alone, or None."""
    hidden, experts = int_field(config, "hidden_size"), _expert_block({**config, "shared_intermediate_size": 0}, "")
    width = _first_int(config, ("shared_intermediate_size",))
    shared = Dense(hidden, width) if width else None
    return ((replace(experts, shared_intermediate_size=width) if experts else shared),) * count


def _gemma4_blocks(config: Config, count: int) -> tuple[FeedForward | None, ...]:
    """The dense MLPs, of widths that may differ, of `count` layers, beside experts where the model has them."""
    hidden, width = int_field(config, "hidden_size"), _mlp_width(config, "gemma4")
    widths = config.get("intermediate_size")
    own_widths = dict(enumerate(widths)) if isinstance(widths, (list, tuple)) else {}
    shared = int(config.get("num_kv_shared_layers") or 0)
    wide = bool(config.get("use_double_wide_mlp"))
    experts = _expert_block(config, "") if config.get("enable_moe_block") or config.get("num_experts") else None
    out: list[FeedForward | None] = []
    for i in range(count):
        own = own_widths.get(i) if isinstance(own_widths.get(i), int) else 0
        dense = Dense(hidden, (own or width) * (2 if wide and i >= count - shared else 1))
        out.append(replace(experts, parallel_dense=dense) if experts else dense)
    return tuple(out)


def _llama4_blocks(config: Config, count: int) -> tuple[FeedForward | None, ...]:
    """The blocks of `count` layers: experts where the config lists them, a dense MLP of its own width elsewhere."""
    width = _first_int(config, ("intermediate_size_mlp",)) or _mlp_width(config, "llama4")
    dense, experts = Dense(int_field(config, "hidden_size"), width), _expert_block(config, "Llama4ForCausalLM")
    return tuple(experts if experts and sparse else dense for sparse in _sparse_layers(config, count))


def _lfm2_blocks(config: Config, count: int) -> tuple[FeedForward | None, ...]:
    """The blocks of `count` layers: experts at sparse ones, else a dense MLP of the width that LFM2 rounds up."""
    width = _first_int(config, ("block_ff_dim", "intermediate_size"))
    if config.get("block_auto_adjust_ff_dim", True) and "block_ff_dim" in config:
        width = int(2 * width / 3 * float(config.get("block_ffn_dim_multiplier") or 1))
        width = round_up(width, _first_int(config, ("block_multiple_of",)) or 256)
    dense, experts = Dense(int_field(config, "hidden_size"), width), _expert_block(config, "")
    return tuple(experts if experts and sparse else dense for sparse in _sparse_layers(config, count))


def _arctic_blocks(config: Config, count: int) -> tuple[FeedForward | None, ...]:
    """The blocks of `count` layers: experts, with any residual MLP, at every `moe_layer_frequency`-th, else dense."""
    dense, experts = _dense_block(config, ""), _expert_block(config, "")
    step = max(_first_int(config, ("moe_layer_frequency",)), 1)
    residual = Dense(dense.hidden_size, dense.hidden_size) if config.get("use_residual") else None
    sparse = replace(experts, parallel_dense=residual) if experts else dense
    return tuple(dense if (i + 1) % step else sparse for i in range(count))


def _phi3_small_blocks(config: Config, count: int) -> tuple[FeedForward | None, ...]:
    """The dense MLPs of `count` layers, as wide as Phi-3-small's config states."""
    width = _first_int(config, ("ff_intermediate_size",)) or _mlp_width(config, "phi3small")
    return (Dense(int_field(config, "hidden_size"), width, True, True),) * count


def _deepseek_v4_blocks(config: Config, count: int) -> tuple[FeedForward | None, ...]:
    """The blocks of `count` layers: experts, the first `num_hash_layers` routed by token id; dense without experts."""
    experts = _expert_block(config, "")
    if experts is None:
        return (_dense_block(config, ""),) * count
    hashed = replace(experts, correction_bias=False, hash_vocabulary=_first_int(config, ("vocab_size",)))
    first = _first_int(config, ("num_hash_layers",))
    return tuple(hashed if i < first else experts for i in range(count))


_SPECIAL: dict[str, Callable[[Config, int], tuple[FeedForward | None, ...]]] = {
    **dict.fromkeys(("deepseek_v4", "deepseek_ref"), _deepseek_v4_blocks),
    **dict.fromkeys(("nemotron_h", "nemotron_h_puzzle"), _nemotron_h_blocks),
    **dict.fromkeys(("nemotron-nas", "deci"), _deci_blocks),
    "jamba": _jamba_blocks,
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), lambda config, count: (None,) * count),
    "granitemoehybrid": _granite_hybrid_blocks,
    **dict.fromkeys(("gemma4", "gemma3n"), _gemma4_blocks),
    "llama4": _llama4_blocks,
    **dict.fromkeys(("lfm2", "lfm2_moe"), _lfm2_blocks),
    "arctic": _arctic_blocks,
    "phi3small": _phi3_small_blocks,
    # The MLP of a shared block, in layers with attention only.
    "zamba2": lambda config, count: tuple(
        _dense_block(config, "") if index in (config.get("hybrid_layer_ids") or range(6, count, 6)) else None
        for index in range(count)
    ),
}
