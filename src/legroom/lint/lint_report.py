"""The report of lint, as legroom's JSON and as SARIF 2.1.0."""

from dataclasses import asdict
from typing import Any
from urllib.parse import quote

from legroom.deployments.source_text import Place, Unread
from legroom.lint.rule import LintFinding, Rule, rules_by_id
from legroom.records import dataclass
from legroom.version import __version__


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file with nothing in it to check."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class LintReport:
    release: str
    files: tuple[str, ...]
    findings: tuple[LintFinding, ...]
    unread: tuple[Unread, ...]
    skipped: tuple[Skipped, ...]
    ignored: int = 0
    """How many findings a comment or an option silenced."""

    @property
    def not_understood(self) -> int:
        """How many files hold vLLM flags that no rule could check."""
        return len({finding.place.path for finding in self.findings if finding.rule == "not-understood"})


def report_json(report: LintReport) -> dict[str, Any]:
    """The document of `legroom lint --json`."""
    shown = ("rule", "severity", "message", "suggestion")
    gaps = ((gap.place, {"reason": gap.reason, "hint": gap.hint}) for gap in report.unread)
    return {
        "vllm": report.release,
        "files": list(report.files),
        "findings": [asdict(each.place) | {name: getattr(each, name) for name in shown} for each in report.findings],
        "unread": [{"path": place.path, "line": place.line, **why} for place, why in gaps],
        "skipped": [asdict(file) for file in report.skipped],
        "ignored": report.ignored,
        "not_understood": report.not_understood,
    }


def report_sarif(report: LintReport) -> dict[str, Any]:
    """The report as one SARIF run."""
    known = rules_by_id()
    broken = {finding.rule for finding in report.findings}
    used = [rule_id for rule_id in known if rule_id in broken]
    rules = [_sarif_rule(known[rule_id]) for rule_id in used]
    unread = [
        {"level": "error", **_sarif_message(f"{gap.place.path} {gap.reason}", gap.place)} for gap in report.unread
    ]
    run = {
        "tool": {"driver": {"name": "legroom", "version": __version__, "rules": rules}},
        "results": [_sarif_result(finding, used.index(finding.rule)) for finding in report.findings],
        "invocations": [{"executionSuccessful": not report.unread, "toolExecutionNotifications": unread}],
        "columnKind": "unicodeCodePoints",
        "properties": {"vllm": report.release},
    }
    return {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}


def _sarif_rule(rule: Rule) -> dict[str, Any]:
    """A rule as SARIF's `reportingDescriptor`."""
    return {
        "id": rule.id,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.help},
        "defaultConfiguration": {"level": rule.severity},
    }


def _sarif_result(finding: LintFinding, index: int) -> dict[str, Any]:
    """A finding as SARIF's `result`; `index`: its rule's position in the run."""
    text = f"{finding.message}. {finding.suggestion}" if finding.suggestion else finding.message
    rule = {"ruleId": finding.rule, "ruleIndex": index, "level": finding.severity}
    return {**rule, **_sarif_message(text, finding.place, finding.length)}


def _sarif_message(text: str, place: Place, length: int = 0) -> dict[str, Any]:
    """A text and its place as the keys of a SARIF result; `length`: characters marked in the line, 0 if unknown."""
    region: dict[str, int] = {"startLine": place.line, "startColumn": place.column}
    if length:
        region["endColumn"] = place.column + length
    uri = quote(place.path.replace("\\", "/"), safe="/:@!$&'()*+,;=-._~", errors="surrogateescape")
    location = {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}
    return {"message": {"text": text}, "locations": [location]}
