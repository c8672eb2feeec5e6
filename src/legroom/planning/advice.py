"""Which changes of flags make a server start and hold: every lever tried on the memory model, what works kept."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from legroom.errors import LegroomError
from legroom.planning.levers import LEVERS, SUPPORTED, Lever
from legroom.planning.plan import Advice, Plan, plan
from legroom.units import human_bytes
from legroom.vllm.served_model import served_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MOST_ADVICE = 5
_ANOTHER_DEPLOYMENT = 6
"""The cost from which on a lever is another checkpoint or other hardware."""


def with_advice(first: Plan, keep: Iterable[str] = ()) -> Plan:
    """The plan with what would fix it; `keep` names flags that must not change. A plan that fits needs none."""
    if first.verdict == "fits":
        return first
    kept = frozenset(keep)
    if first.memory.refused:
        advice = _pull(SUPPORTED, first, kept)
        return replace(first, advice=(advice,) if advice else ())
    working = [advice for lever in LEVERS if (advice := _pull(lever, first, kept))]
    if not any(advice.plan.verdict == "fits" for advice in working):
        together = _together(first, kept)
        working += [together] if together else []
    working.sort(key=lambda advice: (advice.plan.verdict != "fits", _cost(advice)))
    return replace(first, advice=tuple(working[:MOST_ADVICE]))


def _cost(advice: Advice) -> int:
    return sum(lever.cost for lever in LEVERS if lever.trades in advice.trades)


def _pull(lever: Lever, start: Plan, kept: frozenset[str]) -> Advice | None:
    """The first proposal that fits; failing that, the first that at least starts where the plan did not."""
    starts: Advice | None = None
    for flags, changed in _tried(lever, start, kept):
        if changed.verdict == "fits":
            return Advice(flags, why(start, changed), changed, lever.trades)
        if starts is None and start.verdict == "does_not_fit" and changed.verdict == "tight":
            starts = Advice(flags, why(start, changed), changed, lever.trades)
    return starts


def _together(start: Plan, kept: frozenset[str]) -> Advice | None:
    """Where no single lever is enough: the levers one on top of the other, the cheapest first.

    Twice over before other checkpoints and more GPUs: a shorter context helps once a smaller batch passes the profile.
    """
    current, flags, trades = start, dict[str, Any](), list[str]()
    by_cost = sorted(LEVERS, key=lambda lever: lever.cost)
    cheap = [lever for lever in by_cost if lever.cost < _ANOTHER_DEPLOYMENT]
    for lever in (*cheap, *cheap, *by_cost[len(cheap) :]):
        best = _furthest(lever, current, kept)
        if best is None:
            continue
        proposal, current = best
        flags |= proposal
        trades += [lever.trades] if lever.trades not in trades else []
        if current.verdict == "fits":
            return Advice(flags, why(start, current), current, "; ".join(trades))
    return Advice(flags, why(start, current), current, "; ".join(trades)) if current.verdict == "tight" else None


def _furthest(lever: Lever, start: Plan, kept: frozenset[str]) -> tuple[dict[str, Any], Plan] | None:
    """The proposal that leaves the most KV cache without running the card over, if it beats leaving things alone."""
    best: tuple[dict[str, Any], Plan] | None = None
    for flags, changed in _tried(lever, start, kept):
        if changed.verdict == "fits":
            return flags, changed
        if _slack(changed) > _slack(best[1] if best else start):
            best = flags, changed
    return best


def _tried(lever: Lever, start: Plan, kept: frozenset[str]) -> Iterator[tuple[dict[str, Any], Plan]]:
    """Every proposal of a lever that the release and the model take, laid out; none where its flag must not change."""
    for flags in lever.propose(start):
        if kept.intersection(flags):
            return
        changed = _changed(start, flags)
        if changed is not None:
            yield flags, changed


def _slack(candidate: Plan) -> int:
    """How far the worst constraint is from breaking; below zero it breaks."""
    layout, kv = candidate.layout, candidate.memory.kv
    return min(layout.kv_cache.bytes - kv.needed_bytes, layout.headroom_bytes)


def _changed(start: Plan, flags: Mapping[str, Any]) -> Plan | None:
    try:
        args = replace(start.args, **flags)
        model = served_model(args) if "model" in flags else start.target.model
        return plan(replace(start.target, model=model, gpus=max(start.target.gpus, args.gpus_needed)), args)
    except LegroomError:
        return None  # the release or the model does not take this value, so it is no advice


def why(before: Plan, after: Plan) -> str:
    """One sentence with the numbers: what changes in the pool and the headroom."""
    old, new = before.layout, after.layout
    return (
        f"KV cache {human_bytes(max(old.kv_cache.bytes, 0))} -> {human_bytes(new.kv_cache.bytes)}, one request of "
        f"{after.settings.max_model_len:,} tokens needs {human_bytes(after.memory.kv.needed_bytes)}; "
        f"headroom {human_bytes(old.headroom_bytes)} -> {human_bytes(new.headroom_bytes)}"
    )
