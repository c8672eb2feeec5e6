"""Whether the vLLM of an object can start: read by `deployments`, planned by `planning`, said by `render`."""

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
    from legroom.planning.file_plans import FileServer
    from legroom.planning.plan import Plan

Outcome = Literal["fits", "tight", "does_not_fit", "not_understood", "no_server"]
Search = Literal["quick", "whole"]
"""For flags that fix it: only what a single change does, or whatever it takes, which may be seconds."""
_GRAVITY: tuple[Outcome, ...] = ("no_server", "fits", "tight", "not_understood", "does_not_fit")
_MOST_SERVERS = 8
_NAME = "manifest.yaml"
_STOPPING_RULES = frozenset({"shm-missing", "start-too-short"})
"""Of lint: what makes a pod that fits start over and over."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The answer to one object."""

    outcome: Outcome
    sentences: tuple[str, ...] = ()
    is_searched: bool = True
    """Whether the flags that fix it were looked for as far as it takes, found or not."""
    has_fixes: bool = False
    """Whether the sentences name flags that fix each server that needs them."""

    def to_json(self) -> dict[str, Any]:
        return {"outcome": self.outcome, "sentences": list(self.sentences)}

    def to_record(self) -> dict[str, Any]:
        """All of it, for the gate's own processes."""
        return self.to_json() | {"is_searched": self.is_searched, "has_fixes": self.has_fixes}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Judgement:
        searched, fixes = record.get("is_searched", True), record.get("has_fixes", False)
        return cls(record["outcome"], tuple(record["sentences"]), searched, fixes)


def judge(
    thing: Mapping[str, Any],
    default_gpu: str = "",
    *,
    search: Search = "whole",
    hub: bool = False,
    answer_by_s: float = math.inf,
) -> Judgement:
    """The judgement on the deciding part of an object. `default_gpu` is what a pod gets that names none; with `hub` a
    model that is not bundled is looked up on the Hub, whose name alone leaves this machine. A quick search ends at
    `answer_by_s` of the monotonic clock; the verdict does not."""
    from legroom.planning.file_plans import planned_servers, started_servers
    from legroom.planning.machine import Machine
    from legroom.render.verdict_text import verdict_sentences

    text = json.dumps(thing, ensure_ascii=False)
    with isolated():
        servers, unread = started_servers(_NAME, text)
    if unread is not None:
        return Judgement("not_understood", (f"Not understood: the manifest {unread.reason}.",))
    servers = [server for server in servers if server.runs_on_gpus][:_MOST_SERVERS]
    if not servers:
        return Judgement("no_server")
    worst, sentences, plans, is_searched, has_fixes = _GRAVITY[0], list[str](), list["Plan"](), True, True
    idle = 0
    with isolated(_looked_up(servers) if hub else None):
        machine = Machine(default_gpu) if default_gpu else None
        for planned in planned_servers(servers, machine, advice=False):
            server = _advised(planned, search, answer_by_s)
            shown = server.shown
            if shown is not None and shown.verdict != "fits":
                is_searched, has_fixes = is_searched and shown.advised, has_fixes and bool(shown.advice)
            outcome: Outcome = "not_understood" if server.verdict == "unknown" else server.verdict
            worst = max(worst, outcome, key=_GRAVITY.index)
            sentences += verdict_sentences(server)
            plans += [shown] if shown is not None and outcome in ("fits", "tight") else []
            idle = server.gpus_idle
        if worst in ("fits", "tight") and (told := _remarks(servers, plans, idle)):
            worst = "tight"
            sentences += told
    return Judgement(worst, tuple(dict.fromkeys(sentences)), is_searched, has_fixes)


def _advised(server: FileServer, search: Search, answer_by_s: float) -> FileServer:
    """With fixes for the plan that is shown: as many as are said."""
    shown = server.shown
    if shown is None or shown.verdict == "fits":
        return server
    from legroom.planning.advice import with_advice, with_single_changes  # most servers fit
    from legroom.render.verdict_text import MOST_FIXES

    if search == "whole":
        advised = with_advice(shown, enough=MOST_FIXES)
    else:
        advised = with_single_changes(shown, MOST_FIXES, lambda: time.monotonic() >= answer_by_s)
    return replace(server, plans=tuple(advised if plan is shown else plan for plan in server.plans))


def _remarks(servers: list[StartedServer], plans: list[Plan], idle: int) -> list[str]:
    """What is wrong with servers that have the memory: what their controller keeps from vLLM, GPUs that a server alone
    in its object leaves idle, and what lint finds that keeps them from starting, held against the plan."""
    from legroom.lint.linter import LintOptions, lint_servers
    from legroom.planning.plan_json import plan_document

    told = [remark for server in servers for remark in server.remarks]
    if idle and len(servers) == 1:
        used = plans[0].args.gpus_needed
        told.append(
            f"It is given {used + idle} GPUs and uses {used}: lower the limit, or raise --tensor-parallel-size or "
            "--data-parallel-size."
        )
    plan = plan_document(plans[0]) if len(plans) == 1 else None
    findings = lint_servers(servers, LintOptions(plan=plan, only=_STOPPING_RULES))
    told += [f"{finding.message[:1].upper()}{finding.message[1:]}: {finding.suggestion}." for finding in findings]
    return told


def _looked_up(servers: list[StartedServer]) -> dict[str, GivenModel]:
    """The configs of models that are not bundled, from the Hub."""
    from legroom.deployments.deployment import deployment_of
    from legroom.facts.hub import fetch
    from legroom.facts.models import is_hub_id

    given: dict[str, GivenModel] = {}
    for server in servers[:_MOST_SERVERS]:
        with suppress(LegroomError), isolated():
            model = deployment_of(server).args.model
            if is_hub_id(model) and not _is_known(model):
                answer = fetch(model)
                given[model] = GivenModel(answer.config, answer.checkpoint_bytes)
    return given


def _is_known(model: str) -> bool:
    from legroom.facts.models import load

    try:
        load(model)
    except LegroomError:
        return False
    return True
