"""What is secret in a command line: keys and tokens among its flags and variables, credentials inside an address."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legroom.facts.releases import Release

SECRET_FLAGS = {"--api-key": "VLLM_API_KEY", "--hf-token": "HF_TOKEN"}
"""Flags whose value is a secret, and the variable that vLLM (or the Hub's client) reads instead."""
CREDENTIALS = re.compile(r"(\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/@]+@")
"""User and password in an address."""

PLACEHOLDER, HIDDEN = "YOUR_SECRET", "***"
"""What stands for a secret inside a flag's JSON, and for the credentials of an address."""
_SECRET_NAME = re.compile(
    r"(?i)(?:KEYS?|TOKEN|[_-]PASS)$|SECRET|PASSW|AUTHORIZATION|COOKIE|(?:^|[_-])(?:KEY|TOKEN)[_-](?!THRESHOLD)"
)
"""Not TOKENS, which are counted, nor a TOKENIZER."""
_INNER_NAME = re.compile(r"(?i)(?:api|access|auth|private|account)[_-]?(?:key|token)|secret|passw|authorization")
"""A setting inside a flag's JSON. Stricter than a variable: there, a token is mostly a word of the model's language."""
_INNER = re.compile(r'("([^"\\]+)"\s*:\s*")(?:[^"\\]|\\.)+"')
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=.+", re.DOTALL)
_PLACEHOLDERS = {"--api-key": "YOUR_API_KEY", "--hf-token": "YOUR_HF_TOKEN"}


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable, a flag or a key of JSON may hold a secret, by its name or by credentials in an address."""
    return bool(_SECRET_NAME.search(name) or CREDENTIALS.search(value))


def without_secrets(words: Iterable[str], release: Release | None = None) -> Iterator[str]:
    """The words of a command, variables before it included, with a placeholder for every key, token and credential."""
    from legroom.vllm.command_line import command_parts  # noqa: PLC0415 - masking a text needs no table of flags

    for part in command_parts(tuple(words), release):
        hidden = _PLACEHOLDERS.get(part.long_name) if part.name else None
        if part.name and _INNER_NAME.search(part.words[0].partition("=")[0].partition(".")[2]):
            hidden = PLACEHOLDER
        if hidden is None:
            yield from map(_shown, part.words)
            continue
        flag, joined, _ = part.words[0].partition("=")
        yield f"{flag}={hidden}" if joined else flag
        yield from (hidden for _ in part.words[1:])  # --api-key takes several keys


def _shown(word: str) -> str:
    assignment = _ASSIGNMENT.fullmatch(word)
    if assignment and is_secret(assignment[1]):
        return f"{assignment[1]}=YOUR_{assignment[1]}"
    shown = CREDENTIALS.sub(rf"\1{HIDDEN}@", word)
    return _INNER.sub(_inner_shown, shown) if "{" in shown else shown


def _inner_shown(match: re.Match[str]) -> str:
    return f'{match[1]}{PLACEHOLDER}"' if _INNER_NAME.search(match[2]) else match[0]
