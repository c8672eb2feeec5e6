"""Text of a search for flags that hold a load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from shlex import join

from legroom.drawing.terminal import Style
from legroom.drawing.text import columns, count, wrap
from legroom.simulation.flag_search import MAX_REPLICAS, Choice, HoldingFleet
from legroom.simulation.replay_outcome import Goal, ReplayOutcome
from legroom.simulation.trace import Trace
from legroom.vllm.command_line import any_release_words

_MAX_ROWS = 12
Fleets = Sequence[tuple[HoldingFleet, Sequence[str]]]
"""Fleets that hold the load, each with its command."""


def choice_text(choice: Choice, trace: Trace, command: Sequence[str], fleets: Fleets, style: Style) -> str:
    cut_short = " before the interruption" if choice.interrupted else ""
    lines = [f"{len(choice.outcomes)} settings tried{cut_short}; those that no other beats:", ""]
    lines += [*columns(list(_rows(choice, style)), "<>>>>>><"), ""]
    if choice.best.rejected:
        rejected = f"{count(choice.best.rejected)} of {count(len(trace))}"
        consequence = "vLLM turns such requests away, and these figures leave them out."
        lines += [*wrap(f"Requests too long for this server: {rejected}. {consequence}", style.width), ""]
    if choice.sustained is False:
        lines += [*wrap(_ends_too_soon(choice, trace), style.width), ""]
    if choice.holds:
        return "\n".join([*lines, style.paint(join(command), "bold")])
    lines += wrap(_shortfall(choice, trace), style.width)
    lines += ["", "The best of them:", f"  {join(command)}", "", *_holding_fleets(choice, fleets, style)]
    return "\n".join(lines)


def _rows(choice: Choice, style: Style) -> Iterator[tuple[str, ...]]:
    unit = _unit(choice)
    shown = choice.frontier[:_MAX_ROWS]
    if choice.best not in shown:
        shown = [choice.best, *shown]
    yield (
        "",
        f"{'goodput' if _has_limits(choice.goal) else 'tokens'}/{unit}",
        f"first token p99 ({_units(choice)})",
        f"latency p99 ({_units(choice)})",
        "preemptions",
        "peak",
        "hits",
        "flags",
    )
    for outcome in shown:
        yield (
            style.pick("▶", ">") if outcome == choice.best else "",
            f"{outcome.goodput:,.1f}",
            f"{outcome.first_token_p99:,.2f}",
            f"{outcome.latency_p99:,.2f}",
            count(outcome.preemptions),
            f"{outcome.peak_ratio:.0%}",
            f"{outcome.hit_ratio:.0%}",
            " ".join(any_release_words(outcome.flags)),
        )


def _figure(figure: float) -> str:
    """Three significant digits below 0.1, as times per token are."""
    return f"{figure:,.2f}" if figure >= 0.1 else f"{figure:.3g}"


def _shortfall(choice: Choice, trace: Trace) -> str:
    """Which limits of the goal the best setting misses."""
    best, units, each = choice.best, _units(choice), "second" if choice.in_seconds else "step"
    if not best.finished:
        return "No setting serves any request of this load: every one is too long."
    reasons = []
    if not best.keeps_up:
        span = trace.arrivals[-1] - trace.arrivals[0]
        reasons.append(
            f"{len(trace) / span:,.3g} requests arrive a {each}, the best setting serves "
            f"{len(trace) / (span * (1 + best.wait_growth_ratio)):,.2g}, and the wait for the first token grows by "
            f"{best.wait_growth_ratio:,.2g} {units} in every {each} of load"
        )
    reasons += [
        f"the p99 of the {what} is {_figure(reached)} {units}, and {limit:g} was asked for"
        for what, reached, limit in (
            ("first token", best.first_token_p99, choice.goal.first_token_p99),
            ("whole answer", best.latency_p99, choice.goal.latency_p99),
            ("time per token", best.time_per_token_p99, choice.goal.time_per_token_p99),
        )
        if limit is not None and reached > limit
    ]
    allowed = choice.goal.most_preemptions
    if allowed is not None and best.preemptions > allowed:
        reasons.append(f"it preempts {count(best.preemptions)} times, and {count(allowed)} are allowed")
    return f"No setting holds this load: {'; '.join(reasons)}."


def _ends_too_soon(choice: Choice, trace: Trace) -> str:
    units = _units(choice)
    return (
        f"This load lasts {trace.arrivals[-1] - trace.arrivals[0]:,.0f} {units} and its answers up to "
        f"{choice.best.latency_p99:,.0f}, so it ends before the server is full. If it went on at this rate, the server "
        "would fall behind."
    )


def _holding_fleets(choice: Choice, fleets: Fleets, style: Style) -> Iterator[str]:
    if choice.interrupted:
        yield "What would hold it was not looked for: the search was interrupted."
        return
    if choice.best.finished and not any(fleet.replicas > 1 for fleet, _ in fleets):
        yield from wrap(
            f"More replicas of this server do not help (up to {MAX_REPLICAS:,}, or one a request, were tried): "
            "a request that is served alone takes too long already.",
            style.width,
        )
    for fleet, command in fleets:
        yield f"{_fleet_name(fleet)} would hold it: {_waits(fleet.outcome, _units(choice))}"
        yield f"  {style.paint(join(command), 'bold')}"


def _fleet_name(fleet: HoldingFleet) -> str:
    if fleet.replicas == 1:
        return f"One {fleet.gpu}"
    return f"{fleet.replicas} replicas" + (f" on {fleet.gpu}" if fleet.gpu else "")


def _waits(outcome: ReplayOutcome, units: str) -> str:
    return f"p99 of the first token {outcome.first_token_p99:,.2f} {units}, of the answer {outcome.latency_p99:,.2f}"


def _has_limits(goal: Goal) -> bool:
    return any(limit is not None for limit in (goal.first_token_p99, goal.latency_p99, goal.time_per_token_p99))


def _unit(choice: Choice) -> str:
    return "s" if choice.in_seconds else "step"


def _units(choice: Choice) -> str:
    return "s" if choice.in_seconds else "steps"
