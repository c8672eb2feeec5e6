"""A scaled fleet for people: how many servers over time, what waited, and whether it was steady."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from legroom.drawing.chart import area
from legroom.drawing.terminal import Style
from legroom.drawing.text import columns, count, plural
from legroom.simulation.autoscale import ScaledReplay
from legroom.simulation.timeline import percentile

_MARGIN = 12
_MOST_CHANGES = 12


def scaled_text(scaled: ScaledReplay, style: Style) -> str:
    width = style.width - _MARGIN - 10
    lines = [style.paint(_headline(scaled), "bold"), ""]
    for name, colour, height, values, top, scale in _curves(scaled, width):
        for row, line in enumerate(area(values, top, (width, height), style, colour)):
            lines.append(f"{name if row == 0 else '':<{_MARGIN}}{line} {scale if row == 0 else ''}".rstrip())
    end = f"{scaled.samples[-1].time_s / 3600:.1f} h" if scaled.samples else ""
    lines.append(f"{'':<{_MARGIN}}0{end:>{max(1, width - 1)}}")
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


def _curves(scaled: ScaledReplay, width: int) -> Iterator[tuple[str, str, int, list[float], float, str]]:
    samples = scaled.samples
    most = float(max((sample.replicas for sample in samples), default=1))
    waiting = float(max((sample.waiting for sample in samples), default=0)) or 1.0
    yield "servers", "green", 4, _thinned([float(s.replicas) for s in samples], width), most, count(most)
    yield "serving", "blue", 4, _thinned([float(s.ready) for s in samples], width), most, count(most)
    yield "KV use", "blue", 3, _thinned([s.kv_use for s in samples], width), 1.0, "100 %"
    yield "waiting", "orange", 3, _thinned([float(s.waiting) for s in samples], width), waiting, count(waiting)


def _thinned(values: Sequence[float], width: int) -> list[float]:
    """As many as there are columns, each the highest of its time."""
    if len(values) <= width:
        return list(values)
    edges = [i * len(values) // width for i in range(width + 1)]
    return [max(values[a:b]) for a, b in pairwise(edges)]


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
