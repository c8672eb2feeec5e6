"""A server's command line, read as one release reads it.

`parse_flags` never fails on a flag: what the release would refuse is reported as a `FlagProblem` and left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from legroom.facts.flags import Flag, flag_history, flag_kind_ever, flag_name, flags_of
from legroom.facts.releases import Release
from legroom.records import dataclass
from legroom.vllm.args import ServeArgs, Usage
from legroom.vllm.flag_problems import FlagProblem, explain_unknown
from legroom.vllm.reading import (
    NUMBER,
    BadValue,
    FlagReader,
    dotted_value,
    merged,
    nested,
    read_bool,
    read_float,
    read_int,
)

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_API_SERVERS = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
_MOST_HEAD_WORDS = 12
_DOES_NOTHING = {
    "--swap-space": ("0.11.0", "the V1 engine never swaps: a preempted request is recomputed"),
    "--use-v2-block-manager": ("0.6.3.post1", "the second block manager became the only one"),
    "--disable-log-requests": ("0.10.1", "requests are not logged unless --enable-log-requests is given"),
    "--num-lookahead-slots": ("0.11.0", "speculative decoding reserves its slots itself"),
}
"""Flags that a release still takes and that change nothing, since when and why."""


@dataclass(frozen=True)
class ParsedArgs:
    """The flags as `ServeArgs`, and every flag the release would not take."""

    args: ServeArgs
    problems: tuple[FlagProblem, ...] = ()


def parse_flags(tokens: Sequence[str], release: Release, *, usage: Usage = "serve") -> ParsedArgs:
    """Read `vllm serve MODEL ...`, `python -m vllm.entrypoints.openai.api_server ...`, or the flags alone."""
    env, rest, positional_model = _strip_head(list(tokens))
    reading = FlagReader(release, rest)
    while reading.at < len(rest):
        _read_token(reading)
    reading.store_dotted()
    _take_positionals(reading, positional_model)
    return ParsedArgs(reading.to_args(usage, env), tuple(reading.problems))


def _strip_head(tokens: list[str]) -> tuple[dict[str, str], list[str], bool]:
    """Environment assignments, the tokens after the server's name, and whether a bare word is the model."""
    env: dict[str, str] = {}
    while tokens and _ASSIGNMENT.fullmatch(tokens[0]):
        name, _, value = tokens.pop(0).partition("=")
        env[name] = value
    for i, token in enumerate(tokens[:_MOST_HEAD_WORDS]):
        if token == "serve" and i and tokens[i - 1].rpartition("/")[2] == "vllm":
            return env, tokens[i + 1 :], True
        if token in _API_SERVERS or token.endswith("/api_server.py"):
            return env, tokens[i + 1 :], False
    if tokens[:1] == ["serve"]:
        return env, tokens[1:], True
    return env, tokens, True


def _read_token(reading: FlagReader) -> None:
    token = reading.take()
    if not token or token in ("--", "-h", "--help"):
        return
    if not token.startswith("-") or token == "-" or NUMBER.fullmatch(token):
        reading.positionals.append(token)
    elif token.startswith("-O") and not token.startswith("-O."):
        _read_optimization(token, reading)
    else:
        _read_flag(token, reading)


def _read_optimization(token: str, reading: FlagReader) -> None:
    """-O3, -O=3, -O 3: a compilation level until 0.11.2, an optimization level since; also -O '{json}'."""
    text = token[2:].removeprefix("=")
    if not text and reading.has_value_next():
        text = reading.take()
    if reading.release.at_least("0.12.0"):
        if text in ("0", "1", "2", "3"):
            reading.values["optimization_level"] = int(text)
        else:
            reading.problem(token, "bad_value", f"-O takes 0, 1, 2 or 3 since vLLM 0.12.0, not {text!r}", "-cc", text)
        return
    flag = flags_of(reading.release).get("-O")
    if flag is None:
        reading.problem(token, "not_yet", f"-O came with vLLM 0.6.5; {reading.release} does not have it")
    else:
        reading.convert_and_store(flag, token, text)


def _read_flag(token: str, reading: FlagReader) -> None:
    name, has_value, text = token.partition("=")
    value = text if has_value else None
    dashes = "--" if name.startswith("--") else "-"
    head, dot, path = name[len(dashes) :].partition(".")
    name = flag_name(head) if dashes == "--" else dashes + head
    flag, negated = _find(name, reading)
    if flag is None:
        _skip_unknown(name, value, reading)
        return
    if flag.name in _DOES_NOTHING and reading.release.at_least(_DOES_NOTHING[flag.name][0]):
        reading.problem(flag.name, "ignored", f"{flag.name} does nothing here: {_DOES_NOTHING[flag.name][1]}")
    if dot and flag.kind == "json":
        _read_dotted(flag, path, value, reading)
    elif flag.kind in ("switch", "bool", "optbool"):
        _read_switch(flag, negated, value, reading)
    elif flag.kind.startswith("list:"):
        _read_list(flag, value, reading)
    elif value is not None or reading.has_value_next():
        reading.convert_and_store(flag, flag.name, reading.take() if value is None else value)
    elif flag.kind == "maybe":
        reading.store(flag, True)
    else:
        reading.problem(flag.name, "bad_value", f"{flag.name} needs a value")


def _find(name: str, reading: FlagReader) -> tuple[Flag | None, bool]:
    """The flag a name means, and whether it was negated. Unique prefixes count, as argparse lets them."""
    table = flags_of(reading.release)
    if name in table:
        return table[name], False
    base = table.get("--" + name[5:]) if name.startswith("--no-") else None
    if base and base.kind == "bool":
        return base, True
    if not name.startswith("--") or len(name) < 4:
        return None, False
    if flag_history(name) is not None:
        return None, False  # a flag of its own in another release: that is what has to be said of it
    matches = {flag.name: (flag, False) for long, flag in table.items() if long.startswith(name)}
    if name.startswith("--no-"):
        for long, flag in table.items():
            if flag.kind == "bool" and long.startswith("--" + name[5:]):
                matches["--no-" + long[2:]] = (flag, True)
    if len(matches) == 1:
        return next(iter(matches.values()))
    if matches:
        shown = ", ".join(sorted(matches)[:6])
        reading.problem(name, "unknown", f"{name} is short for several flags: {shown}", min(matches))
    return None, False


def _skip_unknown(name: str, value: str | None, reading: FlagReader) -> None:
    """Report a flag the release does not know, and step over the value it would have had."""
    positive = "--" + name[5:] if name.startswith("--no-") else name
    if any(problem.flag == name for problem in reading.problems):
        pass
    elif name != positive and positive in flags_of(reading.release):
        reading.problem(name, "unknown", f"{positive} has no --no- form in vLLM {reading.release}: leave it out")
    else:
        reading.problems.append(explain_unknown(positive, reading.release))
    kind = flag_kind_ever(positive)
    if value is not None or kind in ("switch", "bool") or name != positive:
        return
    while reading.has_value_next():
        reading.take()
        if kind is None or not kind.startswith("list:"):
            break


def _read_switch(flag: Flag, negated: bool, value: str | None, reading: FlagReader) -> None:
    written = f"{flag.name}={value}"
    if value is None and reading.has_value_next() and reading.tokens[reading.at].lower() in ("true", "false"):
        value = reading.take()
        written = f"{flag.name} {value}"
    if value is None:
        reading.store(flag, not negated)
        return
    try:
        wanted = read_bool(value) != negated
    except BadValue:
        reading.problem(flag.name, "bad_value", f"{flag.name} takes no value, got {value!r}", value=value)
        return
    if flag.kind != "optbool":
        off = "--no-" + flag.name[2:] if flag.kind == "bool" else ""
        message = f"{written}: {flag.name} takes no value in vLLM {reading.release}"
        reading.problem(flag.name, "bad_value", message, flag.name if wanted else off)
    reading.store(flag, wanted)


def _read_list(flag: Flag, value: str | None, reading: FlagReader) -> None:
    items = [] if value is None else [value]
    while value is None and reading.has_value_next():
        items.append(reading.take())
    if not items:
        reading.problem(flag.name, "bad_value", f"{flag.name} needs at least one value")
        return
    if flag.kind == "list:int" and items[0].lstrip().startswith("["):
        items = [item for item in re.split(r"[\s,\[\]]+", " ".join(items)) if item]
    converted: list[Any] = list(items)
    try:
        if flag.kind == "list:int":
            converted = [read_int(item, human=False) for item in items]
        elif flag.kind == "list:float":
            converted = [read_float(item) for item in items]
    except BadValue as expected:
        value = " ".join(items)
        reading.problem(flag.name, "bad_value", f"{flag.name} takes {expected}, got {value!r}", value=value)
        return
    reading.store(flag, tuple(converted))


def _read_dotted(flag: Flag, path: str, value: str | None, reading: FlagReader) -> None:
    """--compilation-config.cudagraph_mode X, and --x.list+ a,b."""
    if value is None and reading.at >= len(reading.tokens):
        reading.problem(flag.name, "bad_value", f"{flag.name}.{path} needs a value")
        return
    text = reading.take() if value is None else value
    keys = path.removesuffix("+").split(".")
    if reading.release.before("0.9.0"):
        message = f"{flag.name}.{path}: dotted keys came with vLLM 0.9.0"
        reading.problem(flag.name, "not_yet", message, f"{flag.name} as JSON")
    elif not all(keys) or len(keys) > 8:
        reading.problem(flag.name, "bad_value", f"{flag.name}.{path} is not a key")
    else:
        content: Any = text.split(",") if path.endswith("+") else dotted_value(text)
        _, before = reading.dotted.get(flag.name, (flag, {}))
        reading.dotted[flag.name] = (flag, merged(before, nested(keys, content)))


def _take_positionals(reading: FlagReader, positional_model: bool) -> None:
    words = reading.positionals
    if words and positional_model and not reading.values.get("model"):
        reading.values["model"] = words.pop(0)
    for word in words:
        reading.problem(word, "unknown", f"{word!r} belongs to no flag: vLLM leaves it unrecognized")
