"""`legroom pack`: fractions and pools for several servers, so that all start in any order and after any restart.

A server that is restarted finds its neighbours at their peak. So every server is planned with all the others there: if
the sum of all peaks fits the card, the order makes no difference. How the pool is bounded decides whether that holds:

- from 0.10.2 on by `--kv-cache-memory-bytes`: nothing that a neighbour does while vLLM profiles can change it. The
  utilization is then only what the check of free memory asks for, and is set to the server's own share of the card;
- before, by a number of blocks, with a utilization that leaves room for them in the release's own arithmetic, which in
  0.6.4 and in V1 up to 0.9.0 charges a server for all that its neighbours hold;
- 0.9.1 forgets the number of blocks: utilization alone, less what a neighbour allocates during the profile run."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from legroom.facts.release_support import ENDPOINTS_SWITCH, SLEEP_FLAG
from legroom.memory.overhead import charges_device_wide
from legroom.planning.packing.needs import PackedServer, ServerNeeds, server_needs, takes_pool_bytes
from legroom.planning.packing.placement import Card, PackingProblem, Placement, Shift, place, servers_on, share_pools
from legroom.planning.plan import BAND_KEPT, Plan, Policy, Verdict, plan
from legroom.planning.plan_json import plan_json
from legroom.records import dataclass, field
from legroom.vllm.args import is_given

ALWAYS = "always"
"""The name of the only shift where no server sleeps."""
_SMALLEST_SHARE = 0.01
Order = Literal["any"] | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PackRequest:
    """The servers, cards and shifts to pack."""

    servers: tuple[PackedServer, ...]
    cards: tuple[Card, ...]
    shifts: tuple[Shift, ...] = ()
    policy: Policy = "safe"


@dataclass(frozen=True, slots=True)
class Packed:
    """One server with its cards and the flags that packing gives it."""

    needs: ServerNeeds
    cards: tuple[int, ...]
    pool_bytes: int
    plan: Plan
    """Planned with all its neighbours at their peak."""

    @property
    def name(self) -> str:
        """The server's name in the pack request."""
        return self.needs.server.name

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the server's own processes on each of its cards."""
        return self.needs.footprint_bytes(self.pool_bytes)


@dataclass(frozen=True, slots=True)
class PackedCard:
    """The memory of one card in its fullest shift."""

    card: Card
    shift: Shift
    awake: tuple[tuple[str, int], ...]
    asleep: tuple[tuple[str, int], ...]
    spread_bytes: int
    """Sum of the error bands of the awake servers."""

    @property
    def used_bytes(self) -> int:
        """Bytes held by awake servers, sleeping servers and other programs."""
        return sum(bytes_ for _, bytes_ in (*self.awake, *self.asleep)) + self.card.others_bytes

    @property
    def headroom_bytes(self) -> int:
        """Bytes of the card that nothing uses; negative where it is overcommitted."""
        return self.card.gpu.total_bytes - self.used_bytes

    @property
    def sure_headroom_bytes(self) -> int:
        """Free bytes of the card, less its reserve, if every awake server needs the upper end of its error band."""
        return self.headroom_bytes - self.spread_bytes - self.card.reserve_bytes


@dataclass(frozen=True, slots=True)
class PackResult:
    """The placement, flags and verdict of a pack request."""

    request: PackRequest
    needs: tuple[ServerNeeds, ...]
    verdict: Verdict
    packed: tuple[Packed, ...] = ()
    cards: tuple[PackedCard, ...] = ()
    """Every card in its fullest shift; with the smallest KV caches where nothing fits."""
    order: Order = "any"
    short_bytes: int = 0
    """Bytes that the fullest card lacks with the smallest KV caches, where nothing fits."""
    splits: Mapping[str, int] = field(default_factory=dict)
    """The cards over which packing splits each server that one card does not hold."""

    @property
    def headroom_bytes(self) -> int:
        """Free bytes of the fullest card; negative where it lacks memory."""
        return min((use.headroom_bytes for use in self.cards), default=-self.short_bytes)


@dataclass(frozen=True, slots=True)
class PackChange:
    """A change of the request after which every server fits."""

    server: str
    """The server whose flags change; empty where the machine changes."""
    why: str
    result: PackResult
    flags: Mapping[str, Any] = field(default_factory=dict)
    gpus: int | None = None


def pack(request: PackRequest) -> PackResult:
    """The servers placed on cards, their KV caches sized to share free memory, each planned beside its neighbours."""
    shifts = request.shifts or (Shift(ALWAYS, frozenset(server.name for server in request.servers)),)
    sleepers = {server.name for server in request.servers if any(server.name not in shift.awake for shift in shifts)}
    needs = tuple(server_needs(server, sleeps=server.name in sleepers) for server in request.servers)
    # The share of the error bands that the policy holds back, then smaller ones.
    for band_kept in sorted({kept for kept in BAND_KEPT.values() if kept <= BAND_KEPT[request.policy]}, reverse=True):
        problem = PackingProblem(request.cards, shifts, band_kept)
        placement = place(problem, needs)
        if placement is not None:
            # The result for a placement: KV caches shared out, every server planned, verdict and start order.
            pools = share_pools(problem, needs, placement)
            uses = tuple(_fullest_shift(problem, card, needs, placement, pools) for card in problem.cards)
            servers = tuple(
                _planned_beside_all(problem, each, needs, placement, pools, each.server.name in sleepers)
                for each in needs
            )
            is_tight = any(use.sure_headroom_bytes < 0 for use in uses)
            is_tight = is_tight or any(each.plan.verdict == "tight" for each in servers)
            is_failed = any(each.plan.memory.failure for each in servers)
            verdict: Verdict = "does_not_fit" if is_failed else "tight" if is_tight else "fits"
            # With several shifts, a later one's servers start when those of the earlier ones sleep.
            in_shifts = (each.server.name for shift in shifts for each in needs if each.server.name in shift.awake)
            order: Order = "any" if len(shifts) == 1 else tuple(dict.fromkeys(in_shifts))
            return PackResult(request, needs, verdict, servers, uses, order)
    return _pack_misfit(request, PackingProblem(request.cards, shifts, 0.0), needs)


def _fullest_shift(
    problem: PackingProblem, card: Card, needs: Sequence[ServerNeeds], placement: Placement, pools: Mapping[str, int]
) -> PackedCard:
    """Use of a card in the shift (set of servers awake together) that leaves it least; `pools`: KV bytes by server."""
    here = servers_on(card, placement, needs)
    uses = (_card_use(card, shift, here, pools) for shift in problem.shifts)
    return min(uses, key=lambda use: use.sure_headroom_bytes)


def _card_use(card: Card, shift: Shift, here: Iterable[ServerNeeds], pools: Mapping[str, int]) -> PackedCard:
    """Memory that a card's awake and sleeping servers take in one shift; `pools`: KV cache bytes by server."""
    awake = [each for each in here if each.server.name in shift.awake]
    asleep = [each for each in here if each.server.name not in shift.awake]
    held = tuple((each.server.name, each.footprint_bytes(pools[each.server.name])) for each in awake)
    kept = tuple((each.server.name, each.asleep_bytes) for each in asleep)
    return PackedCard(card, shift, held, kept, sum(each.spread_bytes for each in awake))


def _planned_beside_all(
    problem: PackingProblem,
    needs: ServerNeeds,
    every: Sequence[ServerNeeds],
    placement: Placement,
    pools: Mapping[str, int],
    sleeps: bool,
) -> Packed:
    """One server planned as if it started last, its neighbours at their peak; `pools`: KV bytes by server."""
    name = needs.server.name
    cards = placement[name]
    uses = (
        _card_use(card, shift, servers_on(card, placement, every), pools)
        for card in (problem.cards[number] for number in cards)
        for shift in problem.shifts
        if name in shift.awake
    )
    neighbour_bytes = max(use.used_bytes - dict(use.awake)[name] for use in uses)
    gpu = problem.cards[cards[0]].gpu
    args = replace(needs.server.args, **pool_flags(needs, pools[name], neighbour_bytes, gpu.total_bytes))
    if sleeps:
        others = args.others if is_given(args, SLEEP_FLAG) else (*args.others, SLEEP_FLAG)
        args = replace(args, others=others, env={**args.env, ENDPOINTS_SWITCH: "1"})
    if len(problem.cards) > 1 and not problem.cards[0].is_slice:
        args = replace(args, env={**args.env, "CUDA_VISIBLE_DEVICES": ",".join(map(str, cards))})
    target = replace(needs.server.target, gpu=gpu, held_by_others_bytes=neighbour_bytes, gpus=needs.server.gpus)
    return Packed(needs, cards, pools[name], plan(target, args))


def pool_flags(needs: ServerNeeds, pool_bytes: int, beside_bytes: int, total_bytes: int) -> dict[str, Any]:
    """The flags that give a server a KV cache of `pool_bytes` on a card where its neighbours hold `beside_bytes`."""
    release = needs.server.target.release
    flags: dict[str, Any] = {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": None}
    own = needs.footprint_bytes(pool_bytes) - needs.context_bytes
    if not needs.block_bytes or takes_pool_bytes(needs.settings):
        # What the server takes, so that the check of free memory refuses a start that would not end well.
        share = math.floor(own / total_bytes * 100) / 100
        flags["gpu_memory_utilization"] = min(max(share, _SMALLEST_SHARE), 1.0)
        if needs.block_bytes:
            flags["kv_cache_memory_bytes"] = pool_bytes
        return flags
    charged = beside_bytes if charges_device_wide(needs.settings) else 0
    share = (needs.counted_bytes + pool_bytes + charged) / total_bytes
    if release.version == "0.9.1":
        flags["gpu_memory_utilization"] = min(math.floor(share * 1000) / 1000, 1.0)
    else:
        flags["gpu_memory_utilization"] = min(math.ceil(share * 1000) / 1000, 1.0)
        flags["num_gpu_blocks_override"] = pool_bytes // needs.block_bytes
    return flags


def _pack_misfit(request: PackRequest, problem: PackingProblem, needs: tuple[ServerNeeds, ...]) -> PackResult:
    """The result where no placement fits: every server on the emptiest cards with its smallest KV cache."""
    here: dict[int, list[ServerNeeds]] = {card.number: [] for card in problem.cards}
    placement: dict[str, tuple[int, ...]] = {}
    for each in sorted(needs, key=lambda each: -each.least_bytes):
        rooms = {card.number: problem.least_room_bytes(card, here[card.number]) for card in problem.cards}
        cards = tuple(sorted(sorted(rooms, key=lambda number: -rooms[number])[: each.server.gpus]))
        placement[each.server.name] = cards
        for number in cards:
            here[number].append(each)
    pools = {each.server.name: each.least_pool_bytes for each in needs}
    uses = tuple(_fullest_shift(problem, card, needs, placement, pools) for card in problem.cards)
    short = max(0, *(-use.headroom_bytes for use in uses))
    servers = tuple(_planned_beside_all(problem, each, needs, placement, pools, sleeps=False) for each in needs)
    return PackResult(request, needs, "does_not_fit", servers, uses, "any", short)


def pack_json(result: PackResult, changes: tuple[PackChange, ...] = ()) -> dict[str, Any]:
    """What `legroom pack --json` prints."""
    document: dict[str, Any] = {
        "verdict": result.verdict,
        "servers": [_server_json(each) for each in result.packed],
        "headroom_bytes": result.headroom_bytes,
        "order": result.order if isinstance(result.order, str) else list(result.order),
        "cards": [_card_json(use) for use in result.cards],
        "changes": [
            {
                "server": change.server,
                "flags": dict(change.flags),
                "gpus": change.gpus,
                "why": change.why,
                "verdict": change.result.verdict,
                "headroom_bytes": change.result.headroom_bytes,
            }
            for change in changes
        ],
    }
    if result.request.shifts:
        document["shifts"] = [{"name": shift.name, "awake": sorted(shift.awake)} for shift in result.request.shifts]
    return document


def _server_json(packed: Packed) -> dict[str, Any]:
    """The plan document of one server, with its cards, its KV cache and its bytes while asleep."""
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


def _card_json(use: PackedCard) -> dict[str, Any]:
    """JSON of one card in its fullest shift: bytes used and free, and who holds them."""
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
