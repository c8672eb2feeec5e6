"""A plan as the JSON document that other programs rely on; docs/json.md describes every key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from legroom.planning.plan import cold_start, ready_command
from legroom.vllm.secret_words import is_secret
from legroom.vllm.traits import is_moe

if TYPE_CHECKING:
    from legroom.figures import Figure, Term
    from legroom.memory.layout import Layout
    from legroom.planning.plan import Advice, Plan

_NOT_ARGS = frozenset({"release", "given", "notes", "usage"})

FIGURES = ("weights", "activation", "cuda_graph", "non_torch", "kv_cache", "outside")
"""The parts of a layout that carry a certainty."""


def plan_json(plan: Plan, explain_math: bool = False) -> dict[str, Any]:
    """The whole document. Bytes are integers, ratios 0..1."""
    kv = plan.memory.kv
    document: dict[str, Any] = {
        "model": plan.target.model.name,
        "vllm": plan.target.release.version,
        "gpu": {
            "name": plan.target.gpu.name,
            "count": plan.target.gpus,
            "total_bytes": plan.target.gpu.total_bytes,
        },
        "modalities": [modality.kind for modality in plan.target.model.modalities],
        "moe": is_moe(plan.target.model),
        "checkpoint_bytes": plan.target.model.checkpoint_bytes,
        "args": args_json(plan),
        "layout": layout_json(plan.layout),
        "kv": {
            "block_size": kv.block_size,
            "num_blocks": max(kv.num_blocks, 0),
            "tokens": max(kv.tokens, 0),
            "bytes_per_token": kv.bytes_per_token,
            "max_concurrency": kv.max_concurrency,
            "longest_len": max(kv.longest_len, 0),
            "needed_bytes": kv.needed_bytes,
        },
        "verdict": plan.verdict,
        "reason": plan.reason,
        "failure": failure_json(plan),
        "advice": [advice_json(advice) for advice in plan.advice],
        "command": ready_command(plan),
        "env": env_json(plan),
        "confidence": {f"{name}_bytes": confidence_json(getattr(plan.layout, name)) for name in FIGURES},
        "cold": cold_json(plan),
        "ranks": [{"stage": rank.rank, **layout_json(rank)} for rank in plan.memory.ranks],
        "notes": list(dict.fromkeys(plan.notes)),
    }
    if explain_math:
        terms = {f"{name}_bytes": terms_json(getattr(plan.layout, name).terms) for name in FIGURES}
        document["terms"] = {**terms, "bytes_per_token": terms_json(kv.token_terms)}
    return document


def layout_json(layout: Layout) -> dict[str, int]:
    """Where every byte of one GPU goes."""
    return {
        "total_bytes": layout.total_bytes,
        "budget_bytes": layout.budget_bytes,
        **{f"{name}_bytes": getattr(layout, name).bytes for name in FIGURES},
        "held_by_others_bytes": layout.held_by_others_bytes,
        "peak_used_bytes": layout.peak_used_bytes,
        "headroom_bytes": layout.headroom_bytes,
    }


def args_json(plan: Plan) -> dict[str, Any]:
    """Every setting as the release resolves it; `block_size` is the one the KV cache really uses."""
    settings = plan.settings
    named = {name: _plain(getattr(settings, name)) for name in settings.__dataclass_fields__ if name not in _NOT_ARGS}
    return {**named, "block_size": plan.memory.kv.block_size}


def env_json(plan: Plan) -> dict[str, str]:
    """The environment the server was planned with; what may be a secret is left out."""
    return {name: value for name, value in plan.args.env.items() if not is_secret(name, value)}


def failure_json(plan: Plan) -> dict[str, Any] | None:
    """What ends the start-up, or null."""
    failure = plan.memory.failure
    if failure is None:
        return None
    return {
        "id": failure.id,
        "message": failure.message,
        "needed_bytes": failure.needed_bytes,
        "available_bytes": failure.available_bytes,
        "estimated_max_len": failure.estimated_max_len,
    }


def advice_json(advice: Advice) -> dict[str, Any]:
    """A change of flags and the memory it gives."""
    return {
        "flags": {name: _plain(value) for name, value in advice.flags.items()},
        "why": advice.why,
        "trades": advice.trades,
        "verdict": advice.plan.verdict,
        "layout": layout_json(advice.plan.layout),
        "command": ready_command(advice.plan),
    }


def cold_json(plan: Plan) -> dict[str, Any] | None:
    """The first start, with a cold compile cache; null where it is like any other."""
    cold = cold_start(plan)
    if cold is plan:
        return None
    kv = cold.memory.kv
    return {
        "verdict": cold.verdict,
        "layout": layout_json(cold.layout),
        "num_blocks": max(kv.num_blocks, 0),
        "tokens": max(kv.tokens, 0),
        "max_concurrency": kv.max_concurrency,
    }


def confidence_json(figure: Figure) -> dict[str, Any]:
    """How sure a figure is."""
    return {"kind": figure.kind, "low": figure.low, "high": figure.high}


def terms_json(terms: Sequence[Term]) -> list[dict[str, Any]]:
    """The working behind a figure."""
    return [{"label": term.label, "bytes": term.bytes, "how": term.how} for term in terms]


def _plain(value: Any) -> Any:
    """Tuples and mappings as JSON has them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (tuple, list, frozenset, set)):
        return [_plain(inner) for inner in value]
    return value
