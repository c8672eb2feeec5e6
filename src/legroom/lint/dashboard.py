"""Grafana dashboards: the expressions of panels, variables and annotations."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from legroom.deployments.text import Place, Text
from legroom.errors import LegroomError
from legroom.lint.expressions import Expression

_QUERY = re.compile(r'"(expr|query|definition|rawSql|prometheusQuery)"\s*:\s*"((?:[^"\\]|\\.)*)"')
_QUERY_KEYS = ("expr", "query", "definition", "rawSql")
_LISTS = ("custom", "textbox", "text", "constant", "interval", "datasource")
"""Kinds of variables whose query is a list of values."""
_OTHER_SOURCE = re.compile(
    r"loki|tempo|jaeger|zipkin|elastic|opensearch|influx|postgres|mysql|mssql|clickhouse|cloudwatch|graphite|pyroscope",
    re.IGNORECASE,
)
_OTHER_PRODUCTS = (
    ({"widgets", "layout_type"}, "Datadog"),
    ({"widgets"}, "CloudWatch or Datadog"),
    ({"panelsJSON"}, "Kibana"),
    ({"attributes", "references"}, "Kibana"),
    ({"dashboardMetadata", "tiles"}, "Dynatrace"),
    ({"mosaicLayout"}, "Google Cloud Monitoring"),
    ({"gridLayout"}, "Google Cloud Monitoring"),
    ({"pages", "permissions"}, "New Relic"),
    ({"visualizations", "dataSources"}, "Splunk"),
)
"""Keys that only another product's dashboards have."""


def read_dashboard(source: Text) -> list[Expression] | None:
    """Every expression, at its place in the JSON; None where it is no dashboard."""
    document = json.loads(source.text)
    if _dashboard(document) is not None:
        other = set(_not_promql(document))
        return [expression for expression in _expressions(source) if expression.text not in other]
    if '"prometheusQuery"' in source.text:
        return list(_expressions(source))  # Google Cloud Monitoring asks in PromQL, too
    product = _other_product(document)
    if product:
        raise LegroomError(
            f"is a dashboard of another product ({product}), not one of Grafana", "lint reads Grafana's JSON"
        )
    return None


def _dashboard(document: Any) -> dict[str, Any] | None:
    """The dashboard in a plain export or in what Grafana's API wraps around it."""
    for candidate in (document, document.get("dashboard") if isinstance(document, dict) else None):
        if isinstance(candidate, dict) and isinstance(candidate.get("panels", candidate.get("rows")), list):
            return candidate
    spec = document.get("spec") if isinstance(document, dict) else None
    if isinstance(spec, dict) and isinstance(spec.get("elements"), dict):
        return spec
    return None


def _not_promql(document: Any) -> Iterator[str]:
    """Queries that no Prometheus sees: the values of variables that list them, and those of other data sources."""
    waiting: list[tuple[Any, bool]] = [(document, False)]
    while waiting:
        value, other = waiting.pop()
        if isinstance(value, list):
            waiting += [(inner, other) for inner in value]
        if not isinstance(value, dict):
            continue
        source = value.get("datasource", value.get("group"))
        named = source.get("type", "") if isinstance(source, dict) else source
        if isinstance(named, str) and named:
            other = bool(_OTHER_SOURCE.search(named))
        listed = value.get("type") in _LISTS and "name" in value
        listed = listed or str(value.get("kind", "")).removesuffix("Variable").lower() in _LISTS
        if other or listed:
            for owner in (value, value.get("spec")):
                yield from (str(owner[key]) for key in _QUERY_KEYS if key in owner) if isinstance(owner, dict) else ()
        waiting += [(inner, other) for inner in value.values()]


def _other_product(document: Any) -> str:
    for candidate in document if isinstance(document, list) else [document]:
        if isinstance(candidate, dict):
            for keys, product in _OTHER_PRODUCTS:
                if keys <= set(candidate):
                    return product
    return ""


def _expressions(source: Text) -> Iterator[Expression]:
    for query in _QUERY.finditer(source.text):
        try:
            value = json.loads(f'"{query[2]}"')
        except json.JSONDecodeError:
            continue
        owner = "panel" if query[1] in ("expr", "prometheusQuery") else "variable"
        yield Expression(value, _InString(source, query.start(2), query[2], value), owner)  # type: ignore[arg-type]


class _InString:
    """From an offset in a decoded string to the file, where escapes made it longer."""

    def __init__(self, source: Text, start: int, raw: str, value: str) -> None:
        self._source, self._start, self._raw, self._value = source, start, raw, value

    def __call__(self, offset: int) -> Place:
        if len(self._raw) == len(self._value):
            return self._source.place(self._start + offset)
        position = count = 0
        while position < len(self._raw) and count < offset:
            step = 6 if self._raw.startswith("\\u", position) else 2 if self._raw[position] == "\\" else 1
            position += step
            count += 1
        return self._source.place(self._start + position)
