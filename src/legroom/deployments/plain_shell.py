"""Shell text: split into commands, with wrappers, variables and redirections taken off a server's command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

from legroom.errors import LegroomError
from legroom.records import dataclass, field

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
"""A variable as it stands before a command."""
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^{}]*))?\}|\((\w+)\)|(\w+))")
_CONTINUED = re.compile(r"[\\`^][ \t]*\r?\n")
_OPERATORS = frozenset("();<>|&")
SHELLS = ("sh", "bash", "zsh", "dash", "ash")
_API_SERVERS = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
CONTAINER_TOOLS = ("docker", "podman", "nerdctl")
_MAX_WORDS = 20_000


def assignments(env: Mapping[str, str]) -> list[str]:
    """Variables as they stand before a command."""
    return [f"{name}={value}" for name, value in env.items()]


@dataclass(frozen=True)
class ShellCommand:
    """One server's words as a shell would pass them, and the environment it would see."""

    words: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)


def server_commands(text: str, env: dict[str, str] | None = None, depth: int = 0) -> Iterator[ShellCommand]:
    """Every command in a shell text that starts vLLM, directly or in a container."""
    seen = dict(env or {})
    exported = dict(env or {})
    for words in commands(text):
        expanded = [expand(word, seen) for word in words]
        assigned = _leading_assignments(expanded)
        rest = expanded[len(assigned) :]
        if not rest or rest[0] in ("export", "set", "declare", "local", "readonly"):
            for word in [*assigned, *rest[1:]]:
                if found := ASSIGNMENT.fullmatch(word):
                    seen[found[1]] = found[2]
                    if rest:
                        exported[found[1]] = found[2]
            continue
        yield from _servers_in(expanded, exported, depth)


def _servers_in(words: list[str], env: dict[str, str], depth: int) -> Iterator[ShellCommand]:
    start = server_start(words)
    if start is not None:
        own = {found[1]: found[2] for word in words[:start] if (found := ASSIGNMENT.fullmatch(word))}
        yield ShellCommand(tuple(words[start:]), {**env, **own})
        return
    for i, word in enumerate(words):
        is_script = i and words[i - 1].startswith("-") and words[i - 1].endswith("c") and " " in word.strip()
        if is_script and depth < 4 and any(basename(shell) in SHELLS for shell in words[: i - 1]):
            yield from server_commands(word, env, depth + 1)


def server_start(words: list[str] | tuple[str, ...]) -> int | None:
    """Where the server's own words begin: `vllm serve`, `python -m ...api_server`, or a container run."""
    for i, word in enumerate(words):
        following = words[i + 1] if i + 1 < len(words) else ""
        if basename(word) == "vllm" and following == "serve":
            return i
        if word in _API_SERVERS or word.endswith("entrypoints/openai/api_server.py"):
            return max(i - 2, 0) if i and words[i - 1] == "-m" else i
        if basename(word) in CONTAINER_TOOLS and following in ("run", "container", "create"):
            return i
    return None


def basename(word: str) -> str:
    """The last part of a path."""
    return word.rpartition("/")[2]


def commands(text: str) -> Iterator[list[str]]:
    """The simple commands of a shell text, without redirections. Raises on an unclosed quote."""
    joined = _CONTINUED.sub(" ", text)
    pending = ""
    for line in joined.splitlines():
        pending = f"{pending}\n{line}" if pending else line
        words = _split(_without_prompt(pending))
        if words is None:
            continue
        pending = ""
        yield from _simple_commands(words)
    if pending:
        raise LegroomError(
            "the command line has a quote that is never closed", "check the quotes around JSON values and paths"
        )


def _without_prompt(text: str) -> str:
    stripped = text.lstrip()
    return stripped[2:] if stripped.startswith(("$ ", "# ")) and "vllm" in stripped else text


def _split(text: str) -> list[str] | None:
    """The words of one line, None while a quote is still open."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    try:
        for word in lexer:
            if word.startswith("#") and not words:
                return words
            words.append(word)
            if len(words) > _MAX_WORDS:
                raise LegroomError("the command line has too many words", f"legroom reads at most {_MAX_WORDS:,}")
    except ValueError:
        return None
    return words


def _simple_commands(words: list[str]) -> Iterator[list[str]]:
    current: list[str] = []
    skip_next = False
    for word in words:
        if skip_next:
            skip_next = False
        elif word and set(word) <= _OPERATORS:
            if "<" in word or ">" in word:
                if current and current[-1] in ("1", "2"):
                    current.pop()
                skip_next = True
            elif current:
                yield current
                current = []
        else:
            current.append(word)
    if current:
        yield current


def _leading_assignments(words: list[str]) -> list[str]:
    count = 0
    while count < len(words) and ASSIGNMENT.fullmatch(words[count]):
        count += 1
    return words[:count]


def expand(word: str, env: dict[str, str]) -> str:
    """`$NAME`, `${NAME:-default}` and `$(NAME)` replaced where the value is known, left alone where it is not."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[3] or found[4]
        if name in env:
            return env[name]
        return found[2] if found[2] is not None else found[0]

    return _VARIABLE.sub(value, word) if "$" in word else word
