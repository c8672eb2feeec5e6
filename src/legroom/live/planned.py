"""A plan's JSON document made a plan again, so that what is seen can be answered by trying changes on the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.gpus import gpu, with_total
from legroom.facts.releases import release
from legroom.planning.plan import Plan, Target, plan
from legroom.vllm.parse import parse_flags
from legroom.vllm.served_model import served_model

_HOW = "write one with: legroom plan MODEL --gpu NAME --json > plan.json"


def plan_of(document: Mapping[str, Any]) -> Plan:
    """The plan that a document tells of; LegroomError where it tells too little, or of a model that is not here."""
    try:
        version, words, card = str(document["vllm"]), list(document["command"]), document["gpu"]
        name, count, total_bytes = str(card["name"]), int(card["count"]), int(card["total_bytes"])
    except (KeyError, TypeError, ValueError) as error:
        raise LegroomError("the plan is no document of `legroom plan --json`", _HOW) from error
    known = release(version)
    args = parse_flags(words, known).args
    model = served_model(args)
    return plan(Target(model, with_total(gpu(name), total_bytes), count, known), args)


def tried(start: Plan, flags: Mapping[str, Any]) -> Plan | None:
    """The plan with some flags changed; None where the release or the model does not take them."""
    try:
        return plan(start.target, replace(start.args, **flags))
    except LegroomError:
        return None
