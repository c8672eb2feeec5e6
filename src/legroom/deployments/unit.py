"""systemd units: the server of ExecStart with its environment and its time limits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from legroom.deployments.shell.scan import Word
from legroom.deployments.shell.script import subjects_of
from legroom.deployments.shell.words import Command, commands
from legroom.deployments.subjects import At, Found, Invoked, Started, Subject, Unit
from legroom.deployments.text import Text, without_comment_lines
from legroom.errors import LegroomError

_SETTING = re.compile(
    r"^(?P<key>[A-Za-z]+)[ \t]*=[ \t]*(?P<value>(?:[^\n]*\\\r?\n(?:[ \t]*[#;][^\n]*\n)*)*+[^\n]*)$", re.MULTILINE
)
"""systemd leaves comments between continued lines out."""
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|sec|seconds?|m|min|minutes?|h|hr|hours?|d|days?)?")
_SECONDS = {"u": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
STOP_S = START_S = 90.0
"""systemd's defaults."""


def read_unit(source: Text) -> Found:
    """Every command of a unit."""
    return Found(tuple(_subjects(source)))


def _subjects(source: Text) -> Iterator[Subject]:
    settings: dict[str, Word] = {}
    lines: list[tuple[str, Word]] = []
    env: dict[str, Word] = {}
    for found in _SETTING.finditer(source.text):
        value = without_comment_lines(found["value"], "#;")
        word = Word(value, found.start("value"), value)
        settings[found["key"]] = Word(value.strip(), found.start("key"), found[0])
        if found["key"] == "Environment":
            for inner in re.finditer(r"\"(\w+)=([^\"]*)\"|'(\w+)=([^']*)'|(\w+)=(\S*)", value):
                name, given = next((inner[i], inner[i + 1]) for i in (1, 3, 5) if inner[i])
                env[name] = Word(given, found.start("value") + inner.start(), inner[0])
        elif found["key"].startswith("Exec"):
            lines.append((found["key"], word))
    if "ExecStart" not in settings:
        raise LegroomError("is a unit without ExecStart: it starts nothing", "pass the .service file of the server")
    yield Unit(settings, source.place)
    for key, word in lines:
        yield from _commands(source, key, word, env, settings)


def _commands(
    source: Text, key: str, word: Word, env: dict[str, Word], settings: dict[str, Word]
) -> Iterator[Started | Invoked]:
    text = word.text
    lead = len(text) - len(text.lstrip("-@:+!"))
    # Two dollars or percent signs stand for one, so they must not be read as the shell's own.
    blanked = " " * lead + text[lead:].replace("$$", "$ ").replace("%%", "% ")
    for command in commands(Text(source.path, blanked)):
        moved = tuple(Word(inner.text, inner.offset + word.offset, inner.raw) for inner in command.words)
        for subject in subjects_of(source, Command(moved, env, command.pipeline), "systemd"):
            if isinstance(subject, Started) and key == "ExecStart":
                yield _limited(source, subject, settings)
            else:
                yield subject


def _limited(source: Text, server: Started, settings: dict[str, Word]) -> Started:
    # Only a unit that waits for something is given up: Type=exec and simple have started at once.
    waits = "ExecStartPost" in settings or settings.get("Type", Word("", 0)).text in ("notify", "oneshot", "forking")
    start = _limit(source, settings, "TimeoutStartSec", START_S, server) if waits else None
    stop = _limit(source, settings, "TimeoutStopSec", STOP_S, server)
    return replace(server, start_limit=start, stop_limit=stop)


def _limit(source: Text, settings: dict[str, Word], key: str, default: float, server: Started) -> At | None:
    word = settings.get(key) or settings.get("TimeoutSec")
    if word is None:
        return At(default, server.place)
    seconds = span_s(word.text)
    return At(seconds, source.place(word.offset)) if seconds else None


def span_s(text: str) -> float | None:
    """`90`, `5min 20s`; None for `infinity` and what is no time."""
    found = list(_SPAN.finditer(text.strip()))
    if not found or text.strip().lower().startswith("inf"):
        return None
    total = 0.0
    for part in found:
        unit = part[2] or "s"
        key = "ms" if unit == "ms" else "u" if unit == "us" else unit[0]
        total += float(part[1]) * _SECONDS[key]
    return total
