"""A tier for people: its hits, its copies, and what it was worth."""

from __future__ import annotations

from legroom.drawing.text import columns, count
from legroom.simulation.tiers.tier_report import HIT_SHARE, TierReport, chunks_for
from legroom.simulation.timeline import percentile
from legroom.units import gib

_BAR = 30


def tier_text(report: TierReport) -> str:
    """The lines under a replay's figures."""
    lines = ["", "the cpu tier", *columns(_figures(report), "<<")]
    if report.curve:
        lines += ["", "share of prompt tokens loaded, by size of the tier", *_curve(report)]
    return "\n".join(lines) + "\n"


def _figures(report: TierReport) -> list[tuple[str, str]]:
    replayed, tally, tier = report.replayed, report.replayed.tally, report.replayed.tier
    gpu_share, without = replayed.timeline.hit_ratio, report.without.hit_ratio
    figures = [
        ("room", f"{_size(report, tier.num_chunks)}, {count(tally.peak_chunks)} of {_chunks(tier.num_chunks)} used"),
        ("hits", f"{report.hit_ratio:.1%} of prompt tokens loaded, {gpu_share:.1%} found on the GPU"),
        ("without it", f"{without:.1%} found on the GPU"),
        ("stored", f"{_moved(report, tally.stored_blocks)} in {count(tally.stores)} copies"),
        ("loaded", f"{_moved(report, tally.loaded_blocks)} in {count(tally.loads)} copies"),
        ("evicted", f"{_chunks(tally.evicted_chunks)}"),
    ]
    if report.host_bytes is not None:
        figures.insert(1, ("host memory", f"{gib(report.host_bytes)} allocated"))
    if replayed.files is not None:
        written, read = (_size(report, chunks) for chunks in replayed.files[:2])
        figures.append(("files", f"{written} written, {read} read back"))
    if tally.failed_stores:
        figures.append(("no room", f"{count(tally.failed_stores)} offers found every chunk in use"))
    if replayed.load_busy_s or replayed.store_busy_s:
        copies = f"{replayed.load_busy_s:,.1f} s loading, {replayed.store_busy_s:,.1f} s storing"
        figures.append(("copies", f"{copies}; steps waited {replayed.flush_wait_s:,.2f} s for stores  (estimated)"))
    figures += _worth(report)
    return figures


def _worth(report: TierReport) -> list[tuple[str, str]]:
    figures = []
    if report.is_slower_than_recomputing is not None and report.break_even_bytes_s is not None:
        verdict = "slower than computing again" if report.is_slower_than_recomputing else "faster than computing again"
        figures.append(
            (
                "loading",
                f"{verdict}: {report.replayed.load_busy_s:,.1f} s against {report.recompute_s:,.1f} s; "
                f"even at {report.break_even_bytes_s / 1e9:,.1f} GB/s  (estimated)",
            )
        )
    if report.first_tokens_s:
        ours, theirs = report.first_tokens_s
        figures.append(
            (
                "first token",
                f"p50 {percentile(ours, 0.5):,.2f} s, p99 {percentile(ours, 0.99):,.2f} s; without the tier "
                f"{percentile(theirs, 0.5):,.2f} s and {percentile(theirs, 0.99):,.2f} s  (estimated)",
            )
        )
    return figures


def _curve(report: TierReport) -> list[str]:
    top = max(point.hit_ratio for point in report.curve) or 1.0
    rows = [
        (_size(report, point.num_chunks), f"{point.hit_ratio:.1%}", "#" * round(_BAR * point.hit_ratio / top))
        for point in report.curve
    ]
    lines = columns(rows, ">><")
    enough = chunks_for(report.curve, HIT_SHARE)
    if enough is None:
        return [*lines, "no size of the tier would give a hit"]
    return [*lines, f"{HIT_SHARE:.0%} of all the hits there are: {_size(report, enough)}"]


def _size(report: TierReport, num_chunks: int) -> str:
    return gib(report.tier_bytes(num_chunks)) if report.replayed.tier.block_bytes else _chunks(num_chunks)


def _moved(report: TierReport, blocks: int) -> str:
    return gib(report.bytes_of(blocks)) if report.replayed.tier.block_bytes else f"{count(blocks)} blocks"


def _chunks(number: int) -> str:
    return f"{count(number)} chunk{'' if number == 1 else 's'}"
