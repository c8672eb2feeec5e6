"""vLLM's own --config files: every key is a flag."""

import json

from legroom.deployments.shell.lexer import Word, serve_words
from legroom.deployments.subjects import StartedServer
from legroom.deployments.yaml_nodes import Node
from legroom.facts import read_data
from legroom.facts.flags import all_flag_names, flag_name, flags_of
from legroom.facts.releases import Release

_COMMON_FLAGS = frozenset(read_data("file_formats.json")["common_flags"])
"""Common flags: a vLLM config file has at least one of them."""


_MORE_FLAGS = ("--extra-args", "--additional-args", "--extra-vllm-args")
"""Keys by which programs that start vLLM from such a mapping take flags as they are."""


def is_config(document: Node) -> bool:
    """Whether the document is a vLLM --config file: at least 2/3 of its keys are flags, and one is a common flag."""
    if any(key != key.lower() for key, _ in document.items()):
        return False  # maxModelLen: values of a chart
    keys = [flag_name(key) for key, _ in document.items()]
    known = set(all_flag_names())
    return bool(_COMMON_FLAGS & set(keys)) and sum(key in known for key in keys) * 3 >= 2 * len(keys)


def config_server(document: Node, release: Release) -> StartedServer:
    """The server that vLLM starts from this --config file alone."""
    place = document.source.place
    words = (*serve_words(document.offset), *config_words(document, release))
    return StartedServer("config", words, {}, place, place(document.offset), read_as="a vLLM config file")


def config_words(document: Node, release: Release) -> list[Word]:
    """The file's keys as command-line flags with their values, each at its place in the file."""
    table = flags_of(release)
    words: list[Word] = []
    for key, value in document.items():
        flag = flag_name(key)
        key_at = document.source.text.rfind(key, 0, value.offset)
        offset = key_at if key_at >= 0 else value.offset
        plain = value.plain()
        if isinstance(plain, bool):
            if plain or flag not in table:
                words.append(Word(flag, offset))
            elif table[flag].kind == "bool":
                words.append(Word("--no-" + flag[2:], offset))
        elif isinstance(plain, dict) and flag in all_flag_names():  # `labels: {a: b}` is another program's
            words += [Word(flag, offset), Word(json.dumps(plain), value.offset)]
        elif isinstance(plain, list):
            head = () if flag in _MORE_FLAGS else (Word(flag, offset),)
            words += [*head, *(item.word() for item in value.list())] if plain else []
        elif value.scalar:
            words += [Word(flag, offset), Word(value.scalar, value.offset)]
    return words
