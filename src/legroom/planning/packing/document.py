"""A pack as its JSON document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from legroom.planning.plan_json import plan_json

if TYPE_CHECKING:
    from legroom.planning.packing.changes import PackChange
    from legroom.planning.packing.pack import Packed, PackedCard, PackResult


def pack_json(result: PackResult, changes: tuple[PackChange, ...] = ()) -> dict[str, Any]:
    """What `legroom pack --json` prints."""
    document: dict[str, Any] = {
        "verdict": result.verdict,
        "servers": [_server(each) for each in result.packed],
        "headroom_bytes": result.headroom_bytes,
        "order": result.order if isinstance(result.order, str) else list(result.order),
        "cards": [_card(use) for use in result.cards],
        "changes": [_change(change) for change in changes],
    }
    if result.request.shifts:
        document["shifts"] = [{"name": shift.name, "awake": sorted(shift.awake)} for shift in result.request.shifts]
    return document


def _server(packed: Packed) -> dict[str, Any]:
    needs = packed.needs
    return plan_json(packed.plan) | {
        "name": packed.name,
        "cards": list(packed.cards),
        "peak_bytes": packed.peak_bytes,
        "pool_bytes": packed.pool_bytes,
        "least_pool_bytes": needs.least_pool_bytes,
        "spread_bytes": needs.spread_bytes,
        "asleep_bytes": needs.asleep_bytes or None,
    }


def _card(use: PackedCard) -> dict[str, Any]:
    return {
        "card": use.card.number,
        "name": use.card.gpu.name,
        "total_bytes": use.card.gpu.total_bytes,
        "shift": use.shift.name,
        "used_bytes": use.used_bytes,
        "headroom_bytes": use.headroom_bytes,
        "spread_bytes": use.spread_bytes,
        "awake": dict(use.awake),
        "asleep": dict(use.asleep),
        "others": {other.name: other.bytes for other in use.card.others},
    }


def _change(change: PackChange) -> dict[str, Any]:
    return {
        "server": change.server,
        "flags": dict(change.flags),
        "gpus": change.gpus,
        "why": change.why,
        "verdict": change.result.verdict,
        "headroom_bytes": change.result.headroom_bytes,
    }
