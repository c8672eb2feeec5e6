"""Changes that make a pack fit: flags, cards, or sleeping in turns; each is packed again before it is proposed."""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.release_support import sleep_rules
from legroom.memory.kv.shape import kv_shape
from legroom.planning.capacity_search import search_flags
from legroom.planning.packing.gpu_packing import PackChange, PackRequest, PackResult, pack
from legroom.planning.packing.needs import PackedServer, ServerNeeds, server_needs
from legroom.planning.packing.placement import Shift
from legroom.units import human_bytes

_STEP_TOKENS = 2048
_STEP_SEQUENCES = 64
_SHORTEST_CONTEXT = 1024
_LENGTH_STEP = 256
_MOST_CARDS = 16
_SPLITS = (2, 4, 8)


def changes_that_fit(result: PackResult) -> tuple[PackChange, ...]:
    """Up to four changes, each of which makes a pack fit, smallest loss first; empty where it fits already."""
    if result.verdict != "does_not_fit":
        return ()
    fitting = (change for change in _candidate_changes(result) if change.result.verdict != "does_not_fit")
    return tuple(islice(fitting, 4))


def _candidate_changes(result: PackResult) -> Iterator[PackChange]:
    """Changes to try in order of preference, each with the request packed anew."""
    largest_first = sorted(result.needs, key=lambda needs: -needs.least_bytes)
    for needs in largest_first:
        yield from _smaller_steps(result.request, needs)
    shorter = [change for needs in largest_first for change in _shorter_context(result, needs)]
    # Of all contexts that could be shorter, the one that keeps the largest share of itself.
    before = {needs.server.name: needs.settings.max_model_len for needs in result.needs}
    yield from sorted(shorter, key=lambda change: -float(change.flags["max_model_len"]) / before[change.server])
    for needs in largest_first:
        yield from _fewer_requests(result, needs)
    for needs in largest_first:
        server = needs.server
        if any(server.target.gpu.compute_capability) and server.args.kv_cache_dtype is None and needs.block_bytes:
            yield from _with_flags(result.request, server, {"kv_cache_dtype": "fp8"}, "keys and values in 8 bits")
    packed = _on_more_cards(result, len(result.request.cards) + len(result.needs))
    if packed is not None:
        count, cards = len(packed.request.cards), len(result.request.cards)
        yield PackChange("", f"{count} cards instead of {cards}", packed, gpus=count)
    yield from _split_over_cards(result)
    yield from _one_awake_at_a_time(result.request)


def _smaller_steps(request: PackRequest, needs: ServerNeeds) -> Iterator[PackChange]:
    """A change to smaller max_num_batched_tokens and max_num_seqs, if not given: less memory for the same outputs."""
    settings, args = needs.settings, needs.server.args
    flags: dict[str, Any] = {}
    if args.max_num_batched_tokens is None and settings.max_num_batched_tokens > _STEP_TOKENS:
        flags["max_num_batched_tokens"] = _STEP_TOKENS
    if args.max_num_seqs is None and settings.max_num_seqs > _STEP_SEQUENCES:
        flags["max_num_seqs"] = _STEP_SEQUENCES
    if flags:
        yield from _with_flags(request, needs.server, flags, "smaller steps: less for activations and tables")


def _shorter_context(result: PackResult, needs: ServerNeeds) -> Iterator[PackChange]:
    """A change to this server's longest max_model_len that frees what the cards lack; nothing if that is too short."""
    target, settings = needs.server.target, needs.settings
    room = needs.least_pool_bytes - result.short_bytes
    if not needs.block_bytes or room <= needs.block_bytes or needs.server.goal is not None:
        return
    shape = kv_shape(target.model, settings, target.gpu)
    longest = min(shape.longest_len(shape.checked_bytes(room, stage), stage) for stage in range(len(shape.stages)))
    length = min(longest, settings.max_model_len) // _LENGTH_STEP * _LENGTH_STEP
    if length >= _SHORTEST_CONTEXT:
        why = f"a shorter context: {length:,} instead of {settings.max_model_len:,} tokens"
        yield from _with_flags(result.request, needs.server, {"max_model_len": length}, why)


def _fewer_requests(result: PackResult, needs: ServerNeeds) -> Iterator[PackChange]:
    """A change to a lower concurrency in this server's goal, the highest that memory allows; nothing without a goal."""
    goal = needs.server.goal
    room = needs.least_pool_bytes - result.short_bytes
    if goal is None or goal.concurrency < 2 or room <= 0:
        return
    requests = min(int(goal.concurrency * room / needs.least_pool_bytes), int(goal.concurrency) - 1)
    if requests >= 1:
        changed = replace(needs.server, goal=replace(goal, concurrency=float(requests)))
        why = f"fewer requests at once: {requests} instead of {goal.concurrency:g}"
        yield from _with_server(result.request, changed, {"want_concurrency": requests}, why)


def _with_flags(request: PackRequest, server: PackedServer, flags: Mapping[str, Any], why: str) -> Iterator[PackChange]:
    """The change of one server to these flags, for the reason `why`, packed anew; nothing where vLLM refuses them."""
    yield from _with_server(request, replace(server, args=replace(server.args, **flags)), flags, why)


def _with_server(
    request: PackRequest, changed: PackedServer, flags: Mapping[str, Any], why: str
) -> Iterator[PackChange]:
    """The change that puts `changed` in place of the server of its name, packed anew; nothing where vLLM refuses it."""
    with suppress(LegroomError):  # the release or the model does not take them
        yield PackChange(changed.name, why, pack(_with_changed(request, changed)), flags)


def _with_changed(request: PackRequest, changed: PackedServer) -> PackRequest:
    """The request with `changed` in place of the server of that name."""
    return replace(request, servers=tuple(changed if each.name == changed.name else each for each in request.servers))


def _split_over_cards(result: PackResult) -> Iterator[PackChange]:
    """Tensor parallelism for the one server that is larger than a card; nothing for none or several such."""
    total = result.request.cards[0].gpu.total_bytes
    large = [needs.server for needs in result.needs if needs.server.gpus == 1 and needs.least_bytes > total]
    if len(large) != 1:
        return
    (server,) = large
    for size in _SPLITS:
        for change in _with_flags(result.request, server, {"tensor_parallel_size": size}, ""):
            packed = _on_more_cards(change.result, size + len(result.needs))
            if packed is not None:
                count = len(packed.request.cards)
                why = f"split over {size} cards, as none holds it alone; {count} cards in all"
                yield replace(change, why=why, result=packed, gpus=count)
                return


def _on_more_cards(result: PackResult, most: int) -> PackResult | None:
    """The pack on the fewest cards, up to `most`, that hold it; None if none do, for MIG slices or unequal cards."""
    request = result.request
    cards = request.cards
    if any(card.gpu.name != cards[0].gpu.name for card in cards) or cards[0].is_slice:
        return None
    total = cards[0].gpu.total_bytes
    fewest = math.ceil(sum(needs.least_bytes * needs.server.gpus for needs in result.needs) / total)
    for count in range(max(len(cards) + 1, fewest), min(_MOST_CARDS, most) + 1):
        more = tuple(replace(cards[0], number=number, others=()) for number in range(len(cards), count))
        packed = pack(replace(request, cards=(*cards, *more)))
        if packed.verdict != "does_not_fit":
            return packed
    return None


def _one_awake_at_a_time(request: PackRequest) -> Iterator[PackChange]:
    """The change to one shift per server, so that each is awake alone while the others sleep (sleep mode)."""
    can_sleep = all(sleep_rules(server.target.release) for server in request.servers)
    if request.shifts or len(request.servers) < 2 or not can_sleep:
        return
    shifts = tuple(Shift(server.name, frozenset({server.name})) for server in request.servers)
    yield PackChange("", "one is awake at a time, the others sleep", pack(replace(request, shifts=shifts)))


def proof(result: PackResult) -> tuple[str, ...]:
    """Why the servers cannot fit, as sentences with the sums of bytes."""
    cards, servers = len(result.request.cards), [needs.server for needs in result.needs]
    wide = [each for each in servers if each.gpus > cards]
    if wide:
        return tuple(f"{each.name} asks for {each.gpus} GPUs, and there are {cards}" for each in wide)
    use = min(result.cards, key=lambda use: use.headroom_bytes)
    bare = sum(needs.fixed_bytes for needs in result.needs if needs.server.name in dict(use.awake))
    total = use.card.gpu.total_bytes
    beside = use.used_bytes - sum(bytes_ for _, bytes_ in use.awake)
    has_goal = any(each.goal for each in servers)
    least = "as wished, or one request of full length" if has_goal else "one request of full length each"
    why = f"with the least KV caches ({least}) {human_bytes(use.used_bytes)} are needed"
    why += f", and a card has {human_bytes(total)}"
    if bare + beside > total:
        why = (
            f"without any KV cache {human_bytes(bare + beside)} are needed, and a card has {human_bytes(total)}: "
            "weights, activations, CUDA contexts and graphs alone are too much"
        )
    return (why, f"no way to place them on the {cards} cards holds them all") if cards > 1 else (why,)


def meet_goals(result: PackResult) -> PackResult:
    """The pack with servers too large for a card split over several and, one by one until it fits, flags searched for
    servers with a capacity goal; it may still not fit."""
    result = _split_where_needed(result)
    if result.verdict != "does_not_fit":
        return result
    for needs in sorted(result.needs, key=lambda needs: -needs.least_bytes):
        if needs.server.goal is None:
            continue
        beside = sum(each.least_bytes for each in result.needs if each.server.name != needs.server.name)
        beside += max((card.others_bytes for card in result.request.cards), default=0)
        changed = _server_meeting_goal(needs.server, beside // len(result.request.cards))
        if changed is None:
            continue
        result = pack(_with_changed(result.request, changed))
        if result.verdict != "does_not_fit":
            break
    return result


def _split_where_needed(result: PackResult) -> PackResult:
    """The pack with each server too large for one card split over the fewest that hold it; unchanged if none do."""
    request, splits, cards = result.request, dict[str, int](), result.request.cards
    for needs in result.needs if result.verdict == "does_not_fit" else ():
        if cards[0].is_slice or needs.server.gpus > 1 or needs.least_bytes <= cards[0].gpu.total_bytes:
            continue
        for size in (size for size in _SPLITS if size <= len(cards)):
            args = replace(needs.server.args, tensor_parallel_size=size)
            split = replace(needs.server, args=args, target=replace(needs.server.target, gpus=size))
            with suppress(LegroomError):  # the model's heads are not split so
                if server_needs(split).least_bytes <= cards[0].gpu.total_bytes:
                    request, splits[split.name] = _with_changed(request, split), size
                    break
    packed = pack(request) if splits else result
    return result if packed.verdict == "does_not_fit" else replace(packed, splits=splits)


def _server_meeting_goal(server: PackedServer, beside_bytes: int) -> PackedServer | None:
    """The server with flags that meet its goal beside `beside_bytes` of other servers; None where none do."""
    assert server.goal is not None
    if beside_bytes >= server.target.gpu.total_bytes:
        return None
    target = replace(server.target, held_by_others_bytes=beside_bytes)
    args = replace(server.args, max_model_len=None) if server.args.max_model_len == server.goal.context else server.args
    best = search_flags([target], args, server.goal, max_answers=1).best
    if best is None:
        return None
    # Packing sets the utilization.
    return replace(server, args=replace(best.args, gpu_memory_utilization=server.args.gpu_memory_utilization))
