"""The widths of a recurrent mixer, read from a config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.attention import StateSpace
from legroom.facts.config_fields import int_field, optional_int


def state_space(text: Mapping[str, Any], kind: str) -> StateSpace:
    """The state-space mixer of one layer of the given kind."""
    readers = {
        "mamba1": _mamba1, "mamba2": _mamba2, "gdn": _gdn, "kda": _kda, "lightning": _lightning,
        "short_conv": _short_conv,
    }  # fmt: skip
    if kind not in readers:
        raise LegroomError(
            f"the model config has a layer of type {kind!r}, which legroom does not know",
            "known: full, sliding, chunked, linear attention, mamba, conv",
        )
    return StateSpace(kind, tuple(sorted(readers[kind](text).items())))


def _first(text: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        found = text.get(name)
        if isinstance(found, int | float) and not isinstance(found, bool):
            return int_field(text, name, low=0)
    return int_field(text, names[0], default=default)


def _mamba1(text: Mapping[str, Any]) -> dict[str, int]:
    hidden = int_field(text, "hidden_size")
    expand = _first(text, "mamba_expand", "expand", default=2)
    inner = expand * hidden
    if text.get("mamba_expand") is None and isinstance(text.get("d_inner"), int):
        inner = int_field(text, "d_inner")
    rank = text.get("mamba_dt_rank", text.get("time_step_rank"))
    return {
        "intermediate_size": inner,
        "state_size": _first(text, "mamba_d_state", "state_size", "d_state", default=16),
        "conv_kernel": _first(text, "mamba_d_conv", "conv_kernel", "d_conv", default=4),
        "time_step_rank": rank if isinstance(rank, int) else math.ceil(hidden / 16),
    }


def _mamba2(text: Mapping[str, Any]) -> dict[str, int]:
    hidden = int_field(text, "hidden_size")
    heads = _first(text, "mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads", default=0)
    head_dim = _first(text, "mamba_head_dim", "mamba_d_head", "mamba_headdim", "head_dim", default=0)
    inner = optional_int(text, "mamba_d_ssm") or 0
    if not inner and text.get("mamba_num_heads") is not None:
        inner = heads * head_dim  # Nemotron-H: expand is written but not used
    inner = inner or _first(text, "mamba_expand", "expand", default=2) * hidden
    heads = heads or (inner // head_dim if head_dim else 0)
    if not heads:
        raise LegroomError("the model config has no mamba_num_heads", "a Mamba-2 model needs its number of heads")
    return {
        "intermediate_size": inner,
        "n_groups": _first(text, "mamba_n_groups", "n_groups", "mamba_ngroups", default=1),
        "num_heads": heads,
        "head_dim": head_dim or inner // heads,
        "state_size": _first(text, "mamba_d_state", "ssm_state_size", "state_size", default=128),
        "conv_kernel": _first(text, "mamba_d_conv", "conv_kernel", default=4),
        "chunk_size": _first(text, "mamba_chunk_size", "chunk_size", default=256),
    }


def _gdn(text: Mapping[str, Any]) -> dict[str, int]:
    return {
        "num_k_heads": int_field(text, "linear_num_key_heads"),
        "num_v_heads": int_field(text, "linear_num_value_heads"),
        "head_k_dim": int_field(text, "linear_key_head_dim"),
        "head_v_dim": int_field(text, "linear_value_head_dim"),
        "conv_kernel": int_field(text, "linear_conv_kernel_dim", default=4),
    }


def _kda(text: Mapping[str, Any]) -> dict[str, int]:
    linear = text.get("linear_attn_config")
    if not isinstance(linear, Mapping):
        raise LegroomError("the model config has no linear_attn_config", "a Kimi linear model needs one")
    return {
        "num_heads": int_field(linear, "num_heads"),
        "head_dim": int_field(linear, "head_dim"),
        "conv_kernel": int_field(linear, "short_conv_kernel_size", default=4),
        "full_rank_gate": int(bool(linear.get("use_full_rank_gate"))),
    }


def _lightning(text: Mapping[str, Any]) -> dict[str, int]:
    heads = int_field(text, "num_attention_heads")
    head_dim = int_field(text, "head_dim", default=int_field(text, "hidden_size") // heads)
    return {"num_heads": heads, "head_dim": head_dim}


def _short_conv(text: Mapping[str, Any]) -> dict[str, int]:
    return {
        "intermediate_size": int_field(text, "conv_dim", default=int_field(text, "hidden_size")),
        "conv_kernel": int_field(text, "conv_L_cache", default=3),
    }
