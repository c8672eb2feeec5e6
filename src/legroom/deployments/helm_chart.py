"""Templates of a Helm chart, rendered with the values beside them as far as both tell."""

from __future__ import annotations

import json
import operator
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from legroom.deployments.source_text import Place, Text, read_text
from legroom.deployments.yaml_nodes import Node, load_nodes
from legroom.errors import LegroomError
from legroom.records import dataclass, field

_ACTION = re.compile(
    r"\{\{(-\s)?\s*((?:/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|`[^`]*`|[^\"`])*?)\s*?(?:\s-\}\}\s*|\}\})", re.DOTALL
)
_TOKEN = re.compile(
    r"\s*(\"(?:\\.|[^\"\\])*\"|`[^`]*`|:=|[(|=,]|\)(?:\.\w+)*|-?\d+(?:\.\d+)?(?![\w.])"
    r"|\$\w*(?:\.\w+)*|(?:\.\w+)+|\.|[A-Za-z_]\w*)"
)
_UNKNOWN = object()
"""What only the cluster, the release or a missing file tells."""
_FILLER = "$_template_"
"""Stands for an unknown value: words with a variable are not judged."""
_DROPPED = " # {{ }}"
"""Stands for unknown lines: the result stays a template, which is not judged as a whole."""
_OF_METADATA = re.compile(r"labels|annotations|name", re.IGNORECASE)
"""Templates that neither a container nor its volumes depend on."""


@dataclass(frozen=True)
class _Printed:
    """A text with the places that its pieces come from."""

    pieces: tuple[tuple[str, Text | None, int], ...]

    @property
    def text(self) -> str:
        return "".join(piece[0] for piece in self.pieces)

    def made_into(self, text: str) -> _Printed:
        """Another text at the same place."""
        return _Printed(((text, *self.pieces[0][1:]),) if self.pieces else ((text, None, 0),))

    def indented(self, spaces: int) -> _Printed:
        """The text with every line moved to the right."""
        pieces: list[tuple[str, Text | None, int]] = [(" " * spaces, None, 0)]
        for text, source, start in self.pieces:
            at = 0
            for line in text.splitlines(keepends=True):
                pieces.append((line, source, start + at))
                pieces += [(" " * spaces, None, 0)] if line.endswith("\n") else []
                at += len(line)
        return _Printed(tuple(pieces))


class RenderedText(Text):
    """A template's result, whose places are those of the template and of the values."""

    def __init__(
        self, path: str, pieces: list[tuple[str, Text, int, bool]], is_complete: bool, values: tuple[Node, ...]
    ) -> None:
        super().__init__(path, "".join(piece[0] for piece in pieces))
        self._pieces, self._begins, self.values = pieces, [0], values
        self.is_complete = is_complete
        """Whether every part of it that can matter to a container was known."""
        for text, *_ in pieces[:-1]:
            self._begins.append(self._begins[-1] + len(text))

    def place(self, offset: int) -> Place:
        at = bisect_right(self._begins, max(offset, 0)) - 1
        _, source, start, moves = self._pieces[at]
        return source.place(start + (offset - self._begins[at] if moves else 0))


@dataclass(frozen=True)
class _Block:
    """An action of a template with the parts that it encloses."""

    words: tuple[str, ...]
    offset: int
    body: list[Any] = field(default_factory=list)
    """Texts with their offsets, and blocks."""
    otherwise: list[Any] = field(default_factory=list)


def render_chart_template(source: Text) -> RenderedText | None:
    """A file of a chart's `templates` folder with the chart's default values; None without such values."""
    path = Path(source.path)
    at = next((i for i, part in reversed(list(enumerate(path.parts))) if part == "templates"), None)
    if at is None or not path.is_file():
        return None
    root = Path(*path.parts[:at])
    values, chart = (_first_document(root / name) for name in ("values.yaml", "Chart.yaml"))
    if values is None:
        return None
    named: dict[str, tuple[Text, _Block]] = {}
    for helper in sorted((root / "templates").glob("_*.tpl")):
        text = Text(str(helper), read_text(helper))
        _parse(text, named)
    described = {key[:1].upper() + key[1:]: value for key, value in chart.items()} if chart is not None else {}
    scope = {"Values": values, "Chart": described}
    renderer = _Renderer(source, named, {"$": scope})
    try:
        renderer.render(_parse(source, named), scope)
    except (IndexError, ValueError, RecursionError):
        return None  # more of Go's templates than is read here
    return RenderedText(source.path, renderer.pieces, renderer.is_complete, (values,))


def _first_document(path: Path) -> Node | None:
    try:
        return next(iter(load_nodes(Text(str(path), read_text(path)))), None)
    except LegroomError:
        return None


def _parse(source: Text, named: dict[str, tuple[Text, _Block]]) -> list[Any]:
    """The texts and blocks of a template; what it defines is added to `named`."""
    top: list[Any] = []
    stack: list[tuple[_Block | None, list[Any]]] = [(None, top)]
    end = 0
    for action in _ACTION.finditer(source.text):
        before = source.text[end : action.start()]
        stack[-1][1].append((before.rstrip() if action[1] else before, end))
        end = action.end()
        words = tuple(_TOKEN.findall(action[2])) if not action[2].startswith("/*") else ()
        block = _Block(words, action.start())
        first = words[0] if words else ""
        if first in ("if", "with", "range", "define", "block"):
            stack[-1][1].append(block)
            stack.append((block, block.body))
            if first in ("define", "block"):
                named[json.loads(words[1])] = source, block
        elif first == "else":
            opened = stack.pop()[0]
            assert opened is not None
            stack.append((opened, opened.otherwise))
            if len(words) > 1:  # `else if`: ends with the one around it
                inner = _Block(words[1:], block.offset)
                opened.otherwise.append(inner)
                stack[-1] = (inner, inner.body)
        elif first == "end":
            stack.pop()
        elif words:
            stack[-1][1].append(block)
    stack[-1][1].append((source.text[end:], end))
    return top


class _Renderer:
    """Renders the blocks of one template into pieces of text."""

    def __init__(self, source: Text, named: Mapping[str, tuple[Text, _Block]], variables: dict[str, Any]) -> None:
        self.source, self.named, self.variables = source, named, variables
        self.pieces: list[tuple[str, Text, int, bool]] = []
        self.is_complete = True

    def render(self, parts: list[Any], dot: Any) -> None:
        """Append what the parts print."""
        for part in parts:
            if not isinstance(part, _Block):
                self.pieces.append((part[0], self.source, part[1], True))
            elif part.words[0] in ("if", "with"):
                self._render_choice(part, dot)
            elif part.words[0] == "range":
                self._render_range(part, dot)
            elif part.words[0] != "define":
                self._print(self._evaluate(part.words, dot), part)

    def _print(self, value: Any, block: _Block) -> None:
        printed = _printed(value)
        if printed is None:
            is_block = bool({"nindent", "indent", "toYaml"} & {*block.words})
            is_known = _OF_METADATA.search(" ".join(block.words))
            self.is_complete = self.is_complete and not (is_block and not is_known)
            printed = _Printed(((_DROPPED if is_block else _FILLER, None, 0),))
        for text, source, start in printed.pieces:
            at = (source, start, True) if source is not None else (self.source, block.offset, False)
            self.pieces.append((text, *at))

    def _render_choice(self, block: _Block, dot: Any) -> None:
        value = self._evaluate(block.words[1:], dot)
        inner = value if block.words[0] == "with" else dot
        if value is _UNKNOWN:  # both sides stay
            self.is_complete = False
        if value is _UNKNOWN or _is_true(value):
            self.render(block.body, inner)
        if value is _UNKNOWN or not _is_true(value):
            self.render(block.otherwise, dot)

    def _render_range(self, block: _Block, dot: Any) -> None:
        names = (
            [word for word in block.words[1 : block.words.index(":=")] if word != ","] if ":=" in block.words else []
        )
        value = self._evaluate(block.words[block.words.index(":=") + 1 if names else 1 :], dot)
        if value is _UNKNOWN:
            self.is_complete = False
        for key, item in _items(value):
            self.variables |= dict(zip(reversed(names), (item, key), strict=False))
            self.render(block.body, item)
        if not _items(value):
            self.render(block.otherwise, dot)

    def _evaluate(self, words: tuple[str, ...], dot: Any) -> Any:
        """The value of a pipeline; of an assignment an empty text."""
        if len(words) > 1 and words[1] in (":=", "="):
            self.variables[words[0]] = self._evaluate(words[2:], dot)
            return ""
        pending = list(words)
        value = self._pipeline(pending, dot)
        if pending:
            raise ValueError(pending[0])
        return value

    def _pipeline(self, words: list[str], dot: Any) -> Any:
        value = self._command(words, dot, ())
        while words and words[0] == "|":
            words.pop(0)
            value = self._command(words, dot, (value,))
        return value

    def _command(self, words: list[str], dot: Any, piped: tuple[Any, ...]) -> Any:
        """A call with its arguments, or a single value."""
        name = words.pop(0) if words and words[0][0].isalpha() and words[0] not in _LITERALS else ""
        values: list[Any] = []
        while words and words[0] != "|" and not words[0].startswith(")"):
            values.append(self._operand(words, dot))
        if not name:
            return values[0]
        return self._call(name, (*values, *piped))

    def _operand(self, words: list[str], dot: Any) -> Any:
        word = words.pop(0)
        if word == "(":
            value = self._pipeline(words, dot)
            fields = words.pop(0)[1:]
            return None if value is None else _field(value, fields)  # `(.image).tag` allows for no image
        if word.startswith("$"):
            name, _, path = word.partition(".")
            return _field(self.variables.get(name, _UNKNOWN), f".{path}")
        if word.startswith("."):
            return _field(dot, word)
        if word[0] in '"`':
            return json.loads(word) if word[0] == '"' else word[1:-1]
        if word[0].isalpha():
            return _LITERALS[word] if word in _LITERALS else self._call(word, ())
        return float(word) if "." in word else int(word)

    def _call(self, name: str, values: tuple[Any, ...]) -> Any:
        if name in ("include", "template", "block"):
            return self._include(*values[:2]) if len(values) > 1 else _UNKNOWN
        if name == "tpl":
            printed = _printed(values[0])
            return _UNKNOWN if printed is None or "{{" in printed.text else values[0]
        if name in ("and", "or"):
            return _first_deciding(values, stops_at=name == "or")
        if name in ("default", "coalesce"):
            chosen = reversed(values) if name == "default" else values
            return next((value for value in chosen if value is _UNKNOWN or _is_true(value)), values[0])
        function = _FUNCTIONS.get(name)
        return _UNKNOWN if function is None or _UNKNOWN in values else function(*values)

    def _include(self, name: str, dot: Any) -> Any:
        if name not in self.named:
            return _UNKNOWN
        source, block = self.named[name]
        inner = _Renderer(source, self.named, {"$": dot})
        inner.render(block.body, dot)
        self.is_complete = self.is_complete and inner.is_complete
        pieces = tuple((text, at, start) for text, at, start, _moves in inner.pieces)
        return _UNKNOWN if any(_FILLER in text for text, *_ in pieces) else _Printed(pieces)


_LITERALS: dict[str, Any] = {"true": True, "false": False, "nil": None}


def _field(value: Any, path: str) -> Any:
    """The value at `.a.b` of a value; None where the last name is missing, unknown below a missing one."""
    for name in filter(None, path.split(".")):
        if isinstance(value, dict):
            value = value.get(name, _UNKNOWN)
        else:
            value = value.get(name) if isinstance(value, Node) and isinstance(value.values, dict) else _UNKNOWN
    return value


def _plain(value: Any) -> Any:
    return value.plain() if isinstance(value, Node) else value.text if isinstance(value, _Printed) else value


def _is_true(value: Any) -> bool:
    return bool(_plain(value))


def _first_deciding(values: tuple[Any, ...], stops_at: bool) -> Any:
    """Go's `and` and `or`: the first value that decides, else the last."""
    for value in values:
        if value is _UNKNOWN or _is_true(value) is stops_at:
            return value
    return values[-1]


def _items(value: Any) -> list[tuple[Any, Any]]:
    """The keys and items that `range` runs over; one unknown item of an unknown value."""
    if value is _UNKNOWN:
        return [(_UNKNOWN, _UNKNOWN)]
    if isinstance(value, Node):
        return list(value.items()) or list(enumerate(value.list()))
    return list(enumerate(value)) if isinstance(value, list) else []


def _printed(value: Any) -> _Printed | None:
    """What `{{ value }}` prints; None where it is not known."""
    if isinstance(value, _Printed):
        return value
    if isinstance(value, Node) and value.scalar is not None:
        return _Printed(((value.scalar, value.inner(), 0),))
    plain = _plain(value)
    if value is _UNKNOWN or isinstance(plain, dict | list):
        return None
    text = "" if plain is None else str(plain).lower() if isinstance(plain, bool) else str(plain)
    return _Printed(((text, None, 0),))


def _as_yaml(value: Any) -> _Printed:
    """A value of a file as it is written there, moved to the left edge."""
    if not isinstance(value, Node) or value.scalar is not None or value.values is None:
        return _printed(value if _plain(value) is not None else "null") or _Printed(((json.dumps(value), None, 0),))
    text, indent = value.source.text, value.offset - value.source.start_of(value.source.row_of(value.offset))
    pieces: list[tuple[str, Text | None, int]] = []
    at = value.offset
    for line in text[value.offset : value.end].rstrip().splitlines(keepends=True):
        cut = min(len(line) - len(line.lstrip(" ")), indent) if at > value.offset else 0
        pieces.append((line[cut:], value.source, at + cut))
        at += len(line)
    return _Printed(tuple(pieces))


def _string(change: Callable[..., str]) -> Callable[..., Any]:
    """A function of texts whose last argument is the text that is changed."""

    def changed(*values: Any) -> Any:
        printed = [_printed(value) for value in values]
        texts = [each.text for each in printed if each is not None]
        last = printed[-1]
        return _UNKNOWN if last is None or len(texts) < len(values) else last.made_into(change(*texts))

    return changed


def _indent(spaces: Any, value: Any) -> Any:
    printed = _printed(value)
    return _UNKNOWN if printed is None else printed.indented(int(spaces))


def _on_own_lines(spaces: Any, value: Any) -> Any:
    printed = _indent(spaces, value)
    return printed if printed is _UNKNOWN else _Printed((("\n", None, 0), *printed.pieces))


def _compare(compare: Callable[[Any, Any], bool]) -> Callable[..., bool]:
    return lambda first, *others: any(compare(_plain(first), _plain(other)) for other in others)


def _format(template: str, *values: Any) -> Any:
    texts = [printed.text if (printed := _printed(value)) else "" for value in values]
    return re.sub(r"%[sdvfq]", "%s", template) % tuple(texts)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "toYaml": _as_yaml,
    "nindent": _on_own_lines,
    "indent": _indent,
    "quote": _string(lambda *texts: " ".join(json.dumps(text, ensure_ascii=False) for text in texts)),
    "squote": _string(lambda *texts: " ".join(f"'{text}'" for text in texts)),
    "lower": _string(str.lower),
    "upper": _string(str.upper),
    "trim": _string(str.strip),
    "toString": _string(str),
    "int": _string(lambda text: text.partition(".")[0]),
    "int64": _string(lambda text: text.partition(".")[0]),
    "replace": _string(lambda old, new, text: text.replace(old, new)),
    "trunc": _string(lambda length, text: text[: int(length)]),
    "trimSuffix": _string(lambda end, text: text.removesuffix(end)),
    "trimPrefix": _string(lambda start, text: text.removeprefix(start)),
    "printf": _format,
    "join": lambda by, items: by.join(str(_plain(item)) for _, item in _items(items)),
    "required": lambda _message, value: value,
    "list": lambda *values: list(values),
    "not": lambda value: not _is_true(value),
    "empty": lambda value: not _is_true(value),
    "ternary": lambda yes, no, test: yes if _is_true(test) else no,
    "hasKey": lambda mapping, key: _field(mapping, f".{_plain(key)}") is not None,
    "contains": lambda part, text: str(_plain(part)) in str(_plain(text)),
    "hasPrefix": lambda start, text: str(_plain(text)).startswith(str(_plain(start))),
    "kindIs": lambda kind, value: (_plain(value) is None) == (kind == "invalid"),
    "len": lambda value: len(_plain(value) or ()),
    "eq": _compare(operator.eq),
    "ne": _compare(operator.ne),
    "gt": _compare(lambda first, second: float(first) > float(second)),
    "ge": _compare(lambda first, second: float(first) >= float(second)),
    "lt": _compare(lambda first, second: float(first) < float(second)),
    "le": _compare(lambda first, second: float(first) <= float(second)),
}
