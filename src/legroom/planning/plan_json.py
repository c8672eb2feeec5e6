"""The JSON document of a plan, and the plan of a document."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.fit import bands, evidence, num_starts_as_known
from legroom.facts.gpus import gpu, with_total
from legroom.figures import Figure
from legroom.masking import is_secret
from legroom.memory.bands import band_class
from legroom.memory.layout import Layout
from legroom.memory.server_states import ServerState, server_states
from legroom.planning import plan_document as documents
from legroom.planning.plan import Advice, Plan, Target, cold_start, context_by_user_count, plan, ready_command
from legroom.vllm.parse import parse_flags
from legroom.vllm.resolve import served_model
from legroom.vllm.traits import traits

_NOT_ARGS = frozenset({"release", "given", "notes", "usage"})
_FIGURES = ("weights", "activation", "cuda_graph", "non_torch", "kv_cache", "outside")
"""The parts of a layout that carry a certainty."""


def replan(document: documents.PlanDocument) -> Plan:
    """The plan of a document's server, made again; LegroomError where its model is not known here."""
    if not (document.vllm and document.command and document.gpu.total_bytes):
        raise LegroomError("the plan is no document of `legroom plan --json`", documents.HOW_TO_WRITE_A_PLAN)
    args = parse_flags(document.command, document.release).args
    card = gpu(document.gpu.name)
    if card.total_bytes != document.gpu.total_bytes:
        card = with_total(card, document.gpu.total_bytes)
    return plan(Target(served_model(args), card, document.gpu.count, document.release), args)


def plan_document(plan: Plan, explain_math: bool = False) -> documents.PlanDocument:
    """The document of a plan, with the terms of every figure where `explain_math`."""
    target, kv, layout, failure = plan.target, plan.memory.kv, plan.layout, plan.memory.failure
    named = {name: value for name, value in documents.as_json(plan.settings).items() if name not in _NOT_ARGS}
    terms = {f"{name}_bytes": getattr(layout, name).terms for name in _FIGURES}
    return documents.PlanDocument(
        model=target.model.name,
        vllm=target.release.version,
        gpu=documents.PlannedGpu(target.gpu.name, target.gpus, target.gpu.total_bytes),
        modalities=tuple(modality.kind for modality in target.model.modalities),
        moe=traits(target.model).moe,
        checkpoint_bytes=target.model.checkpoint_bytes,
        args={**named, "block_size": plan.memory.kv.block_size},
        layout=planned_layout(layout),
        kv=documents.PlannedKv(
            kv.block_size,
            max(kv.num_blocks, 0),
            max(kv.tokens, 0),
            kv.bytes_per_token,
            kv.max_concurrency,
            max(kv.longest_len, 0),
            kv.needed_bytes,
            {str(users): tokens for users, tokens in context_by_user_count(plan).items()},
        ),
        host=_planned_host(plan),
        verdict=plan.verdict,
        reason=plan.reason,
        failure=documents.PlannedFailure(**asdict(failure), missing_bytes=plan.missing_bytes) if failure else None,
        advice=tuple(_advice_json(advice) for advice in plan.advice),
        command=tuple(ready_command(plan)),
        env={name: value for name, value in plan.args.env.items() if not is_secret(name, value)},
        confidence={f"{name}_bytes": _planned_band(getattr(layout, name)) for name in _FIGURES},
        basis=_planned_basis(plan),
        first_start=_first_start_json(plan),
        loading={"peak_bytes": layout.loading_peak_bytes, "why": layout.loading_why},
        ranks=tuple(documents.PlannedStage(rank.rank, planned_layout(rank)) for rank in plan.memory.ranks),
        notes=tuple(dict.fromkeys(plan.notes)),
        terms=documents.as_json({**terms, "bytes_per_token": kv.token_terms}) if explain_math else None,
    )


def plan_json(plan: Plan, explain_math: bool = False) -> dict[str, Any]:
    """What `legroom plan --json` prints."""
    return plan_document(plan, explain_math).to_json()


def _planned_host(plan: Plan) -> documents.PlannedHost:
    """Host memory that the server needs, by part, and the limit it is given, in bytes."""
    needs = plan.host
    same = ("held_bytes", "least_bytes", "checkpoint_bytes", "request_bytes", "shm_bytes")
    return documents.PlannedHost(
        **{name: getattr(needs, name) for name in same},
        loading_bytes=min(needs.loading_bytes, needs.checkpoint_bytes),
        given_bytes=plan.target.host_limit_bytes,
        shares=tuple({"what": share.what, "bytes": share.bytes} for share in needs.shares),
    )


def _advice_json(advice: Advice) -> dict[str, Any]:
    """JSON of one advice: the flags, what they give up, and verdict, layout and command with them."""
    return {
        "flags": documents.as_json(advice.flags),
        "why": advice.why,
        "trades": advice.trades,
        "verdict": advice.plan.verdict,
        "layout": layout_json(advice.plan.layout),
        "command": ready_command(advice.plan),
    }


def _planned_basis(plan: Plan) -> documents.PlannedBasis:
    """What a plan rests on: measured starts like it or only vLLM's source, and how many such starts are known."""
    of = band_class(plan.target.model, plan.settings, plan.target.gpu)
    kind, rare = evidence(of.properties)
    hardly_known = ", ".join(f"{name} {value}" for name, value in rare)
    basis = "measured" if kind == "measured" else "read from source"
    return documents.PlannedBasis(basis, hardly_known, bands()["coverage"], num_starts_as_known(of.properties))


def _first_start_json(plan: Plan) -> dict[str, Any]:
    """Verdict, KV cache and layout of a start with a cold torch.compile cache."""
    first = cold_start(plan)
    kv, band = first.memory.kv, first.layout.kv_cache
    return {
        "verdict": first.verdict,
        "num_blocks": max(kv.num_blocks, 0),
        "tokens": max(kv.tokens, 0),
        "max_concurrency": kv.max_concurrency,
        "kv_cache_bytes": band.bytes,
        "confidence": {"kv_cache_bytes": documents.as_json(_planned_band(band))},
        "layout": layout_json(first.layout),
    }


def _planned_band(figure: Figure) -> documents.PlannedBand:
    """Kind of a figure (exact, measured, estimated) and the bounds of its error band in bytes."""
    return documents.PlannedBand(figure.kind, figure.low, figure.high)


def planned_layout(layout: Layout) -> documents.PlannedLayout:
    """The bytes of a layout's parts, without their error bands."""
    figures = {f"{name}_bytes": getattr(layout, name).bytes for name in _FIGURES}
    totals = ("total_bytes", "budget_bytes", "held_by_others_bytes", "peak_used_bytes", "headroom_bytes")
    return documents.PlannedLayout(**figures, **{name: getattr(layout, name) for name in totals})


def layout_json(layout: Layout) -> dict[str, int]:
    """Bytes of each part of one GPU's memory, by name."""
    document: dict[str, int] = documents.as_json(planned_layout(layout))
    return document


def plan_states(plan: Plan, host_bytes_s: float | None = None) -> tuple[ServerState, ...]:
    """Memory of the planned server awake and asleep; `host_bytes_s`: copy speed from the host, None: the usual one."""
    target = plan.target
    return server_states(target.model, target.gpu, plan.settings, plan.memory, host_bytes_s)


def states_json(states: Sequence[ServerState]) -> list[dict[str, Any]]:
    """The `states` of `legroom plan --sleep --json`."""
    return [
        {
            "state": state.name,
            "device_bytes": state.device.bytes,
            "device": _figure_json(state.device),
            "host_bytes": state.host.bytes,
            "host": _figure_json(state.host),
            "wake_s": state.wake_s,
        }
        for state in states
    ]


def _figure_json(figure: Figure) -> dict[str, Any]:
    """A figure's bytes, certainty, error band and terms as JSON."""
    return {name: documents.as_json(getattr(figure, name)) for name in ("kind", "low", "high", "terms")}
