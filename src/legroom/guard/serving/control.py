"""`/-/legroom/status` and `/-/legroom/drain`, which need the token.

The API servers of one vLLM (`Peers`) admit independently and accept from one socket, so a drain reaches only one of
them. Each therefore also listens on an abstract Unix socket named after their common parent process, and the one that
gets a request forwards it to the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from legroom.guard.request.endpoints import DRAIN, STATUS
from legroom.process_table import process_start_ticks

if TYPE_CHECKING:
    from legroom.guard.pool.admission import Admission


def answer_control(
    admission: Admission, token: str | None, method: str, path: str, authorization: bytes, body: bytes
) -> tuple[int, Status]:
    """(HTTP status, JSON document) for a request to `/-/legroom/*`, which is refused without the control `token`."""
    refused = token_refusal(token, authorization)
    if refused is not None:
        return refused
    if path == STATUS and method == "GET":
        return 200, admission.status()
    if path == DRAIN and method == "POST":
        try:
            wanted: Any = json.loads(body or b"{}")["on"]
        except (ValueError, KeyError, TypeError, RecursionError):
            wanted = None
        if not isinstance(wanted, bool):
            return _error_response(400, "bad_request", 'Say {"on": true} or {"on": false}.')
        return 200, admission.drain(wanted)
    return _error_response(405, "method_not_allowed", f"{method} is not answered here.")


def token_refusal(token: str | None, authorization: bytes) -> tuple[int, Status] | None:
    """None if the `authorization` header has the control token, else (401, error); (404, error) if none is set."""
    if token is None:
        return _error_response(404, "not_found", "There is nothing here: LEGROOM_GUARD_TOKEN is not set.")
    scheme, _, given = authorization.partition(b" ")
    if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), token.encode()):
        return _error_response(401, "unauthorized", "Send the token as Authorization: Bearer TOKEN.")
    return None


def _error_response(status: int, code: str, message: str) -> tuple[int, Status]:
    """(status, error document in OpenAI's form)."""
    return status, {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


Status = dict[str, Any]
Drain = Callable[[bool | None], Status]
"""Starts or ends draining, or neither (None); returns the status."""

REPLY_TIMEOUT_S = 2.0


class Peers:
    """Connects this API server with the other `count` - 1 of the same vLLM."""

    def __init__(self, count: int, token: str, drain: Drain, parent: str | None = None) -> None:
        self._names = [f"\0legroom-guard-{parent or _parent_identity()}-{number}" for number in range(count)]
        self._token, self._drain = token, drain
        self._own = ""
        self._server: asyncio.Server | None = None

    async def join(self) -> bool:
        """Listen on the first free abstract socket of this vLLM's group; False where that fails or off Linux."""
        for name in self._names if sys.platform == "linux" else ():
            with contextlib.suppress(OSError):
                self._server = await asyncio.start_unix_server(self._on_request, name)
                self._own = name
                return True
        return False

    async def statuses(self, drain: bool | None) -> list[Status]:
        """Statuses of the other API servers that reply, after they applied `drain`."""
        others = [name for name in self._names if name != self._own]
        statuses = await asyncio.gather(*(self._request_status(name, drain) for name in others))
        return [status for status in statuses if status is not None]

    def leave(self) -> None:
        """Stop listening for the other API servers."""
        if self._server is not None:
            self._server.close()

    async def _request_status(self, name: str, drain: bool | None) -> Status | None:
        """The status of the API server that listens on `name`, after it applied `drain`; None where none answers."""
        line = json.dumps({"drain": drain, "proof": self._token_proof(name, drain)}).encode() + b"\n"
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(sock=_connect(name))
                try:
                    writer.write(line)
                    status = json.loads(await reader.readline())
                finally:
                    writer.close()
        except (OSError, ValueError):  # includes TimeoutError
            return None
        return status if isinstance(status, dict) else None

    async def _on_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer another API server's status or drain request if it proves that it has the token."""
        try:
            request = json.loads(await asyncio.wait_for(reader.readline(), REPLY_TIMEOUT_S))
            drain = request["drain"]
            if hmac.compare_digest(str(request["proof"]).encode(), self._token_proof(self._own, drain).encode()):
                writer.write(json.dumps(self._drain(drain)).encode() + b"\n")
        except (OSError, ValueError, KeyError, TypeError):  # not from a peer
            pass
        finally:
            writer.close()

    def _token_proof(self, name: str, drain: bool | None) -> str:
        """An HMAC of socket name and `drain`, which proves knowledge of the token without sending it."""
        return hmac.new(self._token.encode(), f"{name} {json.dumps(drain)}".encode(), "sha256").hexdigest()


def merge_statuses(own: Status, others: Iterable[Status]) -> Status:
    """The status of all API servers: requests summed, draining only if all drain, the rest as in `own`."""
    statuses = [own, *others]
    sums = {name: sum(status.get(name, 0) for status in statuses) for name in ("running", "waiting", "admitted")}
    rejected: Counter[str] = Counter()
    for status in statuses:
        rejected.update(status.get("rejected", {}))
    draining = all(status.get("draining") for status in statuses)
    return own | sums | {"draining": draining, "rejected": dict(rejected), "api_servers_heard": len(statuses)}


def _connect(name: str) -> socket.socket:
    """Connect to an abstract Unix socket, which uvloop cannot do itself."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.connect(name)
    except OSError:
        connection.close()
        raise
    return connection


def _parent_identity() -> str:
    """The parent's process id and start time as one string, because process ids are reused."""
    return f"{os.getppid()}-{process_start_ticks(os.getppid()) or 0}"
