"""Text of a lint report: one line per finding."""

from collections import Counter
from collections.abc import Iterator

from legroom.drawing.terminal import PLAIN, Colour, Style
from legroom.drawing.text import plural, printable
from legroom.lint.lint_report import LintReport
from legroom.lint.rule import SEVERITIES

_COLOURS: dict[str, Colour] = {"error": "red", "warning": "orange", "note": "blue"}


def report_text(report: LintReport, style: Style = PLAIN) -> str:
    """The text of `legroom lint`: findings, unread and skipped files, and a summary."""
    return "\n".join(_report_lines(report, style)) + "\n"


def _report_lines(report: LintReport, style: Style) -> Iterator[str]:
    """Every finding with its place and suggestion, then what was not read or skipped, then the totals."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for finding in report.findings:
        places.setdefault((finding.rule, finding.severity, finding.message), []).append(str(finding.place))
    for finding in report.findings:
        where, *others = places.pop((finding.rule, finding.severity, finding.message), ("",))
        if not where:
            continue  # said once, with all of its places
        where, message = printable(where), printable(finding.message)
        word = style.paint(f"{finding.severity}:", _COLOURS[finding.severity], "bold")
        yield f"{style.paint(where, 'bold')}: {word} {message} {style.paint(f'[{finding.rule}]', 'dim')}"
        if finding.suggestion:
            yield f"    {style.paint('->', 'green')} {printable(finding.suggestion)}"
        for other in others:
            yield style.paint(f"    also {printable(other)}", "dim")
    for gap in report.unread:
        where, reason = printable(str(gap.place)), printable(gap.reason)
        yield f"{style.paint(where, 'bold')}: {style.paint('not read:', 'red', 'bold')} {reason}"
        if gap.hint:
            yield f"    {style.paint('->', 'green')} {printable(gap.hint)}"
    for left in report.skipped:
        yield style.paint(printable(f"{left.path}: skipped: {left.reason}"), "dim")
    yield _summary_line(report)


def _summary_line(report: LintReport) -> str:
    """The number of files read, findings by severity, and what was not read, skipped or ignored."""
    counted = Counter(finding.severity for finding in report.findings)
    totals = ", ".join(plural(counted[severity], severity) for severity in SEVERITIES if counted[severity])
    whole = {gap.place.path for gap in report.unread if gap.place.line == 1} | {file.path for file in report.skipped}
    read = len(set(report.files) - whole)
    found = totals or ("nothing is wrong" if read else "nothing to say")
    left_out = {"not read": len(report.unread), "skipped": len(report.skipped)}
    left_out |= {"not understood": report.not_understood, "ignored": report.ignored}
    rest = ", ".join(f"{number} {what}" for what, number in left_out.items() if number)
    return f"{plural(read, 'file')} read for vLLM {report.release}: {found}{f'; {rest}' if rest else ''}"
