"""Shell scripts: servers, containers, and every other command."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from legroom.deployments.plain_containers import container_run
from legroom.deployments.plain_shell import ASSIGNMENT, CONTAINER_TOOLS, basename, server_start
from legroom.deployments.shell.scan import TooManyWords, Word, placed_env
from legroom.deployments.shell.words import Command, commands
from legroom.deployments.subjects import At, Found, Invoked, Runs, Started
from legroom.deployments.text import Text, Unread

_SHELLS = ("sh", "bash", "zsh", "dash", "ash", "su", "runuser")
_TAKES_SCRIPT = ("eval", "ssh", "tmux", "screen", "watch")
"""Commands that run a quoted word as a script without being told by -c."""
_ONLY_SAYS = ("echo", "printf", "logger", "grep", "pgrep", "pkill")
"""Commands for which `vllm serve` is a text."""
_WRAPPERS = ("sudo", "exec", "nohup", "command", "time")
_DEEPEST = 4
DOCKER_STOP_S = 10.0
"""What docker stop waits unless told."""


def read_shell(source: Text, runs: Runs = "shell", env: Mapping[str, Word] | None = None) -> Found:
    """Everything a script runs."""
    subjects: list[Started | Invoked] = []
    try:
        for subject in _subjects(source, runs, env or {}, 0):
            subjects.append(subject)
    except TooManyWords as error:
        return Found(tuple(subjects), cut=Unread(source.place(error.offset), error.message, error.hint))
    return Found(tuple(subjects))


def _subjects(source: Text, runs: Runs, env: Mapping[str, Word], depth: int) -> Iterator[Started | Invoked]:
    for command in commands(source):
        yield from subjects_of(source, Command(command.words, {**env, **command.env}, command.pipeline), runs, depth)


def subjects_of(source: Text, command: Command, runs: Runs, depth: int = 0) -> Iterator[Started | Invoked]:
    """What one command is: itself, and the server it starts."""
    yield Invoked(command.words, command.pipeline, source.place)
    texts = command.texts()
    name = next((basename(text) for text in texts if basename(text) not in _WRAPPERS), "")
    if name in _ONLY_SAYS:
        return
    start = server_start(texts)
    if start is not None and basename(texts[start]) in CONTAINER_TOOLS:
        yield from _container(source, command, start, depth)
    elif start is not None:
        yield started(source, command.words[start:], command.env, runs)
    elif depth < _DEEPEST:
        for i, word in enumerate(command.words):
            behind_c = i > 0 and texts[i - 1].startswith("-") and texts[i - 1].endswith("c")
            to_a_shell = behind_c and any(basename(text) in _SHELLS for text in texts[: i - 1])
            if " " in word.text.strip() and (to_a_shell or name in _TAKES_SCRIPT):
                at = source.place(word.offset)
                inner = Text(source.path, _on_its_lines(word), at.line, (at.column,))
                yield from _subjects(inner, runs, placed_env(command.env, source.place), depth + 1)


def _on_its_lines(word: Word) -> str:
    """A script in a word. One that a variable brings has lines that are not here: they are joined."""
    if word.text.count("\n") <= word.raw.count("\n"):
        return word.text
    return re.sub(r"\\\n", "  ", word.text).replace("\n", ";")


def started(source: Text, words: tuple[Word, ...], env: Mapping[str, Word], runs: Runs) -> Started:
    """A server that runs on the host."""
    return Started(runs, words, env, source.place, source.place(words[0].offset))


def _container(source: Text, command: Command, start: int, depth: int) -> Iterator[Started | Invoked]:
    words = command.words[start:]
    run = container_run(tuple(word.text for word in words))
    if run is None or "vllm" not in f"{run.image} {' '.join(run.words)}".lower():
        return
    placed = _own_words(words, run.words)
    env = {**command.env, **dict(_container_env(words, run.image))}
    at = server_start(run.words)
    if at is not None and runs_another_program(run.image, run.words[at:]):
        return
    found: Iterator[Started | Invoked]
    if at is not None:
        found = iter([started(source, placed[at:], env, "docker")])
    elif depth < _DEEPEST and placed:
        found = subjects_of(source, Command(placed, env, command.pipeline), "docker", depth + 1)
    else:
        return
    option = _option(words, "--ipc")
    shm = "host" if option and option.text == "host" else run.shm_size
    mounted = any("/dev/shm" in word.text for word in words)
    stop = _option(words, "--stop-timeout")
    place = source.place(words[0].offset)
    limit = (
        At(float(stop.text), source.place(stop.offset)) if stop and stop.text.isdigit() else At(DOCKER_STOP_S, place)
    )
    for subject in found:
        if isinstance(subject, Started):
            shared = shm or ("mounted" if mounted else None)
            yield replace(
                subject, place=place, image=run.image, in_container=True, shm=shared, gpus=run.gpus, stop_limit=limit
            )
        else:
            yield subject


def _container_env(words: tuple[Word, ...], image: str) -> Iterator[tuple[str, Word]]:
    """What -e NAME=value, -eNAME=value, --env NAME=value and --env=NAME=value in front of the image set."""
    for i, word in enumerate(words):
        if word.text == image:
            return
        given = word
        if word.text in ("-e", "--env") and i + 1 < len(words):
            given = words[i + 1]
        elif found := re.match(r"--env=|-e=?(?=[A-Za-z_]\w*=)", word.text):
            given = word.with_text(word.text[found.end() :])
        if given is not word and (pair := ASSIGNMENT.fullmatch(given.text)):
            yield pair[1], given.with_text(pair[2])


def runs_another_program(image: str, words: Sequence[str]) -> bool:
    """Whether a vLLM image is told to run something else than the server: a bare word that can be no model."""
    added = "vllm" in image.lower() and tuple(words[:2]) == ("vllm", "serve")
    first = words[2] if added and len(words) > 2 else "-"
    return not first.startswith(("-", "/", ".", "~", "$")) and "/" not in first and not re.search(r"\d", first)


def _own_words(words: tuple[Word, ...], server: tuple[str, ...]) -> tuple[Word, ...]:
    """The server's words with their places: they are the last ones of the line, the entry point may be added."""
    tail = list(words)
    placed: list[Word] = []
    for text in reversed(server):
        while tail and tail[-1].text != text:
            tail.pop()
        placed.append(tail.pop() if tail else Word(text, words[0].offset, text))
    return tuple(reversed(placed))


def _option(words: tuple[Word, ...], name: str) -> Word | None:
    for i, word in enumerate(words):
        if word.text == name and i + 1 < len(words):
            return words[i + 1]
        if word.text.startswith(name + "="):
            return word.with_text(word.text[len(name) + 1 :])
    return None
