"""supervisord's files: the server of each program with its environment and how long a stop may take."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from legroom.deployments.shell.scan import Word, placed_env
from legroom.deployments.shell.script import subjects_of
from legroom.deployments.shell.words import commands
from legroom.deployments.subjects import At, Invoked, StartedServer, with_servers
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
    return any(section["name"].startswith("program:") for section in _SECTION.finditer(text))


def supervisord_subjects(source: Text) -> Iterator[StartedServer | Invoked]:
    """What every program runs."""
    for section in _SECTION.finditer(source.text):
        yield from _program(source, section)


def _program(source: Text, section: re.Match[str]) -> Iterator[StartedServer | Invoked]:
    settings = {
        setting["key"]: Word(_plain(setting["value"]), section.start("body") + setting.start("value"))
        for setting in _SETTING.finditer(section["body"])
    }
    command = settings.get("command")
    if not section["name"].startswith("program:") or command is None:
        return
    env = dict(_environment(settings.get("environment")))
    stop = settings.get("stopwaitsecs")
    wait = At(float(stop.text), source.place(stop.offset)) if stop and stop.text.strip().isdecimal() else None
    text = command.text.replace("\n", " ").replace("%%", "% ")
    for simple in commands(Text(source.path, text), placed_env(env, source.place)):
        yield from with_servers(
            subjects_of(source, simple.moved(command.offset, {**env, **simple.env}), "shell"),
            lambda server: replace(
                server,
                stop_limit=server.stop_limit or wait or At(STOP_S, server.place),
                read_as="a supervisord program",
            ),
        )


def _environment(value: Word | None) -> Iterator[tuple[str, Word]]:
    for pair in _VARIABLE.finditer(value.text) if value else ():
        given = next((text for text in pair.groups()[1:] if text is not None), "")
        yield pair[1], Word(given, (value.offset if value else 0) + pair.start(), pair[0])


def _plain(value: str) -> str:
    """Without comments, and with a variable of a shell for what is put in later; every column stays."""
    uncommented = _COMMENT.sub(lambda comment: " " * len(comment[0]), value)
    return _FILLED_IN.sub(lambda name: "$" + "_" * (len(name[0]) - 1), uncommented)
