"""A report in the terminal: a line a finding, as compilers write it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from legroom.exports.lint.finding import SEVERITIES, Report
from legroom.render.terminal import PLAIN, Style
from legroom.render.text import plural

_COLOURS = {"error": "red", "warning": "orange", "note": "blue"}


def report_text(report: Report, style: Style = PLAIN) -> str:
    """Findings, what was not read, and a summary; ends in a newline."""
    return "\n".join(_lines(report, style)) + "\n"


def _lines(report: Report, style: Style) -> Iterator[str]:
    for one in report.findings:
        word = style.paint(f"{one.severity}:", _COLOURS[one.severity], "bold")
        yield f"{style.paint(str(one.place), 'bold')}: {word} {one.message} {style.paint(f'[{one.rule}]', 'dim')}"
        if one.suggestion:
            yield f"    {style.paint('->', 'green')} {one.suggestion}"
    for gap in report.unread:
        yield f"{style.paint(str(gap.place), 'bold')}: {style.paint('not read:', 'red', 'bold')} {gap.reason}"
        if gap.hint:
            yield f"    {style.paint('->', 'green')} {gap.hint}"
    for left in report.skipped:
        yield style.paint(f"{left.path}: skipped: {left.reason}", "dim")
    yield _summary(report)


def _summary(report: Report) -> str:
    counted = Counter(one.severity for one in report.findings)
    said = ", ".join(plural(counted[severity], severity) for severity in SEVERITIES if counted[severity])
    whole = {one.place.path for one in report.unread if one.place.line == 1} | {one.path for one in report.skipped}
    read = len(set(report.files) - whole)
    parts = [
        f"{plural(read, 'file')} read for vLLM {report.release}",
        said or ("nothing is wrong" if read else "nothing to say"),
    ]
    if report.unread:
        parts.append(f"{len(report.unread)} not read")
    if report.skipped:
        parts.append(f"{len(report.skipped)} skipped")
    if report.ignored:
        parts.append(f"{report.ignored} ignored")
    return ": ".join(parts[:2]) + ("; " + ", ".join(parts[2:]) if parts[2:] else "")
