"""Plans, their working, and the GPUs that hold a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

from legroom.errors import LegroomError
from legroom.isolation import GivenModel, isolated

if TYPE_CHECKING:
    from legroom.deployments.deployment import Deployment
    from legroom.planning.plan import Plan


class MathPart(TypedDict):
    """The working behind one part of the card."""

    part: str
    title: str
    meaning: str
    bytes: int
    kind: str
    lines: list[str]


class MathDocument(TypedDict):
    terms: list[MathPart]


def plan(request: dict[str, Any]) -> dict[str, Any]:
    """The document of `legroom plan --json`; without `advice`, which may take seconds, that of --no-advice."""
    from legroom.planning.plan_json import plan_json

    return plan_json(made_plan(request, advice=request.get("advice", True)))


def math(request: dict[str, Any]) -> MathDocument:
    """Every part with its terms in words, as `legroom plan --explain-math` shows them."""
    from legroom.render.plan_parts import certainty, parts
    from legroom.units import human_bytes

    made = made_plan(request, advice=False)
    terms: list[MathPart] = [
        {
            "part": part.key,
            "title": part.name,
            "meaning": part.meaning,
            "bytes": part.figure.bytes,
            "kind": certainty(part.figure),
            "lines": [_line(term.label, human_bytes(term.bytes), term.how) for term in part.figure.terms],
        }
        for part in parts(made.layout)
        if part.figure is not None
    ]
    kv = made.memory.kv
    if kv.token_terms and kv.bytes_per_token:
        lines = [_line(term.label, f"{term.bytes:,} bytes", f"each: {term.how}") for term in kv.token_terms]
        terms.append(
            {
                "part": "bytes_per_token",
                "title": "KV bytes of a token",
                "meaning": "on each GPU",
                "bytes": kv.bytes_per_token,
                "kind": "exact",
                "lines": lines,
            }
        )
    return {"terms": terms}


def _line(label: str, amount: str, how: str) -> str:
    return f"{label}: {amount} ({how})" if how else f"{label}: {amount}"


def size(request: dict[str, Any]) -> dict[str, Any]:
    """The document of `legroom size --json`."""
    from legroom.planning.sizing import named_gpus, size_json, size_models
    from legroom.planning.wish import Wish, counts_up_to

    with requested(request) as what:
        context = request.get("context") or what.args.max_model_len or 4096
        wish = Wish(context, float(request.get("concurrency") or 1), counts_up_to(request.get("max_gpus") or 8))
        rows = size_models([what.args.model], what.release, what.args, wish, named_gpus(request.get("cards")))
        return size_json(tuple(rows), wish, what.release)


def made_plan(request: dict[str, Any], *, advice: bool) -> Plan:
    """The plan that a request describes, with the notes that the command line would have."""
    from legroom.planning.machine import Machine, plan_deployment

    machine = Machine(
        request["gpu"],
        request.get("gpus"),
        request.get("gpu_memory"),
        request.get("gpu_used"),
        request.get("host_memory"),
    )
    with requested(request) as what:
        made = plan_deployment(what, machine, advice=advice)
        made = replace(made, notes=tuple(dict.fromkeys((*what.notes, *made.notes))))
        if request.get("cold"):
            from legroom.planning.plan import cold_start

            made = cold_start(made)
        return made


@contextmanager
def requested(request: dict[str, Any]) -> Iterator[Deployment]:
    """What a request asks to run; within, its model's name means the config that came with it."""
    from legroom.deployments.described import deployment_from_request

    config = request.get("config")
    name = request.get("model") or _named(config)
    if not name:
        raise LegroomError("which model?", "give `model`, a bundled name or Hub id, or `config`, its config.json")
    given = {name: GivenModel(config, request.get("checkpoint_bytes"))} if config is not None else {}
    with isolated(given):
        what = deployment_from_request(name, None, request.get("flags"), request.get("vllm"), local_files=False)
        env = request.get("env") or {}
        yield replace(what, args=replace(what.args, env={**what.args.env, **env}))


def _named(config: dict[str, Any] | None) -> str:
    """A name for a config that came without one."""
    if config is None:
        return ""
    own = config.get("_name_or_path")
    is_name = isinstance(own, str) and 0 < len(own) <= 200 and own.count("/") <= 1 and own[0].isalnum()
    return str(own) if is_name else "your-model"
