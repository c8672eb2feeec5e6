"""Wishes of servers that do not all fit with their usual settings: flags searched for, one server at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from legroom.planning.packing.pack import PackResult, pack
from legroom.planning.search import find

if TYPE_CHECKING:
    from legroom.planning.packing.needs import PackedServer

_DECIDED_BY_PACKING = ("gpu_memory_utilization",)


def grant_wishes(result: PackResult) -> PackResult:
    """The pack with other flags for the servers that wish for something, where that makes it fit; as it is where it
    fits already, or where nobody wishes."""
    if result.verdict != "does_not_fit":
        return result
    for needs in sorted(result.needs, key=lambda needs: -needs.least_bytes):
        if needs.server.wish is None:
            continue
        beside = sum(each.least_bytes for each in result.needs if each.server.name != needs.server.name)
        beside += max((card.others_bytes for card in result.request.cards), default=0)
        changed = _searched(needs.server, beside // len(result.request.cards))
        if changed is None:
            continue
        servers = tuple(changed if each.name == changed.name else each for each in result.request.servers)
        result = pack(replace(result.request, servers=servers))
        if result.verdict != "does_not_fit":
            return result
    return result


def _searched(server: PackedServer, beside_bytes: int) -> PackedServer | None:
    """The server with the flags that hold its wish in what the others leave of a card; None where none do."""
    assert server.wish is not None
    if beside_bytes >= server.target.gpu.total_bytes:
        return None
    target = replace(server.target, held_by_others_bytes=beside_bytes)
    args = replace(server.args, max_model_len=None) if server.args.max_model_len == server.wish.context else server.args
    best = find([target], args, server.wish, most=1).best
    if best is None:
        return None
    kept = {name: getattr(server.args, name) for name in _DECIDED_BY_PACKING}
    return replace(server, args=replace(best.args, **kept))
