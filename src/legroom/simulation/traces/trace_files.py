"""Detects the format of a trace file and reads it."""

import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from legroom.errors import LegroomError
from legroom.simulation.trace import Trace
from legroom.simulation.traces import jsonl, mooncake, text_traces
from legroom.simulation.traces.csv_traces import AZURE, BURSTGPT
from legroom.units import GIB


class Format(NamedTuple):
    """Whether a file that begins with a text has this format; the requests of its lines, with the file's name."""

    looks_like: Callable[[str], bool]
    read: Callable[[Iterable[str], str], Trace]


FORMATS = {
    "jsonl": Format(jsonl.looks_like, jsonl.read),
    "mooncake": Format(mooncake.looks_like, mooncake.read),
    "azure": Format(AZURE.looks_like, AZURE.read),
    "burstgpt": Format(BURSTGPT.looks_like, BURSTGPT.read),
    "sharegpt": Format(text_traces.is_sharegpt, text_traces.read_sharegpt),
    "vllm-log": Format(text_traces.is_vllm_log, text_traces.read_vllm_log),
}
_MAX_LINES = 20_000_000  # A month of 8 requests a second; a replay of them fits in memory.
_MAX_DOCUMENT_BYTES = GIB  # JSON of this size takes several GiB of Python objects.


def read_trace(path: str, format_name: str | None = None, limit: int | None = None) -> Trace:
    """The requests of a trace file, from at most `limit` lines; its format is detected where `format_name` is None."""
    if limit is not None and limit < 1:
        raise LegroomError(f"--limit {limit} leaves nothing to read", "give 1 or more")
    try:
        with Path(path).open(encoding="utf-8", errors="strict") as file:
            return _read_open_file(file, path, os.fstat(file.fileno()).st_size, format_name, limit)
    except OSError as error:
        is_file = Path(path).suffix[1:].isalpha()  # a model's name ends in a size, like llama-3.1-8b
        hint = "" if is_file else f"name a model with --model {path}, and the load with a file or --synthetic"
        raise LegroomError(f"cannot read the trace {path}: {error.strerror}", hint) from None
    except UnicodeDecodeError:
        raise LegroomError(f"{path} is not text", "a trace is JSONL, CSV, JSON or a log") from None


def read_trace_text(text: str) -> Trace:
    """The requests of a trace given as text; its format is detected."""
    return _read_open_file(io.StringIO(text), "the trace", len(text), None, None)


def _read_open_file(file: TextIO, path: str, size: int, format_name: str | None, limit: int | None) -> Trace:
    """The requests of an open trace file of `size` bytes, as `read_trace` reads them."""
    head = file.read(20_000)
    file.seek(0)
    if not head.strip():
        raise LegroomError(f"{path} holds no requests")
    if format_name is None:
        format_name = next((name for name, reader in FORMATS.items() if reader.looks_like(head)), None)
    if format_name is None:
        hint = 'write one JSON object a line, such as {"arrival": 0.5, "prompt_len": 800, "output_len": 120}'
        raise LegroomError(f"{path} looks like none of the known traces ({', '.join(FORMATS)})", hint)
    is_one_document = format_name == "sharegpt"
    if limit is None or is_one_document:
        _check_size(size, path, head, is_one_document)
    lines = _bounded_lines(file, path, None if is_one_document else 10_000_000)
    if limit is not None and not is_one_document:
        lines = itertools.islice(lines, limit)
    try:
        return FORMATS[format_name].read(lines, path)
    except OverflowError:
        raise LegroomError(f"{path}: a number is too large", "drop the request from the trace or fix it") from None


def _check_size(size: int, path: str, head: str, is_one_document: bool) -> None:
    """Raises LegroomError for a file of `size` bytes: too many lines, judged by its `head`, or too large a document."""
    if is_one_document and size > _MAX_DOCUMENT_BYTES:
        hint = "it would be held in memory as a whole: split it, or write it as one JSON object a line"
        raise LegroomError(f"{path} is one JSON document of {size / GIB:.1f} GiB", hint)
    lines = size / len(head.encode()) * max(1, head.count("\n"))
    if not is_one_document and lines > 2 * _MAX_LINES:
        hint = f"up to {_MAX_LINES / 1e6:.0f} million are read: simulate a part of it with --limit"
        raise LegroomError(f"{path} has about {lines / 1e6:,.0f} million lines ({size / GIB:.1f} GiB)", hint)


def _bounded_lines(file: TextIO, path: str, max_chars: int | None) -> Iterator[str]:
    """The file's lines; LegroomError for one of `max_chars` or more (None: no limit), and for too many lines."""
    for number in itertools.count(1):
        line = file.readline() if max_chars is None else file.readline(max_chars)
        if not line:
            return
        if max_chars and len(line) >= max_chars:
            hint = "a trace has short lines"
            raise LegroomError(f"{path}, line {number}: longer than {max_chars:,} characters", hint)
        if number > _MAX_LINES:
            raise LegroomError(f"{path} has more than {_MAX_LINES:,} lines", "simulate a part of it with --limit")
        yield line
