"""Prometheus rule files and the PrometheusRule objects of its operator."""

from __future__ import annotations

from legroom.deployments.subjects import Expression, Found
from legroom.deployments.text import Place
from legroom.deployments.yaml_nodes import Node


def is_rules(document: Node) -> bool:
    """Whether a YAML document holds rule groups."""
    groups = _groups(document)
    return groups is not None and any(group.get("rules") is not None for group in groups.list())


def _groups(document: Node) -> Node | None:
    if document.text("kind") == "PrometheusRule":
        return document.get("spec", "groups")
    return document.get("groups")


def read_rules(document: Node) -> Found:
    """Every rule's expression."""
    subjects = []
    records: dict[str, str] = {}
    groups = _groups(document)
    for group in groups.list() if groups else ():
        rules = group.get("rules")
        for rule in rules.list() if rules else ():
            expression = rule.get("expr")
            if rule.text("record"):
                records[rule.text("record")] = rule.text("expr")
            if expression is None or not expression.scalar:
                continue
            alert = rule.text("alert")
            owner = "alert" if alert else "record"
            subjects.append(Expression(expression.scalar, Locator(expression), owner, alert or rule.text("record")))  # type: ignore[arg-type]
    return Found(tuple(subjects), records)


class Locator:
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
