"""Text and SVG of `legroom fragments`: the finding, the allocator's segments, and the parts of its memory."""

from collections import Counter
from functools import partial
from itertools import groupby

from legroom.black_box import AllocatorSegment
from legroom.drawing.chart import Segment, dominant_kinds, swatch
from legroom.drawing.svg import Svg
from legroom.drawing.terminal import Colour, Style
from legroom.drawing.text import columns, display_width, plural, wrap
from legroom.facts.diagnosis_texts import Language
from legroom.fragments.fragment_report import FragmentReport
from legroom.records import dataclass
from legroom.render.translation import in_language
from legroom.units import human_bytes

_MAX_ROWS = 14
_NAMES = {
    "allocated": "in use",
    "rounding": "rounding",
    "free_whole_segments": "free, whole",
    "free_in_pieces": "free, in pieces",
    "graph_pools": "pools of graphs",
    "non_torch": "beside PyTorch",
    "non_torch_growth": "beside PyTorch, growth",
    "others": "other processes",
    "kv_last_blocks": "last KV blocks",
    "failed_request": "the failed request",
    "leak": "more than before",
}


def fragments_text(report: FragmentReport, style: Style) -> str:
    """The terminal report on PyTorch's allocator: reserved and used memory, a bar per segment, and advice."""
    lines = [style.paint(line, "bold") for line in wrap(fragments_headline(report), style.width)]
    ratio, largest, pieces = report.fragmentation_ratio, report.largest_free_bytes, ""
    if ratio is not None and largest is not None:
        pieces = f", the largest free piece has {human_bytes(largest)} (fragmentation {ratio:.0%})"
    device = "A worker without a GPU" if report.reading.is_host else f"GPU {report.reading.device}"
    lines += ["", *wrap(f"{device}, by its {report.reading.source}: {_totals_text(report)}{pieces}.", style.width)]
    lines += _segment_bar_lines(report, style)
    lines += ["", *_part_lines(report, style)]
    if advice := advice_of(report):
        lines += ["", *wrap(advice, style.width)]
    return "\n".join(lines) + "\n"


def _totals_text(report: FragmentReport) -> str:
    """`70.1 GiB reserved, 60.2 GiB in use`; only what is in use for a worker without a GPU."""
    state = report.reading.state
    reserved = "" if report.reading.is_host else f"{human_bytes(state.reserved_bytes)} reserved, "
    return f"{reserved}{human_bytes(state.allocated_bytes)} in use"


def fragments_headline(report: FragmentReport) -> str:
    """One sentence: the request that failed, else the leak, else how much memory lies in pieces, if any."""
    for name in ("failed_request", "leak"):
        part = report.part(name)
        if part is not None:
            return part.text[0].upper() + part.text[1:] + "."
    if report.is_fragmented:
        pieces = report.part("free_in_pieces")
        return f"{human_bytes(pieces.bytes or 0) if pieces else ''} of PyTorch's memory lies in pieces."
    return "Nothing is wrong with how PyTorch's memory lies."


def advice_of(report: FragmentReport) -> str:
    """A sentence: set what would have served the failed request; empty where no allocator setting would have."""
    failed = report.part("failed_request")
    if failed is None or not failed.details.get("served_by"):
        return ""
    setting = failed.details["served_by"][0]
    return f"Set PYTORCH_CUDA_ALLOC_CONF={setting} in the server's environment (PYTORCH_ALLOC_CONF from torch 2.9 on)."


def _segment_bar_lines(report: FragmentReport, style: Style) -> list[str]:
    """A bar for each of the largest segments with its label, then a legend; empty where no segment is known."""
    rows, left_out = segment_rows(report, _MAX_ROWS)
    if not rows:
        return []
    labels = [" ".join((*row.label, *([f"x {row.count}"] if row.count > 1 else []))) for row in rows]
    width = max(len(label) for label in labels)
    lines = [""]
    for row, label in zip(rows, labels, strict=True):
        cells = dominant_kinds(row.runs, style.width - width - 4)
        lines.append(f"  {label:>{width}}  {''.join(_kind_cell(kind, style) for kind in cells)}")
    if left_out:
        lines.append(f"  {'':>{width}}  and {plural(left_out, 'smaller segment')}")
    shown = {kind for row in rows for kind, _ in row.runs}
    legend = "   ".join(f"{_kind_cell(kind, style)} {KINDS[kind][0]}" for kind in KINDS if kind in shown)
    return [*lines, f"  {'':>{width}}  {legend}"]


def _kind_cell(kind: str, style: Style) -> str:
    """One character of a segment bar, coloured by the kind of memory: `allocated`, `pending`, `private` or `free`."""
    name, colour, glyph, letter = KINDS[kind]
    return swatch(Segment(name, 1, colour, glyph, letter), style)


def _part_lines(report: FragmentReport, style: Style) -> list[str]:
    """A row of size and text for each part of the memory, then a leak's call sites and the failed request."""
    shown = [part for part in report.parts if part.part not in ("failed_request", "leak")]  # which have own lines
    sizes = ("" if part.bytes is None else human_bytes(part.bytes) for part in shown)
    rows = [(_NAMES[part.part], size, part.text) for part, size in zip(shown, sizes, strict=True)]
    width = max((len(name) for name, _, _ in rows), default=0) + 14
    texts = [wrap(text, style.width - width - 2) or [""] for _, _, text in rows]
    merged = []
    for line, text in zip(columns([(name, size) for name, size, _ in rows], "<>"), texts, strict=True):
        merged.append(f"{line.ljust(width)}  {text[0]}".rstrip())
        merged += [f"{'':{width}}  {more}" for more in text[1:]]
    leak = report.part("leak")
    for site in (leak.details.get("sites", []) if leak else [])[:8]:
        merged.append(f"  {human_bytes(site['bytes']):>10}  {site['blocks']:>6,} blocks  {site['place']}")
    failed = report.part("failed_request")
    if failed is not None:
        merged += ["", *_tried_settings_lines(failed.details, style.width)]
    return merged


def _tried_settings_lines(details: dict[str, object], width: int) -> list[str]:
    """The settings in `details` (`served_by`, `refused_by`) with which the request would succeed or fail; may be []."""
    how = "replayed with other settings" if details.get("replayed") else "by what was free: there is no history of it"
    lines = [f"{'The request' if details.get('asked') else 'The failed request'}, {how}:"]
    for name, word in (("served_by", "served"), ("refused_by", "refused")):
        settings = details.get(name)
        if isinstance(settings, list) and settings:
            lines += wrap(f"{word:8} {', '.join(settings)}", width, "  ", " " * 11)
    return lines if len(lines) > 1 else []


KINDS: dict[str, tuple[str, Colour, str, str]] = {
    "allocated": ("in use", "blue", "█", "#"),
    "pending": ("given back, still used by a stream", "purple", "▓", "+"),
    "private": ("in use by graphs", "purple", "▒", "g"),
    "free": ("free", "grey", "·", "."),
}
"""Name, colour, glyph without colour, letter without Unicode."""


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """Identical segments of PyTorch's allocator, drawn as one bar."""

    label: tuple[str, ...]
    size_bytes: int
    runs: tuple[tuple[str, int], ...]
    """(kind, bytes) in the order of addresses."""
    count: int = 1
    """Number of identical segments."""


def segment_rows(report: FragmentReport, max_rows: int) -> tuple[tuple[SegmentRow, ...], int]:
    """(rows of the largest segments, identical ones in one row; number of segments not shown)."""
    segments = sorted(report.reading.state.segments, key=lambda segment: -segment.size_bytes)
    alike = Counter((_segment_label(each), each.size_bytes, _segment_runs(each)) for each in segments)
    rows = [SegmentRow(*shown, number) for shown, number in alike.items()]
    return tuple(rows[:max_rows]), sum(row.count for row in rows[max_rows:])


def _segment_label(segment: AllocatorSegment) -> tuple[str, ...]:
    """A segment's size, `graphs` (of CUDA graphs) or `small` (of small blocks), and `grows` if it is expandable."""
    kind = "graphs" if segment.pool else "small" if segment.is_small else ""
    return tuple(filter(None, (human_bytes(segment.size_bytes), kind, "grows" if segment.is_expandable else "")))


def _segment_runs(segment: AllocatorSegment) -> tuple[tuple[str, int], ...]:
    """Neighbouring blocks of one kind merged, as (kind, bytes), in the segment's order."""
    in_use = "private" if segment.pool else "allocated"
    if not segment.blocks:
        return ((in_use, segment.allocated_bytes), ("free", segment.size_bytes - segment.allocated_bytes))
    merged = groupby(segment.blocks, lambda block: in_use if block.state == "allocated" else block.state)
    return tuple((kind, sum(block.size_bytes for block in blocks)) for kind, blocks in merged)


_SVG_WIDTH, _LEFT, _BAR_LEFT, _RIGHT = 760.0, 28.0, 190.0, 732.0
_ROW_HEIGHT, _GAP = 18.0, 6.0
_NARROWEST_PX = 0.4  # Narrower blocks are not drawn: 100,000 of them would make a file of megabytes.


def fragments_svg(report: FragmentReport, language: Language | None = None) -> str:
    """The allocator report as an SVG picture; with a language, the bars alone, for a page that has the sentences."""
    words = partial(in_language, language=language or "en")
    svg = Svg(_SVG_WIDTH, words(fragments_headline(report)))
    y = 34.0
    for line in wrap(fragments_headline(report), 76) if language is None else ():
        svg.text(_LEFT, y, line, "sans ink", size=15, bold=True)
        y += 20
    svg.text(_LEFT, y + 2, words(_totals_text(report)), "sans soft")
    y += 20
    rows, left_out = segment_rows(report, 24)
    for row in rows:
        label = " ".join(map(words, row.label))
        svg.text(_BAR_LEFT - 10, y + 13, f"{label} x {row.count}" if row.count > 1 else label, "soft", anchor="end")
        svg.box(_BAR_LEFT, y, _RIGHT - _BAR_LEFT, _ROW_HEIGHT, css="room")
        x = _BAR_LEFT
        for kind, size in row.runs:
            width = size / max(row.size_bytes, 1) * (_RIGHT - _BAR_LEFT)
            if kind != "free" and width >= _NARROWEST_PX:
                name, colour, _, _ = KINDS[kind]
                svg.box(x, y, width, _ROW_HEIGHT, fill=colour, tip=f"{human_bytes(size)} {words(name)}")
            x += width
        y += _ROW_HEIGHT + _GAP
    if left_out:
        svg.text(_BAR_LEFT, y + 12, words(f"and {plural(left_out, 'smaller segment')}"), "soft")
        y += 20
    x, shown = _BAR_LEFT, {kind for row in rows for kind, _ in row.runs}
    for kind in (each for each in KINDS if each in shown):
        name, colour, _, _ = words(KINDS[kind])
        svg.box(x, y + 3, 12, 12, fill="" if kind == "free" else colour, css="room")
        svg.text(x + 18, y + 13, name, "soft")
        x += 36 + 8 * display_width(name)
    return svg.render(_draw_parts(svg, report, y + (28 if rows else 10)) if language is None else y + 28)


def _draw_parts(svg: Svg, report: FragmentReport, y: float) -> float:
    """Draws size and text of each part of the memory from `y` on; returns the y below them."""
    for part in report.parts:
        size = human_bytes(part.bytes) if part.bytes is not None else ""
        svg.text(_BAR_LEFT - 10, y + 12, size, "ink", anchor="end")
        for line in wrap(part.text, 72):
            svg.text(_BAR_LEFT, y + 12, line, "soft")
            y += 18
    return y + 14
