"""Functions of a shell script: what stands in them is kept until they are called, with the arguments of the call."""

from __future__ import annotations

import re
from collections.abc import Iterator

from legroom.deployments.shell.scan import Word

Simple = tuple[list[Word], list[Word]]
"""The words of a simple command, and those of the line it stands in."""
LEADING = ("then", "do", "else", "if", "elif", "while", "until", "!", "time")
"""Words before a command that are none of it."""
_NAME = re.compile(r"[A-Za-z_][\w.:-]*")
_BRANCHES = (*LEADING, "for", "case", "select", "&&", "||")
"""What makes a command run several times, or not at all."""


class Function:
    """One function: its commands, and whether the script calls it."""

    def __init__(self) -> None:
        """`knows_places`: whether it is plain which argument `$1` is, wherever it stands; a `shift` in a loop may come
        once or often."""
        self.body: list[Simple] = []
        self.is_called = False
        self.knows_places = True
        self._is_straight = True

    def keep(self, words: list[Word], line: list[Word]) -> None:
        self._is_straight = self._is_straight and not any(word.raw in _BRANCHES for word in line)
        name = words[0].text
        sets = name == "getopts" or (name == "set" and any(word.text == "--" for word in words))
        if sets or (name == "shift" and not self._is_straight):
            self.knows_places = False
        self.body.append((words, line))


class Functions:
    def __init__(self) -> None:
        self.by_name: dict[str, Function] = {}
        self._every: list[Function] = []
        self._announced = ""
        self._open: Function | None = None
        self._depth = 0

    def outside(self, words: list[Word], line: list[Word]) -> list[Word]:
        """What of a command is run where it stands; nothing of what a function keeps."""
        name, words = _defined(words)
        if self._open is None:
            self._announced = name or self._announced
            if not self._announced or not words:
                return words
            name, self._announced = self._announced, ""
            if words[0].text != "{":
                return words  # a body in brackets, or none
            self._open = self.by_name[name] = Function()
            self._every.append(self._open)
        self._keep(words, line)
        return []

    def _keep(self, words: list[Word], line: list[Word]) -> None:
        assert self._open is not None
        while words and words[0].text in ("{", *LEADING):
            self._depth += words[0].text == "{"
            words = words[1:]
        if words and words[0].text == "}":
            self._depth -= 1
            if self._depth == 0:
                self._open = None
        elif words:
            self._open.keep(words, line)

    def not_called(self) -> Iterator[Simple]:
        """The commands of functions that the script itself does not call."""
        for function in self._every:
            if not function.is_called:
                yield from function.body


def joined_names(line: list[Word]) -> list[Word]:
    """The line with `name ( )` as one word: the brackets of a definition are no subshell."""
    joined: list[Word] = []
    i = 0
    while i < len(line):
        word = line[i]
        is_defined = [bracket.raw for bracket in line[i + 1 : i + 3]] == ["(", ")"] and _NAME.fullmatch(word.raw)
        joined.append(Word(word.text + "()", word.offset, word.raw + "()") if is_defined else word)
        i += 3 if is_defined else 1
    return joined


def _defined(words: list[Word]) -> tuple[str, list[Word]]:
    """The name of a function that begins here, and what stands behind it."""
    if words[0].text == "function" and len(words) > 1:
        return words[1].text.removesuffix("()"), words[2:]
    if words[0].raw.endswith("()"):
        return words[0].text.removesuffix("()"), words[1:]
    return "", words
