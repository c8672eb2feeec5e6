"""Values of a Helm chart that no template reads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from legroom.deployments.source_text import Place
from legroom.lint.linted_parts import DoubtfulLine

_READ = re.compile(r"\.Values\.([\w.]+)")
_READ_WHOLE = re.compile(r"\.Values(?!\.\w)|\b(?:include|template)\s+\"[\w.-]*(?<!name)(?<!Name)(?<!abels)(?<!chart)\"")
"""Values as a whole, or a helper of another file that may read any."""
_SERVERS_OWN = frozenset({"args", "extraArgs", "env", "envVars", "extraEnv", "resources", "command", "shmSize"})
_KEY = re.compile(r"^( *)([A-Za-z][\w-]*):(?=\s|$)")


def unread_values(texts: Sequence[tuple[str, str]]) -> Iterator[tuple[str, DoubtfulLine]]:
    """(path, line) of each server setting in a values.yaml that none of its chart's templates, all given, reads."""
    for path, text in texts:
        folder = path.removesuffix("values.yaml")
        templates = [body for name, body in texts if name.startswith(f"{folder}templates/")]
        if folder == path or not templates or any(map(_READ_WHOLE.search, templates)):
            continue
        read = {name.rstrip(".") for body in templates for name in _READ.findall(body)}
        for key, line in _dotted_keys(text):
            is_read = any(f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}.") for name in read)
            parent, dot, last = key.rpartition(".")
            has_template = any(f"{name}.".startswith(f"{parent}{dot}image.") for name in read)  # of its container
            if last in _SERVERS_OWN and has_template and not is_read:
                row = {"rule": "flag-ignored", "message": f"no template of the chart reads {key}"}
                yield path, DoubtfulLine(Place(path, line, 1), row | {"suggestion": "read it, or leave it out"})


def _dotted_keys(text: str) -> Iterator[tuple[str, int]]:
    """The keys of a block of YAML as `a.b.c`, each with its line; those of lists belong to the list's key."""
    above: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if (found := _KEY.match(line)) is not None:
            above = [*(each for each in above if each[0] < found.end(1)), (found.end(1), found[2])]
            yield ".".join(name for _, name in above), number
