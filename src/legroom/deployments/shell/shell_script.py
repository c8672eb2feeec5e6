"""Shell scripts: servers, containers, and every other command."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from legroom.deployments import server_words
from legroom.deployments.mounts_and_ports import published_port
from legroom.deployments.shell.lexer import TooManyWords, Word, after_closing_bracket, env_with_places
from legroom.deployments.shell.simple_commands import SimpleCommand, simple_commands
from legroom.deployments.source_text import Text, Unread
from legroom.deployments.subjects import FilePart, InvokedCommand, Runs, StartedServer, Subject, change_servers
from legroom.facts import pattern

_RUNS_C = (*server_words.SHELLS, "su", "runuser")
_TAKES_SCRIPT = ("eval", "ssh", "tmux", "screen", "watch")  # Commands that run a quoted word as a script without -c.
_PRINTING = ("echo", "printf", "logger", "grep", "pgrep", "pkill")  # Commands that only print or match `vllm serve`.
_WRAPPERS = ("sudo", "exec", "nohup", "command", "time")


def read_shell(source: Text, env: Mapping[str, Word] | None = None) -> FilePart:
    """A script as a file part: all its commands and the servers they start; `env`: variables that it begins with."""
    subjects: list[Subject] = []
    unread, source = None, source.with_text(_with_kept_ids_as_commands(source.text))
    try:
        for subject in script_subjects(source, "shell", env or {}):
            subjects.append(subject)
    except TooManyWords as error:
        unread = Unread(source.place(error.offset), error.message, error.hint)
    hidden = dict(_not_exported(re.sub(r"(?m)^([ \t]*)#.*", lambda line: " " * len(line[0]), source.text)))
    servers = change_servers(subjects, lambda server: replace(server, not_exported=hidden) if hidden else server)
    return FilePart("shell", source, tuple(servers), unread=unread)


_KEPT_ID = pattern("shell_script.kept_id")


def _with_kept_ids_as_commands(text: str) -> str:
    """The text with each `ID=$(docker run ...)` replaced, at the same offsets, by the `docker run` itself."""
    for found in reversed([*_KEPT_ID.finditer(text)]):
        end = after_closing_bracket(text, found.end() - 1)
        blank, tail = " " * len(found["kept"]), len(found["quote"])
        text = (
            f"{text[: found.start('kept')]}{blank}{text[found.end() : end - 1]}{';' * (1 + tail)}{text[end + tail :]}"
        )
    return text


_PLAIN_ASSIGNMENT = pattern("shell_script.plain_assignment")


def _not_exported(text: str) -> Iterator[tuple[str, Word]]:
    """(name, value) of each variable that a line sets for a library, but that the script neither exports nor uses."""
    for line in _PLAIN_ASSIGNMENT.finditer(text):
        before = text[: line.start()].rstrip(" \t")
        is_continued = before.endswith(("\\\n", "\\\r\n")) or line[2].endswith("\\")
        is_used = re.search(rf"(\$\{{?[!#]?{line[1]}\b|\bexport\b[^\n]*\b{line[1]}\b|-e {line[1]}\b)", text)
        if not is_continued and not is_used and not re.search(r"set -\w*a|allexport", text):
            yield line[1], Word(line[2], line.start(1), line[0])


def script_subjects(source: Text, runs: Runs, env: Mapping[str, Word], depth: int = 0) -> Iterator[Subject]:
    """The commands and servers of a script with the outer variables `env`; `depth`: how many shells deep it runs."""
    follows_server = False
    for command in simple_commands(source, env):
        is_cut_off = follows_server and "".join(command.texts()[:1]).startswith("--")
        subjects = list(subjects_of(source, command.within(env), runs, depth, is_cut_off))
        # An action of a template may stand between a command and its flags.
        follows_server = isinstance(subjects[-1], StartedServer) and "{{" not in command.pipeline
        yield from subjects


def subjects_of(
    source: Text, command: SimpleCommand, runs: Runs, depth: int = 0, is_cut_off: bool = False
) -> Iterator[Subject]:
    """The command, then the servers that it starts, also in `docker run` or `sh -c`; `runs`: who runs the script,
    `depth`: nested shells, `is_cut_off`: the command is an option that a line break cut off a server."""
    yield InvokedCommand(command.words, command.pipeline, source.place, is_cut_off)
    texts = command.texts()
    name = next((server_words.basename(text) for text in texts if server_words.basename(text) not in _WRAPPERS), "")
    if name in _PRINTING:
        return
    start = server_words.server_start(texts)
    if start is not None and any(text.endswith(":") for text in texts[:start]):
        return  # a line of a log
    if start is not None and server_words.basename(texts[start]) in server_words.CONTAINER_TOOLS:
        yield from _container_subjects(source, command, start, depth)
    elif start is not None:
        words = command.words[start:]
        before = (
            (word, server_words.ASSIGNMENT.fullmatch(word.text)) for word in command.words[:start]
        )  # `env A=1 vllm serve`
        env = {**command.env, **{pair[1]: word.with_text(pair[2]) for word, pair in before if pair}}
        yield StartedServer(runs, words, env, source.place, source.place(words[0].offset))
    elif words := server_words.dynamo_as_serve(command.words):
        place = source.place(words[0].offset)
        yield StartedServer(runs, words, command.env, source.place, place, launcher=server_words.DYNAMO)
    elif runs == "shell" and (words := server_words.wrapped_as_serve(command.words)):
        place = source.place(words[0].offset)
        yield StartedServer(runs, words, command.env, source.place, place, launcher=name)
    elif depth < 4:
        for i, word in enumerate(command.words):
            behind_c = i > 0 and texts[i - 1].startswith("-") and texts[i - 1].endswith("c")
            to_a_shell = behind_c and any(server_words.basename(text) in _RUNS_C for text in texts[: i - 1])
            if " " in word.text.strip() and (to_a_shell or name in _TAKES_SCRIPT):
                at, text = word.place or source.place(word.offset), word.text
                if text.count("\n") > word.raw.count("\n"):  # the lines of a variable become one
                    text = re.sub(r"\\\n", "  ", text).replace("\n", ";")
                inner = Text(source.path, text, at.line, (at.column,))
                yield from script_subjects(inner, runs, env_with_places(command.env, source.place), depth + 1)


def _container_subjects(source: Text, command: SimpleCommand, start: int, depth: int) -> Iterator[Subject]:
    """The vLLM server of a `docker run` whose words begin at `start`; `depth` counts nested shells."""
    from legroom.deployments.container_images import container_run  # not for a plain command line

    run = container_run(command.words[start:])
    if run is None or not run.words:
        return
    texts = tuple(word.text for word in run.words)
    if "vllm" not in f"{run.image} {' '.join(texts)}".lower():
        return
    env = {**{name: command.env[name] for name in run.inherited if name in command.env}, **run.env}
    at = server_words.server_start(texts)
    subjects: Iterable[Subject] = ()
    if at is not None:
        words = run.words[at:]
        subjects = [StartedServer("docker", words, env, source.place, source.place(words[0].offset))]
    elif depth < 4:
        subjects = subjects_of(source, SimpleCommand(run.words, env, command.pipeline), "docker", depth + 1)
    tool = command.words[start]
    place = source.place(tool.offset)
    yield from change_servers(
        subjects,
        lambda server: replace(
            server,
            place=place,
            in_container=True,
            published=tuple(published_port(word.text, source.place(word.offset)) for word in run.published),
            other_env=frozenset((*run.inherited, *(("*",) if run.reads_env_file else ()))),
            read_as=f"a {server_words.basename(tool.text)} run line",
            **run.of_server,
        ),
    )
