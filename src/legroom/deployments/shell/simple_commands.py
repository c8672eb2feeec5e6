"""Shell text as simple commands, with variables, arrays and functions expanded."""

import re
from collections.abc import Iterator, Mapping
from itertools import takewhile

from legroom.deployments.server_words import ASSIGNMENT, expand_variables
from legroom.deployments.shell.lexer import LITERAL_DOLLAR, OPERATORS, TooManyWords, Word, logical_lines, split_words
from legroom.deployments.source_text import Text
from legroom.facts import pattern
from legroom.records import dataclass, field

Simple = tuple[list[Word], list[Word]]
"""The words of a simple command, and the words of its whole line."""
LEADING = ("then", "do", "else", "if", "elif", "while", "until", "!", "time")
"""Reserved words before a command."""
_NAME = re.compile(r"[A-Za-z_][\w.:-]*")
_BRANCHES = (*LEADING, "for", "case", "select", "&&", "||")
"""Words of a line whose commands may run several times or not at all."""


class Function:
    """A shell function whose commands are kept until it is called."""

    def __init__(self) -> None:
        """`knows_positions` is False where `$1` may be any argument: after `shift` in a loop, `getopts` or `set --`."""
        self.body: list[Simple] = []
        self.is_called = False
        self.knows_positions = self._is_straight = True

    def keep_command(self, words: list[Word], line: list[Word]) -> None:
        """Adds a command of this `line` to the function's body; one that changes `$1` ... unsets `knows_positions`."""
        self._is_straight = self._is_straight and not any(word.raw in _BRANCHES for word in line)
        name = words[0].text
        sets = name == "getopts" or (name == "set" and any(word.text == "--" for word in words))
        if sets or (name == "shift" and not self._is_straight):
            self.knows_positions = False
        self.body.append((words, line))


class Functions:
    """The functions that a script has defined so far, and the one whose body is being read."""

    def __init__(self) -> None:
        self.by_name: dict[str, Function] = {}
        self._every: list[Function] = []
        self._announced = ""
        self._open: Function | None = None
        self._depth = 0

    def words_outside(self, words: list[Word], line: list[Word]) -> list[Word]:
        """The command's words, for the caller to run; [] inside a function, where they are kept for its calls."""
        name, words = _function_definition(words)
        if self._open is None:
            self._announced = name or self._announced
            if not self._announced or not words:
                return words
            name, self._announced = self._announced, ""
            if words[0].text != "{":
                return words  # a body in parentheses, or none
            self._open = self.by_name[name] = Function()
            self._every.append(self._open)
        self._keep_in_body(words, line)
        return []

    def _keep_in_body(self, words: list[Word], line: list[Word]) -> None:
        """Adds the command to the function being defined; its closing `}` ends the definition."""
        assert self._open is not None
        while words and words[0].text in ("{", *LEADING):
            self._depth += words[0].text == "{"
            words = words[1:]
        if words and words[0].text == "}":
            self._depth -= 1
            if self._depth == 0:
                self._open = None
        elif words:
            self._open.keep_command(words, line)

    def uncalled_commands(self) -> Iterator[Simple]:
        """(words, line) of each command in the bodies of functions that the script never calls."""
        for function in self._every:
            if not function.is_called:
                yield from function.body


def joined_names(line: list[Word]) -> list[Word]:
    """The line with the `name ( )` of a function definition joined into one word `name()`."""
    joined: list[Word] = []
    i = 0
    while i < len(line):
        word = line[i]
        is_defined = [bracket.raw for bracket in line[i + 1 : i + 3]] == ["(", ")"] and _NAME.fullmatch(word.raw)
        joined.append(Word(word.text + "()", word.offset, word.raw + "()") if is_defined else word)
        i += 3 if is_defined else 1
    return joined


def _function_definition(words: list[Word]) -> tuple[str, list[Word]]:
    """(the name of the function whose definition begins here, or empty; the words after the name)."""
    if words[0].text == "function" and len(words) > 1:
        return words[1].text.removesuffix("()"), words[2:]
    return (words[0].text.removesuffix("()"), words[1:]) if words[0].raw.endswith("()") else ("", words)


_ARRAY, _ARGUMENTS = pattern("simple_commands.array"), pattern("simple_commands.arguments")
_ARRAY_START = re.compile(r"(\w+)\+?=\(")
_DECLARES = ("export", "declare", "readonly", "local", "typeset")
_BARE_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_ALTERNATIVE = pattern("simple_commands.alternative")
_APPENDED = re.compile(r"([A-Za-z_]\w*)\+=(.*)", re.DOTALL)
_PLACEHOLDERS = ("...", "…")
_VALUE_OF_FLAG = pattern("simple_commands.value_of_flag")
_MAX_DEPTH = 8
"""Nested calls and expansions; with the limits below it bounds the work for a script that calls or doubles itself."""
_MAX_PIECES = 1_000
_MAX_CALLED_COMMANDS = 2_000
_MAX_VALUE_CHARS = 100_000


@dataclass(frozen=True)
class SimpleCommand:
    """One simple command with its environment."""

    words: tuple[Word, ...]
    env: Mapping[str, Word] = field(default_factory=dict)
    """Variables that are exported before it or assigned in front of it."""
    pipeline: str = ""
    """The whole line as written."""

    def texts(self) -> tuple[str, ...]:
        return tuple(word.text for word in self.words)

    def within(self, env: Mapping[str, Word]) -> "SimpleCommand":
        """The same command with the variables `env` added, where it does not set them itself."""
        return SimpleCommand(self.words, {**env, **self.env}, self.pipeline)

    def moved_by(self, offset: int, env: Mapping[str, Word]) -> "SimpleCommand":
        """The same command at `offset` of a longer text, with the variables `env` in place of its own."""
        words = tuple(Word(word.text, word.offset + offset, word.raw, word.place, word.is_open) for word in self.words)
        return SimpleCommand(words, env, self.pipeline)


def simple_commands(source: Text, env: Mapping[str, Word] | None = None) -> Iterator[SimpleCommand]:
    """Every simple command, with variables replaced where the text or `env` sets them; then TooManyWords if cut."""
    state = _ScriptState()
    for name, value in (env or {}).items():
        state.set(name, value)
        state.pieces[name] = [value]
    cut: TooManyWords | None = None
    try:
        for line in logical_lines(source.text):
            for words in _split_commands(joined_names(line)):
                yield from _evaluated(state.functions.words_outside(words, line), line, state)
    except TooManyWords as error:
        cut = error
    for words, line in state.functions.uncalled_commands():
        yield from _evaluated(words, line, state)
    if cut is not None:
        raise cut


class _ScriptState:
    """Variables, arrays and functions of a script up to the current line."""

    def __init__(self) -> None:
        """`pieces` are the parts that `NAME+=" ..."` added to a variable, each at its place; `positions` the names of
        the current positional parameters; `calls` the depth of function calls; `called` the commands run by calls."""
        self.values: dict[str, Word] = {}
        self.texts: dict[str, str] = {}
        self.exported: dict[str, Word] = {}
        self.arrays: dict[str, list[Word]] = {}
        self.pieces: dict[str, list[Word]] = {}
        self.positions: tuple[str, ...] = ()
        self.functions = Functions()
        self.calls = self.called = 0
        self.tested: set[str] = set()
        """Flags in the condition of the present `if`: `if supports "--swap-space"; then ARGS+=(--swap-space 4)`."""

    def set(self, name: str, value: Word) -> None:
        """Sets a variable to a value that is not an array."""
        self.values[name], self.texts[name] = value, value.text


def _evaluated(words: list[Word], line: list[Word], state: _ScriptState) -> Iterator[SimpleCommand]:
    """Yields the command `words` of a `line`, expanded, then a called function's; an assignment only sets `state`."""
    raw = " ".join(word.raw for word in line)
    if line and line[0].raw in ("if", "elif"):
        condition = takewhile(lambda word: word.raw != "then", line)
        state.tested = {word.text for word in condition if word.text.startswith("--")}
    elif line and line[0].raw in ("else", "fi"):
        state.tested = set()
    while words and (words[0].text in LEADING or words[0].text == "{"):
        words = words[1:]
    start = 0
    while start < len(words) and (words[start].text in _DECLARES or (start and words[start].text.startswith("-"))):
        start += 1
    first = start
    while start < len(words) and (array := _ARRAY_START.fullmatch(words[start].text)):
        end = next((at for at in range(start, len(words)) if words[at].text == ")"), len(words))
        inner = list(_expanded_words(words[start + 1 : end], state))
        inner = list(_without_flags(inner, state.tested))  # only a release that has them gets them
        longer = state.arrays.get(array[1], []) + inner if "+=" in words[start].text else inner
        state.arrays[array[1]] = longer[:_MAX_PIECES]
        start = end + 1
    if start > first:
        return
    words = list(_expanded_words(words, state))
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
        known, by = state.arrays["@"], rest[1].text if len(rest) > 1 else "1"
        is_sure = by in map(str, range(len(_positional_parameters(known)) + 1))
        _set_arguments(state, known[int(by) :] if is_sure else None)
    given = dict(_split_assignment(word) for word in own)
    env = {name: _with_literal_dollars(word) for name, word in {**state.exported, **given}.items()}
    yield SimpleCommand(tuple(_with_literal_dollars(word) for word in rest), env, raw)
    function = state.functions.by_name.get(rest[0].text)
    if function is not None and state.calls < _MAX_DEPTH and state.called < _MAX_CALLED_COMMANDS:
        yield from _call_function(function, rest[1:], given, state)


def _without_flags(words: list[Word], flags: set[str]) -> Iterator[Word]:
    """The words without these flags and their values."""
    is_left_out = False
    for word in words:
        if word.text.startswith("--"):
            is_left_out = word.text.partition("=")[0] in flags
        if not is_left_out:
            yield word


def _call_function(
    function: Function, given: list[Word], env: Mapping[str, Word], state: _ScriptState
) -> Iterator[SimpleCommand]:
    """Runs a called function's body with the arguments `given` and the call's variables `env`: yields its commands."""
    function.is_called = True
    outer, outer_env = state.arrays.get("@"), {name: state.exported.get(name) for name in env}
    _set_arguments(state, given if function.knows_positions else None)
    state.exported.update(env)
    state.calls += 1
    for words, line in function.body:
        state.called += 1
        yield from _evaluated(words, line, state)
    state.calls -= 1
    _set_arguments(state, outer)
    for name, word in outer_env.items():
        state.exported.pop(name, None)
        if word is not None:
            state.exported[name] = word


def _set_arguments(state: _ScriptState, given: list[Word] | None) -> None:
    """Sets `$1`, `$2` ... and `$@` to `given`; for None, unknown arguments, unsets them."""
    for name in state.positions:
        del state.values[name], state.texts[name]
    positions = _positional_parameters(given or [])
    state.positions = tuple(positions)
    for name, word in positions.items():
        state.set(name, word)
        state.pieces[name] = [word]
    state.arrays.pop("@", None)
    if given is not None:
        state.arrays["@"] = given


def _positional_parameters(given: list[Word]) -> dict[str, Word]:
    """{"1": first argument, ...} up to an argument that may expand to no word or several."""

    def is_one_word(word: Word) -> bool:
        """Whether the argument stays one word when the shell expands it."""
        is_quoted = word.raw.startswith(('"', "'")) and "@" not in word.text
        return is_quoted or not ("$" in word.text or "`" in word.text)

    return {str(number): word for number, word in enumerate(takewhile(is_one_word, given), 1)}


def _split_assignment(word: Word) -> tuple[str, Word]:
    """(the name of `NAME=value` or `NAME+=value`, its value as a word at the same place)."""
    name, _, value = word.text.partition("=")
    return name.removesuffix("+"), Word(value, word.offset, word.raw)


def _assign(word: Word, state: _ScriptState, *, exported: bool) -> None:
    """Applies `NAME=value` or `NAME+=value` to the state; a bare name is only exported."""
    if ASSIGNMENT.fullmatch(word.text):
        name, value = _split_assignment(word)
        state.pieces[name] = [value]
    elif added := _APPENDED.fullmatch(word.text):
        name, value = _split_assignment(word)
        before = state.values.get(name, Word("", word.offset))
        state.pieces[name] = [*state.pieces.get(name, []), value][:_MAX_PIECES]
        if not added[2][:1].isspace() and not before.text[-1:].isspace():
            state.pieces[name] = [before.with_text(before.text + value.text)]
        value = before.with_text(before.text + value.text)
    else:
        if exported and word.text in state.values:
            state.exported[word.text] = state.values[word.text]
        return
    if len(value.text) <= _MAX_VALUE_CHARS:
        state.set(name, value)
        if exported or name in state.exported:
            state.exported[name] = value


def _expanded_words(words: list[Word], state: _ScriptState, depth: int = 0) -> Iterator[Word]:
    """The words with variables, arrays and `$1` ... replaced where `state` knows them; `depth`: nested `${A:+...}`."""
    texts = state.texts
    for word in words:
        if word.text in _PLACEHOLDERS:
            continue
        array = _ARRAY.fullmatch(word.text)
        if array and array[1] in state.arrays:
            first, count = int(array[2] or 0), int(array[3]) if array[3] else None
            for inner in state.arrays[array[1]][first:][:count]:
                yield inner.with_text(expand_variables(inner.text, texts))
            continue
        given = _ARGUMENTS.fullmatch(word.text)
        if given and "@" in state.arrays:
            first, count = int(given[1] or 1), int(given[2]) if given[2] else None
            yield from state.arrays["@"][max(first - 1, 0) :][:count]
            continue
        alternative = _ALTERNATIVE.fullmatch(word.text)
        if alternative and depth < _MAX_DEPTH:
            inner_words = [Word(part, word.offset, part) for part in split_words(alternative[2])]
            if texts.get(alternative[1]) != "":
                yield from _expanded_words(inner_words, state, depth + 1)
            continue
        bare = _BARE_VARIABLE.fullmatch(word.raw)
        name = bare[1] or bare[2] if bare else ""
        value = state.values.get(name)
        splits = value is not None and any(character.isspace() for character in value.text)
        if value is not None and splits and "$(" not in value.text and "`" not in value.text:
            for piece in state.pieces[name]:
                # Quotes inside stay, as in a shell, so that JSON stays JSON.
                is_plain = "'" in piece.text or '{"' not in piece.text
                parts = split_words(piece.text) if is_plain else piece.text.split()
                yield from (Word(part, piece.offset, part, piece.place) for part in parts)
        else:
            yield word.with_text(expand_variables(_keep_empty_variables(word.text, texts), texts))


def _keep_empty_variables(text: str, texts: Mapping[str, str]) -> str:
    """The text with `--flag $NAME` protected from expansion where NAME is empty, as then a script leaves it out."""

    def kept_if_empty(variable: re.Match[str]) -> str:
        """The flag and its variable, protected from expansion where the variable is empty."""
        is_empty = texts.get(variable[3] or variable[4]) == ""
        return f"{variable[1]}{LITERAL_DOLLAR}{variable[2]}" if is_empty else variable[0]

    return _VALUE_OF_FLAG.sub(kept_if_empty, text) if "--" in text and "$" in text else text


def _with_literal_dollars(word: Word) -> Word:
    """The word with the lexer's placeholder for an escaped dollar sign turned back into `$`."""
    return word.with_text(word.text.replace(LITERAL_DOLLAR, "$")) if LITERAL_DOLLAR in word.text else word


def _split_commands(line: list[Word]) -> Iterator[list[Word]]:
    """The commands of a shell line, split at operators, without redirections and their targets."""
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
                last = current[-1] if current else None
                if last and last.raw.isdigit() and last.offset + len(last.raw) == word.offset:
                    current.pop()  # `2>`; in `--port 8000 > x.log` the number is an argument
                skip = not word.raw.endswith("&") or word.raw == ">&"
            elif current:
                yield current
                current = []
        else:
            current.append(word)
            in_array = word.raw.endswith("=(")
    if current:
        yield current
