"""The verdict on a Kubernetes object: whether the vLLM servers it starts fit their GPUs, and which flags fix them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from legroom.errors import LegroomError
from legroom.isolation import GivenModel, isolated
from legroom.records import dataclass

if TYPE_CHECKING:
    from legroom.deployments.subjects import StartedServer
    from legroom.lint.rule import LintFinding
    from legroom.planning.file_plans import FileServer
    from legroom.planning.plan import Plan

Outcome = Literal["fits", "tight", "does_not_fit", "not_understood", "no_server"]
FixSearch = Literal["single_change", "full"]
"""Which fixes are tried: changes of a single flag, or any combination, which can take seconds."""
_BY_SEVERITY: tuple[Outcome, ...] = ("no_server", "fits", "tight", "not_understood", "does_not_fit")
_MAX_SERVERS = 8
"""Servers planned per object; the rest of a larger object is ignored to bound the work."""
_RESTART_LOOP_RULES = frozenset({"shm-missing", "start-too-short"})
"""Lint rules for settings that make a pod restart although its memory suffices."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer for one object."""

    outcome: Outcome
    sentences: tuple[str, ...] = ()
    is_searched: bool = True
    """Whether the full search for fixes has ended, with or without a result."""
    has_fixes: bool = False
    """Whether the sentences name a fix for every server that needs one."""

    def to_json(self) -> dict[str, Any]:
        return {"outcome": self.outcome, "sentences": list(self.sentences)}


def plan_verdict(
    manifest: Mapping[str, Any],
    default_gpu: str = "",
    *,
    search: FixSearch = "full",
    hub: bool = False,
    search_until_s: float = math.inf,
) -> Verdict:
    """Plan every server of a manifest and return the most severe outcome.

    `default_gpu` applies to pods that name no GPU. With `hub`, configs of unknown models are fetched from the Hugging
    Face Hub. A single-change search stops at `search_until_s` of the monotonic clock.
    """
    from legroom.planning.file_plans import planned_servers, started_servers
    from legroom.planning.machine import Machine
    from legroom.render.file_plan_text import verdict_sentences

    with isolated():
        servers, unread = started_servers("manifest.yaml", json.dumps(manifest, ensure_ascii=False))
    if unread is not None:
        return Verdict("not_understood", (f"Not understood: the manifest {unread.reason}.",))
    servers = [server for server in servers if server.runs_on_gpus][:_MAX_SERVERS]
    if not servers:
        return Verdict("no_server")
    worst, sentences, plans, is_searched, has_fixes = _BY_SEVERITY[0], list[str](), list["Plan"](), True, True
    idle_gpus = 0
    with isolated(_hub_models(servers) if hub else None):
        machine = Machine(default_gpu) if default_gpu else None
        for planned in planned_servers(servers, machine, advice=False):
            server = _with_fixes(planned, search, search_until_s)
            shown = server.shown
            if shown is not None and shown.verdict != "fits":
                is_searched, has_fixes = is_searched and shown.advised, has_fixes and bool(shown.advice)
            outcome: Outcome = "not_understood" if server.verdict == "unknown" else server.verdict
            worst = max(worst, outcome, key=_BY_SEVERITY.index)
            sentences += verdict_sentences(server)
            plans += [shown] if shown is not None and outcome in ("fits", "tight") else []
            idle_gpus = server.gpus_idle
        if worst != "does_not_fit":
            warnings, findings = _startup_warnings(servers, plans, idle_gpus), _restart_loops(servers, plans)
            sentences += [*warnings, *map(_finding_sentence, findings)]
            if any(found.severity == "error" for found in findings):
                worst = "does_not_fit"
            elif worst == "fits" and (warnings or findings):
                worst = "tight"
    return Verdict(worst, tuple(dict.fromkeys(sentences)), is_searched, has_fixes)


def _with_fixes(server: FileServer, search: FixSearch, search_until_s: float) -> FileServer:
    """The server with fixes in its shown plan; unchanged where it fits. `search_until_s` is monotonic time."""
    shown = server.shown
    if shown is None or shown.verdict == "fits":
        return server
    from legroom.planning.advice import with_advice, with_quick_advice  # most servers fit
    from legroom.render.file_plan_text import MAX_FIXES

    if search == "full":
        advised = with_advice(shown, enough=MAX_FIXES)
    else:
        advised = with_quick_advice(shown, MAX_FIXES, lambda: time.monotonic() >= search_until_s)
    return replace(server, plans=tuple(advised if plan is shown else plan for plan in server.plans))


def _startup_warnings(servers: list[StartedServer], plans: list[Plan], idle_gpus: int) -> list[str]:
    """Problems of servers whose memory suffices: settings their controller drops, idle GPUs."""
    warnings = [remark for server in servers for remark in server.remarks]
    if idle_gpus and len(servers) == 1 and plans:
        used = plans[0].args.gpus_needed
        warnings.append(
            f"It is given {used + idle_gpus} GPUs and uses {used}: lower the limit, or raise --tensor-parallel-size or "
            "--data-parallel-size."
        )
    return warnings


def _restart_loops(servers: list[StartedServer], plans: list[Plan]) -> list[LintFinding]:
    """The lint findings that make a server restart over and over."""
    from legroom.lint.linter import LintOptions, lint_servers
    from legroom.planning.plan_json import plan_document

    plan = plan_document(plans[0]) if len(plans) == 1 else None
    return lint_servers(servers, LintOptions(plan=plan, only=_RESTART_LOOP_RULES))


def _finding_sentence(found: LintFinding) -> str:
    return f"{found.message[:1].upper()}{found.message[1:]}: {found.suggestion}."


def _hub_models(servers: list[StartedServer]) -> dict[str, GivenModel]:
    """Configs from the Hub of models that are not bundled; models that cannot be fetched are left out."""
    from legroom.deployments.deployment import deployment_of
    from legroom.facts.huggingface import fetch
    from legroom.facts.model_sources import is_hub_id, load

    fetched: dict[str, GivenModel] = {}
    for server in servers:
        with suppress(LegroomError), isolated():
            model = deployment_of(server).args.model
            try:
                load(model)
            except LegroomError:
                if is_hub_id(model):
                    answer = fetch(model)
                    fetched[model] = GivenModel(answer.config, answer.checkpoint_bytes)
    return fetched
