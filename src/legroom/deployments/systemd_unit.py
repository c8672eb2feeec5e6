"""systemd units: their commands, environment and time limits."""

import re
from collections.abc import Iterator
from dataclasses import replace

from legroom.deployments.shell.lexer import Word, env_with_places
from legroom.deployments.shell.shell_script import subjects_of
from legroom.deployments.shell.simple_commands import simple_commands
from legroom.deployments.source_text import Text, without_comment_lines
from legroom.deployments.subjects import StartedServer, Subject, TimeLimit, Unit, change_servers
from legroom.errors import LegroomError
from legroom.facts import pattern

_SETTING = pattern("systemd_unit.setting")
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|sec|seconds?|m|min|minutes?|h|hr|hours?|d|days?)?(?![A-Za-z])")
_SECONDS = {"u": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DEFAULT_TIMEOUT_S = 90.0  # systemd's default of TimeoutStartSec.


def unit_subjects(source: Text) -> Iterator[Subject]:
    """The unit itself, then the servers and commands of its Exec lines; LegroomError without ExecStart."""
    settings: dict[str, Word] = {}
    lines: list[tuple[str, Word]] = []
    env: dict[str, Word] = {}
    for setting in _SETTING.finditer(source.text):
        value = without_comment_lines(setting["value"], "#;")
        word = Word(value, setting.start("value"), value)
        settings[setting["key"]] = Word(value.strip(), setting.start("key"), setting[0])
        if setting["key"] == "Environment":
            for pair in re.finditer(r"\"(\w+)=([^\"]*)\"|'(\w+)=([^']*)'|(\w+)=(\S*)", value):
                name, given = next((pair[i], pair[i + 1]) for i in (1, 3, 5) if pair[i])
                env[name] = Word(given, setting.start("value") + pair.start(), pair[0])
        elif setting["key"].startswith("Exec"):
            lines.append((setting["key"], word))
    if "ExecStart" not in settings:
        raise LegroomError("is a unit without ExecStart: it starts nothing", "pass the .service file of the server")
    yield Unit(settings, source.place, env)
    for key, word in lines:
        yield from _subjects_of_exec_line(source, key, word, env, settings)


def _subjects_of_exec_line(
    source: Text, key: str, word: Word, env: dict[str, Word], settings: dict[str, Word]
) -> Iterator[Subject]:
    """Servers and commands of one line `key`=`word`, such as ExecStart=...; `settings`: all other keys of the unit."""
    text = word.text
    lead = len(text) - len(text.lstrip("-@:+!"))
    # `$$` and `%%` are escapes, not shell syntax.
    blanked = " " * lead + text[lead:].replace("$$", "$ ").replace("%%", "% ")
    for command in simple_commands(Text(source.path, blanked), env_with_places(env, source.place)):
        yield from change_servers(
            subjects_of(source, command.moved_by(word.offset, env), "systemd"),
            lambda server: _with_start_limit(source, server, settings) if key == "ExecStart" else server,
        )


def _with_start_limit(source: Text, server: StartedServer, settings: dict[str, Word]) -> StartedServer:
    """The server with its unit's start timeout; none for Type=exec and simple, whose start systemd does not await."""
    start = None
    if "ExecStartPost" in settings or settings.get("Type", Word("", 0)).text in ("notify", "oneshot", "forking"):
        word = settings.get("TimeoutStartSec") or settings.get("TimeoutSec")
        seconds = seconds_of_span(word.text) if word else _DEFAULT_TIMEOUT_S  # None for `infinity`
        start = TimeLimit(seconds, source.place(word.offset) if word else server.place) if seconds else None
    other = frozenset({"*"} if "EnvironmentFile" in settings or "PassEnvironment" in settings else ())
    return replace(server, start_limit=start, other_env=other, read_as="a systemd unit")


def seconds_of_span(text: str) -> float | None:
    """The seconds of `90` or `5min 20s`; None for `infinity` and other texts."""
    spans = list(_SPAN.finditer(text.strip()))
    if not spans or text.strip().lower().startswith("inf"):
        return None
    units = ((float(part[1]), part[2] or "s") for part in spans)
    return sum(number * _SECONDS["ms" if unit == "ms" else unit[0]] for number, unit in units)
