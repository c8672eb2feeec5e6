"""Endpoints that plan a server, show the arithmetic, size a model and simulate a load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from math import inf
from typing import TYPE_CHECKING, Any

from legroom.api.simulate_request import bounded_trace, requested_settings
from legroom.errors import LegroomError
from legroom.facts.releases import latest, release
from legroom.isolation import GivenModel, isolated
from legroom.units import human_bytes
from legroom.vllm.args import ServeArgs

if TYPE_CHECKING:
    from legroom.deployments.deployment import Deployment
    from legroom.memory.deployment_memory import Measurements
    from legroom.planning.machine import Machine
    from legroom.planning.plan import Plan
    from legroom.simulation.trace import Trace


def plan(request: dict[str, Any]) -> dict[str, Any]:
    """The document of `legroom plan --json` for the best setting that holds a `want` (`context`, `users`), else for the
    `flags`, with fixes unless `advice` is false. A `language` adds the sentences of the text."""
    from legroom.planning.plan_json import plan_json
    from legroom.render.plan_text import plan_words, search_words

    has_words = "language" in request
    if want := request.get("want"):
        from legroom.api.plan_report import search

        wish, keep = (want.get("context"), float(want.get("users") or 1)), bool(want.get("keep_model"))
        with deployment_of_request(request) as deployment:
            asked = deployment.args, deployment.release, machine_of_request(request)
            found = search(*asked, *wish, "balanced", keep_model=keep)
            return found.json() | ({"words": search_words(found.answer)} if has_words else {})
    planned = plan_of_request(request, advice=request.get("advice", True))
    return plan_json(planned) | ({"words": plan_words(planned)} if has_words else {})


def speed(request: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second, for `want.users` together too, and the list price of the planned server."""
    from legroom.simulation.card_models import speed_and_price_json

    return speed_and_price_json(plan_of_request(request, advice=False), (request.get("want") or {}).get("users"))


def card(request: dict[str, Any]) -> dict[str, Any]:
    """The models `names` on a `gpu`: `models`, the best checkpoint of each that fits, and near misses, `too_large`."""
    from legroom.facts.bundled import find
    from legroom.simulation.card_models import CardSearch, models_on_card
    from legroom.sweeps import ProcessExecutor

    context, users = request.get("context") or 8192, request.get("users") or 1
    words = (request.get("words") or "").lower().split()
    named = [model.with_words(words) or model for name in request["names"] if (model := find(name))]
    search = CardSearch.of(machine_of_request(request), request.get("vllm"), context, users)
    answer = models_on_card(named, search, ProcessExecutor(1))
    rows = {"models": answer.best_of_each, "too_large": answer.nearest_missing}
    return {name: [each.as_json() for each in models] for name, models in rows.items()}


def math(request: dict[str, Any]) -> dict[str, Any]:
    """The terms of each part of the memory of a planned server (as for `plan`), as --explain-math prints them."""
    from legroom.render.plan_parts import certainty_text, layout_parts

    planned = plan_of_request(request, advice=False)
    names = ("part", "title", "bytes", "kind", "lines")
    rows: list[tuple[Any, ...]] = []
    for part, figure in ((part, part.figure) for part in layout_parts(planned.layout) if part.figure):
        lines = [_math_line(term.label, human_bytes(term.bytes), term.how) for term in figure.terms]
        rows.append((part.key, part.name, figure.bytes, certainty_text(figure), lines))
    kv = planned.memory.kv
    if kv.token_terms and kv.bytes_per_token:
        lines = [_math_line(term.label, f"{term.bytes:,} bytes", f"each: {term.how}") for term in kv.token_terms]
        rows.append(("bytes_per_token", "KV bytes of a token", kv.bytes_per_token, "exact", lines))
    return {"terms": [dict(zip(names, row, strict=True)) for row in rows]}


def _math_line(label: str, amount: str, how: str) -> str:
    """One term of a figure as the plain text `LABEL: AMOUNT (HOW)`, or `LABEL: AMOUNT` where `how` is empty."""
    return f"{label}: {amount} ({how})" if how else f"{label}: {amount}"


def size(request: dict[str, Any]) -> dict[str, Any]:
    """The document of `legroom size --json` for the `cards`; with `mix` or `trace`, that of `size --rate --json`."""
    from legroom.api.size_report import size_deployment

    with deployment_of_request(request) as deployment:
        if request.get("mix") or request.get("trace"):
            from legroom.facts.gpus import list_prices
            from legroom.planning.sizing import named_gpus
            from legroom.render.size_text import smaller_weights_text
            from legroom.simulation.fleet_size import FleetTask, ServingLoad, fleet_report
            from legroom.simulation.replay_outcome import Goal

            each_ms, cards = request.get("time_per_token_ms"), named_gpus(request.get("cards"))
            goal = Goal(request.get("first_token_s"), None, None, each_ms / 1000 if each_ms else None)
            load, args = ServingLoad.of_trace(_trace_of_request(request), goal), deployment.args
            task = FleetTask.of([args.model], deployment.release, args, load, request.get("max_gpus") or 32)
            report = replace(fleet_report(task, cards, list_prices()), budget=request.get("budget") or inf)
            fleets, document = [fleet for card in report.cards for fleet in card.fleets], report.as_json()
            reasons = [row["reason"] or "" for row in document["rows"]]
            return document | {"words": {"reasons": reasons, "smaller": smaller_weights_text(report, fleets)}}
        context = request.get("context") or deployment.args.max_model_len or 4096
        most = request.get("max_gpus") or 32
        found = size_deployment(deployment, context, request.get("concurrency"), most, request.get("cards"))
        return replace(found, budget=request.get("budget") or inf).json()


def machine_of_request(request: dict[str, Any]) -> Machine:
    """The GPUs and the host memory that a request names, and the sizes that a log of the server printed."""
    from legroom.planning.machine import Machine

    gpus, memory, used, host = (request.get(name) for name in ("gpus", "gpu_memory", "gpu_used", "host_memory"))
    return Machine(request["gpu"], gpus, memory, used, host, _measured_sizes(request))


def _measured_sizes(request: dict[str, Any]) -> Measurements | None:
    """The request's `measured` bytes from a log, without parts that flags changed since affect; None without any."""
    if not (given := request.get("measured")):
        return None
    from legroom.diagnosis.fixes.fix_planner import measurements_after
    from legroom.memory.deployment_memory import Measurements

    now, then = request.get("flags") or {}, given["flags"]
    changed = {name: now.get(name) for name in {*now, *then} if now.get(name) != then.get(name)}
    sizes = {name: size for name, size in given.items() if name.endswith("_bytes")}
    seen = Measurements(**sizes, source="this log", derived=tuple(given.get("derived", ())))
    return measurements_after(seen, changed)


def upgrade(request: dict[str, Any]) -> dict[str, Any]:
    """The document of `legroom upgrade --json` from the release `vllm` to the release `to`, with its sentences."""
    from legroom.exports.prometheus.alerts import silenced_alerts
    from legroom.planning.upgrades.release_upgrade import upgrade as compare_releases
    from legroom.render.upgrade_text import upgrade_words

    with deployment_of_request(request) as deployment:
        machine, to = machine_of_request(request), release(request["to"])
        made = compare_releases(deployment.args, deployment.release, to, machine)
        gone = {metric.name for metric in made.metrics}
        return made.to_json() | {"words": upgrade_words(made, silenced_alerts(deployment.release, gone))}


def pack(request: dict[str, Any]) -> dict[str, Any]:
    """The document of `legroom pack --json` for the request's `commands`, packed on `gpus` of its `gpu`."""
    from legroom.deployments.deployment import deployment_from_command
    from legroom.planning.machine import Machine, card_and_used_bytes, make_target
    from legroom.planning.packing.gpu_packing import PackRequest, pack_json
    from legroom.planning.packing.gpu_packing import pack as pack_servers
    from legroom.planning.packing.needs import packed_server, split_command, with_own_names_and_ports
    from legroom.planning.packing.pack_changes import changes_that_fit, meet_goals
    from legroom.planning.packing.placement import offered_cards
    from legroom.render.pack_text import capacity_text, change_texts, pack_headline, split_texts

    on = release(request["vllm"]) if request.get("vllm") else None
    card, used_bytes = card_and_used_bytes(machine_of_request(request), on or latest(), ServeArgs())
    servers = []
    for text in request["commands"]:
        options, command = split_command(text)
        deployment = deployment_from_command(command, on)
        needed = Machine(request["gpu"], max(deployment.args.gpus_needed, 1), request.get("gpu_memory"))
        target = replace(make_target(deployment.args, deployment.release, needed), gpu=card)
        servers.append(packed_server(options, target, deployment.args, "safe"))
    cards = offered_cards([card] * (request.get("gpus") or 1), (), used_bytes)
    result = meet_goals(pack_servers(PackRequest(tuple(with_own_names_and_ports(servers)), cards, (), "safe")))
    changes = changes_that_fit(result)
    ways = change_texts(changes) if result.verdict == "does_not_fit" else split_texts(result)
    words = {"headline": pack_headline(result), "changes": ways, "holds": list(map(capacity_text, result.packed))}
    return pack_json(result, changes) | {"words": words}


def files(request: dict[str, Any]) -> dict[str, Any]:
    """The files of `legroom export FORMAT` for the server of a request's `plan`; LegroomError if it does not start."""
    from importlib import import_module

    from legroom.exports.export_request import ExportRequest
    from legroom.planning.plan_json import plan_document

    planned = plan_document(plan_of_request(request["plan"], advice=False))
    if not planned.fits:
        raise LegroomError("the planned server does not start", "plan one that does")
    name = "prometheus.rules" if request["format"] == "prometheus" else f"deploy.{request['format']}"
    module = import_module(f"legroom.exports.{name}")
    return {"files": [asdict(file) for file in module.files(ExportRequest(planned.release, planned))]}


def plan_of_request(request: dict[str, Any], *, advice: bool) -> Plan:
    """The plan of a request (as for `plan`) with its deployment's notes; with fixes if `advice`."""
    from legroom.planning.machine import plan_deployment

    with deployment_of_request(request) as deployment:
        planned = plan_deployment(deployment, machine_of_request(request), advice=advice)
        planned = replace(planned, notes=tuple(dict.fromkeys((*deployment.notes, *planned.notes))))
        if request.get("cold"):
            from legroom.planning.plan import cold_start

            planned = cold_start(planned)
        return planned


@contextmanager
def deployment_of_request(request: dict[str, Any]) -> Iterator[Deployment]:
    """Yields the request's deployment; inside the `with` block its model's name stands for the given `config`."""
    from legroom.deployments.described import deployment_from_request

    config = request.get("config")
    name = request.get("model") or _config_name(config)
    if not name:
        raise LegroomError("which model?", "give `model`, a bundled name or Hub id, or `config`, its config.json")
    given = {name: GivenModel(config, request.get("checkpoint_bytes"))} if config is not None else {}
    with isolated(given):
        deployment = deployment_from_request(name, None, request.get("flags"), request.get("vllm"), local_files=False)
        env = request.get("env") or {}
        yield replace(deployment, args=replace(deployment.args, env={**deployment.args.env, **env}))


def _config_name(config: dict[str, Any] | None) -> str:
    """The name inside a config where it looks like a model's, else `your-model`; empty without a config."""
    if config is None:
        return ""
    own = config.get("_name_or_path")
    is_name = isinstance(own, str) and 0 < len(own) <= 200 and own.count("/") <= 1 and own[0].isalnum()
    return str(own) if is_name else "your-model"


def simulate(request: dict[str, Any]) -> dict[str, Any]:
    """The document of `legroom simulate --json` for a `trace` or `mix` on a `plan` or `blocks`, with KV blocks over
    time; LegroomError for arrivals in seconds where neither `plan` nor `step_ms` is given."""
    from legroom.render.simulation_text import timeline_words
    from legroom.simulation.fleet_size import lasting_verdict
    from legroom.simulation.from_plan import hardware, planned_scheduler
    from legroom.simulation.replay_outcome import Goal
    from legroom.simulation.step_time import fixed_cost, roofline, step_band
    from legroom.simulation.timeline import pool_curves_json
    from legroom.simulation.trace_replay import simulate as replay

    trace = _trace_of_request(request)
    plan = plan_of_request(request["plan"], advice=False) if request.get("plan") is not None else None
    fields = ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "enable_prefix_caching")
    given = {name: request.get(name) for name in fields} | {"num_blocks": request.get("blocks")}
    trace = trace.of_engine(plan.settings.data_parallel_size if plan else 1)
    settings = requested_settings(trace, plan, given)
    step_ms = request.get("step_ms")
    work = hardware(plan) if plan and trace.in_seconds and not step_ms else None
    cost = fixed_cost(step_ms / 1000) if step_ms else roofline(work) if work else None
    if trace.in_seconds and cost is None:
        why = "arrivals are in seconds, and how long a step takes is not known"
        raise LegroomError(why, "give `plan` to have it estimated, or `step_ms`")
    timeline = replay(trace, settings, cost=cost)
    band = step_band(plan, work) if plan and work else None
    load = lasting_verdict(timeline, Goal(), cost, band)
    document = {**timeline.as_json(), **load.as_json(), "timeline": pool_curves_json(timeline)}
    notes = [*(planned_scheduler(plan).notes[1:] if plan else ()), *([band.text] if band else [])]
    return document | ({"words": timeline_words(timeline, load, notes)} if "language" in request else {})


def _trace_of_request(request: dict[str, Any]) -> Trace:
    """The load: the uploaded trace or the synthetic mix; LegroomError for both, neither or too many requests."""
    from legroom.simulation.trace import THINK_S
    from legroom.simulation.traces import synthetic
    from legroom.simulation.traces.trace_files import read_trace_text

    text, mix = request.get("trace"), request.get("mix")
    if (text is None) == (mix is None):
        raise LegroomError("say what the load is once", "give `trace`, its text, or `mix`")
    if mix is None:
        return bounded_trace(read_trace_text(text or ""))
    prompt, output = mix.get("prompt_tokens", 1000), mix.get("output_tokens", 300)
    if mix.get("spread", True):
        prompt, output = f"lognormal({prompt},0.8)", f"lognormal({output},0.6)"
    arrivals = f"rate={mix.get('rate_per_s', 8)}"
    if users := mix.get("users"):
        arrivals = f"users={users} think={mix.get('think_s', THINK_S)}"
    arrivals = f"poisson {arrivals} requests={mix.get('requests', 300)}"
    return bounded_trace(synthetic.read(f"{arrivals} prompt={prompt} output={output}", mix.get("seed", 0)))
