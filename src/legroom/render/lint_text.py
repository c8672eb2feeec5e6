"""A report in the terminal: a line a finding, as compilers write it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from legroom.drawing.terminal import PLAIN, Style
from legroom.drawing.text import plural
from legroom.lint.finding import SEVERITIES, Report

_COLOURS = {"error": "red", "warning": "orange", "note": "blue"}


def report_text(report: Report, style: Style = PLAIN) -> str:
    """Findings, what was not read, and a summary; ends in a newline."""
    return "\n".join(_lines(report, style)) + "\n"


def _lines(report: Report, style: Style) -> Iterator[str]:
    for one in report.findings:
        where, message = _told(str(one.place)), _told(one.message)
        word = style.paint(f"{one.severity}:", _COLOURS[one.severity], "bold")
        yield f"{style.paint(where, 'bold')}: {word} {message} {style.paint(f'[{one.rule}]', 'dim')}"
        if one.suggestion:
            yield f"    {style.paint('->', 'green')} {_told(one.suggestion)}"
    for gap in report.unread:
        where, reason = _told(str(gap.place)), _told(gap.reason)
        yield f"{style.paint(where, 'bold')}: {style.paint('not read:', 'red', 'bold')} {reason}"
        if gap.hint:
            yield f"    {style.paint('->', 'green')} {_told(gap.hint)}"
    for left in report.skipped:
        yield style.paint(_told(f"{left.path}: skipped: {left.reason}"), "dim")
    yield _summary(report)


def _told(text: str) -> str:
    """On one line, and without what would steer the terminal: files of others are quoted here."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


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
