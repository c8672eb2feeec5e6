"""Answers of the HTTP API."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from legroom.errors import LegroomError
from legroom.web.endpoints import error_document
from legroom.web.pool import Refused, WorkerAnswer

_NOT_KEPT = {"cache-control": "no-store"}


def error_response(status: int, message: str, hint: str = "", exit_code: int = 2) -> Response:
    headers = {**_NOT_KEPT, "retry-after": "2"} if status == 429 else _NOT_KEPT
    return JSONResponse(error_document(LegroomError(message, hint, exit_code)), status, headers)


def refusal_response(error: Refused) -> Response:
    return error_response(error.status, error.message, error.hint, error.exit_code)


def worker_response(answer: WorkerAnswer) -> Response:
    """What a worker wrote is sent as it is."""
    return Response(answer.body, answer.status, _NOT_KEPT, "application/json")
