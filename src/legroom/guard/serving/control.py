"""`/-/legroom/status` and `/-/legroom/drain`: for whoever holds the token, and for nobody where none is set.

The API servers of one vLLM (`Peers`) each admit on their own, and a drain has to reach all of them. They accept from
one socket, so nobody outside chooses which of them hears a request. Each therefore also listens under a name that only
the processes with the same parent share, in Linux' abstract namespace: no file is left behind, and nothing has to be
writable. Who is asked from outside asks the others.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legroom.guard.request.endpoints import DRAIN, STATUS

if TYPE_CHECKING:
    from legroom.guard.pool.admission import Admission


def answer(
    admission: Admission, token: str | None, method: str, path: str, authorization: bytes, body: bytes
) -> tuple[int, Status]:
    """HTTP status and JSON document."""
    refused = denied(token, authorization)
    if refused is not None:
        return refused
    if path == STATUS and method == "GET":
        return 200, admission.status()
    if path == DRAIN and method == "POST":
        return _drain(admission, body)
    return _error(405, "method_not_allowed", f"{method} is not answered here.")


def denied(token: str | None, authorization: bytes) -> tuple[int, Status] | None:
    """The answer to who does not hold the token; ask before reading what they send."""
    if token is None:
        return _error(404, "not_found", "There is nothing here: LEGROOM_GUARD_TOKEN is not set.")
    scheme, _, given = authorization.partition(b" ")
    if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), token.encode()):
        return _error(401, "unauthorized", "Send the token as Authorization: Bearer TOKEN.")
    return None


def _drain(admission: Admission, body: bytes) -> tuple[int, Status]:
    try:
        asked: Any = json.loads(body or b"{}")
        wanted = asked["on"]
    except (ValueError, KeyError, TypeError, RecursionError):
        wanted = None
    if not isinstance(wanted, bool):
        return _error(400, "bad_request", 'Say {"on": true} or {"on": false}.')
    return 200, admission.drain(wanted)


def _error(status: int, code: str, message: str) -> tuple[int, Status]:
    kind = "invalid_request_error"
    return status, {"error": {"message": message, "type": kind, "param": None, "code": code}}


Status = dict[str, Any]
Answer = Callable[[bool | None], Status]
"""Drains, or ends it, or (None) does neither; and tells the state."""

ASK_S = 2.0
_LONGEST_BYTES = 1 << 16
_SUMS = ("running", "waiting", "admitted")


class Peers:
    """One process's place among `count` of them."""

    def __init__(self, count: int, token: str, answer: Answer, family: str | None = None) -> None:
        self._names = [f"\0legroom-guard-{family or _family()}-{number}" for number in range(count)]
        self._token, self._answer = token, answer
        self._own = ""
        self._server: asyncio.Server | None = None

    async def join(self) -> bool:
        """Take the first free name; whether there was one, and the system has such names at all."""
        for name in self._names if sys.platform == "linux" else ():
            with contextlib.suppress(OSError):
                self._server = await asyncio.start_unix_server(self._heard, name, limit=_LONGEST_BYTES)
                self._own = name
                return True
        return False

    async def ask(self, drain: bool | None) -> list[Status]:
        """What each of the others says, as far as they answer."""
        others = [name for name in self._names if name != self._own]
        statuses = await asyncio.gather(*(self._ask(name, drain) for name in others))
        return [status for status in statuses if status is not None]

    def leave(self) -> None:
        """Be asked no more."""
        if self._server is not None:
            self._server.close()

    async def _ask(self, name: str, drain: bool | None) -> Status | None:
        line = json.dumps({"drain": drain, "proof": self._proof(name, drain)}).encode() + b"\n"
        try:
            async with asyncio.timeout(ASK_S):
                reader, writer = await asyncio.open_unix_connection(sock=_connected(name), limit=_LONGEST_BYTES)
                try:
                    writer.write(line)
                    status = json.loads(await reader.readline())
                finally:
                    writer.close()
        except (OSError, ValueError):  # a timeout too: it is gone, or says nothing
            return None
        return status if isinstance(status, dict) else None

    async def _heard(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked = json.loads(await asyncio.wait_for(reader.readline(), ASK_S))
            drain = asked["drain"]
            if hmac.compare_digest(str(asked["proof"]).encode(), self._proof(self._own, drain).encode()):
                writer.write(json.dumps(self._answer(drain)).encode() + b"\n")
        except (OSError, ValueError, KeyError, TypeError):  # whoever that was, it is none of us
            pass
        finally:
            writer.close()

    def _proof(self, name: str, drain: bool | None) -> str:
        """That who says this to whom has the token, without telling it: anybody could listen under a free name."""
        return hmac.new(self._token.encode(), f"{name} {json.dumps(drain)}".encode(), "sha256").hexdigest()


def together(own: Status, others: Iterable[Status]) -> Status:
    """One state for all: requests added up, and draining only where each of them is. Tokens stay those of the one that
    was asked, as each has a share of the pool to itself.
    """
    statuses = [own, *others]
    sums = {name: sum(status.get(name, 0) for status in statuses) for name in _SUMS}
    rejected: Counter[str] = Counter()
    for status in statuses:
        rejected.update(status.get("rejected", {}))
    draining = all(status.get("draining") for status in statuses)
    return own | sums | {"draining": draining, "rejected": dict(rejected), "api_servers_heard": len(statuses)}


def _connected(name: str) -> socket.socket:
    """By hand: uvloop, which vLLM runs on, listens under abstract names and does not connect to them."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.connect(name)
    except OSError:
        connection.close()
        raise
    return connection


def _family() -> str:
    """The parent, and when it began: numbers of processes come back."""
    parent = os.getppid()
    began = "0"
    with contextlib.suppress(OSError, IndexError):
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{parent}-{began}"
