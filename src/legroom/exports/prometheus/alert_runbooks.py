"""`legroom export alert-runbooks`: one page an alert, which the alert's `runbook_url` leads to."""

import re
from collections.abc import Sequence
from typing import Any

from legroom.exports.export_request import MARK, ExportedFile, ExportRequest
from legroom.exports.prometheus import alerts
from legroom.exports.prometheus.alert_levels import AlertLevels, duration, levels_for
from legroom.exports.prometheus.measures import Measures

NAME = "alert-runbooks"
HELP = "a page for each exported alert: what it means, where to look, how to fix it"
TAKES_ANY = True

_IN_A_PAGE = {
    "where": "the server",
    "value": "so many",
    "rate": "so many",
    "percent": "so much",
    "seconds": "so long",
    "size": "so much",
    **dict.fromkeys(("waiting", "running", "preemptions"), "some"),
}


def add_options(parser: Any) -> None:
    """Adds the options of the scrape job and of latency targets."""
    parser.add_argument("--job", default="vllm", metavar="NAME", help="the scrape job of the servers (default: vllm)")
    parser.add_argument("--ttft-p99", metavar="TIME", help="target for the p99 of the first token (2s)")
    parser.add_argument("--inter-token-p99", metavar="TIME", help="target for the p99 between tokens (150ms)")


def files(request: ExportRequest) -> tuple[ExportedFile, ...]:
    """A Markdown runbook page for each exported alert, and an index of them."""
    levels = levels_for(request.plan, request.options)
    job = str(request.options.get("job") or "vllm")
    conditions = (*alerts.vllm_conditions(Measures(request.release), levels, job), *alerts.legroom_conditions(levels))
    pages = [ExportedFile(f"{condition.name}.md", runbook_page(condition, levels)) for condition in conditions]
    usual = "" if request.plan else "\nTimes and levels are the usual ones; `--plan` gives those of its rules.\n"
    return (ExportedFile("README.md", _runbook_index(conditions, levels) + usual), *pages)


def runbook_page(condition: alerts.AlertCondition, levels: AlertLevels) -> str:
    """The Markdown page of one alert: meaning, harm, what to look at, fixes and dead ends."""
    from legroom.explain.catalog_entries import entry  # reads the whole catalog

    texts = alerts.alert_texts()[condition.name]
    more = [f"`legroom explain {name}`: {entry(name).title.en}" for name in texts["entries"]]
    slots = {**_IN_A_PAGE, **alerts.threshold_texts(levels)}
    holds = f"after {duration(condition.for_s)}" if condition.for_s else "at once"
    parts = [
        f"# {condition.name}",
        f"**{texts['severity'].capitalize()}**, {holds}.",
        alerts.fill_slots(texts["meaning"], slots),
        f"**What it costs.** {alerts.fill_slots(texts['harm'], slots)}",
        _markdown_list_section("Look", texts["look"]),
        _markdown_list_section("Fix", texts["fix"]),
        _markdown_list_section("What does not help", [f"{action}: {why}." for action, why in texts["dead_ends"]]),
        _markdown_list_section("More", more),
        f"{MARK}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown_list_section(title: str, lines: Sequence[str]) -> str:
    """A Markdown heading `title` with a list of the lines; empty without lines."""
    return f"## {title}\n\n" + "\n".join(f"- {line}" for line in lines) if lines else ""


def _runbook_index(conditions: Sequence[alerts.AlertCondition], levels: AlertLevels) -> str:
    """The README in Markdown: a table of the alerts with their severity and what each says."""
    slots = {**_IN_A_PAGE, **alerts.threshold_texts(levels)}
    rows = []
    for name in (condition.name for condition in conditions):
        texts = alerts.alert_texts()[name]
        summary = re.sub(r" (on|of job) {{.*?}}", "", alerts.fill_slots(texts["summary"], slots))
        says = summary.replace("{{ $labels.kind }}", "a problem")
        rows.append(f"| [{name}]({name}.md) | {texts['severity']} | {says} |")
    head = f"# Runbooks\n\nOne page for each alert that `legroom export prometheus` writes. {MARK} (`legroom export "
    head += "alert-runbooks`); serve them where your team reads, and name that address with `--runbook-base`.\n"
    return head + "\n| alert | severity | what it says |\n|---|---|---|\n" + "\n".join(rows) + "\n"
