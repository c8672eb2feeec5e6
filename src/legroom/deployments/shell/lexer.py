"""Shell text split into words and operators with their offsets, without comments and here-documents."""

import re
import shlex
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from legroom.deployments.source_text import Place
from legroom.errors import LegroomError
from legroom.facts import pattern
from legroom.records import dataclass

OPERATORS = "();<>|&"
_HEREDOC = re.compile(r"<<-?[ \t]*\\?(?P<quote>['\"]?)(?P<end>[^\s'\"<>|&;()\\]+)(?P=quote)")
_CONTINUED = pattern("lexer.continued")
_PLACEHOLDER = pattern("lexer.placeholder")
"""`<your model>`, `<org>/<model>`, `{your model}`, `{{ model }}`; shell has a comma, semicolon or space in braces."""
_QUOTED_DEFAULT = re.compile(r"""(:?-)(["'])([^"'}]*)\2\}$""")
_MAX_WORDS = 200_000  # About a second of work; real scripts have a few thousand words.
LITERAL_DOLLAR = "\ue000"
"""Stands for an escaped or single-quoted dollar sign until variables are replaced."""


@dataclass(frozen=True)
class Word:
    """One word of a command without its quotes, and the offset where it begins."""

    text: str
    offset: int
    raw: str = ""
    place: Place | None = None
    """Its place, if it comes from another text than the words around it."""
    is_open: bool = False
    """Whether it has a quote that is never closed."""

    def with_text(self, text: str) -> "Word":
        """The word with another text at the same place."""
        return Word(text, self.offset, self.raw, self.place, self.is_open)


def serve_words(offset: int) -> tuple[Word, Word]:
    """The words `vllm serve` at this offset, for a server whose command line is not in the text."""
    return Word("vllm", offset, "vllm"), Word("serve", offset, "serve")


def words_found_in(text: str, parts: Iterable[str], start: int, end: int) -> tuple[Word, ...]:
    """Each of `parts` as a word at its offset in `text[start:end]`, in order; one not found at the one before it."""
    words = []
    for part in parts:
        at = text.find(part, start, end)
        start = at if at >= 0 else start
        words.append(Word(part, start, part))
    return tuple(words)


def split_words(text: str) -> list[str]:
    """The words of a shell text; split at spaces where its quotes do not match."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def env_with_places(env: Mapping[str, Word], locate: Callable[[int], Place]) -> dict[str, Word]:
    """The variables with their places in the file, by `locate`, for a script embedded in another text."""
    return {name: replace(word, place=word.place or locate(word.offset)) for name, word in env.items()}


class TooManyWords(LegroomError):
    """Raised where a text has too many words; it is read up to `offset`."""

    def __init__(self, offset: int) -> None:
        super().__init__(f"nothing from here on: it has more than {_MAX_WORDS:,} words", "split it into several files")
        self.offset = offset


@dataclass(frozen=True)
class HereDocument:
    """The text between `<<EOF` and `EOF`."""

    words: tuple[Word, ...]
    """The words of the line with `<<EOF`."""
    start: int
    end: int
    is_quoted: bool
    """Whether the shell leaves `$` and backslashes in it alone."""


def here_documents(text: str) -> list[HereDocument]:
    """Every here-document of a script, in order."""
    documents: list[HereDocument] = []
    with suppress(TooManyWords):
        for _ in logical_lines(text, documents):
            pass
    return documents


def logical_lines(text: str, documents: list[HereDocument] | None = None) -> Iterator[list[Word]]:
    """The words of each logical line of a script; adds here-documents to `documents`. May raise TooManyWords."""
    lexer = _Lexer(text, documents if documents is not None else [])
    while lexer.position < len(text):
        if lexer.count >= _MAX_WORDS:
            raise TooManyWords(lexer.position)
        if text[lexer.position] == "\n":
            finished = lexer.end_line()
            if finished:
                yield finished
        else:
            lexer.read_token()
    if lexer.words:
        yield lexer.words


class _Lexer:
    """The position in a text and the words of the current line."""

    def __init__(self, text: str, documents: list[HereDocument]) -> None:
        self.text = text
        self.position = self.count = 0
        self.words: list[Word] = []
        self.documents = documents
        self._heredocs: list[re.Match[str]] = []
        self._arrays = self._arithmetic_end = 0
        self._ends: dict[str, list[int]] | None = None

    def end_line(self) -> list[Word]:
        """Skips the newline and the here-documents after it; returns the line's words, or [] while an array is open."""
        self.position += 1
        if self._arrays:
            return []
        for announced in self._heredocs:
            start, self.position = self.position, self._after_heredoc(announced["end"])
            if self.position > start:
                body_end = max(self.text.rfind("\n", start, self.position), start)
                is_quoted = announced["quote"] != "" or "\\" in announced[0]
                self.documents.append(HereDocument(tuple(self.words), start, body_end, is_quoted))
        self._heredocs = []
        finished, self.words = self.words, []
        return finished

    def _after_heredoc(self, delimiter: str) -> int:
        """The end of the line that closes a here-document with this delimiter; the position now where none does."""
        if self._ends is None:
            self._ends = {}
            for line in re.finditer(r"[^\n]+", self.text):
                self._ends.setdefault(line[0].strip(), []).append(line.end())
        ends = self._ends.get(delimiter, [])
        at = bisect_right(ends, self.position)
        return ends[at] if at < len(ends) else self.position

    def read_token(self) -> None:
        """Read one space, comment, operator or word."""
        character = self.text[self.position]
        continued = _CONTINUED.match(self.text, self.position) if character in "\\`^" else None
        if continued:
            self.position = continued.end()
        elif character.isspace():
            self.position += 1
        elif character == "#":
            end = self.text.find("\n", self.position)
            self.position = len(self.text) if end < 0 else end
        elif character in OPERATORS and not _PLACEHOLDER.match(self.text, self.position):
            self._read_operator(character)
        else:
            word, self.position = _parse_word(self.text, self.position)
            if word.raw.endswith("=") and self.text[self.position : self.position + 1] == "(":
                word = Word(word.text + "(", word.offset, word.raw + "(")
                self.position += 1
                self._arrays += 1
            self.words.append(word)
            self.count += 1

    def _read_operator(self, character: str) -> None:
        """Appends the operator at the position as a word; a `<<` is remembered until the line ends."""
        if self.text.startswith("((", self.position):
            # In `(( a << b ))`, `<<` is a shift.
            line_end = self.text.find("\n", self.position)
            closing = self.text.find("))", self.position, line_end if line_end >= 0 else len(self.text))
            self._arithmetic_end = max(self._arithmetic_end, closing)
        heredoc = _HEREDOC.match(self.text, self.position)
        if heredoc and self.position >= self._arithmetic_end:
            self._heredocs.append(heredoc)
            self.position = heredoc.end()
            return
        end = self.position + (2 if self.text.startswith("&>", self.position) else 1)
        while end < len(self.text) and self.text[end] == self.text[end - 1]:
            end += 1
        if character == ">" and self.text[end : end + 1] == "&":
            end += 1
        self.words.append(Word(self.text[self.position : end], self.position, self.text[self.position : end]))
        if self._arrays and character == ")":
            self._arrays -= 1
        self.position = end


def _parse_word(text: str, start: int) -> tuple[Word, int]:
    """(the word at `start` with its quotes removed, the position after it)."""
    position, out, is_open = start, [], False
    while position < len(text):
        character = text[position]
        if character == "'":
            end = text.find("'", position + 1)
            is_open = end < 0
            end = len(text) if is_open else end
            out.append(text[position + 1 : end].replace("$", LITERAL_DOLLAR))
            position = end + 1
        elif character == '"':
            content, position = _double_quoted(text, position + 1)
            is_open = position > len(text)
            out.append(content)
        elif character == "`":
            end = text.find("`", position + 1)
            end = len(text) - 1 if end < 0 else end
            out.append(text[position : end + 1])
            position = end + 1
        elif text.startswith(("$(", "${"), position):
            end = after_closing_bracket(text, position + 1)
            out.append(_QUOTED_DEFAULT.sub(r"\1\3}", text[position:end]))
            position = end
        elif character in "<{" and (blank := _PLACEHOLDER.match(text, position)):
            out.append(blank[0])
            position = blank.end()
        elif character == "\\":
            if _CONTINUED.match(text, position):
                break
            out.append(text[position + 1 : position + 2].replace("$", LITERAL_DOLLAR))
            position += 2
        elif character.isspace() or character in OPERATORS:
            break
        else:
            out.append(character)
            position += 1
    return Word("".join(out), start, text[start:position], is_open=is_open), max(position, start + 1)


def _double_quoted(text: str, position: int) -> tuple[str, int]:
    """(the content up to the closing quote with escapes resolved, the position after that quote)."""
    out: list[str] = []
    while position < len(text) and text[position] != '"':
        if text[position] == "\\" and position + 1 < len(text) and text[position + 1] in '"\\$`\n':
            out.append({"\n": "", "$": LITERAL_DOLLAR}.get(text[position + 1], text[position + 1]))
            position += 2
        elif text.startswith("$(", position):
            end = after_closing_bracket(text, position + 1)
            out.append(text[position:end])
            position = end
        else:
            out.append(text[position])
            position += 1
    return "".join(out), position + 1


def after_closing_bracket(text: str, position: int) -> int:
    """The position after the bracket that closes the one at `position`; the text's end where none does."""
    opening = text[position]
    closing = {"(": ")", "{": "}"}[opening]
    depth = 0
    for i in range(position, len(text)):
        if text[i] == opening:
            depth += 1
        elif text[i] == closing:
            depth -= 1
            if depth == 0:
                return i + 1
    return len(text)
