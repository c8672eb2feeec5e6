"""supervisord files: the commands of each program."""

import re
from collections.abc import Iterator
from dataclasses import replace

from legroom.deployments.shell.lexer import Word, env_with_places
from legroom.deployments.shell.shell_script import subjects_of
from legroom.deployments.shell.simple_commands import simple_commands
from legroom.deployments.source_text import Text
from legroom.deployments.subjects import Subject, change_servers
from legroom.facts import pattern

_SECTION = re.compile(r"^\[(?P<name>[^\]\n]+)\](?P<body>(?:\n(?!\[)[^\n]*)*)", re.MULTILINE)
_SETTING = pattern("supervisord.setting")
_COMMENT = re.compile(r"[ \t];[^\n]*")
_EXPANSION = pattern("supervisord.expansion")
_VARIABLE = re.compile(r"(\w+)=(?:\"([^\"]*)\"|'([^']*)'|([^,\s]*))")


def is_supervisord(text: str) -> bool:
    """Whether the text has a `[program:...]` section, so that it is no systemd unit."""
    return any(section["name"].startswith("program:") for section in _SECTION.finditer(text))


def supervisord_subjects(source: Text) -> Iterator[Subject]:
    """The servers and commands of all `[program:...]` sections."""
    for section in _SECTION.finditer(source.text):
        settings: dict[str, Word] = {}
        for setting in _SETTING.finditer(section["body"]):  # without `;` comments, `%(ENV_X)s` as a shell variable
            value = _COMMENT.sub(lambda comment: " " * len(comment[0]), setting["value"])
            value = _EXPANSION.sub(lambda name: "$" + "_" * (len(name[0]) - 1), value)
            settings[setting["key"]] = Word(value, section.start("body") + setting.start("value"))
        command = settings.get("command")
        if not section["name"].startswith("program:") or command is None:
            continue
        env, given = {}, settings.get("environment", Word("", 0))  # `environment=A="1",B="2"`
        for pair in _VARIABLE.finditer(given.text):
            text = next((text for text in pair.groups()[1:] if text is not None), "")
            env[pair[1]] = Word(text, given.offset + pair.start(), pair[0])
        text = command.text.replace("\n", " ").replace("%%", "% ")
        for simple in simple_commands(Text(source.path, text), env_with_places(env, source.place)):
            yield from change_servers(
                subjects_of(source, simple.moved_by(command.offset, {**env, **simple.env}), "shell"),
                lambda server: replace(server, read_as="a supervisord program"),
            )
