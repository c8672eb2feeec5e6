"""Writing a command's answer: JSON on stdout, or a file that the user named."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError

_SECONDS_BETWEEN, _PATIENCE_S, _WIDTH = 0.2, 1.0, 30


class ProgressBar:
    """Draws nothing unless a person is watching and the wait is longer than a moment."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.began = self.drawn_at = time.monotonic()
        self.is_drawn = False

    def __call__(self, share: float) -> None:
        """`share` of the work is done."""
        now = time.monotonic()
        if not sys.stderr.isatty() or now - self.began < _PATIENCE_S or now - self.drawn_at < _SECONDS_BETWEEN:
            return
        self.drawn_at, self.is_drawn = now, True
        full = round(share * _WIDTH)
        left = (now - self.began) * (1 - share) / share if share > 0 else 0
        sys.stderr.write(f"\r{self.what} [{'#' * full}{'.' * (_WIDTH - full)}] {share:4.0%} {left:4.0f} s left ")
        sys.stderr.flush()

    def clear(self) -> None:
        """Leave no trace."""
        if self.is_drawn:
            sys.stderr.write("\r" + " " * 79 + "\r")
            sys.stderr.flush()


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
