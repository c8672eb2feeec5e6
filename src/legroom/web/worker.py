"""One worker process of `legroom ui`: a call at a time from standard input, its answer on standard output.

Work that hangs or grows is ended by ending its process, which a thread would not allow. `python -m legroom.web.worker`
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

from legroom.errors import UNREACHABLE, LegroomError
from legroom.memo import Memo
from legroom.web.endpoints import BadRequest, answer, error_document

HEADER = struct.Struct(">cI")
"""A frame: its kind and how many bytes follow."""
CALL, STREAM, PIECE, END = b"C", b"S", b"P", b"E"
"""A whole request; one whose log follows in pieces; a piece; the end of them."""
STATUS = struct.Struct(">HI")
"""An answer: its HTTP status and how many bytes follow."""
_CALLS_REMEMBERED = 200
"""A slider asks for much the same again and again; what a hundred visitors asked for would only fill the memory."""
_OK, _BAD_REQUEST, _UNPROCESSABLE, _DEPENDENCY, _BUG = 200, 400, 422, 424, 500


class Frame(NamedTuple):
    kind: bytes
    body: bytes


def main() -> None:
    """Answer the endpoints' calls until the input ends."""
    answer_frames(_answered)


def answer_frames(answered: Callable[[Frame, BinaryIO], tuple[int, bytes]]) -> None:
    """Frames in, an HTTP status and a document out, one after the other."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which closes our input
    source = sys.stdin.buffer
    # What a library prints must not get between answers.
    target = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for number, frame in enumerate(iter(lambda: _read(source), None), 1):
        status, document = answered(frame, source)
        target.write(STATUS.pack(status, len(document)) + document)
        target.flush()
        if number % _CALLS_REMEMBERED == 0:
            Memo.forget_everything()


def _read(source: BinaryIO) -> Frame | None:
    header = source.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    kind, length = HEADER.unpack(header)
    return Frame(kind, source.read(length))


def _answered(frame: Frame, source: BinaryIO) -> tuple[int, bytes]:
    head, _, body = frame.body.partition(b"\n")
    name, _, query = head.partition(b" ")
    pieces = _pieces(source) if frame.kind == STREAM else iter(())
    try:
        hints = _log_hints(query)
        if frame.kind == STREAM:
            document = _diagnosis(hints, pieces)
        else:
            request = _request(body)
            document = answer(name.decode(), {**hints, **request} if isinstance(request, dict) else request)
        status = _OK
    except LegroomError as error:
        document, status = error_document(error), status_of(error)
    except Exception:
        import traceback

        traceback.print_exc()
        bug = LegroomError("this is a bug in legroom, not in your input", "the server's terminal shows where", 70)
        document, status = error_document(bug), _BUG
    for _ in pieces:  # what was not read of a log must not be taken for the next call
        pass
    return status, json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        "utf-8", "replace"
    )


def status_of(error: LegroomError) -> int:
    """400 for a wrong form, 424 where something needed was unreachable, 422 for what cannot be answered."""
    if isinstance(error, BadRequest):
        return _BAD_REQUEST
    return _DEPENDENCY if error.exit_code == UNREACHABLE else _UNPROCESSABLE


def _request(body: bytes) -> object:
    try:
        return json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise BadRequest("the body is not JSON", "send one JSON object") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _log_hints(query: bytes) -> dict[str, object]:
    """What the address says beside a log, of the form that a request's own fields have."""
    from legroom.web.schemas import check_request

    hints: dict[str, object] = json.loads(query) if query else {}
    problem = check_request("diagnose", {**hints, "log": ""}) if hints else ""
    if problem:
        raise BadRequest(f"the query is not of the form that diagnose takes: {problem[:300]}", "see /openapi.json")
    return hints


def _diagnosis(hints: dict[str, object], pieces: Iterator[bytes]) -> dict[str, object]:
    from legroom.isolation import isolated
    from legroom.web.endpoints.texts import diagnose_pieces

    with isolated():
        return diagnose_pieces(pieces, hints)


def _pieces(source: BinaryIO) -> Iterator[bytes]:
    while (frame := _read(source)) and frame.kind == PIECE:
        yield frame.body


if __name__ == "__main__":
    main()
