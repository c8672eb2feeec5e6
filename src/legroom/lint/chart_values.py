"""A Helm chart's values that no template reads, and values that a template reads and the chart does not have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from legroom.deployments.source_text import Place
from legroom.lint.linted_parts import DoubtfulLine

_READ = re.compile(r"\.Values\.([\w.]+)")
_PRINTED = re.compile(r"\{\{-?\s*\.Values\.([\w.]+)\s*(?:\|\s*quote\s*)?-?\}\}")
_READ_WHOLE = re.compile(r"\.Values(?!\.\w)|\b(?:include|template)\s+\"[\w.-]*(?<!name)(?<!Name)(?<!abels)(?<!chart)\"")
"""Values as a whole, or a helper of another file that may read any."""
_SERVERS_OWN = frozenset({"args", "extraArgs", "env", "envVars", "extraEnv", "resources", "command", "shmSize"})
_KEY = re.compile(r"^( *)([A-Za-z][\w-]*):(?=\s|$)(.*)$")


def chart_mistakes(texts: Sequence[tuple[str, str]]) -> Iterator[tuple[str, DoubtfulLine]]:
    """The mistakes between the values and the templates of each chart, with the path of their file."""
    for path, text in texts:
        folder = path.removesuffix("values.yaml")
        templates = [(name, body) for name, body in texts if name.startswith(f"{folder}templates/")]
        if folder == path or not templates or any(_READ_WHOLE.search(body) for _, body in templates):
            continue
        keys = dict(_dotted_keys(text))
        read = {name.rstrip(".") for _, body in templates for name in _READ.findall(body)}
        for key, line in keys.items():
            is_read = any(f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}.") for name in read)
            parent, dot, last = key.rpartition(".")
            has_template = any(f"{name}.".startswith(f"{parent}{dot}image.") for name in read)  # of its container
            if last in _SERVERS_OWN and has_template and not is_read:
                yield path, _line(path, line, f"no template of the chart reads {key}")
        for name, body in templates:
            yield from ((name, each) for each in _values_left_out(name, body, keys))


def _values_left_out(path: str, template: str, keys: dict[str, int]) -> Iterator[DoubtfulLine]:
    """What a template prints beside values that the chart has, and its values do not hold."""
    parents = {key.rpartition(".")[0] for key in keys}
    for number, line in enumerate(template.splitlines(), 1):
        for name in _PRINTED.findall(line):
            is_guarded = re.search(rf"(?:if|with|default|hasKey|or|and)\b[^}}]*\.Values\.{re.escape(name)}\b", template)
            if name not in keys and name.rpartition(".")[0] in parents and not is_guarded:
                yield _line(path, number, f"the chart's values have no {name}: nothing is written here")


def _line(path: str, line: int, message: str) -> DoubtfulLine:
    row = {"rule": "flag-ignored", "message": message, "suggestion": "use the same name in values and template"}
    return DoubtfulLine(Place(path, line, 1), row)


def _dotted_keys(text: str) -> Iterator[tuple[str, int]]:
    """The keys of a block of YAML as `a.b.c`, each with its line; those of lists belong to the list's key."""
    above: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if (found := _KEY.match(line)) is not None:
            indent = len(found[1])
            above = [*(each for each in above if each[0] < indent), (indent, found[2])]
            yield ".".join(name for _, name in above), number
