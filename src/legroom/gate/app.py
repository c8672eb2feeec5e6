"""The gate over HTTP: an ASGI application that answers reviews, probes and Prometheus."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from legroom.errors import LegroomError
from legroom.gate.judgement import Judgement
from legroom.gate.judges import Judges, Undecided
from legroom.gate.meters import Ending, GateMeters
from legroom.gate.review import AdmissionRequest, Mode, NotAReview, admission_request, deciding_part, review_answer
from legroom.records import dataclass

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
LARGEST_BODY_BYTES = 8 << 20
"""Twice the largest object that etcd keeps, new and old, with room to spare."""
_MOST_HELD_BYTES = 64 << 20
"""Of all bodies that are being read together."""
_LARGEST_AT_ONCE = 512 << 10
"""What is parsed on the event loop: some milliseconds. Larger ones are parsed beside it."""
_LONGEST_BODY_S = 10.0
_SWITCHED: Mapping[str, Mode] = {"warn": "warn", "enforce": "enforce"}
_PATHS: Mapping[str, Mode | None] = {"/validate": None, "/validate/warn": "warn", "/validate/enforce": "enforce"}
_JSON = b"application/json"
_TEXT = b"text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class GatePolicy:
    """Whom the gate looks at, and what it does about what it sees."""

    mode: Mode = "warn"
    only_namespaces: frozenset[str] = frozenset()
    not_namespaces: frozenset[str] = frozenset({"kube-system", "kube-public", "kube-node-lease"})
    only_labelled: bool = False
    """Leave objects alone that do not carry the label or annotation `legroom/gate`."""

    def mode_for(self, request: AdmissionRequest, path_mode: Mode | None) -> Mode | None:
        """The mode for one object; None leaves it alone."""
        switch, namespace = request.switch, request.namespace
        if switch == "off" or namespace in self.not_namespaces:
            return None
        if (self.only_namespaces and namespace not in self.only_namespaces) or (self.only_labelled and not switch):
            return None
        return _SWITCHED.get(switch) or path_mode or self.mode


class _TooMuch(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


class GateApp:
    """One process's application."""

    def __init__(self, policy: GatePolicy, judges: Judges, meters: GateMeters) -> None:
        self._policy, self._judges, self._meters = policy, judges, meters
        self._held_bytes = 0
        self.is_ready = False

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        if path in _PATHS:
            await self._reviewed(scope, receive, send)
        elif method not in ("GET", "HEAD"):
            await _respond(send, 405, b"only a GET is answered here\n")
        elif path in ("/healthz", "/livez"):
            await _respond(send, 200, b"ok\n")
        elif path == "/readyz":
            await _respond(send, *((200, b"ok\n") if self.is_ready else (503, b"it has just started\n")))
        elif path == "/metrics":
            await _respond(send, 200, self._meters.page().encode(), _TEXT)
        else:
            await _respond(send, 404, b"reviews go to /validate\n")

    async def _reviewed(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await _respond(send, 405, b"a review is a POST\n")
            return
        body = b""
        try:
            body = await self._body(scope, receive)
            began_s = time.perf_counter()
            document = await _parsed(body)
            request = admission_request(document)
        except _TooMuch as refused:
            self._meters.count("bad_request")
            await _respond(send, refused.status, f"{refused.text}\n".encode())
            return
        except (NotAReview, ValueError, RecursionError) as error:
            self._meters.count("bad_request")
            text = error.message if isinstance(error, LegroomError) else "the body is not JSON"
            await _respond(send, 400, f"{text}\n".encode())
            return
        finally:
            self._held_bytes -= len(body)
        ending, answer = await self._answer(request, _PATHS[scope["path"]])
        self._meters.took(time.perf_counter() - began_s)
        self._meters.count(f"ending:{ending}")
        await _respond(send, 200, answer, _JSON)

    async def _body(self, scope: MutableMapping[str, Any], receive: Receive) -> bytes:
        """The body, refused as soon as it is too large or does not come. Bytes count as held until it is parsed."""
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(_LONGEST_BODY_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _TooMuch(400, "the connection ended")
                    piece = message.get("body", b"")
                    size += len(piece)
                    self._held_bytes += len(piece)
                    if size > LARGEST_BODY_BYTES:
                        raise _TooMuch(413, f"a review has at most {LARGEST_BODY_BYTES >> 20} MiB")
                    if self._held_bytes > _MOST_HELD_BYTES:
                        raise _TooMuch(429, "too many large reviews at once")
                    pieces.append(piece)
                    if not message.get("more_body"):
                        return b"".join(pieces)
        except (TimeoutError, _TooMuch) as error:
            self._held_bytes -= size
            raise error if isinstance(error, _TooMuch) else _TooMuch(408, "the review stopped coming") from None

    async def _answer(self, request: AdmissionRequest, path_mode: Mode | None) -> tuple[Ending, bytes]:
        mode = self._policy.mode_for(request, path_mode)
        if mode is None or request.is_leaving or request.is_owned:
            return "skipped", review_answer(request.uid, True)
        try:
            part = deciding_part(request.new)
            if request.operation == "UPDATE" and request.old and part == deciding_part(request.old):
                return "unchanged", review_answer(request.uid, True)
            key, judgement = self._judges.known(part)
            self._meters.count("cache:miss" if judgement is None else "cache:hit")
            if judgement is None or not judgement.is_searched:
                judgement = await self._judges.decide(key, part)
        except Undecided as undecided:
            return self._failed_open(request, undecided.reason)
        except Exception as error:
            print(f"legroom gate: {type(error).__name__}: {error}", file=sys.stderr)
            return self._failed_open(request, "error")
        if not judgement.is_searched:
            self._meters.count("answered_before_search")
        return _judged(request, judgement, mode)

    def _failed_open(self, request: AdmissionRequest, reason: str) -> tuple[Ending, bytes]:
        self._meters.count(f"reason:{reason}")
        warning = f"this {request.kind} was not checked ({_UNDECIDED[reason]}) and is let through"
        return "failed_open", review_answer(request.uid, True, warnings=[warning])


_UNDECIDED = {
    "timeout": "no judgement in time",
    "error": "an error in the gate; its log shows where",
    "overload": "too many other objects",
}


_BEING_SEARCHED = "Flags that fix it are being searched for: the answer to the next try has them."


def _judged(request: AdmissionRequest, judgement: Judgement, mode: Mode) -> tuple[Ending, bytes]:
    uid, sentences = request.uid, judgement.sentences
    if not judgement.is_searched and not judgement.has_fixes:
        sentences = (*sentences, _BEING_SEARCHED)
    if judgement.outcome == "does_not_fit":
        if mode == "enforce":
            return "refused", review_answer(uid, False, " ".join(sentences))
        return "would_refuse", review_answer(uid, True, warnings=sentences)
    if judgement.outcome == "not_understood":
        return "not_understood", review_answer(uid, True, warnings=sentences)
    if judgement.outcome == "tight":
        return "warned", review_answer(uid, True, warnings=sentences)
    return ("no_server" if judgement.outcome == "no_server" else "allowed"), review_answer(uid, True)


async def _parsed(body: bytes) -> Any:
    if len(body) <= _LARGEST_AT_ONCE:
        return json.loads(body)
    return await asyncio.to_thread(json.loads, body)


async def _respond(send: Send, status: int, body: bytes, kind: bytes = b"text/plain; charset=utf-8") -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
