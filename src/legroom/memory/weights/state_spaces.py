"""The modules of recurrent mixers on one rank: Mamba, gated delta nets, linear attention, convolutions."""

from __future__ import annotations

from legroom.facts.anatomy import Anatomy
from legroom.facts.model import StateSpace
from legroom.memory.weights.module import Module, projection, share
from legroom.units import cdiv


def _mamba2(mixer: StateSpace, hidden: int, tp: int, anatomy: Anatomy) -> list[Module]:
    inner = share(mixer.width("intermediate_size"), tp, "mamba width")
    heads = share(mixer.width("num_heads"), tp, "mamba heads")
    # Groups that do not divide over the ranks are replicated.
    conv = inner + 2 * cdiv(mixer.width("n_groups"), tp) * mixer.width("state_size")
    return [
        Module("attention", "mixer.A", heads, dtype="float32"),
        Module("attention", "mixer.D", heads),
        Module("attention", "mixer.dt_bias", heads),
        Module("attention", "mixer.conv1d", conv, mixer.width("conv_kernel"), bias=True),
        projection("mixer.in_proj", inner + conv + heads, hidden),
        projection("mixer.out_proj", hidden, inner),
        *([Module("norms", "mixer.norm", inner)] if anatomy.mamba_norm else ()),
    ]


def _mamba1(mixer: StateSpace, hidden: int, tp: int, anatomy: Anatomy) -> list[Module]:
    inner = share(mixer.width("intermediate_size"), tp, "mamba width")
    state, rank = mixer.width("state_size"), mixer.width("time_step_rank")
    norms = (rank, state, state) if anatomy.mamba_input_norms else ()
    return [
        Module("attention", "mixer.conv1d", inner, mixer.width("conv_kernel"), bias=True),
        projection("mixer.in_proj", 2 * inner, hidden),
        projection("mixer.x_proj", rank + 2 * state, inner),
        Module("attention", "mixer.dt_proj", inner, rank, bias=True),
        Module("attention", "mixer.A", inner, state, dtype="float32"),
        Module("attention", "mixer.D", inner),
        projection("mixer.out_proj", hidden, inner),
        *(Module("norms", f"mixer.norm{n}", size) for n, size in enumerate(norms)),
    ]


def _gdn(mixer: StateSpace, hidden: int, tp: int, anatomy: Anatomy) -> list[Module]:
    value_heads = share(mixer.width("num_v_heads"), tp, "linear-attention value heads")
    keys = share(mixer.width("num_k_heads") * mixer.width("head_k_dim"), tp, "linear-attention key width")
    values = value_heads * mixer.width("head_v_dim")
    return [
        Module("attention", "linear_attn.dt_bias", value_heads),
        Module("attention", "linear_attn.A_log", value_heads, dtype="float32"),
        Module("attention", "linear_attn.conv1d", 2 * keys + values, mixer.width("conv_kernel")),
        projection("linear_attn.in_proj_qkvz", 2 * (keys + values), hidden, shards=("in_proj_qkv", "in_proj_z")),
        projection("linear_attn.in_proj_ba", 2 * value_heads, hidden, shards=("in_proj_b", "in_proj_a")),
        Module("norms", "linear_attn.norm", mixer.width("head_v_dim")),
        projection("linear_attn.out_proj", hidden, values),
    ]


def _kda(mixer: StateSpace, hidden: int, tp: int, anatomy: Anatomy) -> list[Module]:
    heads, dim = share(mixer.width("num_heads"), tp, "KDA heads"), mixer.width("head_dim")
    kernel, width = mixer.width("conv_kernel"), heads * dim
    gate = [
        Module("attention", "self_attn.g_a_proj", dim, hidden),
        Module("attention", "self_attn.g_b_proj", width, dim),
    ]
    if mixer.width("full_rank_gate"):
        gate = [projection("self_attn.g_proj", width, hidden)]
    return [
        projection("self_attn.qkv_proj", 3 * width, hidden, shards=("q_proj", "k_proj", "v_proj")),
        Module("attention", "self_attn.f_a_proj", dim, hidden),
        Module("attention", "self_attn.f_b_proj", width, dim),
        Module("attention", "self_attn.dt_bias", width, dtype="float32"),
        Module("attention", "self_attn.b_proj", heads, hidden),
        *(Module("attention", f"self_attn.{which}_conv1d", width, kernel, dtype="float32") for which in "qkv"),
        Module("attention", "self_attn.A_log", heads, dtype="float32"),
        *gate,
        Module("norms", "self_attn.o_norm", dim),
        projection("self_attn.o_proj", hidden, width),
    ]


def _lightning(mixer: StateSpace, hidden: int, tp: int, anatomy: Anatomy) -> list[Module]:
    heads, dim = share(mixer.width("num_heads"), tp, "linear-attention heads"), mixer.width("head_dim")
    width = heads * dim
    return [
        projection("self_attn.qkv_proj", 3 * width, hidden),
        projection("self_attn.output_gate", width, hidden),
        projection("self_attn.out_proj", hidden, width),
        Module("norms", "self_attn.norm", width),
    ]


def _short_conv(mixer: StateSpace, hidden: int, tp: int, anatomy: Anatomy) -> list[Module]:
    width = share(mixer.width("intermediate_size"), tp, "convolution width")
    return [
        Module("attention", "conv.conv", width, mixer.width("conv_kernel")),
        projection("conv.in_proj", 3 * width, hidden),
        projection("conv.out_proj", hidden, width),
    ]


STATE_SPACES = {
    "mamba1": _mamba1,
    "mamba2": _mamba2,
    "gdn": _gdn,
    "kda": _kda,
    "lightning": _lightning,
    "short_conv": _short_conv,
}
