"""The start-up lines among the evidence's lines, read by the same facts as `legroom calibrate`, in linear time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from legroom.diagnosis.evidence import Passage
from legroom.diagnosis.linear import PatternSet, compiled
from legroom.facts.group_units import typed
from legroom.facts.startup_lines import startup_lines
from legroom.planning.startup_log import Event

_NOT_BEHIND = re.compile(r"\(\?<!(?P<text>[^)]*)\)")


def events_of(passage: Passage) -> Iterator[Event]:
    """The events of one line."""
    line = passage.line
    text = line.raw
    for index in _every().matching(text):
        form = startup_lines()[index]
        pattern, not_behind = _linear(form.pattern.pattern)
        found = compiled(pattern).search(text)
        if found is None or any(text[: found.start()].endswith(before) for before in not_behind):
            continue
        fields = typed({name: value for name, value in found.groupdict().items() if value is not None})
        yield Event(line.number, form.id, form.kind, line.process, fields, text[:2000].strip())


@cache
def _every() -> PatternSet:
    return PatternSet(_linear(form.pattern.pattern)[0] for form in startup_lines())


def _linear(pattern: str) -> tuple[str, tuple[str, ...]]:
    """RE2 has no look-behind; what must not stand in front is checked after the match."""
    return _NOT_BEHIND.sub("", pattern), tuple(found["text"] for found in _NOT_BEHIND.finditer(pattern))
