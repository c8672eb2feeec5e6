"""Flags that a published start-up recorded as text: a command line's words, or an excerpt of a Python dict."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

_PAIR = re.compile(r"'(?P<name>[a-z_]+)': (?P<value>True|False|-?\d+(?:\.\d+)?|'[^']*'|\{[^{}]*\}?)")
_SWITCHES_OFF = "--no-"


def recorded_words(text: str) -> list[str]:
    """The words of the command line that would say the same; what cannot be read is left out."""
    if text.lstrip().startswith("--"):
        try:
            return shlex.split(text)
        except ValueError:
            return []
    return [word for name, value in _pairs(text) for word in _words(name, value)]


def _pairs(text: str) -> Iterator[tuple[str, Any]]:
    for found in _PAIR.finditer(text):
        written = found["value"]
        if written.startswith("{") and not written.endswith("}"):
            written += "}"  # the excerpt was cut inside the last value
        try:
            yield found["name"], ast.literal_eval(written)
        except (ValueError, SyntaxError):
            continue


def _words(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if value is True:
        return [f"--{flag}"]
    if value is False:
        return [f"{_SWITCHES_OFF}{flag}"]
    return [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
