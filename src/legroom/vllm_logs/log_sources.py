"""Reads logs in pieces of bytes: plain or compressed files, standard input, the output of a command."""

import codecs
import gzip
import itertools
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing
from typing import IO, Any

from legroom.errors import LegroomError
from legroom.files import expanded

PIECE_BYTES = 2 << 20
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_UNSUPPORTED_ARCHIVES = {b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
_CONTROL = bytes(code for code in range(32) if chr(code) not in "\t\n\v\f\r\x1b\b")
_UTF16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


def names_a_file(text: str) -> bool:
    """Whether the text is the path of an existing file or folder, and not itself a log."""
    if not text.strip() or "\n" in text:
        return False
    try:
        return expanded(text).exists()
    except (OSError, ValueError):  # too long, or a zero byte
        return False


def pieces_of_file(path: str) -> Iterator[bytes]:
    """The bytes of a log file, decompressed where it is gzip or zstd; LegroomError where it cannot be read."""
    try:
        stream = expanded(path).open("rb")
    except IsADirectoryError:
        hint = f"name a log file in it: legroom diagnose {path.rstrip('/')}/*.log"
        raise LegroomError(f"{path} is a directory", hint) from None
    except FileNotFoundError:
        raise LegroomError(f"there is no file {path}", "give the path of a vLLM log, or - for standard input") from None
    except OSError as error:
        raise LegroomError(f"cannot read {path}: {error.strerror or error}", "check its permissions") from None
    with stream:
        yield from _opened_pieces(stream, path)


def pieces_of_stdin() -> Iterator[bytes]:
    """The bytes of standard input, in pieces; LegroomError where it is a terminal."""
    stream = sys.stdin
    if stream is None or stream.closed or stream.isatty():
        raise LegroomError("no log was given", "legroom diagnose vllm.log, or: kubectl logs POD | legroom diagnose -")
    yield from _opened_pieces(stream.buffer, "standard input")


def pieces_of_command(words: list[str], what: str) -> Iterator[bytes]:
    """The output of a program such as `journalctl -u UNIT`; LegroomError where it fails. `what`: whose log it is."""
    try:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise LegroomError(f"{words[0]} is not on this machine", f"write the log of {what} to a file first") from None
    except OSError as error:
        raise LegroomError(f"cannot run {words[0]}: {error.strerror or error}") from None
    assert process.stdout is not None
    head = b""
    with closing(process.stdout):
        for piece in _opened_pieces(process.stdout, what):
            head = head or piece[:400]
            yield piece
    if process.wait(timeout=600.0) != 0:
        printed = head.decode("utf-8", "replace").strip().splitlines() or ["no reason given"]
        raise LegroomError(f"{words[0]} could not give the log of {what}: {printed[0]}")


def _opened_pieces(stream: IO[bytes], name: str) -> Iterator[bytes]:
    """The log's bytes, decompressed and in UTF-8; raises LegroomError where it is empty, binary or unreadable."""
    try:
        head = stream.read(PIECE_BYTES)
        if not head:
            raise LegroomError(f"{name} is empty", "check that the server's output really goes there")
        rest = _decompressed_pieces(stream, head, name)
        first = next(rest, b"")
        if not first:
            raise LegroomError(f"{name} is empty once unpacked", "check how it was written")
        yield from _as_utf8(first, rest, name)
    except OSError as error:
        raise LegroomError(f"cannot read {name}: {error}", "the file may be damaged or cut short") from None


def _decompressed_pieces(stream: IO[bytes], head: bytes, name: str) -> Iterator[bytes]:
    """The bytes of `head`, already read, and of the rest in `stream`; gzip and zstd unpacked, other archives raise."""
    for magic, kind in _UNSUPPORTED_ARCHIVES.items():
        if head.startswith(magic):
            raise LegroomError(f"{name} is a {kind} archive", "unpack it first; gzip and zstd are read as they are")
    joined: Any = _PrependedStream(head, stream)
    if head.startswith(_GZIP):
        yield from _read_compressed(gzip.GzipFile(fileobj=joined), name)
    elif head.startswith(_ZSTD):
        try:
            import zstandard
        except ImportError:
            hint = "pip install 'legroom[scan]', or unpack it with zstd -d"
            raise LegroomError(f"{name} is packed with zstd", hint) from None
        reader = zstandard.ZstdDecompressor().stream_reader(joined, read_across_frames=True)
        yield from _read_compressed(reader, name, zstandard.ZstdError)
    else:
        yield head
        while piece := stream.read(PIECE_BYTES):
            yield piece


def _read_compressed(stream: Any, name: str, damaged: type[Exception] = EOFError) -> Iterator[bytes]:
    """Decompressed pieces, of a cut-off file as far as it goes, or LegroomError; `damaged`: the decoder's error."""
    pending: list[bytes] = []
    size = 0
    while True:
        try:
            piece = stream.read1(1 << 16)
        except (EOFError, zlib.error, OSError, damaged) as error:
            if not pending:
                raise LegroomError(f"cannot read {name}: {error}", "the file is damaged or cut short") from None
            piece = b""
        pending.append(piece)
        size += len(piece)
        if size >= PIECE_BYTES or (not piece and size):
            yield b"".join(pending)
            pending, size = [b""], 0
        if not piece:
            return


class _PrependedStream:
    """The bytes already read, then the rest of the stream."""

    def __init__(self, head: bytes, rest: IO[bytes]) -> None:
        self._head, self._rest = head, rest

    def read(self, size: int) -> bytes:
        """Up to `size` bytes: those read before, then those of the stream."""
        taken, self._head = self._head[:size], self._head[size:]
        return taken or self._rest.read(size)


def _as_utf8(first: bytes, rest: Iterator[bytes], name: str) -> Iterator[bytes]:
    """The pieces as UTF-8, from UTF-16 where its byte order mark begins them; LegroomError for binary data."""
    for mark, encoding in _UTF16.items():
        if first.startswith(mark):
            decoder = codecs.getincrementaldecoder(encoding)("replace")
            yield decoder.decode(first[len(mark) :]).encode("utf-8", "replace")
            for piece in rest:
                yield decoder.decode(piece).encode("utf-8", "replace")
            return
    sample = first[:65536].replace(b"\0", b"")  # a log that was cut while its writer had it open is filled with zeros
    unprintable = len(sample) - len(sample.translate(None, _CONTROL))
    if unprintable > max(8, len(sample) // 20):
        raise LegroomError(f"{name} is a binary file, not a log", "give the text that vLLM printed")
    yield from (piece.replace(b"\0", b"") for piece in itertools.chain((first,), rest))
