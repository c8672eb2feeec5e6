"""Dockerfiles: the server of ENTRYPOINT and CMD, and the commands of RUN."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from legroom.deployments.container_images import container_command, is_server_image, repeated_entry
from legroom.deployments.file_kinds import Kind, kind_of
from legroom.deployments.kubernetes_reader import probe_of_words
from legroom.deployments.server_words import basename, expand_variables, server_start
from legroom.deployments.shell.lexer import Word, env_with_places, here_documents
from legroom.deployments.shell.shell_script import script_subjects, subjects_of
from legroom.deployments.shell.simple_commands import simple_commands
from legroom.deployments.source_text import Text, read_text, without_comment_lines
from legroom.deployments.subjects import InvokedCommand, Probe, StartedServer, Subject, change_servers
from legroom.errors import LegroomError
from legroom.facts import pattern

_INSTRUCTION = pattern("dockerfile.instruction")


def copied_files(source: Text) -> Iterator[tuple[Kind, Text]]:
    """(kind, text) of each here-document of a Dockerfile: files of `COPY <<EOF /start.sh`, scripts of `RUN <<EOF`."""
    for document in here_documents(source.text):
        words = [word.text for word in document.words]
        part = source.dedented_rows(source.row_of(document.start), source.row_of(document.end) + 1)
        kind = "shell" if words[:1] == ["RUN"] else kind_of(words[-1] if words else "", part.text)
        if kind != "document":
            yield kind, part


def _without_here_documents(text: str) -> str:
    """The text with here-documents blanked line by line, so that line numbers stay."""
    for document in here_documents(text):
        body = text[document.start : document.end]
        text = text[: document.start] + re.sub(r"[^\n]", " ", body) + text[document.end :]
    return text


def dockerfile_subjects(source: Text, given: Mapping[str, Word] | None = None) -> Iterator[Subject]:
    """The server of the last stage's image, with the variables `given` to it, and the commands of all RUN lines."""
    build_args: dict[str, str] = {}
    stages: dict[str, _Stage] = {}
    stage = _Stage("")
    for instruction in _INSTRUCTION.finditer(_without_here_documents(source.text)):
        name, start = instruction[1].upper(), instruction.start(2)
        body = without_comment_lines(instruction[2], "#")
        if name == "FROM":
            stage = _new_stage(body, build_args, stages)
        elif name == "ARG":
            build_args |= {key: word.text for key, word in _env_instruction(body, start).items()}
        elif name == "ENV":
            stage.env = {**stage.env, **_env_instruction(body, start)}
        elif name == "RUN":
            for command in simple_commands(Text(source.path, body)):
                subjects = subjects_of(source, command.moved_by(start, stage.env), "docker")
                image = "" if _ADDS_PYTHON.search(source.text) else stage.image
                yield from (
                    replace(each, image=image) if isinstance(each, InvokedCommand) else each for each in subjects
                )
        elif name == "HEALTHCHECK" and (check := _HEALTH_COMMAND.search(body)):
            try:
                words = [str(word) for word in json.loads(check[1])]
            except ValueError:
                words = ["sh", "-c", check[1]]
            stage.probe = probe_of_words("health", words, source.place(instruction.start()))
        elif name == "ENTRYPOINT":
            stage.entry, stage.has_entry = _exec_or_shell_words(body, start), True
            if not stage.has_cmd:
                stage.given = ()  # ENTRYPOINT resets the CMD of the base image
        elif name == "CMD":
            stage.given, stage.has_cmd = _exec_or_shell_words(body, start), True
    stage.env = {**stage.env, **(given or {})}
    if stage.entry or stage.given:
        repeated = None if stage.has_entry else repeated_entry(stage.image, (), stage.given)
        servers = _image_server(source, stage)
        probes = (stage.probe,) if stage.probe is not None else ()
        yield from change_servers(servers, lambda server: replace(server, repeated_entry=repeated, probes=probes))


_ADDS_PYTHON = re.compile(r"\bln -s|python-is-python3|\bPATH=|conda|pyenv|alias|venv")
_HEALTH_COMMAND = re.compile(r"\bCMD\s+(.*)", re.DOTALL)


def _image_server(source: Text, stage: "_Stage") -> Iterator[Subject]:
    """The server that a stage's image starts, also behind `["sh", "-c", "vllm serve ..."]`; none without one."""
    first = (*stage.entry, *stage.given)[0].offset
    values = {name: word.text for name, word in stage.env.items()}
    command = container_command(stage.image, stage.entry, stage.given, first)
    words = tuple(word.with_text(expand_variables(word.text, values)) for word in command)
    at = server_start(tuple(word.text for word in words))
    if at is not None:
        server = StartedServer("docker", words[at:], stage.env, source.place, source.place(first), stage.image)
        yield replace(server, read_as="a Dockerfile", is_exec_form=source.text[first - 1 : first] in ("[", '"'))
        return
    if any(basename(word.text) == "vllm" for word in words[:1]):
        yield InvokedCommand(words, "", source.place)
    if is_server_image(stage.image) and stage.env and not any(" " in word.text for word in words):
        # A program of its own starts vLLM in this environment.
        yield StartedServer("docker", (), stage.env, source.place, source.place(first), stage.image)
    scripts = []
    for word in words:
        if word.text.endswith(".sh") and (script := _text_beside(source, word.text)) is not None:
            scripts.append(script)
        if " " in word.text.strip():
            place = source.place(word.offset)
            scripts.append(Text(source.path, word.text, place.line, (place.column - 1,)))
    env = env_with_places(stage.env, source.place)
    subjects = (subject for script in scripts for subject in script_subjects(script, "docker", env))
    yield from change_servers(subjects, lambda server: replace(server, image=stage.image, read_as="a Dockerfile"))


def _text_beside(source: Text, name: str) -> Text | None:
    """The file of the same base name as `name` in the Dockerfile's folder; None where there is none."""
    path = Path(source.path).parent / basename(name)
    try:
        return Text(str(path), read_text(path)) if Path(source.path).is_file() and path.is_file() else None
    except LegroomError:
        return None


@dataclass
class _Stage:
    """The state of one build stage."""

    image: str
    entry: tuple[Word, ...] = ()
    given: tuple[Word, ...] = ()
    has_cmd: bool = False
    """Whether the stage itself has a CMD."""
    has_entry: bool = False
    """Whether the stage or one below it has an ENTRYPOINT, which may be empty."""
    env: Mapping[str, Word] = field(default_factory=dict)
    probe: Probe | None = None


def _new_stage(body: str, build_args: dict[str, str], stages: dict[str, _Stage]) -> _Stage:
    """The stage of a FROM line (`body`), which inherits from its base; with `AS name` it is added to `stages`."""
    words = [expand_variables(word, build_args) for word in body.split() if not word.startswith("--")]
    if not words:
        return _Stage("")
    stage = replace(stages.get(words[0].lower(), _Stage(words[0])), has_cmd=False)
    if len(words) > 2 and words[1].lower() == "as":
        stages[words[2].lower()] = stage
    return stage


def _exec_or_shell_words(text: str, start: int) -> tuple[Word, ...]:
    """The words of an exec form `["a", "b"]` or of a shell line; `start` is the offset of `text` in the file."""
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
    words = (word for command in simple_commands(Text("", text)) for word in command.words)
    return tuple(Word(word.text, word.offset + start, word.raw) for word in words)


def _env_instruction(text: str, start: int) -> dict[str, Word]:
    """The variables of one ENV instruction, `NAME=value ...` or `NAME value`; `start` is its offset in the file."""
    env = {}
    for pair in re.finditer(r"(\w+)=(\"[^\"]*\"|\S*)", text):
        env[pair[1]] = Word(pair[2].strip('"'), start + pair.start(), pair[0])
    if not env and (plain := re.match(r"(\w+)\s+(.*)", text, re.DOTALL)):
        env[plain[1]] = Word(plain[2].strip(), start, plain[2])
    return env
