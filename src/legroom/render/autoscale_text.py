"""A scaled fleet for people: how many servers over time, what waited, and whether it was steady."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from legroom.drawing.curve import Curve, axis_line, counted, curve_lines
from legroom.drawing.terminal import Style
from legroom.drawing.text import columns, count, plural
from legroom.simulation.autoscale import ScaledReplay
from legroom.simulation.timeline import percentile

_MOST_CHANGES = 12


def scaled_text(scaled: ScaledReplay, style: Style) -> str:
    lines = [style.paint(_headline(scaled), "bold"), ""]
    for curve in _curves(scaled):
        lines += curve_lines(curve, style)
    end = f"{scaled.samples[-1].time_s / 3600:.1f} h" if scaled.samples else ""
    lines.append(axis_line("0", end, style))
    lines += ["", *columns(list(_figures(scaled)), "<<"), "", *_changes(scaled)]
    return "\n".join(lines) + "\n"


def _headline(scaled: ScaledReplay) -> str:
    if scaled.flaps:
        return f"The fleet flaps: a server was started again soon after one was given up, {_times(scaled.flaps)}."
    if scaled.is_thrashing:
        return f"The fleet thrashes: {count(scaled.preemptions)} preemptions for {count(scaled.finished)} requests."
    return f"The fleet is steady: {plural(len(scaled.changes), 'change')}, no flapping."


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _curves(scaled: ScaledReplay) -> list[Curve]:
    samples = scaled.samples
    servers = counted("servers", "green", [sample.replicas for sample in samples], height=4)
    return [
        servers,
        replace(servers, name="serving", colour="blue", values=[sample.ready for sample in samples]),
        Curve("KV use", "blue", 3, [sample.kv_use for sample in samples], 1.0, "100%"),
        counted("waiting", "orange", [sample.waiting for sample in samples], height=3),
    ]


def _figures(scaled: ScaledReplay) -> Iterator[tuple[str, str]]:
    policy = scaled.policy
    ordered = sorted(scaled.first_token_s)
    yield "requests", f"{count(scaled.finished)} served, {count(scaled.rejected)} refused"
    if ordered:
        shares = ", ".join(f"p{share} {percentile(ordered, share / 100):.1f} s" for share in (50, 90, 99))
        yield "first token", f"{shares} (estimated)"
    yield "preemptions", count(scaled.preemptions)
    yield "servers", f"{policy.least} to {policy.most}, {scaled.replica_seconds / 3600:.1f} server hours"
    yield "policy", f"KV use {policy.kv_target_ratio:.0%}, {policy.waiting_target} waiting for each server"
    yield "", f"up: twice as many in {policy.up_period_s} s, after {policy.up_window_s} s of need"
    yield "", f"down: one in {policy.down_period_s} s, after {policy.down_window_s} s without need"
    yield "", f"a server starts in {policy.start_s:.0f} s"


def _changes(scaled: ScaledReplay) -> Iterator[str]:
    for time_s, before, after in scaled.changes[:_MOST_CHANGES]:
        yield f"  {time_s / 60:7.1f} min  {before} -> {after}"
    if len(scaled.changes) > _MOST_CHANGES:
        yield f"  and {len(scaled.changes) - _MOST_CHANGES} more"
