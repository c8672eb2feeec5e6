"""Writing a command's answer: JSON on stdout, or a file that the user named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError


def print_json(document: Any) -> None:
    """Exactly one JSON document on stdout."""
    sys.stdout.write(_json(document, 1) + "\n")


def print_json_line(document: Any) -> None:
    """One JSON document of a stream: a line of its own on stdout, for a reader who waits for it."""
    sys.stdout.write(_json(document, None) + "\n")
    sys.stdout.flush()


def _json(document: Any, indent: int | None) -> str:
    text = json.dumps(document, indent=indent, ensure_ascii=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:  # a file name that is no text, a terminal that has only ASCII
        text = json.dumps(document, indent=indent)
    return text


def write_file(path: str, text: str, what: str) -> None:
    """Write what the user asked for, or say why it could not be."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise LegroomError(f"could not write the {what} to {path}: {error.strerror}") from error


def note(text: str) -> None:
    """A remark beside the answer, on stderr."""
    print(text, file=sys.stderr)
