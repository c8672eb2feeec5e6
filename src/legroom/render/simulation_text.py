"""Text and SVG of `legroom simulate`: a timeline, an autoscaled fleet, a KV offloading tier, a search for flags."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf
from shlex import join
from typing import Any

from legroom.drawing.svg import Curve, Svg, axis_line, curve_lines, draw_curves, draw_rows, scaled_curve
from legroom.drawing.terminal import Style
from legroom.drawing.text import columns, count, plural, wrap
from legroom.simulation.autoscale import ScaledReplay
from legroom.simulation.disaggregation import DisaggregatedTimeline
from legroom.simulation.flag_search import MAX_REPLICAS, Choice, HoldingFleet
from legroom.simulation.replay_outcome import LoadVerdict
from legroom.simulation.tiers.tier_report import HIT_SHARE, TierReport, chunks_for_hit_share
from legroom.simulation.timeline import WAITS, Timeline, percentile
from legroom.simulation.trace import Trace
from legroom.units import gib
from legroom.vllm.command_line import any_release_words


def timeline_text(timeline: Timeline, load: LoadVerdict, style: Style) -> str:
    """The terminal report of a simulated load: verdict, curves of KV blocks and queue, figures, rejections."""
    lines = [*(style.paint(line, "bold") for line in wrap(_headline(timeline, load), style.width)), ""]
    for curve in _timeline_curves(timeline):
        lines += curve_lines(curve, style)
    lines.append(axis_line("step 0", f"step {count(timeline.last_step)}", style))
    lines += ["", *columns(_timeline_rows(timeline, load), "<<")]
    if timeline.rejections:
        lines += ["", f"{len(timeline.rejections)} rejected, as vLLM would:"]
        lines += [f"  {rejection.id}: {rejection.why}" for rejection in timeline.rejections[:5]]
    lines += [line for step in _next_steps(load, _CHOOSING) for line in ("", *wrap(step, style.width))]
    return "\n".join(lines) + "\n"


def timeline_words(timeline: Timeline, load: LoadVerdict, notes: Sequence[str]) -> dict[str, Any]:
    """The verdict, the figures and the notes of `legroom simulate`, for the page."""
    figures = [{"name": name, "text": text} for name, text in _timeline_rows(timeline, load)]
    steps = _next_steps(load, "the count of GPUs on this page tries servers, splits and larger cards")
    return {"headline": _headline(timeline, load), "figures": figures, "notes": [*steps, *notes]}


def _next_steps(load: LoadVerdict, tools: str) -> Iterator[str]:
    """Sentences if the load is not held, or would not be if it lasted; `tools`: what finds servers that hold it."""
    if load.sustained is False:
        yield _UNSUSTAINED
    if load.sustained is False or load.verdict in ("falls_behind", "serves_late", "misses_limits"):
        yield f"to hold it: {tools}; legroom guard refuses what would only wait, with Retry-After"


def timeline_svg(timeline: Timeline, load: LoadVerdict) -> str:
    """The simulated load as an SVG picture: verdict, curves and figures."""
    svg = Svg(760, _headline(timeline, load))
    verdict, _, figures = _headline(timeline, load).partition(": ")
    svg.text(24, 34, verdict, "ink sans", size=16, bold=True)
    svg.text(24, 54, figures, "ink sans", size=13)
    y = draw_curves(svg, 76.0, _timeline_curves(timeline))
    return svg.render(draw_rows(svg, y, _timeline_rows(timeline, load)) + 24)


_CHOOSING = "legroom simulate --choose --ttft S tries flags, replicas and larger cards"
_UNSUSTAINED = "The load ends before the server is full. If it went on at this rate, the server would fall behind."
_VERDICTS = {
    "holds": "Holds the load",
    "holds_with_waiting": "Holds the load, with waiting",
    "serves_late": "Serves the load late",
    "misses_limits": "Serves the load, but misses its limits",
    "falls_behind": "Falls behind the load",
    "turns_away": "Turns requests away",
}


def _headline(timeline: Timeline, load: LoadVerdict) -> str:
    """The verdict on the load in one sentence, with the number that decides it."""
    tally, unit = timeline.tally, "a second" if timeline.clocks else "a step"
    words = [f"{count(tally.finished)} of {count(len(timeline.trace))} requests served"]
    if (engines := timeline.trace.engines) > 1:
        words[0] = f"on each of {engines} data-parallel engines {words[0]}"
    if timeline.clocks and tally.finished:
        wait_s, users = percentile(timeline.seconds["first_token_s"], 0.5), timeline.trace.users
        words.append(f"the first token takes {wait_s:,.{0 if wait_s >= 10 else 2}f} s (p50)")
        rate = f"{1 / (load.time_per_token_p50 or inf):,.0f} tokens a second (p50)"
        words += [f"after it each of {users.count:,.0f} users gets {rate}"] if users else []
    if load.sustained is False:
        words.insert(0, "as long as this load lasts, and not if it went on")
    if load.slowest and not load.slowest[1]:
        words.insert(0, f"at the expected speed, and not with steps that take {load.slowest[0]:g} times as long")
    if load.verdict == "falls_behind":
        words.insert(0, f"{load.arriving:,.3g} arrive {unit}, {load.served:,.3g} are served")
    words[:0] = _missed_limits(load.missed, "s" if timeline.clocks else "steps")
    if tally.preemptions:
        words.append(f"the pool ran dry: {count(tally.preemptions)} preemptions")
    if timeline.rejections:
        words.append(f"{count(len(timeline.rejections))} turned away, the first: {timeline.rejections[0].why}")
    part = " (interrupted)" if timeline.interrupted else ""
    return f"{_VERDICTS[load.verdict]}: {'; '.join(words)}{part}"


def _missed_limits(missed: Iterable[tuple[str, float, float]], units: str) -> list[str]:
    """A clause for each (name, value reached, limit) in `missed`; `units`: the unit of the latencies."""
    return [
        f"it preempts {count(int(reached))} times, and {count(int(limit))} are allowed"
        if what == "preemptions"
        else f"the p99 of the {what} is {reached:,.3g} {units}, and {limit:g} was asked for"
        for what, reached, limit in missed
    ]


def _timeline_curves(timeline: Timeline) -> list[Curve]:
    """Used KV blocks, running and waiting requests, over the simulated steps."""
    samples, usable = timeline.samples, timeline.settings.usable_blocks
    # A peak may lie between two samples.
    running, waiting = max(1, timeline.tally.peak_running), max(1, timeline.tally.peak_waiting)
    return [
        Curve("KV blocks", "blue", 5, [sample.used_blocks for sample in samples], usable, count(usable)),
        Curve("running", "green", 2, [sample.running for sample in samples], running, count(running)),
        Curve("waiting", "orange", 2, [sample.waiting for sample in samples], waiting, count(waiting)),
    ]


def _timeline_rows(timeline: Timeline, load: LoadVerdict) -> list[tuple[str, str]]:
    """(name, text) of each figure: preemptions, peaks, prefix hits, latencies (s or steps), wasted slots."""
    tally, settings = timeline.tally, timeline.settings
    share = tally.peak_blocks / settings.usable_blocks
    null = ", and the null block" if settings.usable_blocks < settings.num_blocks else ""
    figures = [
        *engines_row(timeline.trace),
        *_users_row(timeline),
        ("load", _load_text(timeline.trace)),
        ("steps", count(tally.steps)),
        ("preemptions", f"{count(tally.preemptions)}, {count(tally.recomputed_tokens)} tokens computed again"),
        ("peak blocks", f"{count(tally.peak_blocks)} of {count(settings.usable_blocks)} ({share:.0%}){null}"),
        ("peak running", f"{count(tally.peak_running)} of {plural(settings.max_num_seqs, 'sequence')}"),
        ("prefix cache", f"{timeline.hit_ratio:.1%} of prompt tokens found"),
    ]
    if timeline.clocks is None:
        for name in WAITS:
            steps = [float(wait) for wait in timeline.wait_steps(name)]
            figures.append((name.replace("_", " "), _percentiles_text(steps, "steps")))
    else:
        seconds = timeline.seconds
        for name, key in (("queue", "queue_s"), ("first token", "first_token_s"), ("latency", "latency_s")):
            figures.append((name, _percentiles_text(seconds[key], "s") + "  (estimated)"))
        if tally.finished:
            figures.append(("a token", f"p50 {load.time_per_token_p50 * 1000:,.1f} ms  (estimated)"))
        rate = f"{timeline.output_tokens_per_s:,.0f} output tokens/s from the first arrival to the last answer"
        figures.append(("throughput", f"{rate}  (estimated)"))
    waste = f"{timeline.wasted_slot_ratio:.2%} of those held, at block size {settings.block_size}"
    return [*figures, ("wasted slots", waste)]


def engines_row(trace: Trace) -> Iterator[tuple[str, str]]:
    """(name, text) that all figures are of one of several data-parallel engines; no row for a single engine."""
    if trace.engines > 1:
        share = "they share the load in turn, and all figures here are of one of them"
        yield "engines", f"{trace.engines} data-parallel engines: {share}"


def _users_row(timeline: Timeline) -> Iterator[tuple[str, str]]:
    """(name, text) of how often each user of a load sends a request; none for a load without users, or in steps."""
    if (users := timeline.trace.users) and timeline.clocks:
        answer_s, rate = percentile(timeline.seconds["latency_s"], 0.5), timeline.requests_per_s
        asks = f"{users.count:,.0f} ask again {users.think_s:g} s after an answer, which takes {answer_s:,.0f} s (p50)"
        yield "users", f"{asks}: {rate:.3g} requests a second"


def _load_text(trace: Trace) -> str:
    """How many requests, and the median and p99 of their tokens."""
    lens = {"input": sorted(map(float, trace.prompt_lens)), "output": sorted(map(float, trace.output_lens))}
    texts = [plural(len(trace), "request")]
    for name, each in lens.items():
        texts.append(f"{name} tokens p50 {percentile(each, 0.5):,.0f}, p99 {percentile(each, 0.99):,.0f}")
    return "; ".join(texts)


def _percentiles_text(values: list[float], unit: str) -> str:
    """p50, p99 and maximum of values that are sorted already, followed by their unit."""
    if not values:
        return "none served"
    p50, p99, largest = percentile(values, 0.5), percentile(values, 0.99), values[-1]
    digits = 0 if unit == "steps" else 2
    return f"p50 {p50:,.{digits}f}  p99 {p99:,.{digits}f}  max {largest:,.{digits}f} {unit}"


_MAX_ROWS = 12


def autoscale_text(scaled: ScaledReplay, style: Style) -> str:
    """The terminal report of an autoscaled replay: whether it flaps, curves, figures, scaling events."""
    lines = [style.paint(_fleet_headline(scaled), "bold"), ""]
    samples = scaled.samples
    servers = scaled_curve("servers", "green", [sample.replicas for sample in samples], height=4)
    for curve in [
        servers,
        replace(servers, name="serving", colour="blue", values=[sample.ready for sample in samples]),
        Curve("KV use", "blue", 3, [sample.kv_use for sample in samples], 1.0, "100%"),
        scaled_curve("waiting", "orange", [sample.waiting for sample in samples], height=3),
    ]:
        lines += curve_lines(curve, style)
    end = f"{scaled.samples[-1].time_s / 3600:.1f} h" if scaled.samples else ""
    lines.append(axis_line("0", end, style))
    lines += ["", *columns(list(_fleet_figures(scaled)), "<<"), ""]
    first = scaled.changes[:_MAX_ROWS]
    lines += [f"  {time_s / 60:7.1f} min  {before} -> {after}" for time_s, before, after in first]
    if len(scaled.changes) > _MAX_ROWS:
        lines.append(f"  and {len(scaled.changes) - _MAX_ROWS} more")
    return "\n".join(lines) + "\n"


def _fleet_headline(scaled: ScaledReplay) -> str:
    """One sentence: whether the autoscaled fleet flaps, thrashes or is steady."""
    if scaled.flaps:
        times = "once" if scaled.flaps == 1 else f"{scaled.flaps} times"
        return f"The fleet flaps: a server was started again soon after one was given up, {times}."
    if scaled.is_thrashing:
        return f"The fleet thrashes: {count(scaled.preemptions)} preemptions for {count(scaled.finished)} requests."
    return f"The fleet is steady: {plural(len(scaled.changes), 'change')}, no flapping."


def _fleet_figures(scaled: ScaledReplay) -> Iterator[tuple[str, str]]:
    """(name, text) of each figure: requests, time to first token, preemptions, server hours, policy."""
    policy = scaled.policy
    ordered = sorted(scaled.first_token_s)
    yield "requests", f"{count(scaled.finished)} served, {count(scaled.rejected)} refused"
    if ordered:
        shares = ", ".join(f"p{share} {percentile(ordered, share / 100):.1f} s" for share in (50, 90, 99))
        yield "first token", f"{shares} (estimated)"
    yield "preemptions", count(scaled.preemptions)
    yield "servers", f"{policy.least} to {policy.most}, {scaled.replica_seconds / 3600:.1f} server hours"
    yield "policy", f"KV use {policy.kv_target_ratio:.0%}, {policy.waiting_target} waiting for each server"
    yield "", f"up: twice as many in {policy.scaling_period_s} s, after {policy.up_window_s} s of need"
    yield "", f"down: one in {policy.scaling_period_s} s, after {policy.down_window_s} s without need"
    yield "", f"a server starts in {policy.start_s:.0f} s"


def disaggregation_text(replayed: DisaggregatedTimeline) -> str:
    """p99 of when prefill ends and of the KV transfer in seconds, and the busiest link's utilization."""
    return (
        f"\nprefill ends {replayed.prefill_p99_s:.2f} s after arrival (p99), the transfer takes "
        f"{replayed.transfer_p99_s:.3f} s (p99), the busiest link is {replayed.link_busy_ratio:.0%} in use\n"
    )


def tier_text(report: TierReport) -> str:
    """The figures of a replay with an offloading tier, and the tier's hit ratio by size."""
    lines = ["", "the cpu tier", *columns(list(_tier_figures(report)), "<<")]
    if report.curve:  # a bar of the hit ratio for each size, and the size that gives most of the hits
        top = max(point.hit_ratio for point in report.curve) or 1.0
        shares = [(point.num_chunks, point.hit_ratio) for point in report.curve]
        rows = [(_size_text(report, chunks), f"{hits:.1%}", "#" * round(30 * hits / top)) for chunks, hits in shares]
        enough = chunks_for_hit_share(report.curve, HIT_SHARE)
        found = f"{HIT_SHARE:.0%} of all the hits there are: {_size_text(report, enough)}" if enough is not None else ""
        lines += ["", "share of prompt tokens loaded, by size of the tier", *columns(rows, ">><")]
        lines.append(found or "no size of the tier would give a hit")
    return "\n".join(lines) + "\n"


def _tier_figures(report: TierReport) -> Iterator[tuple[str, str]]:
    """(name, text) of each figure of an offloading tier: size, hits, bytes stored, loaded and evicted."""
    replayed, tally, chunks = report.replayed, report.replayed.tally, report.replayed.tier.num_chunks
    gpu_share, without = replayed.timeline.hit_ratio, report.without.hit_ratio
    yield "room", f"{_size_text(report, chunks)}, {count(tally.peak_chunks)} of {plural(chunks, 'chunk')} used"
    if report.host_bytes is not None:
        yield "host memory", f"{gib(report.host_bytes)} allocated"
    yield "hits", f"{replayed.hit_ratio:.1%} of prompt tokens loaded, {gpu_share:.1%} found on the GPU"
    yield "without it", f"{without:.1%} found on the GPU"
    yield "stored", f"{_blocks_text(report, tally.stored_blocks)} in {count(tally.stores)} copies"
    yield "loaded", f"{_blocks_text(report, tally.loaded_blocks)} in {count(tally.loads)} copies"
    yield "evicted", plural(tally.evicted_chunks, "chunk")
    if replayed.files is not None:
        written, read = (_size_text(report, chunks) for chunks in replayed.files[:2])
        yield "files", f"{written} written, {read} read back"
    if tally.failed_stores:
        yield "no room", f"{count(tally.failed_stores)} offers found every chunk in use"
    if replayed.load_busy_s or replayed.store_busy_s:
        copies = f"{replayed.load_busy_s:,.1f} s loading, {replayed.store_busy_s:,.1f} s storing"
        yield "copies", f"{copies}; steps waited {replayed.flush_wait_s:,.2f} s for stores  (estimated)"
    # Loading against recomputing, and time to first token with and without the tier, where estimated.
    if report.is_slower_than_recomputing is not None and report.break_even_bytes_s is not None:
        verdict = "slower than computing again" if report.is_slower_than_recomputing else "faster than computing again"
        seconds = f"{report.replayed.load_busy_s:,.1f} s against {report.recompute_s:,.1f} s"
        yield "loading", f"{verdict}: {seconds}; even at {report.break_even_bytes_s / 1e9:,.1f} GB/s  (estimated)"
    if report.first_tokens_s:
        (p50, p99), (plain_p50, plain_p99) = (
            [f"{percentile(seconds, share):,.2f} s" for share in (0.5, 0.99)] for seconds in report.first_tokens_s
        )
        yield "first token", f"p50 {p50}, p99 {p99}; without the tier {plain_p50} and {plain_p99}  (estimated)"


def _size_text(report: TierReport, num_chunks: int) -> str:
    """The chunks' size in GiB, or their number where the bytes of a block are unknown."""
    return gib(report.tier_bytes(num_chunks)) if report.replayed.tier.block_bytes else plural(num_chunks, "chunk")


def _blocks_text(report: TierReport, blocks: int) -> str:
    """The blocks' size in GiB, or their number where the bytes of a block are unknown."""
    return gib(report.bytes_of(blocks)) if report.replayed.tier.block_bytes else f"{count(blocks)} blocks"


Fleets = Sequence[tuple[HoldingFleet, Sequence[str]]]
"""Fleets that hold the load, each with its command."""


def choice_text(choice: Choice, trace: Trace, command: Sequence[str], fleets: Fleets, style: Style) -> str:
    """The settings that no other beats as a table, then the best's `command`, or the `fleets` that hold the load."""
    cut_short = " before the interruption" if choice.interrupted else ""
    lines = [f"{len(choice.outcomes)} settings tried{cut_short}; those that no other beats:", ""]
    lines += [*columns(list(_choice_rows(choice, style)), "<>>>>>><"), ""]
    lines += [line for _, text in engines_row(trace) for line in (*wrap(text, style.width), "")]
    if choice.best.rejected:
        rejected = f"{count(choice.best.rejected)} of {count(len(trace))}"
        consequence = "vLLM turns such requests away, and these figures leave them out."
        lines += [*wrap(f"Requests too long for this server: {rejected}. {consequence}", style.width), ""]
    if choice.sustained is False:
        lines += [*wrap(_UNSUSTAINED, style.width), ""]
    if choice.holds:
        return "\n".join([*lines, style.paint(join(command), "bold")])
    lines += wrap(_missed_goals_text(choice, trace), style.width)
    lines += ["", "The best of them:", f"  {join(command)}", "", *_holding_fleets(choice, fleets, style)]
    return "\n".join(lines)


def _choice_rows(choice: Choice, style: Style) -> Iterator[tuple[str, ...]]:
    """A header, then goodput, p99 waits, preemptions, peak, hits and flags of each undominated setting."""
    goal, unit = choice.goal, "s" if choice.in_seconds else "step"
    has_limits = any(limit is not None for limit in (goal.first_token_p99, goal.latency_p99, goal.time_per_token_p99))
    shown = choice.frontier[:_MAX_ROWS]
    if choice.best not in shown:
        shown = [choice.best, *shown]
    waits = [f"{name} p99 ({_time_unit_text(choice)})" for name in ("first token", "latency")]
    yield "", f"{'goodput' if has_limits else 'tokens'}/{unit}", *waits, "preemptions", "peak", "hits", "flags"
    for each in shown:
        mark = style.pick("▶", ">") if each == choice.best else ""
        times = (
            f"{each.goodput:,.{1 if each.goodput >= 0.05 else 4}f}",
            f"{each.first_token_p99:,.2f}",
            f"{each.latency_p99:,.2f}",
        )
        shares = f"{each.peak_ratio:.0%}", f"{each.hit_ratio:.0%}"
        yield mark, *times, count(each.preemptions), *shares, " ".join(any_release_words(each.flags))


def _missed_goals_text(choice: Choice, trace: Trace) -> str:
    """Why no setting holds the load: too long requests, or which limits of the goal the best setting misses."""
    best, units, each = choice.best, _time_unit_text(choice), "second" if choice.in_seconds else "step"
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
    reasons += _missed_limits(choice.goal.missed_by(best), units)
    return f"No setting holds this load: {'; '.join(reasons)}."


def _holding_fleets(choice: Choice, fleets: Fleets, style: Style) -> Iterator[str]:
    """Which number of replicas, or which GPU, would hold the load, with its waits and command."""
    if choice.interrupted:
        yield "What would hold it was not looked for: the search was interrupted."
        return
    if choice.best.finished and not any(fleet.replicas > 1 for fleet, _ in fleets):
        tried = f"More replicas of this server do not help (up to {MAX_REPLICAS:,}, or one a request, were tried)"
        yield from wrap(f"{tried}: a request that is served alone takes too long already.", style.width)
    for fleet, command in fleets:
        first_token, latency = fleet.outcome.first_token_p99, fleet.outcome.latency_p99
        unit = _time_unit_text(choice)
        waits = f"p99 of the first token {first_token:,.2f} {unit}, of the answer {latency:,.2f} {unit}"
        replicas = f"{fleet.replicas} replicas{f' on {fleet.gpu}' if fleet.gpu else ''}"
        yield f"{f'One {fleet.gpu}' if fleet.replicas == 1 else replicas} would hold it: {waits}"
        yield f"  {style.paint(join(command), 'bold')}"
    if fleets and choice.in_seconds:
        yield ""
        why = "These counts are for steps of the length assumed here, and for p99 limits only where you gave them"
        yield from wrap(f"{why}: legroom size MODEL --rate counts for the slowest steps of the estimate.", style.width)


def _time_unit_text(choice: Choice) -> str:
    """The unit of the times in a search's outcomes: `s` or `steps`."""
    return "s" if choice.in_seconds else "steps"
