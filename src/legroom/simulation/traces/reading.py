"""Find out what a file is, and read it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol, TextIO

from legroom.errors import LegroomError
from legroom.simulation.trace import Trace
from legroom.simulation.traces import azure, burstgpt, jsonl, mooncake, sharegpt, vllm_log


class Reader(Protocol):
    """What the file of a format exposes."""

    def looks_like(self, head: str) -> bool:
        """Whether a file that begins like this is of the format."""

    def read(self, lines: Iterable[str], name: str) -> Trace:
        """Its requests."""


FORMATS: dict[str, Reader] = {
    "jsonl": jsonl, "mooncake": mooncake, "azure": azure, "burstgpt": burstgpt, "sharegpt": sharegpt,
    "vllm-log": vllm_log,
}  # fmt: skip
_HEAD = 20_000
_MOST_LINES = 20_000_000


def read_trace(path: str, format_name: str | None = None, limit: int | None = None) -> Trace:
    """The requests of a file; `limit` reads only so many lines."""
    if limit is not None and limit < 1:
        raise LegroomError(f"--limit {limit} leaves nothing to read", "give 1 or more")
    try:
        with Path(path).open(encoding="utf-8", errors="strict") as file:
            return _read(file, path, format_name, limit)
    except OSError as error:
        raise LegroomError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise LegroomError(f"{path} is not text", "a trace is JSONL, CSV, JSON or a log") from None


def _read(file: TextIO, path: str, format_name: str | None, limit: int | None) -> Trace:
    head = file.read(_HEAD)
    file.seek(0)
    if not head.strip():
        raise LegroomError(f"{path} holds no requests")
    if format_name is None:
        format_name = next((name for name, reader in FORMATS.items() if reader.looks_like(head)), None)
    if format_name is None:
        raise LegroomError(
            f"{path} looks like none of the known traces ({', '.join(FORMATS)})",
            'write one JSON object a line, such as {"arrival": 0.5, "prompt_len": 800, "output_len": 120}',
        )
    lines = itertools.islice(file, limit) if limit is not None and format_name != "sharegpt" else file
    return FORMATS[format_name].read(_bounded(lines, path), path)


def _bounded(lines: Iterator[str], path: str) -> Iterator[str]:
    for number, line in enumerate(lines):
        if number >= _MOST_LINES:
            raise LegroomError(f"{path} has more than {_MOST_LINES:,} lines", "simulate a part of it with --limit")
        yield line
