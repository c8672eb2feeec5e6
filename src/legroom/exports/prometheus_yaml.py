"""YAML of rules: keys in their order, expressions of several lines as a block, sentences on one line."""

from __future__ import annotations

from typing import Any


def rules_text(document: Any) -> str:
    """One document."""
    import yaml  # noqa: PLC0415 - only an export writes YAML

    class Dumper(yaml.SafeDumper):
        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            # Lists stand under their key, indented, as hand-written files have them.
            super().increase_indent(flow, False)

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return yaml.dump(document, Dumper=Dumper, sort_keys=False, width=100_000, allow_unicode=True)
