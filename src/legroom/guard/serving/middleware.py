"""`vllm serve ... --middleware legroom.guard.Guard`: admission inside vLLM's own API server.

Pure ASGI: messages pass through as they come, only those of guarded paths are looked at. vLLM adds this middleware
outside its own (0.32), so it also sees requests that vLLM's API-key check is about to refuse; these go straight
through, as they must not take anybody's place.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.releases import release
from legroom.guard.log import LOG, log_to_stderr
from legroom.guard.pool.admission import Admission
from legroom.guard.pool.engine_usage import use_of_registry
from legroom.guard.pool.meters import with_page
from legroom.guard.request import refusals
from legroom.guard.request.clients import client_of
from legroom.guard.request.endpoints import DRAIN, METRICS, STATUS, TOKEN_NAME, Kind, kind_of, plain_path
from legroom.guard.request.refusals import Refusal
from legroom.guard.serving import control
from legroom.guard.serving.asgi import Message, Receive, Replay, Upload, call, soon
from legroom.guard.serving.control import Peers, together
from legroom.guard.serving.engine_processes import EngineProcesses
from legroom.guard.weight.engine_limits import EngineLimits, limits_of_metrics, limits_of_vllm, read_limits
from legroom.guard.weight.guarded_request import GuardedRequest

_EVER = ("/v1",)
_SINCE = (("0.22.0", ("/v2", "/inference")), ("0.27.0", ("/cohere",)))
"""Paths that the check covers, and since when: elsewhere a request without a key is served as any other."""


class KeyCheck:
    """Learns keys and release from the application with the first request."""

    __slots__ = ("_keys", "_paths")

    def __init__(self) -> None:
        self._keys: list[bytes] | None = None
        self._paths: tuple[str, ...] = _EVER

    def will_refuse(self, scope: MutableMapping[str, Any]) -> bool:
        """Whether vLLM will refuse this request for want of a key."""
        if self._keys is None:
            self._keys = _keys(scope)
            self._paths = covered_paths(str(getattr(sys.modules.get("vllm"), "__version__", "")))
        if not self._keys or not scope["path"].removeprefix(scope.get("root_path", "")).startswith(self._paths):
            return False
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        shown = hashlib.sha256(key).digest()
        return scheme.lower() != b"bearer" or not any(hmac.compare_digest(shown, known) for known in self._keys)


def _keys(scope: MutableMapping[str, Any]) -> list[bytes]:
    args = getattr(getattr(scope.get("app"), "state", None), "args", None)
    named = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    keys = [named] if isinstance(named, str) else named
    return [hashlib.sha256(key.encode()).digest() for key in keys if key]


def covered_paths(version: str) -> tuple[str, ...]:
    """What the check of a release covers; of one that is not known, what every release's does."""
    try:
        running = release(version)
    except LegroomError:
        return _EVER
    return _EVER + tuple(path for since, paths in _SINCE if not running.before(since) for path in paths)


Scope = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

RELEARN_S = 5.0
"""How often to ask again for the size of a pool that could not be learnt."""
INNER_CALL_S = 5.0


class Guard:
    """The middleware. `LEGROOM_GUARD_POLICY` and `LEGROOM_GUARD_PLAN` name its files, `LEGROOM_GUARD_TOKEN` lets
    somebody drain it.
    """

    def __init__(self, app: App, policy: str | None = None, plan: str | None = None, token: str | None = None) -> None:
        log_to_stderr()
        policy = policy or os.environ.get("LEGROOM_GUARD_POLICY")
        plan = plan or os.environ.get("LEGROOM_GUARD_PLAN")
        self.app = app
        self.token = token or os.environ.get(TOKEN_NAME) or None
        self._learn_at_s = 0.0
        self._key_check = KeyCheck()
        self._peers: Peers | None = None
        self._engines = EngineProcesses()
        self._server: Any = None
        self._summary = ""
        try:
            planned = read_limits(Path(plan)) if plan else None
            file = Path(policy) if policy else None
            self.admission = Admission(file, planned, self._tokenize, engine_use=use_of_registry)
        except LegroomError as error:
            # vLLM prints what a middleware raises; a sentence is worth more than its traceback.
            raise SystemExit(f"legroom guard: {error.message}{f' ({error.hint})' if error.hint else ''}") from None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await (self._living if scope["type"] == "lifespan" else self.app)(scope, receive, send)
            return
        path, root = scope["path"], scope.get("root_path", "")
        kind = kind_of(scope["method"], path, root)
        if kind is not None:
            await self._guarded(kind, scope, receive, send)
        elif path == METRICS or (path.startswith(METRICS) and plain_path(path, root) == METRICS):
            await self._metrics(scope, receive, send)
        elif path.startswith("/-/legroom/") and path in (DRAIN, STATUS):
            await self._control(scope, receive, send)
        else:
            self.admission.meters.passed += 1
            await self.app(scope, receive, send)

    async def _guarded(self, kind: Kind, scope: Scope, receive: Receive, send: Send) -> None:
        admission = self.admission
        if self._key_check.will_refuse(scope):
            admission.meters.passed += 1
            await self.app(scope, receive, send)
            return
        admission.reload()
        await self._learn(scope)
        body = self._announced(scope) or b"" if kind is Kind.UPLOAD else await self._body(scope, receive)
        if body is None:
            return  # the client went away
        address = (scope.get("client") or ("",))[0]
        client = client_of(scope["headers"], str(address), admission.policy.clients)
        request = body if isinstance(body, Refusal) else admission.read(kind, body, client)
        if isinstance(request, Refusal):
            await _answer(request, send)
            return
        refusal = await admission.count(request) if admission.weigh(request) else None
        refusal = refusal or admission.admit(request)
        if refusal is not None:
            await _answer(refusal, send)
            return
        pending: asyncio.Future[Message] | None = None
        if admission.is_waiting(request):
            if kind is not Kind.UPLOAD:
                pending = asyncio.ensure_future(receive())
            try:
                refusal = await admission.wait(request, pending)
            except asyncio.CancelledError:
                if pending is not None:
                    pending.cancel()
                raise
            if refusal is not None or (pending is not None and pending.done()):
                if pending is not None:
                    pending.cancel()
                if refusal is not None:
                    await _answer(refusal, send)
                return
        await self._served(request, kind, scope, receive, pending, send)

    async def _served(
        self, request: GuardedRequest, kind: Kind, scope: Scope, receive: Receive, pending: Any, send: Send
    ) -> None:
        """Run the request in vLLM and give its place back when the answer ended, however it ended."""
        admission, ended, good, started = self.admission, False, False, False
        upload = Upload(receive, admission.policy) if kind is Kind.UPLOAD else None
        inside = upload or Replay(request.body, receive, pending)

        async def passing(message: Message) -> None:
            nonlocal ended, good, started
            if upload is not None and upload.refusal is not None and not started:
                return  # the server speaks of a body that broke off; the reason is told below
            started = True
            if message["type"] == "http.response.body":
                if good and (chunk := message.get("body")):
                    admission.on_chunk(request, chunk)
                if not message.get("more_body", False):
                    ended = True
            elif message["type"] == "http.response.start":
                good = message["status"] == 200
                if message["status"] in (429, 503):
                    message = _with_retry_after(message, admission)
            await send(message)

        if request.changed:
            scope = _with_length(scope, len(request.body))
        try:
            await self.app(scope, inside, passing)
        except Exception:
            if upload is None or upload.refusal is None or started:
                raise
        finally:
            admission.release(request, ended)
            if pending is not None:
                pending.cancel()
        if upload is not None and upload.refusal is not None and not started:
            await _answer(admission.refuse(upload.refusal), send)

    def _announced(self, scope: Scope) -> Refusal | None:
        """A body that says itself that it is too large."""
        most = self.admission.policy.requests.body_bytes
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > most:
                return self.admission.refuse(refusals.too_large(most))
        return None

    async def _body(self, scope: Scope, receive: Receive) -> bytes | Refusal | None:
        """The whole body, within the policy's size and time; None where the client left."""
        admission, bounds = self.admission, self.admission.policy
        most = bounds.requests.body_bytes
        refusal = self._announced(scope)
        if refusal is not None:
            return refusal
        deadline_s = admission.clock() + bounds.queue.body_timeout_s
        message = await soon(receive, bounds.queue.body_timeout_s)
        if message is not None and message["type"] == "http.request" and not message.get("more_body", False):
            body: bytes = message.get("body", b"")
            return body if len(body) <= most else admission.refuse(refusals.too_large(most))
        pieces, size = [], 0
        while message is not None and message["type"] == "http.request":
            piece = message.get("body", b"")
            pieces.append(piece)
            size += len(piece)
            if size > most:
                return admission.refuse(refusals.too_large(most))
            if not message.get("more_body", False):
                return b"".join(pieces)
            message = await soon(receive, deadline_s - admission.clock())
        if message is None:
            return admission.refuse(refusals.body_timeout(bounds.queue.body_timeout_s))
        return None

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """vLLM's page with ours behind it; compressed pages cannot be added to, so none is asked for."""
        await self._learn(scope)  # else a server that nobody has asked yet would seem to let all in
        stopped = await asyncio.to_thread(self._engines.stopped)
        plain = dict(scope)
        plain["headers"] = [header for header in scope["headers"] if header[0] != b"accept-encoding"]
        start: Message | None = None
        pieces: list[bytes] = []

        async def gather(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
            elif message["type"] == "http.response.body":
                pieces.append(message.get("body", b""))
                if not message.get("more_body", False) and start is not None:
                    await _send_page(start, b"".join(pieces), self.admission, stopped, send)

        await self.app(plain, receive, gather)

    async def _control(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._learn(scope)
        method, given = scope["method"], dict(scope["headers"]).get(b"authorization", b"")
        body: bytes | Refusal | None = b""
        if method == "POST" and control.denied(self.token, given) is None:
            body = await self._body(scope, receive)
        if body is None:
            return  # the client went away
        if isinstance(body, Refusal):
            await _answer(body, send)
            return
        status, document = control.answer(self.admission, self.token, method, scope["path"], given, body)
        if status == 200 and self._peers is not None:
            others = await self._peers.ask(self.admission.draining if method == "POST" else None)
            document = json.dumps(together(json.loads(document), others)).encode()
        length = str(len(document)).encode()
        shown = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": status, "headers": shown})
        await send({"type": "http.response.body", "body": document})

    async def _living(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The server's life, among its peers if it has any: a drain of one is meant for all of them."""
        count = limits_of_vllm(None, getattr(getattr(scope.get("app"), "state", None), "args", None)).api_servers
        if count == 1 or self.token is None:
            await self.app(scope, receive, send)
            return
        peers = Peers(count, self.token, self.admission.drain)
        if await peers.join():
            self._peers = peers
        else:
            LOG.warning(
                "could not reach the other %d API servers: a drain only counts for the one that receives it", count - 1
            )
        try:
            await self.app(scope, receive, send)
        finally:
            peers.leave()

    async def _learn(self, scope: Scope) -> None:
        """Ask vLLM what it can hold: its configuration in this process, else its metrics page."""
        if self.admission.limits.known and self._learn_at_s:
            return
        now_s = self.admission.clock()
        if now_s < self._learn_at_s:
            return
        self._learn_at_s = now_s + RELEARN_S
        self._server = scope.get("app")
        state = getattr(self._server, "state", None)
        limits = limits_of_vllm(getattr(state, "vllm_config", None), getattr(state, "args", None))
        if not limits.known:
            limits = await self._limits_of_page(limits)
        self.admission.learn_engine(limits)
        if (summary := self.admission.summary()) == self._summary:
            return
        self._summary = summary
        LOG.info("%s", summary)
        hint = self.admission.native_flags_hint(str(getattr(sys.modules.get("vllm"), "__version__", "")))
        if hint and limits.known:
            LOG.info("%s", hint)

    async def _limits_of_page(self, limits: EngineLimits) -> EngineLimits:
        try:
            status, page = await call(self.app, self._server, "GET", METRICS, b"", INNER_CALL_S)
        except Exception as error:  # whatever the server does here, requests must go on
            LOG.error("could not read the metrics page: %r", error)
            return limits
        return limits_of_metrics(page.decode("utf-8", "replace")).over(limits) if status == 200 else limits

    async def _tokenize(self, body: bytes) -> int | None:
        """Ask vLLM's own tokenizer, in this process."""
        try:
            status, answer = await call(self.app, self._server, "POST", "/tokenize", body, INNER_CALL_S)
            return int(json.loads(answer)["count"]) if status == 200 else None
        except Exception as error:
            LOG.error("could not count a prompt's tokens: %r", error)
            return None


async def _answer(refusal: Refusal, send: Send) -> None:
    body = refusal.body()
    await send({"type": "http.response.start", "status": refusal.status, "headers": refusal.headers(body)})
    await send({"type": "http.response.body", "body": body})


async def _send_page(start: Message, body: bytes, admission: Admission, stopped: int | None, send: Send) -> None:
    if start["status"] == 200:
        kind = next((value for name, value in start["headers"] if name.lower() == b"content-type"), b"")
        body = with_page(body, admission.page(b"openmetrics" in kind, stopped_engines=stopped))
    headers = [header for header in start["headers"] if header[0].lower() != b"content-length"]
    start["headers"] = [*headers, (b"content-length", str(len(body)).encode())]
    await send(start)
    await send({"type": "http.response.body", "body": body})


def _with_length(scope: Scope, length: int) -> Scope:
    """The scope with the length of the body as it is now."""
    headers = [header for header in scope["headers"] if header[0] not in (b"content-length", b"transfer-encoding")]
    scope["headers"] = [*headers, (b"content-length", str(length).encode())]
    return scope


def _with_retry_after(message: Message, admission: Admission) -> Message:
    """vLLM's own refusals say nothing about when to come back."""
    headers = list(message.get("headers", ()))
    if not any(name.lower() == b"retry-after" for name, _ in headers):
        headers.append(
            (b"retry-after", str(admission.policy.queue.drain_retry_s if admission.draining else 1).encode())
        )
    message["headers"] = headers
    return message
