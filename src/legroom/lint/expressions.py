"""PromQL and series names in rule files, dashboards, manifests and programs, each with its place."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from legroom.deployments.file_reader import rule_groups
from legroom.deployments.source_text import Place, ShiftedLocator, Text
from legroom.deployments.yaml_nodes import Node
from legroom.errors import LegroomError
from legroom.facts import pattern, read_data

Owner = Literal["alert", "scaler", "record", "panel", "variable", "text", "family"]
"""`scaler`: an autoscaler's query with its threshold as a comparison; `text`: a string in a program that may be a
series name; `family`: one that may be a family's name."""
NAMES_ONLY: tuple[Owner, ...] = ("text", "family")
"""Owners of names rather than of PromQL."""
COMPARED: tuple[Owner, ...] = ("alert", "scaler")
"""Owners of PromQL that fires an alert or scales."""
_QUERY_KEYS = ("expr", "query", "metricsQuery", "seriesQuery", "promql", "expression")
_SCALED_BY = pattern("expressions.scaled_by")
_NUMBER = re.compile(r"\d+(\.\d+)?")
_NAME = re.compile(r"""(['"])(vllm[:_][a-z][a-z0-9_:]*)\1""")
_FAMILIES = pattern("expressions.families")


@dataclass(frozen=True)
class Expression:
    """A PromQL expression, or a series name in a program."""

    text: str
    locate: Callable[[int], Place]
    """Converts an offset in the text to its place in the file."""
    owner: Owner = "panel"
    name: str = ""
    """The alert's or the recorded series' name."""
    beside: frozenset[str] = frozenset()
    """All series names of the same program."""


def manifest_queries(document: Node) -> Iterator[Expression]:
    """The PromQL and the series names in a Kubernetes manifest's autoscalers and monitors, as expressions."""
    for node in document.walk():
        for key in _QUERY_KEYS:
            value = node.get(key)
            if value is not None and value.scalar and re.search(r"vllm[:_]", value.scalar):
                threshold = node.text("threshold") if key == "query" else ""
                if _NUMBER.fullmatch(threshold):
                    yield Expression(f"{value.scalar.rstrip()} > {threshold}", ScalarLocator(value), "scaler")
                else:
                    yield Expression(value.scalar, ScalarLocator(value), "panel")
        for value in (node.get("metric", "name"), node.get("metricName")):
            if value is not None and value.scalar and _SCALED_BY.search(value.scalar):
                yield Expression(value.scalar, ScalarLocator(value), "panel")


class ScalarLocator:
    """Converts an offset in a YAML scalar's value to its place in the file, across quotes, folding and indentation."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._raw = node.source.text[node.offset : node.end]

    def __call__(self, offset: int) -> Place:
        """Line and column in the file of the word that begins at `offset` of the scalar's value."""
        value = self._node.scalar or ""
        end = offset
        while end < len(value) and not value[end].isspace():
            end += 1
        word = value[offset:end] or value[offset : offset + 1]
        start = -1
        for _ in range(value.count(word, 0, offset) + 1 if word else 0):
            start = self._raw.find(word, start + 1)
            if start < 0:
                break
        return self._node.source.place(self._node.offset + max(start, 0))


def program_series(source: Text) -> Iterator[Expression]:
    """The series names in a program's string literals; none if the program does not mention metrics or Prometheus."""
    if not re.search("prometheus|metrics", source.text, re.IGNORECASE):
        return
    # A program with both spellings uses the one with an underscore as a key of its own.
    text = source.text
    names = [
        name for name in _NAME.finditer(text) if "vllm:" in name[2] or name[2].replace("vllm_", "vllm:", 1) not in text
    ]
    beside = frozenset(name[2] for name in names)
    owner = "family" if _FAMILIES.search(source.text) else "text"
    for name in names:
        yield Expression(name[2], ShiftedLocator(source, name.start(2)), owner, beside=beside)  # type: ignore[arg-type]


def rule_expressions(document: Node) -> tuple[list[Expression], dict[str, str]]:
    """(expressions of a Prometheus rule file, {recorded series: its expression})."""
    expressions: list[Expression] = []
    records: dict[str, str] = {}
    for group in rule_groups(document):
        for rule in group.list("rules"):
            expression = rule.get("expr")
            if rule.text("record"):
                records[rule.text("record")] = rule.text("expr")
            if expression is None or not expression.scalar:
                continue
            alert, recorded = rule.text("alert"), rule.text("record")
            owner = "alert" if alert else "record"
            expressions.append(Expression(expression.scalar, ScalarLocator(expression), owner, alert or recorded))  # type: ignore[arg-type]
    return expressions, records


_TERRAFORM = pattern("expressions.terraform")


def terraform_rules(source: Text) -> Iterator[Expression]:
    """The PromQL of rules that Terraform makes."""
    for found in _TERRAFORM.finditer(source.text):
        yield Expression(found["text"], ShiftedLocator(source, found.start("text")), "panel")


_DECLARED = pattern("expressions.declared")
_SUFFIXES = {
    "Counter": ("_total",),
    "Gauge": ("",),
    "Histogram": ("_bucket", "_sum", "_count"),
    "Summary": ("", "_sum", "_count"),
}


def declared_series(text: str) -> frozenset[str]:
    """The series named like vLLM's that a Python program, such as an exporter, exposes itself."""
    families = ((name["name"].removesuffix("_total"), _SUFFIXES[name["type"]]) for name in _DECLARED.finditer(text))
    return frozenset(family + ending for family, endings in families for ending in endings)


_JSON_QUERY = re.compile(r'"(expr|query|definition|rawSql|prometheusQuery)"\s*:\s*"((?:[^"\\]|\\.)*)"')
_PANEL_KEYS = ("expr", "query", "definition", "rawSql")
_LIST_VARIABLES = ("custom", "textbox", "text", "constant", "interval", "datasource")
"""Types of dashboard variables whose query is a list of values."""
_OTHER_DATASOURCE = pattern("expressions.other_datasource")


def dashboard_expressions(source: Text) -> list[Expression] | None:
    """The queries of panels, variables and annotations of a Grafana dashboard, or of Google's in PromQL; None for other
    JSON, LegroomError for a dashboard of another product."""
    document = json.loads(source.text)
    if _exported_dashboard(document) is not None:
        other = set(_other_queries(document))
        return [expression for expression in _dashboard_queries(source) if expression.text not in other]
    if '"prometheusQuery"' in source.text:
        return list(_dashboard_queries(source))  # Google Cloud Monitoring uses PromQL, too
    if product := _other_metrics_product(document):
        problem = f"is a dashboard of another product ({product}), not one of Grafana"
        raise LegroomError(problem, "lint reads Grafana's JSON")
    return None


def _exported_dashboard(document: Any) -> dict[str, Any] | None:
    """The Grafana dashboard in a JSON document, also inside an export or an API's answer; None for other JSON."""
    for candidate in (document, document.get("dashboard") if isinstance(document, dict) else None):
        if isinstance(candidate, dict) and isinstance(candidate.get("panels", candidate.get("rows")), list):
            return candidate
    spec = document.get("spec") if isinstance(document, dict) else None
    return spec if isinstance(spec, dict) and isinstance(spec.get("elements"), dict) else None


def _other_queries(document: Any) -> Iterator[str]:
    """The texts in a dashboard that are not PromQL: queries of other data sources, values of list variables."""
    pending: list[tuple[Any, bool]] = [(document, False)]
    while pending:
        value, other = pending.pop()
        if isinstance(value, list):
            pending += [(inner, other) for inner in value]
        if not isinstance(value, dict):
            continue
        source = value.get("datasource", value.get("group"))
        named = source.get("type", "") if isinstance(source, dict) else source
        if isinstance(named, str) and named:
            other = bool(_OTHER_DATASOURCE.search(named))
        listed = value.get("type") in _LIST_VARIABLES and "name" in value
        listed = listed or str(value.get("kind", "")).removesuffix("Variable").lower() in _LIST_VARIABLES
        if other or listed:
            for owner in (value, value.get("spec")):
                yield from (str(owner[key]) for key in _PANEL_KEYS if key in owner) if isinstance(owner, dict) else ()
        pending += [(inner, other) for inner in value.values()]


def _other_metrics_product(document: Any) -> str:
    """The name of the monitoring product, other than Grafana, whose dashboard this JSON is; empty for none."""
    candidates = [each for each in (document if isinstance(document, list) else [document]) if isinstance(each, dict)]
    products = read_data("file_formats.json")["dashboard_keys"]
    matching = (product for each in candidates for keys, product in products if each.keys() >= set(keys))
    return next(matching, "")


def _dashboard_queries(source: Text) -> Iterator[Expression]:
    """The queries of a Grafana dashboard's panels and variables, with their places in the JSON text."""
    for query in _JSON_QUERY.finditer(source.text):
        try:
            value = json.loads(f'"{query[2]}"')
        except json.JSONDecodeError:
            continue
        owner = "panel" if query[1] in ("expr", "prometheusQuery") else "variable"
        yield Expression(value, _JsonStringLocator(source, query.start(2), query[2], value), owner)  # type: ignore[arg-type]


class _JsonStringLocator:
    """Converts an offset in a decoded JSON string to its place in the file."""

    def __init__(self, source: Text, start: int, raw: str, value: str) -> None:
        self._source, self._start, self._raw, self._value = source, start, raw, value

    def __call__(self, offset: int) -> Place:
        """Line and column in the file of the character at `offset` of the decoded string."""
        if len(self._raw) == len(self._value):
            return self._source.place(self._start + offset)
        position = count = 0
        while position < len(self._raw) and count < offset:
            step = 6 if self._raw.startswith("\\u", position) else 2 if self._raw[position] == "\\" else 1
            position += step
            count += 1
        return self._source.place(self._start + position)
