"""PromQL and names of series, each with its place: what rules about metrics look at."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from legroom.deployments.read import rule_groups
from legroom.deployments.text import Place, Shifted, Text
from legroom.deployments.yaml_nodes import Node

Owner = Literal["alert", "scaler", "record", "panel", "variable", "text", "family", "sample", "prose"]
"""`scaler`: an autoscaler's query with its threshold, as a comparison; `text`: a string that may be a name; `family`:
one that may be a family's name; `sample`: a line of /metrics; `prose`: a name that a sentence or a table quotes."""
NAMES_ONLY: tuple[Owner, ...] = ("text", "family", "sample", "prose")
"""Owners of names rather than of PromQL."""
COMPARED: tuple[Owner, ...] = ("alert", "scaler")
"""Owners of PromQL that something happens by."""
_QUERY_KEYS = ("expr", "query", "metricsQuery", "seriesQuery", "promql", "expression")
_SCALED_BY = re.compile(r"(?:^|[|/])vllm:[a-z0-9_]+(?:$|[|/])")
"""A series under its own name that an autoscaler asks for, also as Google's adapter writes it."""
_NUMBER = re.compile(r"\d+(\.\d+)?")
_NAME = re.compile(r"""(['"])(vllm[:_][a-z][a-z0-9_:]*)\1""")
_SPAN = re.compile(r"(?<!`)`(vllm:[a-z][a-z0-9_]*)`(?!`)")
_READS_METRICS = re.compile(r"/metrics|prometheus|metrics", re.IGNORECASE)
_FAMILIES = re.compile(
    r"\.get_metrics\(|vllm\.v1\.metrics\.reader|text_string_to_metric_families|text_fd_to_metric_families"
)
"""What gives families rather than series: a counter has no `_total` there, a histogram no `_bucket`."""
_DECLARED = re.compile(
    r"""\b(?:Counter|Gauge|Histogram|Summary|Info)(?:MetricFamily)?\(\s*(?:name\s*=\s*)?['"](vllm[:_][a-z0-9_:]+)"""
)
_ENDINGS = ("", "_total", "_bucket", "_sum", "_count", "_info")
_SAMPLE = re.compile(r"^(vllm[:_][a-z][a-z0-9_:]*)(?:\{[^}\n]*\})?[ \t]+[-+0-9.eEINaf]+[ \t]*$", re.MULTILINE)


@dataclass(frozen=True)
class Expression:
    """PromQL, or names of series in a text."""

    text: str
    locate: Callable[[int], Place]
    """From an offset in the text to its place in the file."""
    owner: Owner = "panel"
    name: str = ""
    """The alert's or the recorded series' name."""
    beside: frozenset[str] = frozenset()
    """Names that the same text asks for too."""


def queries(document: Node) -> Iterator[Expression]:
    """PromQL that scales or watches a server."""
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


def samples(source: Text) -> Iterator[Expression]:
    """Lines of /metrics in a document, and names in the code spans of its sentences."""
    for name in _SPAN.finditer(source.text):
        yield Expression(name[1], Shifted(source, name.start(1)), "prose")
    for line in _SAMPLE.finditer(source.text):
        yield Expression(line[1], Shifted(source, line.start(1)), "sample")


class ScalarLocator:
    """From an offset in a scalar's value to the file: quotes, folding and indentation lie between the two."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._raw = node.source.text[node.offset : node.end]

    def __call__(self, offset: int) -> Place:
        """The place of the same word, counted by how often it stands before."""
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


def read_series(source: Text) -> tuple[list[Expression], dict[str, str]]:
    """String literals that are series names in code that is about metrics, and the series that it shows itself."""
    series = list(_series(source)) if _READS_METRICS.search(source.text) else []
    # What a program shows itself is there, whoever asks for it.
    own = {declared[1].removesuffix("_total") for declared in _DECLARED.finditer(source.text)}
    return series, {name + ending: "" for name in own for ending in _ENDINGS}


def _series(source: Text) -> Iterator[Expression]:
    # A program that knows both spellings keeps the series under a name of its own.
    names = [
        name
        for name in _NAME.finditer(source.text)
        if name[2].startswith("vllm:") or name[2].replace("vllm_", "vllm:", 1) not in source.text
    ]
    beside = frozenset(name[2] for name in names)
    owner = "family" if _FAMILIES.search(source.text) else "text"
    for name in names:
        yield Expression(name[2], Shifted(source, name.start(2)), owner, beside=beside)  # type: ignore[arg-type]


def read_rules(document: Node) -> tuple[list[Expression], dict[str, str]]:
    """Every rule's expression, and the series that the file records."""
    expressions: list[Expression] = []
    records: dict[str, str] = {}
    for group in rule_groups(document):
        rules = group.get("rules")
        for rule in rules.list() if rules else ():
            expression = rule.get("expr")
            if rule.text("record"):
                records[rule.text("record")] = rule.text("expr")
            if expression is None or not expression.scalar:
                continue
            alert, recorded = rule.text("alert"), rule.text("record")
            owner = "alert" if alert else "record"
            expressions.append(Expression(expression.scalar, ScalarLocator(expression), owner, alert or recorded))  # type: ignore[arg-type]
    return expressions, records


_DECLARED = re.compile(
    r"\b(?P<type>Counter|Gauge|Histogram|Summary)\(\s*(?:name\s*=\s*)?[\"'](?P<name>vllm[:_]\w+)[\"']"
)
_SHOWN_AS = {
    "Counter": ("_total",),
    "Gauge": ("",),
    "Histogram": ("_bucket", "_sum", "_count"),
    "Summary": ("", "_sum", "_count"),
}


def declared_series(text: str) -> frozenset[str]:
    """The series under vLLM's prefix that a Python program shows itself: an exporter's or a server's around vLLM."""
    return frozenset(
        name["name"].removesuffix("_total") + ending
        for name in _DECLARED.finditer(text)
        for ending in _SHOWN_AS[name["type"]]
    )
