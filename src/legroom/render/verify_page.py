"""Text and SVG of a verification."""

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from legroom.drawing.svg import Curve, Svg, axis_line, curve_lines, draw_curves, draw_rows, scaled_curve
from legroom.drawing.terminal import PLAIN, Colour, Style
from legroom.drawing.text import columns, count, printable, wrap
from legroom.simulation.timeline import percentile
from legroom.verify.load_run import LoadRun
from legroom.verify.verification_checks import Check, Verification


def _with_printable_texts(verification: Verification) -> Verification:
    """The verification with control characters escaped in all texts, which may come from the server."""
    checks = [replace(check, text=printable(" ".join(check.text.split()))) for check in verification.checks]
    notes = [printable(" ".join(note.split())) for note in verification.notes]
    return replace(verification, server=printable(verification.server), checks=tuple(checks), notes=tuple(notes))


def verification_html(verification: Verification) -> str:
    """The picture and the report as one page."""
    title = escape(verdict_headline(_with_printable_texts(verification)))
    head = f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>'
    report = escape(verification_text(verification))
    return f"{head}\n<body>\n{verification_svg(verification)}\n<pre>{report}</pre>\n</body></html>\n"


def verification_text(verification: Verification, style: Style = PLAIN) -> str:
    """The terminal report of a verified server: verdict, each check, and the test load's curves and figures."""
    verification = _with_printable_texts(verification)
    colour: Colour = "green" if verification.ok else "red"
    lines = [style.paint(verdict_headline(verification), colour, "bold"), ""]
    width = max((len(check.name) for check in verification.checks), default=0)
    for check in verification.checks:
        text = f"{_check_mark(check, style)} {check.name:<{width}}  {check.text}"
        lines += wrap(text, style.width, "", " " * (width + 4))
    if verification.load and verification.load.samples:
        load = verification.load
        curves = (line for curve in _load_curves(load) for line in curve_lines(curve, style))
        lines += ["", *curves, axis_line("0 s", f"{load.samples[-1].at_s:.0f} s", style)]
        lines += ["", *columns(_load_rows(load), "<<")]
    for remark in verification.notes:
        lines += ["", *wrap(f"note: {remark}", style.width)]
    return "\n".join(lines) + "\n"


def verdict_headline(verification: Verification) -> str:
    """A sentence that says whether the server is verified, else which checks failed or why none was made."""
    if verification.ok:
        return f"Verified: {verification.server} holds what was asked of it"
    failed = [check.name for check in verification.checks if check.ok is False]
    why = ", ".join(failed) or (verification.load.interrupted if verification.load else "") or "nothing was checked"
    return f"Not verified: {verification.server} ({why})"


def _check_mark(check: Check, style: Style) -> str:
    """A green tick, a red cross, or a grey dot where the check could not be made."""
    if check.ok is None:
        return style.paint(style.pick("·", "-"), "grey")
    return style.paint(style.pick("✓", "+"), "green") if check.ok else style.paint(style.pick("×", "x"), "red")


def _load_curves(run: LoadRun) -> list[Curve]:
    """KV cache usage, running and waiting requests, over the test load."""
    return [
        Curve("KV use", "blue", 5, [sample.kv_use or 0.0 for sample in run.samples], 1.0, "100%"),
        scaled_curve("running", "green", [sample.running for sample in run.samples]),
        scaled_curve("waiting", "orange", [sample.waiting for sample in run.samples]),
    ]


def _load_rows(run: LoadRun) -> list[tuple[str, str]]:
    """(name, text) of each figure of the test load: requests, tokens/s, first token, latency."""
    good = [outcome for outcome in run.outcomes if outcome.ok]
    tokens = sum(outcome.output_tokens for outcome in good)
    figures = [
        ("load", f"{run.name}: {count(run.requests)} requests, up to {run.concurrency} at a time, {run.seconds:.1f} s"),
        ("answered", f"{count(len(good))}, {tokens / run.seconds if run.seconds else 0:,.0f} output tokens/s"),
    ]
    if good:
        firsts = [outcome.first_token_s for outcome in good if outcome.first_token_s is not None]
        figures += [("first token", percentiles(firsts)), ("latency", percentiles([each.total_s for each in good]))]
    if run.interrupted:
        figures.append(("ended early", run.interrupted))
    return figures


def percentiles(values: Sequence[float]) -> str:
    """`p50 0.21 s  p99 0.80 s  max 0.83 s` of values in seconds; `not measured` without any."""
    if not values:
        return "not measured"
    ranked = sorted(values)
    p50, p99 = (percentile(ranked, share) for share in (0.5, 0.99))
    return f"p50 {p50:.2f} s  p99 {p99:.2f} s  max {ranked[-1]:.2f} s"


def verification_svg(verification: Verification) -> str:
    """The verification as an SVG picture: verdict, checks and the test load's curves."""
    verification = _with_printable_texts(verification)
    svg = Svg(760, verdict_headline(verification))
    svg.text(24, 34, verdict_headline(verification), "ink sans", size=16, bold=True)
    y = 44.0
    for check in verification.checks:
        for number, line in enumerate(wrap(check.text, 72)):
            y += 20
            if number == 0:
                css = "soft" if check.ok is None else "good" if check.ok else "bad"
                svg.text(24, y, {None: "·", True: "✓", False: "×"}[check.ok], css)
                svg.text(40, y, check.name, "soft")
            svg.text(150, y, line, "ink")
    y += 24
    if verification.load and verification.load.samples:
        y = draw_curves(svg, y, _load_curves(verification.load))
        svg.text(110, y + 6, "0 s", "soft")
        svg.text(670, y + 6, f"{verification.load.samples[-1].at_s:.0f} s", "soft", anchor="end")
        y = draw_rows(svg, y + 12, _load_rows(verification.load))
    return svg.render(y + 12)
