"""`/-/legroom/status` and `/-/legroom/drain`: for whoever holds the token, and for nobody where none is set."""

from __future__ import annotations

import hmac
import json
from typing import TYPE_CHECKING, Any

from legroom.guard.paths import DRAIN, STATUS

if TYPE_CHECKING:
    from legroom.guard.admission import Admission


def answer(
    admission: Admission, token: str | None, method: str, path: str, authorization: bytes, body: bytes
) -> tuple[int, bytes]:
    """Status and JSON document."""
    refused = denied(token, authorization)
    if refused is not None:
        return refused
    if path == STATUS and method == "GET":
        return 200, json.dumps(admission.status()).encode()
    if path == DRAIN and method == "POST":
        return _drain(admission, body)
    return _error(405, "method_not_allowed", f"{method} is not answered here.")


def denied(token: str | None, authorization: bytes) -> tuple[int, bytes] | None:
    """The answer to who does not hold the token; ask before reading what they send."""
    if token is None:
        return _error(404, "not_found", "There is nothing here: LEGROOM_GUARD_TOKEN is not set.")
    scheme, _, given = authorization.partition(b" ")
    if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), token.encode()):
        return _error(401, "unauthorized", "Send the token as Authorization: Bearer TOKEN.")
    return None


def _drain(admission: Admission, body: bytes) -> tuple[int, bytes]:
    try:
        asked: Any = json.loads(body or b"{}")
        wanted = asked["on"]
    except (ValueError, KeyError, TypeError, RecursionError):
        wanted = None
    if not isinstance(wanted, bool):
        return _error(400, "bad_request", 'Say {"on": true} or {"on": false}.')
    return 200, json.dumps(admission.drain(wanted)).encode()


def _error(status: int, code: str, message: str) -> tuple[int, bytes]:
    kind = "invalid_request_error"
    return status, json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
