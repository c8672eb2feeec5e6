"""Dockerfiles: ENV, ENTRYPOINT and CMD of an image that serves vLLM, and what RUN runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from legroom.exports.lint.readers.shell import subjects_of
from legroom.exports.lint.shell_scan import Word
from legroom.exports.lint.shell_words import Command, commands
from legroom.exports.lint.subjects import Found, Invoked, Started
from legroom.exports.lint.text import Text, without_comment_lines
from legroom.vllm.containers import with_entrypoint
from legroom.vllm.shell import expand, server_start

_INSTRUCTION = re.compile(
    r"^[ \t]*([A-Za-z]+)[ \t]+((?:\\[ \t]*\r?\n(?:[ \t]*(?:#[^\n]*)?\r?\n)*|[^\n])*+)", re.MULTILINE
)
"""Every one, so that the continued lines of HEALTHCHECK or ONBUILD are not read as instructions of their own."""


def read_dockerfile(source: Text) -> Found:
    """The last stage's server, and every command."""
    return Found(tuple(_subjects(source)))


def _subjects(source: Text) -> Iterator[Started | Invoked]:
    env: dict[str, Word] = {}
    build_args: dict[str, str] = {}
    image = ""
    entry: tuple[Word, ...] = ()
    given: tuple[Word, ...] = ()
    for found in _INSTRUCTION.finditer(source.text):
        name, start, body = found[1].upper(), found.start(2), without_comment_lines(found[2], "#")
        if name == "FROM":
            image, entry, given = expand(_image(body), build_args), (), ()
        elif name == "ARG":
            build_args |= {key: word.text for key, word in _environment(body, start).items()}
        elif name == "ENV":
            env |= _environment(body, start)
        elif name == "RUN":
            for command in commands(Text(source.path, body)):
                moved = tuple(Word(word.text, word.offset + start, word.raw) for word in command.words)
                yield from subjects_of(source, Command(moved, env, command.pipeline), "docker")
        elif name == "ENTRYPOINT":
            entry = _words(body, start)
        elif name == "CMD":
            given = _words(body, start)
    texts = with_entrypoint(image, tuple(word.text for word in entry), tuple(word.text for word in given))
    if (entry or given) and (at := server_start(texts)) is not None:
        every = (*entry, *given)
        missing = len(texts) - len(every)
        placed = tuple(Word(text, every[0].offset, text) for text in texts[:missing]) + every
        yield Started("docker", placed[at:], env, source.place, source.place(every[0].offset), image)


def _image(text: str) -> str:
    return next((word for word in text.split() if not word.startswith("--")), "")


def _words(text: str, start: int) -> tuple[Word, ...]:
    """The exec form `["a", "b"]`, or a shell line."""
    if text.lstrip().startswith("["):
        try:
            listed = json.loads(re.sub(r"\\\r?\n", " ", text))
        except json.JSONDecodeError:
            listed = []
        placed, cursor = [], 0
        for item in listed if isinstance(listed, list) else []:
            cursor = max(text.find(json.dumps(str(item), ensure_ascii=False), cursor), cursor)
            placed.append(Word(str(item), start + cursor + 1, str(item)))
        return tuple(placed)
    return tuple(
        Word(word.text, word.offset + start, word.raw) for command in commands(Text("", text)) for word in command.words
    )


def _environment(text: str, start: int) -> dict[str, Word]:
    env = {}
    for found in re.finditer(r"(\w+)=(\"[^\"]*\"|\S*)", text):
        env[found[1]] = Word(found[2].strip('"'), start + found.start(), found[0])
    if not env and (plain := re.match(r"(\w+)\s+(.*)", text, re.DOTALL)):
        env[plain[1]] = Word(plain[2].strip(), start, plain[2])
    return env
