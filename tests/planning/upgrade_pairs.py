"""`legroom upgrade` against published or measured starts of one server on two releases."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.releases import release
from legroom.memory.kv.kv_plan import KvPlan, kv_plan
from legroom.planning.machine import Machine
from legroom.planning.plan import Plan
from legroom.planning.upgrades.release_upgrade import Upgrade, upgrade
from legroom.units import GIB
from legroom.vllm.parse import parse_flags

PAIRS = Path(__file__).parents[1] / "fixtures" / "upgrade_pairs.json"
SAME = 0.005
"""Up to this share of it, a figure that was read off a log is the same."""
ROUNDING_BYTES = 0.006 * GIB
"""Logs write two places."""


def planned(pair: dict[str, Any]) -> Upgrade:
    old, new = map(release, pair["vllm"])
    args = parse_flags(shlex.split(pair["command"]), old).args
    machine = Machine(pair["gpu"], None, pair.get("gpu_memory"), pair.get("gpu_used"))
    return upgrade(args, old, new, machine, advice=False)


def direction(before: float, after: float, same: float) -> str:
    """`same`: the share of the first figure up to which a change is none."""
    if abs(after - before) <= same * abs(before):
        return "same"
    return "up" if after > before else "down"


def true_direction(pair: dict[str, Any]) -> str | None:
    """None: nobody said what the KV cache did, only how the starts ended."""
    if "expect" in pair:
        return str(pair["expect"])
    return direction(*pair["kv_bytes"], same=0) if "kv_bytes" in pair else None


def planned_direction(pair: dict[str, Any], made: Upgrade) -> str:
    same = 0 if "kv_bytes" in pair else SAME  # what was measured to the byte has a sign, however small
    if pair.get("of") == "request":
        return direction(made.old.memory.kv.needed_bytes, made.new.memory.kv.needed_bytes, same)
    return direction(made.old.layout.kv_cache.bytes, made.new.layout.kv_cache.bytes, same)


def in_bands(pair: dict[str, Any], made: Upgrade) -> Iterator[bool]:
    """For each figure of each start, whether the plan's band holds it."""
    for side, plan in enumerate((made.old, made.new)):
        band = plan.layout.kv_cache
        if (known := pair.get("kv_bytes", (None, None))[side]) is not None:
            yield band.low <= known <= band.high
        if (written := pair.get("kv_gib", (None, None))[side]) is not None:
            yield band.low - ROUNDING_BYTES <= written * GIB <= band.high + ROUNDING_BYTES
        if (least := pair.get("kv_at_least_gib", (None, None))[side]) is not None:
            yield band.high >= least * GIB - ROUNDING_BYTES
        low, high = pools(plan)
        if (tokens := pair.get("tokens", (None, None))[side]) is not None:
            yield low.tokens <= tokens <= high.tokens
        if (blocks := pair.get("blocks", (None, None))[side]) is not None:
            yield low.num_blocks <= blocks <= high.num_blocks
        if (requests := pair.get("concurrency", (None, None))[side]) is not None:
            yield low.max_concurrency - 0.005 <= requests <= high.max_concurrency + 0.005


def pools(plan: Plan) -> tuple[KvPlan, KvPlan]:
    """The pool at both ends of the band."""
    ranks = plan.memory.ranks
    ends = ([rank.kv_cache.low for rank in ranks], [rank.kv_cache.high for rank in ranks])
    model, gpu = plan.target.model, plan.target.gpu
    return kv_plan(model, plan.settings, gpu, ends[0]), kv_plan(model, plan.settings, gpu, ends[1])


def ends_right(pair: dict[str, Any], made: Upgrade) -> bool | None:
    """Whether the starts end as they did: what did not start is not called "fits"; None where nobody said."""
    starts = pair.get("starts")
    if starts is None:
        return None
    verdicts = made.old.verdict, made.new.verdict
    return all(
        verdict != "does_not_fit" if started else verdict != "fits"
        for started, verdict in zip(starts, verdicts, strict=True)
    )


def summary() -> dict[str, Any]:
    """Counts over all pairs: directions, figures inside their bands, and ends that are right."""
    right, inside, ended, errors = [], [], [], []
    for pair in json.loads(PAIRS.read_text("utf-8"))["pairs"]:
        try:
            made = planned(pair)
        except LegroomError:
            errors.append(pair["id"])
            continue
        wanted = true_direction(pair)
        if wanted is not None:
            right.append(wanted == planned_direction(pair, made))
        inside += in_bands(pair, made)
        if "missed" not in pair and (end := ends_right(pair, made)) is not None:
            ended.append(end)
    return {"not_planned": errors, "directions": right, "figures": inside, "ends": ended}
