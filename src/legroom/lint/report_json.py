"""A report as legroom's own JSON, and as SARIF 2.1.0 for code scanners."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from legroom.lint.finding import LintFinding, Report, Rule
from legroom.lint.rules import rules
from legroom.version import __version__

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def report_json(report: Report) -> dict[str, Any]:
    """The document of `legroom lint --json`."""
    return {
        "vllm": report.release,
        "files": list(report.files),
        "findings": [
            {
                "path": one.place.path,
                "line": one.place.line,
                "column": one.place.column,
                "rule": one.rule,
                "severity": one.severity,
                "message": one.message,
                "suggestion": one.suggestion,
            }
            for one in report.findings
        ],
        "unread": [
            {"path": one.place.path, "line": one.place.line, "reason": one.reason, "hint": one.hint}
            for one in report.unread
        ],
        "skipped": [{"path": one.path, "reason": one.reason} for one in report.skipped],
        "ignored": report.ignored,
    }


def sarif(report: Report) -> dict[str, Any]:
    """The report as one SARIF run."""
    known = rules()
    used = [rule_id for rule_id in known if any(one.rule == rule_id for one in report.findings)]
    run = {
        "tool": {
            "driver": {
                "name": "legroom",
                "version": __version__,
                "rules": [_rule(known[rule_id]) for rule_id in used],
            }
        },
        "results": [_result(one, used.index(one.rule)) for one in report.findings],
        "invocations": [
            {
                "executionSuccessful": not report.unread,
                "toolExecutionNotifications": [
                    {
                        "level": "error",
                        "message": {"text": f"{one.place.path} {one.reason}"},
                        "locations": [_location(one.place.path, one.place.line, one.place.column, 0)],
                    }
                    for one in report.unread
                ],
            }
        ],
        "columnKind": "unicodeCodePoints",
        "properties": {"vllm": report.release},
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.help},
        "defaultConfiguration": {"level": rule.severity},
    }


def _result(one: LintFinding, index: int) -> dict[str, Any]:
    text = f"{one.message}. {one.suggestion}" if one.suggestion else one.message
    return {
        "ruleId": one.rule,
        "ruleIndex": index,
        "level": one.severity,
        "message": {"text": text},
        "locations": [_location(one.place.path, one.place.line, one.place.column, one.length)],
    }


def _location(path: str, line: int, column: int, length: int) -> dict[str, Any]:
    region: dict[str, int] = {"startLine": line, "startColumn": column}
    if length:
        region["endColumn"] = column + length
    uri = quote(path.replace("\\", "/"), safe="/:@!$&'()*+,;=-._~", errors="surrogateescape")
    return {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}
