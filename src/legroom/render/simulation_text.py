"""A timeline for people: the picture of the load, and the figures under it."""

from __future__ import annotations

from legroom.drawing.curve import Curve, axis_line, curve_lines, draw_curve
from legroom.drawing.svg import Svg
from legroom.drawing.terminal import Colour, Style
from legroom.drawing.text import columns, count
from legroom.simulation.timeline import Timeline, percentile
from legroom.simulation.trace import Trace

BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)


def waste_by_block_size(trace: Trace, block_sizes: tuple[int, ...] = BLOCK_SIZES) -> dict[int, float]:
    """Share of allocated slots that hold nothing, averaged over the decode steps of every request of the trace."""
    stored = 0
    slots_held = dict.fromkeys(block_sizes, 0)
    for prompt_len, output_len in zip(trace.prompt_lens, trace.output_lens, strict=True):
        last = prompt_len + output_len - 1
        stored += (prompt_len + last) * output_len // 2
        for size in block_sizes:
            slots_held[size] += size * (_blocks_up_to(last, size) - _blocks_up_to(prompt_len - 1, size))
    return {size: (slots - stored) / slots for size, slots in slots_held.items() if slots}


def _blocks_up_to(length: int, size: int) -> int:
    """Sum of the blocks that 1, 2, ... `length` tokens take."""
    whole, rest = divmod(length, size)
    return size * whole * (whole + 1) // 2 + rest * (whole + 1)


def timeline_text(timeline: Timeline, style: Style) -> str:
    lines = [style.paint(_headline(timeline), "bold"), ""]
    for curve in _curves(timeline):
        lines += curve_lines(curve, style)
    lines.append(axis_line("step 0", f"step {count(timeline.last_step)}", style))
    lines += ["", *columns(_figures(timeline), "<<")]
    if timeline.rejections:
        lines += ["", f"{len(timeline.rejections)} rejected, as vLLM would:"]
        lines += [f"  {rejection.id}: {rejection.why}" for rejection in timeline.rejections[:5]]
    return "\n".join(lines) + "\n"


def timeline_svg(timeline: Timeline) -> str:
    svg = Svg(760, _headline(timeline))
    svg.text(24, 34, _headline(timeline), "ink sans", size=16, bold=True)
    y = 60.0
    for curve in _curves(timeline):
        box = 28.0 * curve.height
        draw_curve(svg, y, curve, (540, box))
        y += box + 14
    for name, value in _figures(timeline):
        y += 20
        svg.text(24, y, name, "soft")
        svg.text(200, y, value, "ink")
    return svg.render(y + 24)


def _headline(timeline: Timeline) -> str:
    tally = timeline.tally
    end = "held the load" if not tally.preemptions and not timeline.rejections else "was too tight"
    if tally.preemptions:
        end = f"ran dry: {count(tally.preemptions)} preemptions"
    elif timeline.rejections:
        end = f"turned {count(len(timeline.rejections))} requests away"
    part = " (interrupted)" if timeline.interrupted else ""
    return f"{count(tally.finished)} of {count(len(timeline.trace))} requests served; the pool {end}{part}"


def _curves(timeline: Timeline) -> list[Curve]:
    samples, usable = timeline.samples, timeline.settings.usable_blocks
    return [
        Curve("KV blocks", "blue", 5, [sample.used_blocks for sample in samples], usable, count(usable)),
        _with_peak("running", "green", [sample.running for sample in samples], timeline.tally.peak_running),
        _with_peak("waiting", "orange", [sample.waiting for sample in samples], timeline.tally.peak_waiting),
    ]


def _with_peak(name: str, colour: Colour, values: list[int], peak: int) -> Curve:
    """As high as its peak, which may lie between two samples."""
    return Curve(name, colour, 2, values, max(1, peak), count(max(1, peak)))


def _figures(timeline: Timeline) -> list[tuple[str, str]]:
    tally, settings = timeline.tally, timeline.settings
    share = tally.peak_blocks / settings.usable_blocks
    figures = [
        ("steps", count(tally.steps)),
        ("preemptions", f"{count(tally.preemptions)}, {count(tally.recomputed_tokens)} tokens computed again"),
        ("peak blocks", f"{count(tally.peak_blocks)} of {count(settings.usable_blocks)} ({share:.0%})"),
        ("peak running", f"{count(tally.peak_running)} of {count(settings.max_num_seqs)}"),
        ("prefix cache", f"{timeline.hit_ratio:.1%} of prompt tokens found"),
    ]
    if timeline.clocks is None:
        for name, values in (
            ("queue", timeline.queue_steps),
            ("first token", timeline.first_token_wait_steps),
            ("latency", timeline.latency_steps),
        ):
            figures.append((name, _percentiles([float(value) for value in values], "steps")))
    else:
        seconds = timeline.seconds
        for name, key in (("queue", "queue_s"), ("first token", "first_token_s"), ("latency", "latency_s")):
            figures.append((name, _percentiles(seconds[key], "s") + "  (estimated)"))
        figures.append(("throughput", f"{timeline.output_tokens_per_s:,.0f} output tokens/s  (estimated)"))
    wasted = waste_by_block_size(timeline.trace, (8, 16, 32, 64, 128))
    figures.append(
        ("wasted slots", f"{timeline.wasted_slot_ratio:.2%} of those held, at block size {settings.block_size}")
    )
    figures.append(("by block size", "  ".join(f"{size}: {ratio:.1%}" for size, ratio in wasted.items())))
    figures.append(("fragmentation", "none between blocks: any free block serves any request"))
    return figures


def _percentiles(values: list[float], unit: str) -> str:
    def show(value: float) -> str:
        return f"{value:,.0f}" if unit == "steps" else f"{value:,.2f}"

    return f"p50 {show(percentile(values, 0.5))}  p99 {show(percentile(values, 0.99))}  max " + (
        f"{show(values[-1]) if values else 0} {unit}"
    )
