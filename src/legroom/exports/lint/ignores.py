"""`# legroom: ignore RULE`: findings that somebody has looked at."""

from __future__ import annotations

import re
from collections.abc import Iterable

from legroom.exports.lint.finding import Finding

_COMMENT = re.compile(r"legroom:\s*ignore(?P<file>-file)?(?P<rules>(?:[ \t]+[a-z][a-z-]*,?)*)")
_ALONE = re.compile(r"\s*(#|//|<!--|;)")
_EVERY = "*"


class Ignores:
    """What the comments of one file silence: a line, the command below a comment that stands alone, or the file."""

    def __init__(self, text: str) -> None:
        self._lines: dict[int, set[str]] = {}
        self._file: set[str] = set()
        lines = text.splitlines()
        for number, line in enumerate(lines, 1):
            found = _COMMENT.search(line)
            if found is None:
                continue
            rules = set(re.findall(r"[a-z][a-z-]*", found["rules"])) or {_EVERY}
            if found["file"]:
                self._file |= rules
                continue
            self._add(number, rules)
            if _ALONE.match(line):
                for below in _following(lines, number):
                    self._add(below, rules)

    def _add(self, number: int, rules: set[str]) -> None:
        self._lines.setdefault(number, set()).update(rules)

    def silences(self, finding: Finding) -> bool:
        """Whether a comment speaks of this finding."""
        named = self._file | self._lines.get(finding.place.line, set())
        return finding.rule in named or _EVERY in named


def _following(lines: list[str], number: int) -> Iterable[int]:
    """The next line that is no comment, and those that continue it."""
    row = number
    while row < len(lines) and (not lines[row].strip() or _ALONE.match(lines[row])):
        row += 1
    while row < len(lines):
        yield row + 1
        if not lines[row].rstrip().endswith("\\"):
            break
        row += 1
