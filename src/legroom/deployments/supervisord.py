"""supervisord's files: the server of each program with its environment and how long a stop may take."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from legroom.deployments.shell.scan import Word
from legroom.deployments.shell.script import subjects_of
from legroom.deployments.shell.words import Command, commands
from legroom.deployments.subjects import At, Found, Invoked, Started
from legroom.deployments.text import Text

_SECTION = re.compile(r"^\[(?P<name>[^\]\n]+)\](?P<body>(?:\n(?!\[)[^\n]*)*)", re.MULTILINE)
_SETTING = re.compile(r"^(?P<key>\w+)[ \t]*=[ \t]*(?P<value>[^\n]*(?:\n[ \t]+[^\n]*)*)", re.MULTILINE)
"""A line that begins with a space goes on with the value."""
_COMMENT = re.compile(r"[ \t];[^\n]*")
_FILLED_IN = re.compile(r"%\(\w+\)\w?")
"""`%(ENV_NAME)s`: put in when it starts."""
_VARIABLE = re.compile(r"(\w+)=(?:\"([^\"]*)\"|'([^']*)'|([^,\s]*))")
STOP_S = 10.0
"""stopwaitsecs unless told."""


def is_supervisord(text: str) -> bool:
    """Whether it has programs of supervisord; units of systemd look alike otherwise."""
    return any(found["name"].startswith("program:") for found in _SECTION.finditer(text))


def read_supervisord(source: Text) -> Found:
    """Every program."""
    return Found(tuple(subject for found in _SECTION.finditer(source.text) for subject in _program(source, found)))


def _program(source: Text, section: re.Match[str]) -> Iterator[Started | Invoked]:
    settings = {
        found["key"]: Word(_plain(found["value"]), section.start("body") + found.start("value"))
        for found in _SETTING.finditer(section["body"])
    }
    command = settings.get("command")
    if not section["name"].startswith("program:") or command is None:
        return
    env = dict(_environment(settings.get("environment")))
    stop = settings.get("stopwaitsecs")
    text = command.text.replace("\n", " ").replace("%%", "% ")
    for one in commands(Text(source.path, text)):
        moved = tuple(Word(word.text, word.offset + command.offset, word.raw) for word in one.words)
        for subject in subjects_of(source, Command(moved, {**env, **one.env}, one.pipeline), "shell"):
            if isinstance(subject, Started) and subject.stop_limit is None:
                said = stop is not None and stop.text.strip().isdecimal()
                limit = At(float(stop.text), source.place(stop.offset)) if stop and said else At(STOP_S, subject.place)
                yield replace(subject, stop_limit=limit)
            else:
                yield subject


def _environment(value: Word | None) -> Iterator[tuple[str, Word]]:
    for found in _VARIABLE.finditer(value.text) if value else ():
        given = next((text for text in found.groups()[1:] if text is not None), "")
        yield found[1], Word(given, (value.offset if value else 0) + found.start(), found[0])


def _plain(value: str) -> str:
    """Without comments, and with a variable of a shell for what is put in later; every column stays."""
    uncommented = _COMMENT.sub(lambda found: " " * len(found[0]), value)
    return _FILLED_IN.sub(lambda found: "$" + "_" * (len(found[0]) - 1), uncommented)
