"""Templates of a Helm chart, rendered with the values beside them as far as both tell."""

import json
import operator
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from legroom.deployments.source_text import OPEN_WORD, Place, Text, read_text
from legroom.deployments.yaml_nodes import Node, load_nodes
from legroom.errors import LegroomError
from legroom.facts import pattern
from legroom.records import dataclass, field

_ACTION, _TOKEN = pattern("helm_chart.action"), pattern("helm_chart.token")
_UNKNOWN = object()  # What only the cluster, the release or a missing file tells.
_DROPPED = " # {{ }}"
"""Stands for unknown lines, with which the result stays a template; OPEN_WORD for an unknown value."""
_OF_METADATA = pattern("helm_chart.of_metadata")
_Pieces = tuple[tuple[str, Text | None, int], ...]
"""Parts of a text, each with the text and the offset that it comes from."""


@dataclass(frozen=True)
class _Printed:
    """A text with the places that its pieces come from."""

    pieces: _Pieces

    @property
    def text(self) -> str:
        return "".join(piece[0] for piece in self.pieces)

    def indented(self, spaces: int) -> "_Printed":
        """The printed text with every line indented by this many more spaces."""
        pieces: list[tuple[str, Text | None, int]] = [(" " * spaces, None, 0)]
        for text, source, start in self.pieces:
            for line in re.finditer(r"[^\n]+\n?|\n", text):
                pieces.append((line[0], source, start + line.start()))
                pieces += [(" " * spaces, None, 0)] if line[0].endswith("\n") else []
        return _Printed(tuple(pieces))


class RenderedText(Text):
    """A template's result, whose places are those of the template and of the values."""

    def __init__(self, path: str, pieces: list[tuple[str, Text, int, bool]], is_complete: bool, values: Node) -> None:
        """`is_complete`: every part of it that can matter to a container was known."""
        super().__init__(path, "".join(piece[0] for piece in pieces))
        self._pieces, self._begins, self.is_complete, self.values = pieces, [0], is_complete, values
        for text, *_ in pieces[:-1]:
            self._begins.append(self._begins[-1] + len(text))

    def place(self, offset: int) -> Place:
        """The place of a character (`offset`) of the rendered text in the template or values file that it came from."""
        at = bisect_right(self._begins, max(offset, 0)) - 1
        _, source, start, moves = self._pieces[at]
        return source.place(start + (offset - self._begins[at] if moves else 0))


@dataclass(frozen=True)
class _Block:
    """An action of a template with the texts, each with its offset, and the blocks that it encloses."""

    words: tuple[str, ...]
    offset: int
    body: list[Any] = field(default_factory=list)
    otherwise: list[Any] = field(default_factory=list)


def render_chart_template(source: Text) -> RenderedText | None:
    """A chart's template, rendered with the chart's own values; None for other files and if unreadable."""
    root = next((folder.parent for folder in Path(source.path).parents if folder.name == "templates"), None)
    values = _first_document(root / "values.yaml") if root is not None and Path(source.path).is_file() else None
    if root is None or values is None:
        return None
    chart, named = _first_document(root / "Chart.yaml"), dict[str, tuple[Text, _Block]]()
    described = {key[:1].upper() + key[1:]: value for key, value in chart.items()} if chart is not None else {}
    scope = {"Values": values, "Chart": described}
    renderer = _Renderer(source, named, scope)
    try:
        for helper in sorted((root / "templates").glob("_*.tpl")):
            _parse(Text(str(helper), read_text(helper)), named)
        renderer.render(_parse(source, named), scope)
    except (IndexError, ValueError, TypeError, RecursionError, LegroomError):
        return None  # more of Go's templates than is read here
    return RenderedText(source.path, renderer.pieces, renderer.is_complete, values)


def _first_document(path: Path) -> Node | None:
    """The first document of a YAML file; None where there is none or the file cannot be read."""
    try:
        return next(iter(load_nodes(Text(str(path), read_text(path)))), None)
    except LegroomError:
        return None


def _parse(source: Text, named: dict[str, tuple[Text, _Block]]) -> list[Any]:
    """The texts and blocks of a template; the blocks that it defines go to `named`, each with its template, by name."""
    top = _Block((), 0)
    opened, inside, end = [top], [top.body], 0
    for action in _ACTION.finditer(source.text):
        before = source.text[end : action.start()]
        inside[-1].append((before.rstrip() if action[1] else before, end))
        end = action.end()
        block = _Block(tuple(_TOKEN.findall("" if action[2].lstrip().startswith("/*") else action[2])), action.start())
        first = block.words[0] if block.words else ""
        if first == "else":
            inside[-1] = opened[-1].otherwise
            if block.words[1:]:  # `else if` ends with the block around it
                opened[-1] = _Block(block.words[1:], block.offset)
                inside[-1].append(opened[-1])
                inside[-1] = opened[-1].body
        elif first == "end":
            opened.pop()
            inside.pop()
        elif first:
            inside[-1].append(block)
        if first in ("if", "with", "range", "define", "block"):
            opened.append(block)
            inside.append(block.body)
            if first in ("define", "block"):
                named[json.loads(block.words[1])] = source, block
    inside[-1].append((source.text[end:], end))
    return top.body


class _Renderer:
    """Renders the blocks of one template into pieces of text."""

    def __init__(self, source: Text, named: Mapping[str, tuple[Text, _Block]], root: Any) -> None:
        self.source, self.named, self.variables = source, named, {"$": root}
        self.pieces: list[tuple[str, Text, int, bool]] = []
        self.is_complete = True

    def render(self, parts: list[Any], dot: Any) -> None:
        """Appends what texts and blocks print, with Go's `.` as `dot`; if a condition is unknown, of both its sides."""
        for part in parts:
            if not isinstance(part, _Block):
                self.pieces.append((part[0], self.source, part[1], True))
            elif part.words[0] in ("if", "with", "range"):
                self._render_block(part, dot)
            elif part.words[0] != "define":
                self._print(self._evaluate(part.words, dot), part)

    def _print(self, value: Any, block: _Block) -> None:
        """Appends what a value prints, or a placeholder, which unsets `is_complete` for lines other than metadata's."""
        printed = _printed(value)
        if printed is None:
            is_block = bool({"nindent", "indent", "toYaml"} & {*block.words})
            self.is_complete &= not is_block or bool(_OF_METADATA.search(" ".join(block.words)))
            printed = _Printed(((_DROPPED if is_block else OPEN_WORD, None, 0),))
        for text, source, start in printed.pieces:
            is_own = source is None
            self.pieces.append((text, source or self.source, block.offset if is_own else start, not is_own))

    def _render_block(self, block: _Block, dot: Any) -> None:
        """Appends what an `if`, a `with` or a `range` prints, with Go's `.` as `dot`."""
        at = block.words.index(":=") if ":=" in block.words else 0
        names = [word for word in block.words[1:at] if word != ","]
        value = self._evaluate(block.words[at + 1 :], dot)
        self.is_complete &= value is not _UNKNOWN
        for key, item in _items(value) if block.words[0] == "range" else [("", value)] * _may_be_true(value):
            self.variables |= dict(zip(reversed(names), (item, key), strict=False))
            self.render(block.body, dot if block.words[0] == "if" else item)
        if value is _UNKNOWN or not _may_be_true(value):
            self.render(block.otherwise, dot)

    def _evaluate(self, words: tuple[str, ...], dot: Any) -> Any:
        """The value of a pipeline with `.` as `dot`, empty for an assignment. ValueError for syntax not supported."""
        if words[1:2] in ((":=",), ("=",)):
            self.variables[words[0]] = self._evaluate(words[2:], dot)
            return ""
        pending = list(words)
        value = self._pipeline(pending, dot)
        if pending:
            raise ValueError(pending[0])
        return value

    def _pipeline(self, words: list[str], dot: Any) -> Any:
        """The value of `a | b ...` at the front of `words`, from which the words read are removed."""
        value = self._call_or_operand(words, dot, ())
        while words[:1] == ["|"]:
            words.pop(0)
            value = self._call_or_operand(words, dot, (value,))
        return value

    def _call_or_operand(self, words: list[str], dot: Any, piped: tuple[Any, ...]) -> Any:
        """The value of the call or operand at the front of `words`, which loses it; `piped`: a call's last argument."""
        name = words.pop(0) if words and words[0][0].isalpha() and words[0] not in _LITERALS else ""
        values: list[Any] = []
        while words and words[0][0] not in "|)":
            values.append(self._operand(words, dot))
        return self._call(name, (*values, *piped)) if name else values[0]

    def _operand(self, words: list[str], dot: Any) -> Any:
        """The value of the literal, variable, field of `dot` or bracket at the front of `words`, which loses it."""
        word = words.pop(0)
        if word == "(":
            value = self._pipeline(words, dot)
            fields = words.pop(0)[1:]
            return None if value is None else _field(value, fields)  # `(.image).tag` allows for no image
        if word[0] in "$.":
            name, _, path = word.partition(".")
            return _field(self.variables.get(name, _UNKNOWN) if name else dot, path)
        if word[0] in '"`':
            return json.loads(word) if word[0] == '"' else word[1:-1]
        if word[0].isalpha():
            return _LITERALS[word] if word in _LITERALS else self._call(word, ())
        return float(word) if "." in word else int(word)

    def _call(self, name: str, values: tuple[Any, ...]) -> Any:
        """The result of the template function `name` for `values`; _UNKNOWN where it or a value is not known."""
        if name in ("include", "template", "block"):
            return self._include(*values[:2]) if len(values) > 1 else _UNKNOWN
        if name in ("and", "or", "default", "coalesce"):  # the first value that decides, else the last
            stops = name != "and"
            values = tuple(reversed(values)) if name == "default" else values
            return next((value for value in values if value is _UNKNOWN or _may_be_true(value) is stops), values[-1])
        function = _FUNCTIONS.get(name)
        return _UNKNOWN if function is None or _UNKNOWN in values else function(*values)

    def _include(self, name: str, dot: Any) -> Any:
        """What the named template prints with `dot` as `.`; _UNKNOWN if it is undefined or prints something unknown."""
        if name not in self.named:
            return _UNKNOWN
        source, block = self.named[name]
        inner = _Renderer(source, self.named, dot)
        inner.render(block.body, dot)
        self.is_complete &= inner.is_complete
        is_told = not any(OPEN_WORD in text for text, *_ in inner.pieces)
        return _Printed(tuple((text, at, start) for text, at, start, _moves in inner.pieces)) if is_told else _UNKNOWN


_LITERALS: dict[str, Any] = {"true": True, "false": False, "nil": None}


def _field(value: Any, path: str) -> Any:
    """The value at a `path` like `a.b`; None where its last name is missing, _UNKNOWN where an earlier one is."""
    for name in filter(None, path.split(".")):
        is_node = isinstance(value, Node) and isinstance(value.values, dict)
        value = value.get(name) if is_node else value.get(name, _UNKNOWN) if isinstance(value, dict) else _UNKNOWN
    return value


def _plain(value: Any) -> Any:
    """A YAML node as a Python value, a printed text as a string; any other value unchanged."""
    return value.plain() if isinstance(value, Node) else value.text if isinstance(value, _Printed) else value


def _may_be_true(value: Any) -> bool:
    """Whether Go takes the value for true; True for an unknown one."""
    return bool(_plain(value))


def _items(value: Any) -> list[tuple[Any, Any]]:
    """(key, item) pairs of a mapping or list for `range`; for _UNKNOWN one pair of it."""
    if isinstance(value, Node):
        return list(value.items()) or list(enumerate(value.list()))
    return [(value, value)] if value is _UNKNOWN else list(enumerate(value or ()))


def _printed(value: Any) -> _Printed | None:
    """What `{{ value }}` prints; None for mappings, lists and values that are not known."""
    if isinstance(value, _Printed):
        return value
    if isinstance(value, Node) and value.scalar is not None:
        return _Printed(((value.scalar, value.inner(), 0),))
    plain = _plain(value)
    if value is _UNKNOWN or isinstance(plain, dict | list):
        return None
    return _Printed((("" if plain is None else str(plain).lower() if plain is True else str(plain), None, 0),))


def _as_yaml(value: Any) -> Any:
    """A mapping or list as written in its file, moved to the left edge; `null` for None; else the value itself."""
    if not isinstance(value, Node) or not isinstance(value.values, dict | list):
        return "null" if _plain(value) is None else value
    indent = value.offset - value.source.start_of(value.source.row_of(value.offset))
    pieces: list[tuple[str, Text | None, int]] = []
    for line in re.finditer(r"[^\n]*\n?", value.source.text[value.offset : value.end].rstrip()):
        cut = min(len(line[0]) - len(line[0].lstrip(" ")), indent) if line.start() else 0
        pieces.append((line[0][cut:], value.source, value.offset + line.start() + cut))
    return _Printed(tuple(pieces))


def _text_function(change: Callable[..., str]) -> Callable[..., Any]:
    """`change` (texts -> text) as a template function; its result has the last argument's place, or is _UNKNOWN."""

    def changed(*values: Any) -> Any:
        """`change` applied to what the values print; _UNKNOWN where one of them is not known."""
        printed = [each for value in values if (each := _printed(value)) is not None]
        if len(printed) < len(values):
            return _UNKNOWN
        return _Printed(((change(*(each.text for each in printed)), *printed[-1].pieces[0][1:]),))

    return changed


def _indent(spaces: Any, value: Any) -> Any:
    """Helm's `indent`: what the value prints, each line moved right by `spaces`; _UNKNOWN where it is not known."""
    printed = _printed(value)
    return _UNKNOWN if printed is None else printed.indented(int(_plain(spaces)))


def _nindent(spaces: Any, value: Any) -> Any:
    """Helm's `nindent`: a line break, then what `indent` gives for `spaces` and the value."""
    printed = _indent(spaces, value)
    return printed if printed is _UNKNOWN else _Printed((("\n", None, 0), *printed.pieces))


def _compare(compare: Callable[[Any, Any], bool], kind: Callable[[Any], Any]) -> Callable[..., bool]:
    """A template function: whether `compare` holds for the first and any later argument, converted by `kind`."""
    return lambda first, *others: any(compare(kind(_plain(first)), kind(_plain(other))) for other in others)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "toYaml": _as_yaml,
    "nindent": _nindent,
    "indent": _indent,
    "quote": _text_function(lambda text: json.dumps(text, ensure_ascii=False)),
    "squote": _text_function(lambda text: f"'{text}'"),
    "lower": _text_function(str.lower),
    "trim": _text_function(str.strip),
    "toString": _text_function(str),
    "int": _text_function(lambda text: text.partition(".")[0]),
    "replace": _text_function(lambda old, new, text: text.replace(old, new)),
    "trunc": _text_function(lambda length, text: text[: int(length)]),
    "trimSuffix": _text_function(lambda end, text: text.removesuffix(end)),
    "printf": _text_function(lambda form, *texts: re.sub(r"%[sdvfq]", "%s", form) % texts),
    "tpl": lambda text, _dot: _UNKNOWN if "{{" in str(_plain(text)) else text,
    "required": lambda _message, value: value,
    "not": lambda value: not _may_be_true(value),
    "empty": lambda value: not _may_be_true(value),
    "kindIs": lambda kind, value: (_plain(value) is None) == (kind == "invalid"),
    "hasKey": lambda mapping, key: _field(mapping, str(_plain(key))) is not None,
    "eq": _compare(operator.eq, str),
    "ne": _compare(operator.ne, str),
    "gt": _compare(operator.gt, float),
    "lt": _compare(operator.lt, float),
}
