"""Names of vLLM that a file mentions where no reader understood what they are for: in a table, a docstring, a list."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from legroom.deployments.kinds import Kind
from legroom.deployments.read import named_releases
from legroom.deployments.subjects import StartedServer, Subject
from legroom.deployments.text import Text
from legroom.facts.flags import flag_name
from legroom.lint.counterexamples import GONE
from legroom.lint.expressions import Expression
from legroom.vllm.command_line import plain_name

MentionKind = Literal["flag", "series", "variable"]
_NAMES: dict[MentionKind, re.Pattern[str]] = {
    "flag": re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*(?![\w-])"),
    "series": re.compile(r"(?<![\w:])vllm:[a-z][a-z0-9_]+(?![\w:])"),
    "variable": re.compile(r"(?<![\w$])VLLM_[A-Z0-9_]+(?!\w)"),
}
_SETTING = re.compile(r"""(?<![\w$-])['"]?([a-z][a-z0-9]*(?:_[a-z0-9]+)+)['"]?\s*(?:=(?!=)|:)""")
"""A flag under its name in Python: a keyword, a key of a mapping."""
_IS_SET = re.compile(r"""^(=|['"]?\s*\]\s*=[^=]|['"]?:\s+\S)""")
"""What follows the name of a variable that is given a value: `NAME=1`, `environ["NAME"] = "1"`, `NAME: "1"`."""
_IS_LISTED = re.compile(r"""(?<!\w)['"]?name['"]?:\s*['"]?$""")
"""What stands before it in a list of `name` and `value`."""
_DECLARES = re.compile(r"""add_argument\(|action\s*=""")
"""A program's own option: its name says nothing of what the program does with it."""
_LINES_ABOVE = 12
"""How far above a line a document may say that what follows is gone."""
_SETTINGS_OF: tuple[Kind, ...] = ("yaml", "json")
"""Where a key is a setting of something; in a program it may be any variable."""
_COMMENTED: tuple[Kind, ...] = ("yaml", "shell", "dockerfile", "python", "unit", "env")


@dataclass(frozen=True)
class Mention:
    """A name of vLLM, where it stands first."""

    kind: MentionKind
    name: str
    source: Text
    offset: int
    is_document: bool
    """Whether it stands in something that people read, rather than a program."""
    is_plain: bool
    """Whether a variable is given a value there, or a flag has its dashes."""
    is_told_gone: bool
    """Whether the text around it says that the name is one of the past."""
    beside: frozenset[str]
    """Every name that the file mentions."""
    releases: frozenset[str]
    """The releases that the file names anywhere."""


def mentions(kind: Kind, source: Text, subjects: Iterable[Subject | Expression]) -> Iterator[Mention]:
    """Every name that no subject of the file has, once; a line that is a comment says nothing."""
    subjects = tuple(subjects)
    judged = {name for subject in subjects for name in _names_of(subject)}
    # In a script that starts a server, its reader follows every variable to the server that sees it.
    is_env_read = kind == "shell" and any(isinstance(subject, StartedServer) and subject.words for subject in subjects)
    first: dict[tuple[MentionKind, str], tuple[int, bool]] = {}
    offset = 0
    for line in source.text.splitlines(keepends=True):
        if not (kind in _COMMENTED and line.lstrip().startswith("#")):
            for what, name, column, is_plain in _named_in(line, kind in _SETTINGS_OF):
                if (what, name) not in first or (is_plain and not first[what, name][1]):
                    first[what, name] = (offset + column, is_plain)
        offset += len(line)
    started = (subject.named_release for subject in subjects if isinstance(subject, StartedServer))
    releases = named_releases(source.text) | frozenset(filter(None, started))
    beside = frozenset(name for _, name in first) | judged
    for (what, name), (at, is_plain) in first.items():
        if name not in judged and not (what == "variable" and is_env_read):
            is_document = kind == "document"
            is_told_gone = _is_told_gone(source, at, is_document)
            yield Mention(what, name, source, at, is_document, is_plain, is_told_gone, beside, releases)


def _is_told_gone(source: Text, offset: int, is_document: bool) -> bool:
    row = source.row_of(offset)
    above = _LINES_ABOVE if is_document else 1
    return bool(GONE.search(source.rows(max(row - above, 0), row + 1).text))


def _named_in(line: str, has_settings: bool) -> Iterator[tuple[MentionKind, str, int, bool]]:
    """The names in a line: what each is, its column, and whether it is plain what it does there."""
    for flag in _NAMES["flag"].finditer(line):
        yield "flag", plain_name(flag[0]), flag.start(), _DECLARES.search(line) is None
    for setting in _SETTING.finditer(line):
        yield "flag", flag_name(setting[1]), setting.start(1), has_settings and setting[0].endswith(":")
    if "{{" not in line:  # the text of a message asks for nothing
        for series in _NAMES["series"].finditer(line):
            yield "series", series[0], series.start(), False
    for variable in _NAMES["variable"].finditer(line):
        is_set = _IS_SET.match(line[variable.end() :]) or _IS_LISTED.search(line[: variable.start()])
        yield "variable", variable[0], variable.start(), bool(is_set)


def _names_of(subject: Subject | Expression) -> Iterator[str]:
    if isinstance(subject, StartedServer):
        yield from (plain_name(word.text) for word in subject.words if word.text.startswith("-"))
        yield from subject.env
    elif isinstance(subject, Expression) and subject.owner != "prose":
        yield from _NAMES["series"].findall(subject.text)
