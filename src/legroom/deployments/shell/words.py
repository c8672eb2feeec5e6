"""Shell text as simple commands whose words know where they stand."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

from legroom.deployments.server_words import ASSIGNMENT, expand
from legroom.deployments.shell.functions import LEADING, Function, Functions, joined_names
from legroom.deployments.shell.scan import LITERAL_DOLLAR, OPERATORS, TooManyWords, Word, logical_lines
from legroom.deployments.text import Text
from legroom.records import dataclass, field

_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\](?::(\d+)(?::(\d+))?)?\}")
"""`${NAME[@]}`, and a slice of it."""
_ARGUMENTS = re.compile(r"\$(?:[@*]|\{[@*](?::(\d+)(?::(\d+))?)?\})")
"""`$@`, and a slice of it."""
_ARRAY_START = re.compile(r"(\w+)\+?=\(")
_DECLARES = ("export", "declare", "readonly", "local", "typeset")
_BARE_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_ALTERNATIVE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?:?\+(.*)\}", re.DOTALL)
"""`${NAME:+--flag}`: what stands there once NAME is set."""
_APPENDED = re.compile(r"([A-Za-z_]\w*)\+=(.*)", re.DOTALL)
_PLACEHOLDERS = ("...", "…")
_VALUE_OF_FLAG = re.compile(r"""(--[\w-]+[ =]+["']?)\$(\{(\w+)\}|(\w+))""")
"""`--quantization $QUANTIZATION` inside a text that is put together."""
_DEEPEST = 8
_MOST_PIECES = 1_000
_MOST_CALLED = 2_000
"""Commands inside functions that are looked at once more for a call."""
_LONGEST_VALUE = 100_000
"""Of one variable or array; a script that doubles its own value would double it for ever."""


@dataclass(frozen=True)
class SimpleCommand:
    """One simple command with the environment it sees."""

    words: tuple[Word, ...]
    env: Mapping[str, Word] = field(default_factory=dict)
    """What was exported before it or stands in front of it."""
    pipeline: str = ""
    """The raw line it stands in."""

    def texts(self) -> tuple[str, ...]:
        return tuple(word.text for word in self.words)

    def within(self, env: Mapping[str, Word]) -> SimpleCommand:
        """The same command where variables are set around its text."""
        return SimpleCommand(self.words, {**env, **self.env}, self.pipeline)

    def moved(self, offset: int, env: Mapping[str, Word]) -> SimpleCommand:
        """The same command of a text that stands at `offset` of a longer one."""
        words = tuple(Word(word.text, word.offset + offset, word.raw, word.place, word.is_open) for word in self.words)
        return SimpleCommand(words, env, self.pipeline)


def commands(source: Text, env: Mapping[str, Word] | None = None) -> Iterator[SimpleCommand]:
    """Every simple command, variables replaced where the text itself or `env` around it sets them."""
    state = _State()
    for name, value in (env or {}).items():
        state.set(name, value)
        state.pieces[name] = [value]
    cut: TooManyWords | None = None
    try:
        for line in logical_lines(source.text):
            for words in _split_commands(joined_names(line)):
                yield from _take(state.functions.outside(words, line), line, state)
    except TooManyWords as error:
        cut = error
    for words, line in state.functions.not_called():
        yield from _take(words, line, state)
    if cut is not None:
        raise cut


class _State:
    """Where the reading of one script stands."""

    def __init__(self) -> None:
        """`texts` are the values alone, `pieces` what `NAME+=" ..."` added to a variable, each where it stands, and
        `places` the variables that are arguments of a call: `1`, `2` ... `calls` is how deep one function is called by
        another, `called` how many commands were looked at because of a call."""
        self.values: dict[str, Word] = {}
        self.texts: dict[str, str] = {}
        self.exported: dict[str, Word] = {}
        self.arrays: dict[str, list[Word]] = {}
        self.pieces: dict[str, list[Word]] = {}
        self.places: tuple[str, ...] = ()
        self.functions = Functions()
        self.calls = self.called = 0

    def set(self, name: str, value: Word) -> None:
        """A variable's value from here on."""
        self.values[name], self.texts[name] = value, value.text


def _take(words: list[Word], line: list[Word], state: _State) -> Iterator[SimpleCommand]:
    raw = " ".join(word.raw for word in line)
    while words and (words[0].text in LEADING or words[0].text == "{"):
        words = words[1:]
    start = 0
    while start < len(words) and (words[start].text in _DECLARES or (start and words[start].text.startswith("-"))):
        start += 1
    if start < len(words) and (array := _ARRAY_START.fullmatch(words[start].text)):
        inner = list(_expanded([word for word in words[start + 1 :] if word.text != ")"], state))
        longer = state.arrays.get(array[1], []) + inner if "+=" in words[start].text else inner
        state.arrays[array[1]] = longer[:_MOST_PIECES]
        return
    words = list(_expanded(words, state))
    count = 0
    while count < len(words) and (ASSIGNMENT.fullmatch(words[count].text) or _APPENDED.fullmatch(words[count].text)):
        count += 1
    own, rest = words[:count], words[count:]
    exports = bool(rest) and rest[0].text in _DECLARES
    if not rest or exports:
        for word in (*own, *rest[1:]):
            _assign(word, state, exported=exports)
        return
    if rest[0].text == "shift" and "@" in state.arrays:
        _set_arguments(state, _shifted(state.arrays["@"], rest[1].text if len(rest) > 1 else "1"))
    given = dict(_assignment(word) for word in own)
    env = {name: _final(word) for name, word in {**state.exported, **given}.items()}
    yield SimpleCommand(tuple(_final(word) for word in rest), env, raw)
    function = state.functions.by_name.get(rest[0].text)
    if function is not None and state.calls < _DEEPEST and state.called < _MOST_CALLED:
        yield from _call(function, rest[1:], given, state)


def _call(function: Function, given: list[Word], env: Mapping[str, Word], state: _State) -> Iterator[SimpleCommand]:
    """A function's commands with the arguments of a call in their places, and with the variables before it."""
    function.is_called = True
    outer, outer_env = state.arrays.get("@"), {name: state.exported.get(name) for name in env}
    _set_arguments(state, given if function.knows_places else None)
    state.exported.update(env)
    state.calls += 1
    for words, line in function.body:
        state.called += 1
        yield from _take(words, line, state)
    state.calls -= 1
    _set_arguments(state, outer)
    for name, word in outer_env.items():
        state.exported.pop(name, None)
        if word is not None:
            state.exported[name] = word


def _set_arguments(state: _State, given: list[Word] | None) -> None:
    """`$1`, `$2` ... and `$@`, those before put away; None where they are not known."""
    for name in state.places:
        del state.values[name], state.texts[name]
    places = _places(given or [])
    state.places = tuple(places)
    for name, word in places.items():
        state.set(name, word)
        state.pieces[name] = [word]
    state.arrays.pop("@", None)
    if given is not None:
        state.arrays["@"] = given


def _places(given: list[Word]) -> dict[str, Word]:
    """`$1`, `$2` ...: up to a word that may become several, or none."""
    places: dict[str, Word] = {}
    for number, word in enumerate(given, 1):
        is_single = word.raw.startswith(('"', "'")) and "@" not in word.text
        if not is_single and ("$" in word.text or "`" in word.text):
            break
        places[str(number)] = word
    return places


def _shifted(given: list[Word], count: str) -> list[Word] | None:
    """What is left after `shift`; None where it is not plain which words go."""
    return given[int(count) :] if count in map(str, range(len(_places(given)) + 1)) else None


def _assignment(word: Word) -> tuple[str, Word]:
    name, _, value = word.text.partition("=")
    return name.removesuffix("+"), Word(value, word.offset, word.raw)


def _assign(word: Word, state: _State, *, exported: bool) -> None:
    if ASSIGNMENT.fullmatch(word.text):
        name, value = _assignment(word)
        state.pieces[name] = [value]
    elif added := _APPENDED.fullmatch(word.text):
        name, value = _assignment(word)
        before = state.values.get(name, Word("", word.offset))
        state.pieces[name] = [*state.pieces.get(name, []), value][:_MOST_PIECES]
        if not added[2][:1].isspace() and not before.text[-1:].isspace():
            state.pieces[name] = [before.with_text(before.text + value.text)]
        value = before.with_text(before.text + value.text)
    else:
        if exported and word.text in state.values:
            state.exported[word.text] = state.values[word.text]
        return
    if len(value.text) <= _LONGEST_VALUE:
        state.set(name, value)
        if exported or name in state.exported:
            state.exported[name] = value


def _expanded(words: list[Word], state: _State, depth: int = 0) -> Iterator[Word]:
    texts = state.texts
    for word in words:
        if word.text in _PLACEHOLDERS:
            continue
        array = _ARRAY.fullmatch(word.text)
        if array and array[1] in state.arrays:
            first, count = int(array[2] or 0), int(array[3]) if array[3] else None
            for inner in state.arrays[array[1]][first:][:count]:
                yield inner.with_text(expand(inner.text, texts))
            continue
        given = _ARGUMENTS.fullmatch(word.text)
        if given and "@" in state.arrays:
            first, count = int(given[1] or 1), int(given[2]) if given[2] else None
            yield from state.arrays["@"][max(first - 1, 0) :][:count]
            continue
        alternative = _ALTERNATIVE.fullmatch(word.text)
        if alternative and depth < _DEEPEST:
            inner_words = [Word(part, word.offset, part) for part in _parts(alternative[2])]
            if texts.get(alternative[1]) != "":
                yield from _expanded(inner_words, state, depth + 1)
            continue
        bare = _BARE_VARIABLE.fullmatch(word.raw)
        name = bare[1] or bare[2] if bare else ""
        value = state.values.get(name)
        splits = value is not None and any(character.isspace() for character in value.text)
        if value is not None and splits and "$(" not in value.text and "`" not in value.text:
            for piece in state.pieces[name]:
                yield from (Word(part, piece.offset, part, piece.place) for part in _split_value(piece.text))
        else:
            yield word.with_text(expand(_with_open_values(word.text, texts), texts))


def _with_open_values(text: str, texts: Mapping[str, str]) -> str:
    """A value that is empty unless somebody sets it stays what it is: the script adds its flag only where it is set."""

    def value(variable: re.Match[str]) -> str:
        is_empty = texts.get(variable[3] or variable[4]) == ""
        return f"{variable[1]}{LITERAL_DOLLAR}{variable[2]}" if is_empty else variable[0]

    return _VALUE_OF_FLAG.sub(value, text) if "--" in text and "$" in text else text


def _final(word: Word) -> Word:
    return word.with_text(word.text.replace(LITERAL_DOLLAR, "$")) if LITERAL_DOLLAR in word.text else word


def _end(word: Word) -> int:
    return word.offset + len(word.raw)


def _split_value(text: str) -> list[str]:
    """The words of a variable without quotes around it. The shell leaves quotes inside of it alone: JSON stays JSON.

    Single quotes are for `eval`, or a slip that nobody means; the words inside them are what is meant.
    """
    return _parts(text) if "'" in text or '{"' not in text else text.split()


def _parts(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _split_commands(line: list[Word]) -> Iterator[list[Word]]:
    """Cut at operators; redirections and their targets are left out."""
    current: list[Word] = []
    skip = in_array = False
    for word in line:
        if in_array:
            current.append(word)
            in_array = word.raw != ")"
            continue
        if skip:
            skip = False
        elif word.raw and set(word.raw) <= set(OPERATORS):
            if "<" in word.raw or ">" in word.raw:
                if current and current[-1].raw.isdigit() and _end(current[-1]) == word.offset:
                    current.pop()  # `2>`; in `--port 8000 > x.log` the number is a word of its own
                skip = not word.raw.endswith("&") or word.raw == ">&"
            elif current:
                yield current
                current = []
        else:
            current.append(word)
            in_array = word.raw.endswith("=(")
    if current:
        yield current
