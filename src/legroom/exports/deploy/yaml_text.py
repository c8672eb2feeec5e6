"""YAML with comments, which PyYAML cannot write."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from legroom.drawing.text import wrap
from legroom.records import dataclass

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n", "none"})
_NEWLINE = "\n"


@dataclass(frozen=True, slots=True)
class Commented:
    comment: str
    value: Any


def manifest(api_version: str, kind: str, metadata: Any, spec: Any) -> dict[str, Any]:
    """A Kubernetes object with these four top-level keys."""
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}


def literal(text: str) -> str:
    """The text with `$` escaped, so that Compose (`$NAME`) and Kubernetes (`$(NAME)`) expand nothing."""
    return text.replace("$", "$$")


def yaml_text(*documents: Any, head: Sequence[str] = ()) -> str:
    """The documents as YAML below the comment lines of `head`; `Commented` values keep their comments."""
    start = "".join(f"{line}\n" for text in head for line in _comment_lines(text, 0))
    return start + "---\n".join("\n".join(_yaml_lines(document, 0)) + "\n" for document in documents)


def without_comments(value: Any) -> Any:
    """The value with every `Commented` replaced by what it wraps."""
    if isinstance(value, Commented):
        return without_comments(value.value)
    if isinstance(value, Mapping):
        return {key: without_comments(inner) for key, inner in value.items()}
    return [without_comments(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _comment_lines(text: str, indent: int) -> list[str]:
    """The text as wrapped lines that begin with `indent` spaces and `# `."""
    lead = " " * indent + "# "
    return wrap(text, max(100, indent + 60), lead, lead)


def _yaml_lines(value: Any, indent: int) -> Iterator[str]:
    """The value as block-style YAML lines, each comment above its value."""
    if isinstance(value, Commented):
        yield from _comment_lines(value.comment, indent)
        yield from _yaml_lines(value.value, indent)
    elif isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _entry_lines(f"{_scalar(str(key))}:", inner, indent)
    elif isinstance(value, (list, tuple)) and value:
        for inner in value:
            yield from _entry_lines("-", inner, indent)
    else:
        yield " " * indent + _scalar(value)


def _entry_lines(lead: str, value: Any, indent: int) -> Iterator[str]:
    """The lines of one entry of a mapping (`lead`: its key and colon) or of a list (`lead`: `-`), with its comment."""
    if isinstance(value, Commented):
        yield from _comment_lines(value.comment, indent)
        value = value.value
    space, is_item = " " * indent, lead == "-"
    is_filled = isinstance(value, (Mapping, list, tuple)) and value
    if is_item and is_filled and isinstance(value, Mapping) and not isinstance(next(iter(value.values())), Commented):
        lines = list(_yaml_lines(value, indent + 2))
        yield f"{space}- {lines[0][indent + 2 :]}"  # the first key beside the dash
        yield from lines[1:]
    elif is_filled:
        yield f"{space}{lead}"
        yield from _yaml_lines(value, indent + 2)
    elif not is_item and isinstance(value, str) and (lines := _block_scalar_lines(value)):
        yield f"{space}{lead} |{'' if value.endswith(_NEWLINE) else '-'}"
        yield from (f"{space}  {line}" if line else "" for line in lines)
    else:
        yield f"{space}{lead} {_scalar(value)}"


def _block_scalar_lines(text: str) -> list[str]:
    """The text's lines if a YAML block scalar can represent it exactly; none otherwise."""
    lines = text.removesuffix(_NEWLINE).split(_NEWLINE)
    plain_lines = all(line.isprintable() and not line.startswith(" ") for line in lines)
    return lines if len(lines) > 1 and plain_lines and lines[0] and lines[-1] else []


def _scalar(value: Any) -> str:
    """The value as one-line YAML, double-quoted where plain text would be misread; empty collections as {}, []."""
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)
    if isinstance(value, (Mapping, list, tuple)):
        return "{}" if isinstance(value, Mapping) else "[]"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return '"' + "".join(map(_escaped_character, text)) + '"'


def _escaped_character(character: str) -> str:
    """The character as it is written inside a double-quoted YAML text."""
    if character in '"\\':
        return "\\" + character
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
