"""Grafana dashboards: the expressions of panels, variables and annotations."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from legroom.deployments.subjects import Expression, Found
from legroom.deployments.text import Place, Text
from legroom.errors import LegroomError

_QUERY = re.compile(r'"(expr|query|definition|rawSql)"\s*:\s*"((?:[^"\\]|\\.)*)"')
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


def read_dashboard(source: Text) -> Found:
    """Every expression, at its place in the JSON."""
    try:
        document = json.loads(source.text)
    except (json.JSONDecodeError, RecursionError) as error:
        line = f" (line {source.place(error.pos).line})" if isinstance(error, json.JSONDecodeError) else ""
        raise LegroomError(f"is not valid JSON{line}", "check its commas and quotes") from None
    if _dashboard(document) is not None:
        other = set(_not_promql(document))
        return Found(tuple(one for one in _expressions(source) if one.text not in other))
    product = _other_product(document)
    if product:
        raise LegroomError(
            f"is a dashboard of another product ({product}), not one of Grafana", "lint reads Grafana's JSON"
        )
    return Found(nothing="JSON, but no Grafana dashboard: it has no panels")


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
            texts = [value, value.get("spec")]
            yield from (str(one[key]) for one in texts if isinstance(one, dict) for key in _QUERY_KEYS if key in one)
        waiting += [(inner, other) for inner in value.values()]


def _other_product(document: Any) -> str:
    for candidate in document if isinstance(document, list) else [document]:
        if isinstance(candidate, dict):
            for keys, product in _OTHER_PRODUCTS:
                if keys <= set(candidate):
                    return product
    return ""


def _expressions(source: Text) -> Iterator[Expression]:
    for found in _QUERY.finditer(source.text):
        try:
            value = json.loads(f'"{found[2]}"')
        except json.JSONDecodeError:
            continue
        owner = "panel" if found[1] == "expr" else "variable"
        yield Expression(value, _InString(source, found.start(2), found[2], value), owner)  # type: ignore[arg-type]


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
