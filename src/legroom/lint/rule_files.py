"""Prometheus rule files and the PrometheusRule objects of its operator."""

from __future__ import annotations

from legroom.deployments.yaml_nodes import Node
from legroom.lint.expressions import Expression, ScalarLocator


def read_rules(document: Node) -> tuple[list[Expression], dict[str, str]]:
    """Every rule's expression, and the series that the file records."""
    expressions: list[Expression] = []
    records: dict[str, str] = {}
    groups = document.get("spec", "groups") if document.text("kind") == "PrometheusRule" else document.get("groups")
    for group in groups.list() if groups else ():
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
