"""YAML values with their offsets in the text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from legroom.deployments.shell.lexer import Word
from legroom.deployments.source_text import Text
from legroom.errors import LegroomError

_MAX_NODES = 300_000
"""Bounds the memory of aliases that expand to each other; the largest rendered charts have a tenth of it."""
_MERGE = "tag:yaml.org,2002:merge"
TEMPLATE_HINT = "render it first, for example with `helm template`, and pass the result"


class Node:
    """One value of a YAML text: a mapping, a list or a scalar."""

    def __init__(self, source: Text, node: Any, values: Any) -> None:
        self.source = source
        self.offset: int = node.start_mark.index
        self.end: int = node.end_mark.index
        self.style: str = getattr(node, "style", None) or ""
        self.tag: str = node.tag
        self.values = values
        self.repeated_keys: list[int] = []
        """The offsets of the keys that the mapping has already."""

    @property
    def scalar(self) -> str | None:
        """The text of a scalar; None for null, mappings and lists."""
        return self.values if isinstance(self.values, str) else None

    def get(self, *keys: str) -> Node | None:
        """The node at a path of mapping keys; None where it is absent."""
        node: Node | None = self
        for key in keys:
            node = node.values.get(key) if node is not None and isinstance(node.values, dict) else None
        return node

    def text(self, *keys: str) -> str:
        """The scalar at a path of keys, empty where there is none."""
        node = self.get(*keys)
        return node.scalar or "" if node is not None else ""

    def items(self, *keys: str) -> Iterator[tuple[str, Node]]:
        """The keys and values of the mapping at a path of keys; none where there is no mapping."""
        node = self.get(*keys)
        yield from node.values.items() if node is not None and isinstance(node.values, dict) else ()

    def list(self, *keys: str) -> list[Node]:
        """The items of the list at a path of keys; none where there is no list."""
        node = self.get(*keys)
        return node.values if node is not None and isinstance(node.values, list) else []

    def walk(self) -> Iterator[Node]:
        """This node and every node inside it."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            inner = node.values.values() if isinstance(node.values, dict) else node.list()
            stack += reversed(list(inner))

    def plain(self) -> object:
        """The value as a Python object; None for null; dates and the like stay texts."""
        if isinstance(self.values, dict):
            return {key: value.plain() for key, value in self.items()}
        if isinstance(self.values, list):
            return [item.plain() for item in self.list()]
        kind = self.tag.rpartition(":")[2]
        if self.scalar is None:
            return None
        try:
            if kind == "bool":
                return self.scalar.lower() in ("true", "yes", "on")
            return int(self.scalar, 0) if kind == "int" else float(self.scalar) if kind == "float" else self.scalar
        except ValueError:
            return self.scalar

    def word(self) -> Word:
        """The scalar's text as a word at its offset; a word with empty text for other nodes."""
        return Word(self.scalar or "", self.offset, self.scalar or "")

    def inner(self) -> Text:
        """The text of a scalar, such as a script in YAML, whose lines keep their places in the file."""
        text, row = self.scalar or "", self.source.row_of(self.offset) + (self.style in ("|", ">"))
        start = self.source.start_of(row) if self.style in ("|", ">") else self.offset + (self.style in ("'", '"'))
        rows = self.source.text[start : self.end].rstrip("\"'\n ").split("\n")
        columns = [len(line) - len(line.lstrip()) for line in rows]
        columns[0] += start - self.source.start_of(row)
        lines = [line.strip() for line in rows]
        is_folded = self.style != "|" and len(rows) > 1 and not any(line[:1] == "#" for line in lines)
        if is_folded and (unfolded := _unfolded(lines, text)):
            return Text(self.source.path, unfolded, row + 1, tuple(columns), self.source)
        if self.style in ("|", ">"):
            lead = re.compile(r"(?:[ \t]*\r?\n)*([ \t]*)").match(self.source.text, start)
            columns = [len(lead[1]) if lead else 0] * (text.count("\n") + 1)
        return Text(self.source.path, text, row + 1, tuple(columns), self.source)


def _unfolded(lines: list[str], text: str) -> str:
    r"""A folded scalar's `text` on its source `lines`, ` \` where YAML joins two; empty if they are not its lines."""
    parts, at = [lines[0]], len(lines[0]) + text.find(lines[0])
    for line in lines[1:]:
        start = text.find(line, at)
        if start < at:
            return ""
        parts += ["\n" if "\n" in text[at:start] else " \\\n", line]
        at = start + len(line)
    return "".join(parts)


def load_nodes(source: Text) -> list[Node]:
    """All documents of a YAML text; LegroomError where it is not valid, nested too deeply or too large."""
    import yaml  # only files need it

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        depth = 0
        for event in yaml.parse(source.text, Loader=loader):
            name = type(event).__name__
            depth += name.endswith("StartEvent") - name.endswith("EndEvent")
            if depth > 200:
                raise LegroomError("is nested too deeply", "check its brackets")
        documents = [node for node in yaml.compose_all(source.text, Loader=loader) if node is not None]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _yaml_error(source, error) from None
    budget = [_MAX_NODES]
    try:
        return [_to_node(source, node, budget) for node in documents]
    except RecursionError:
        raise LegroomError("holds a value that contains itself", "check its anchors (&name) and aliases") from None


def is_template(text: str) -> bool:
    """Whether a text is a template of YAML: `{{ .Values.model }}`, `{% if %}`."""
    return bool(re.search(r"\{\{-?\s*[\w.$(\"/]|\{%", text))


_ACTION = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)
_ONLY_ACTIONS = re.compile(r"^[ \t]*(?:(?:\{\{.*?\}\}|\{%.*?%\})[ \t]*)+(?:#[^\n]*)?$", re.MULTILINE)


def template_as_yaml(text: str) -> str:
    """A template as YAML of the same columns: a placeholder `$____` for each value, both sides of each `if`."""

    # Both sides of an `if` stay.
    def blank(action: re.Match[str]) -> str:
        """The matched action as spaces, its line breaks kept."""
        return re.sub(r"[^\n]", " ", action[0])

    text = re.sub(r"\{\{-?\s*/\*.*?\*/\s*-?\}\}", blank, text, flags=re.DOTALL)
    # A line of actions inside a continued command continues it.
    text = _ONLY_ACTIONS.sub(lambda line: blank(line)[:-1] + "\0", text)
    text = re.sub(r"\\\n(?:.*\0\n)+", lambda run: run[0].replace("\0", "\\"), text).replace("\0", " ")
    return _ACTION.sub(lambda action: "$" + re.sub(r"[^\n]", "_", action[0][1:]).replace("\n", "_"), text)


def _yaml_error(source: Text, error: Exception) -> LegroomError:
    """The error for text that is not YAML: that it is a template, or the line of the problem."""
    if is_template(source.text):
        return LegroomError("is a template (it holds {{ ... }}), not YAML", TEMPLATE_HINT)
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "check its indentation and quotes"
    where = f" at line {source.place(mark.index).line}" if mark is not None and mark.index is not None else ""
    return LegroomError(f"is not valid YAML{where}: {problem}", "check its indentation and quotes")


def _to_node(source: Text, node: Any, budget: list[int]) -> Node:
    """The tree of a PyYAML node with merge keys resolved; LegroomError once `budget[0]`, the nodes left, is used up."""
    budget[0] -= 1
    if budget[0] < 0:
        raise LegroomError("has too many values", f"legroom reads at most {_MAX_NODES:,}")
    kind = node.id
    repeated: list[int] = []
    inherited: dict[str, Node] = {}
    if kind == "mapping":
        values: Any = {}
        for key, value in node.value:
            if key.tag == _MERGE:  # `<<: *anchor` or `<<: [*one, *two]`; the first anchor has priority
                for anchor in value.value if value.id == "sequence" else [value]:
                    inherited = dict(_to_node(source, anchor, budget).items()) | inherited
            else:
                name = key.value if isinstance(key.value, str) else "?"
                repeated += [key.start_mark.index] if name in values else []
                values[name] = _to_node(source, value, budget)
        values = inherited | values
    elif kind == "sequence":
        values = [_to_node(source, item, budget) for item in node.value]
    else:
        values = None if node.tag.endswith(":null") else node.value
    made = Node(source, node, values)
    made.repeated_keys = repeated
    return made
