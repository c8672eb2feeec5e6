"""A timeline for people: the picture of the load, and the figures under it."""

from __future__ import annotations

from legroom.drawing.chart import area
from legroom.drawing.svg import Svg, svg_curve
from legroom.drawing.terminal import Style
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


_CURVES = (("KV blocks", "blue", 5), ("running", "green", 2), ("waiting", "orange", 2))
_MARGIN = 12


def timeline_text(timeline: Timeline, style: Style) -> str:
    width = style.width - _MARGIN - 10
    lines = [style.paint(_headline(timeline), "bold"), ""]
    for (name, colour, height), (values, top) in zip(_CURVES, _series(timeline), strict=True):
        drawn = area(values, top, (width, height), style, colour)
        for row, line in enumerate(drawn):
            label = name if row == 0 else ""
            scale = count(top) if row == 0 else ("0" if row == len(drawn) - 1 and height > 2 else "")
            lines.append(f"{label:<{_MARGIN}}{line} {scale}")
    lines.append(f"{'':<{_MARGIN}}step 0{'step ' + count(timeline.last_step):>{max(1, width - 6)}}")
    lines += ["", *columns(_figures(timeline), "<<")]
    if timeline.rejections:
        lines += ["", f"{len(timeline.rejections)} rejected, as vLLM would:"]
        lines += [f"  {rejection.id}: {rejection.why}" for rejection in timeline.rejections[:5]]
    return "\n".join(lines) + "\n"


def timeline_svg(timeline: Timeline) -> str:
    svg = Svg(760, _headline(timeline))
    svg.text(24, 34, _headline(timeline), "ink sans", size=16, bold=True)
    y = 60.0
    for (name, colour, height), (values, top) in zip(_CURVES, _series(timeline), strict=True):
        box = 28.0 * height
        svg_curve(svg, y, (name, count(top)), values, top, (540, box), colour)
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


def _series(timeline: Timeline) -> list[tuple[list[float], float]]:
    samples = timeline.samples
    return [
        ([float(sample.used_blocks) for sample in samples], float(timeline.settings.usable_blocks)),
        ([float(sample.running) for sample in samples], float(max(1, timeline.tally.peak_running))),
        ([float(sample.waiting) for sample in samples], float(max(1, timeline.tally.peak_waiting))),
    ]


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
        for name, values in (("queue", timeline.queue_steps), ("first token", timeline.first_token_wait_steps),
                             ("latency", timeline.latency_steps)):  # fmt: skip
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
