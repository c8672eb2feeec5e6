"""A server's command line parsed to ServeArgs, as one release parses it. `parse_flags` raises on no flag: one that the
release refuses is reported as a `FlagProblem` and left out."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from legroom.facts.flags import Flag, choices, flag_history, flag_name, flags_ever, flags_of
from legroom.facts.releases import Release, successor
from legroom.records import dataclass, field
from legroom.vllm import flag_values
from legroom.vllm.args import ServeArgs, Usage
from legroom.vllm.flag_problems import FlagProblem, ProblemKind, explain_unknown

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_API_SERVERS = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
_SHORT_SPECULATIVE = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
_REPEATABLE = {"--middleware"}
_DOES_NOTHING = {
    "--swap-space": ("0.11.0", "the V1 engine never swaps: a preempted request is recomputed"),
    "--use-v2-block-manager": ("0.6.3.post1", "the second block manager became the only one"),
    "--disable-log-requests": ("0.10.1", "requests are not logged unless --enable-log-requests is given"),
    "--num-lookahead-slots": ("0.11.0", "speculative decoding reserves its slots itself"),
}
"""Flags without effect: since which release, and why."""


@dataclass
class FlagReader:
    """The state of parsing one command line for one release."""

    release: Release
    tokens: list[str]
    at: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    others: dict[str, tuple[str, ...]] = field(default_factory=dict)
    dotted: dict[str, tuple[Flag, dict[str, Any]]] = field(default_factory=dict)
    problems: list[FlagProblem] = field(default_factory=list)
    positionals: list[str] = field(default_factory=list)

    def problem(self, flag: str, kind: ProblemKind, message: str, instead: str = "", value: str = "") -> None:
        """Records a problem of a flag; `instead`: the flag or value to write in its place; `value`: the one written."""
        self.problems.append(FlagProblem(flag, kind, message, instead, value))

    def has_value_next(self) -> bool:
        """Whether the next word is a value rather than a flag or the end."""
        return self.at < len(self.tokens) and not flag_values.looks_like_flag(self.tokens[self.at])

    def take_token(self) -> str:
        """The next word, which is then read."""
        self.at += 1
        return self.tokens[self.at - 1]

    def convert_and_store(self, flag: Flag, written: str, text: str) -> None:
        """Stores `text` as the flag's value, or records why the release rejects it; `written`: the name as typed."""
        try:
            value = self._convert(flag, text)
        except flag_values.BadValue as expected:
            self.problem(flag.name, "bad_value", f"{written} takes {expected}, got {text!r}", value=text)
            return
        allowed = choices(flag.name, self.release) if flag.kind in ("str", "int") else None
        if allowed and value is not None and value not in allowed and not self._newer_takes(flag, value):
            listed = ", ".join(str(choice) for choice in allowed if choice is not None)
            message = f"{flag.name} {text} is not among the choices of vLLM {self.release}: {listed}"
            self.problem(flag.name, "bad_choice", message, _nearest_choice(text, allowed), text)
            return
        self.store(flag, value)

    def _newer_takes(self, flag: Flag, value: Any) -> bool:
        """Whether the release after an unreleased build's takes the value; then an uncertain problem is recorded."""
        newer = successor(self.release)
        if newer is None or value not in (choices(flag.name, newer) or ()):
            return False
        message = f"{flag.name} {value} came with vLLM {newer}; whether {self.release.requested} takes it is not known"
        self.problem(flag.name, "uncertain", message)
        return True

    def _convert(self, flag: Flag, text: str) -> Any:
        """The text as a value of the flag's type, `None` as None; raises BadValue where it is no such value."""
        if text == "None" and flag.kind not in ("str", "maybe"):
            return None
        if flag.name == "--max-model-len" and self.release.at_least("0.14.0") and text.strip().lower() == "auto":
            return -1
        if flag.kind in ("int", "human"):
            return flag_values.read_int(text, human=flag.kind == "human")
        if flag.kind == "float":
            return flag_values.read_float(text)
        if flag.kind == "pairs" or (flag.name == "--limit-mm-per-prompt" and not text.lstrip().startswith("{")):
            # `image=2,video=1` or a JSON object as a dict; the former is a recorded problem since 0.10.
            if text.lstrip().startswith("{"):
                value = flag_values.read_json(text)
                if not isinstance(value, dict):
                    raise flag_values.BadValue("pairs like image=2,video=1")
                return value
            pairs = flag_values.read_pairs(text)
            if self.release.at_least("0.10.0"):
                message = f"{flag.name} takes JSON in vLLM {self.release}, got {text!r}"
                self.problem(flag.name, "bad_value", message, f"{flag.name} '{json.dumps(pairs)}'", text)
            return pairs
        return self._convert_json(flag, text) if flag.kind == "json" else text

    def _convert_json(self, flag: Flag, text: str) -> Any:
        """The JSON value; raises BadValue where the flag needs an object."""
        value = flag_values.read_json(text)
        if flag.name == "--compilation-config" and isinstance(value, int) and not isinstance(value, bool):
            if self.release.at_least("0.12.0"):
                message = f"{flag.name} takes JSON since vLLM 0.12.0, got {text!r}"
                self.problem(flag.name, "bad_value", message, f"-O{value}", text)
            return {"level": value}
        if flag_values.FIELDS.get(flag.dest, "").startswith("Mapping") and not isinstance(value, dict):
            raise flag_values.BadValue("a JSON object like '{\"key\": 1}'")
        return value

    def store(self, flag: Flag, value: Any) -> None:
        """Store a converted value in its field, merge it into the speculative config, or keep it as words among the
        others (--middleware adds up, None drops the flag); a bad --optimization-level becomes a problem."""
        if flag.dest in flag_values.SPECULATIVE_FIELDS or flag.dest in _SHORT_SPECULATIVE:
            key = flag_values.SPECULATIVE_FIELDS.get(flag.dest) or _SHORT_SPECULATIVE[flag.dest]
            self.values["speculative_config"] = {**(self.values.get("speculative_config") or {}), key: value}
        elif flag.dest == "optimization_level":
            # Stores --optimization-level 0 to 3; anything else is recorded as a problem.
            text = str(value).removeprefix("O")
            if text in ("0", "1", "2", "3"):
                self.values["optimization_level"] = int(text)
            else:
                message = f"--optimization-level takes 0, 1, 2 or 3, got {value!r}"
                self.problem("--optimization-level", "bad_value", message, value=str(value))
        elif flag.dest in flag_values.FIELDS:
            is_draft = flag.dest == "speculative_config" and isinstance(value, dict)  # beside --spec-model and the like
            self.values[flag.dest] = {**(self.values.get(flag.dest) or {}), **value} if is_draft else value
        elif flag.name in _REPEATABLE and flag.name in self.others:
            self.others[flag.name] += (flag.name, str(value))
        elif value is None:
            self.others.pop(flag.name, None)
        else:
            self.others[flag.name] = flag_values.as_words(value)

    def to_args(self, usage: Usage, env: Mapping[str, str]) -> ServeArgs:
        """All values read so far as ServeArgs, with the environment's variables."""
        others: list[str] = []
        table = flags_of(self.release)
        for name, words in self.others.items():
            kind = table[name].kind if name in table else "str"
            if words == ("False",) and kind == "bool":
                others.append("--no-" + name[2:])
            elif len(words) == 1 and (
                flag_values.looks_like_flag(words[0]) or kind in ("optbool", "maybe") or not words[0]
            ):
                others.append(f"{name}={words[0]}")
            elif words != ("False",) or kind != "switch":
                others += [name, *words]
        values = {name: value for name, value in self.values.items() if value is not None}
        return ServeArgs(usage=usage, env=dict(env), others=tuple(others), **values)


def _nearest_choice(text: str, allowed: tuple[Any, ...]) -> str:
    """The choice nearest to a misspelt value; empty where none is near."""
    import difflib  # only a misspelt value needs it

    numbers = [choice for choice in allowed if isinstance(choice, int)]
    if numbers and text.isdecimal():
        return str(min(numbers, key=lambda choice: abs(choice - int(text))))
    near = difflib.get_close_matches(text, [str(choice) for choice in allowed], n=1)
    return near[0] if near else ""


@dataclass(frozen=True)
class ParsedArgs:
    """The parsed flags, and every flag that the release does not accept."""

    args: ServeArgs
    problems: tuple[FlagProblem, ...] = ()


def parse_flags(tokens: Sequence[str], release: Release, *, usage: Usage = "serve") -> ParsedArgs:
    """Parse `vllm serve MODEL ...`, `python -m vllm.entrypoints.openai.api_server ...`, or the flags alone."""
    env, rest, positional_model = _strip_head(tokens)
    reader = FlagReader(release, rest)
    while reader.at < len(rest):
        token = reader.take_token()
        if not token or token in ("--", "-h", "--help"):
            continue
        if not token.startswith("-") or token == "-" or flag_values.NUMBER.fullmatch(token):
            reader.positionals.append(token)
        elif token.startswith("-O") and not token.startswith("-O."):
            _read_optimization(token, reader)
        else:
            _read_flag(token, reader)
    # The dotted keys of a flag are one JSON value, which replaces one given as a whole.
    for flag, value in reader.dotted.values():
        reader.store(flag, value)
    # Takes the first positional as the model where none is given; the others are recorded as problems.
    words = reader.positionals
    if words and positional_model and not reader.values.get("model"):
        reader.values["model"] = words.pop(0)
    for word in words:
        reader.problem(word, "unknown", f"{word!r} belongs to no flag: vLLM leaves it unrecognized")
    return ParsedArgs(reader.to_args(usage, env), tuple(reader.problems))


def split_assignments(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(the leading NAME=value words as variables, the words after them) of a shell command."""
    count = next((i for i, word in enumerate(words) if not _ASSIGNMENT.fullmatch(word)), len(words))
    return dict(word.partition("=")[::2] for word in words[:count]), list(words[count:])


def _strip_head(tokens: Sequence[str]) -> tuple[dict[str, str], list[str], bool]:
    """(environment variables, the words after the program's name, whether a bare word among them is the model)."""
    env, tokens = split_assignments(tokens)
    for i, token in enumerate(tokens[:12]):
        if token == "serve" and i and tokens[i - 1].rpartition("/")[2] == "vllm":
            return env, tokens[i + 1 :], True
        if token in _API_SERVERS or token.endswith("/api_server.py"):
            return env, tokens[i + 1 :], False
    if tokens[:1] == ["serve"]:
        return env, tokens[1:], True
    return env, tokens, True


def _read_optimization(token: str, reader: FlagReader) -> None:
    """Reads -O3, -O=3, -O 3: a compilation level up to 0.11.2, an optimization level since; also -O '{json}'."""
    text = token[2:].removeprefix("=")
    if not text and reader.has_value_next():
        text = reader.take_token()
    if reader.release.at_least("0.12.0"):
        if text in ("0", "1", "2", "3"):
            reader.values["optimization_level"] = int(text)
        else:
            reader.problem(token, "bad_value", f"-O takes 0, 1, 2 or 3 since vLLM 0.12.0, not {text!r}", "-cc", text)
        return
    flag = flags_of(reader.release).get("-O")
    if flag is None:
        reader.problem(token, "not_yet", f"-O came with vLLM 0.6.5; {reader.release} does not have it")
    else:
        reader.convert_and_store(flag, token, text)


def _read_flag(token: str, reader: FlagReader) -> None:
    """Stores the flag's value, or records a problem where the release does not know it or rejects the value."""
    name, has_value, text = token.partition("=")
    value = text if has_value else None
    dashes = "--" if name.startswith("--") else "-"
    head, dot, path = name[len(dashes) :].partition("\0" if " " in name else ".")  # a flag and its value as one word
    name = flag_name(head) if dashes == "--" else dashes + head
    flag, negated = _find_flag(name, reader)
    if flag is None:
        _skip_unknown(name, value, reader)
        return
    if flag.name in _DOES_NOTHING and reader.release.at_least(_DOES_NOTHING[flag.name][0]):
        reader.problem(flag.name, "ignored", f"{flag.name} does nothing here: {_DOES_NOTHING[flag.name][1]}")
    if dot and flag.kind == "json":
        _read_dotted(flag, path, value, reader)
    elif flag.kind in ("switch", "bool", "optbool"):
        _read_switch(flag, negated, value, reader)
    elif flag.kind.startswith("list:"):
        _read_list(flag, value, reader)
    elif value is not None or reader.has_value_next():
        reader.convert_and_store(flag, flag.name, reader.take_token() if value is None else value)
    elif flag.kind == "maybe":
        reader.store(flag, True)
    else:
        reader.problem(flag.name, "bad_value", f"{flag.name} needs a value")


def _find_flag(name: str, reader: FlagReader) -> tuple[Flag | None, bool]:
    """(the flag with this name or only one with this prefix, else None; whether `--no-` negates it)."""
    table = flags_of(reader.release)
    if name in table:
        return table[name], False
    base = table.get("--" + name[5:]) if name.startswith("--no-") else None
    if base and base.kind == "bool":
        return base, True
    if not name.startswith("--") or len(name) < 4:
        return None, False
    if flag_history(name) is not None:
        return None, False  # a flag of another release, which is reported as such
    matches = {flag.name: (flag, False) for long, flag in table.items() if long.startswith(name)}
    if name.startswith("--no-"):
        for long, flag in table.items():
            if flag.kind == "bool" and long.startswith("--" + name[5:]):
                matches["--no-" + long[2:]] = (flag, True)
    if len(matches) == 1:
        return next(iter(matches.values()))
    if matches:
        shown = ", ".join(sorted(matches)[:6])
        reader.problem(name, "unknown", f"{name} is short for several flags: {shown}", min(matches))
    return None, False


def _skip_unknown(name: str, value: str | None, reader: FlagReader) -> None:
    """Records the flag `name`, which the release does not have, as a problem, and skips its value."""
    positive = "--" + name[5:] if name.startswith("--no-") else name
    if any(problem.flag == name for problem in reader.problems):
        pass
    elif name != positive and positive in flags_of(reader.release):
        reader.problem(name, "unknown", f"{positive} has no --no- form in vLLM {reader.release}: leave it out")
    else:
        reader.problems.append(explain_unknown(positive if flag_history(positive) else name, reader.release))
    known = flags_ever().get(positive)
    kind = known.kind if known else None
    if value is not None or kind in ("switch", "bool") or name != positive:
        return
    while reader.has_value_next():
        reader.take_token()
        if kind is None or not kind.startswith("list:"):
            break


def _read_switch(flag: Flag, negated: bool, value: str | None, reader: FlagReader) -> None:
    """Stores a boolean flag, off where `negated`; a value after it counts, and is a problem for all but `optbool`."""
    written = f"{flag.name}={value}"
    if value is None and reader.has_value_next() and reader.tokens[reader.at].lower() in ("true", "false"):
        value = reader.take_token()
        written = f"{flag.name} {value}"
    if value is None:
        reader.store(flag, not negated)
        return
    wanted = (value.strip().lower() == "true") != negated
    if value.strip().lower() not in ("true", "false"):
        taken = "true or false" if flag.kind == "optbool" else "no value"
        reader.problem(flag.name, "bad_value", f"{flag.name} takes {taken}, got {value!r}", value=value)
        return
    if flag.kind != "optbool":
        off = "--no-" + flag.name[2:] if flag.kind == "bool" else ""
        message = f"{written}: {flag.name} takes no value in vLLM {reader.release}"
        reader.problem(flag.name, "bad_value", message, flag.name if wanted else off)
    reader.store(flag, wanted)


def _read_list(flag: Flag, value: str | None, reader: FlagReader) -> None:
    """Stores the words up to the next flag as a list; without any, or with bad ones, a problem is recorded."""
    items = [] if value is None else [value]
    while value is None and reader.has_value_next():
        items.append(reader.take_token())
    if not items:
        reader.problem(flag.name, "bad_value", f"{flag.name} needs at least one value")
        return
    if flag.kind == "list:int" and items[0].lstrip().startswith("["):
        items = [item for item in re.split(r"[\s,\[\]]+", " ".join(items)) if item]
    converted: list[Any] = list(items)
    try:
        if flag.kind == "list:int":
            converted = [flag_values.read_int(item, human=False) for item in items]
        elif flag.kind == "list:float":
            converted = [flag_values.read_float(item) for item in items]
    except flag_values.BadValue as expected:
        value = " ".join(items)
        reader.problem(flag.name, "bad_value", f"{flag.name} takes {expected}, got {value!r}", value=value)
        return
    reader.store(flag, tuple(converted))


def _read_dotted(flag: Flag, path: str, value: str | None, reader: FlagReader) -> None:
    """Stores key `path` of a JSON flag (`--x.key V`), or list items (`--x.list+ a,b`); no `value`: of the next word."""
    if value is None and reader.at >= len(reader.tokens):
        reader.problem(flag.name, "bad_value", f"{flag.name}.{path} needs a value")
        return
    text = reader.take_token() if value is None else value
    keys = path.removesuffix("+").split(".")
    if reader.release.before("0.9.0"):
        message = f"{flag.name}.{path}: dotted keys came with vLLM 0.9.0"
        reader.problem(flag.name, "not_yet", message, f"{flag.name} as JSON")
    elif not all(keys) or len(keys) > 8:
        reader.problem(flag.name, "bad_value", f"{flag.name}.{path} is not a key")
    else:
        content: Any = text.split(",") if path.endswith("+") else flag_values.dotted_value(text)
        _, before = reader.dotted.get(flag.name, (flag, {}))
        reader.dotted[flag.name] = (flag, flag_values.merged(before, flag_values.nested(keys, content)))
