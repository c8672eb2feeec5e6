"""Admission as an ASGI application in front of another one: the part that the vLLM middleware and the proxy share."""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any

from legroom.guard.log import LOG
from legroom.guard.pool.admission import Admission
from legroom.guard.request import refusals
from legroom.guard.request.endpoints import DRAIN, METRICS, STATUS, Kind, client_of, kind_of, plain_path
from legroom.guard.request.refusals import Refusal
from legroom.guard.serving import control
from legroom.guard.weight.guarded_request import GuardedRequest

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Headers = list[tuple[bytes, bytes]]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Pending = asyncio.Future[Message] | None

ON_CHUNK = "legroom.on_chunk"
"""The scope's key of a function that an application calls with chunks it does not pass to `send`."""


class AdmissionApp:
    """Admits requests on guarded paths, answers `/-/legroom/*` and `/metrics`, and passes everything else on."""

    def __init__(self, app: App, admission: Admission, token: str | None) -> None:
        self.app, self.admission, self.token = app, admission, token
        self._summary = ""

    def log_limits(self, version: str, is_known: bool) -> None:
        """Log what is admitted, if it changed; if the pool `is_known`, also flags for vLLM's own queue bounds."""
        if (summary := self.admission.summary()) == self._summary:
            return
        self._summary = summary
        LOG.info("%s", summary)
        if is_known and (hint := self.admission.native_flags_hint(version)):
            LOG.info("%s", hint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await (self.run_lifespan if scope["type"] == "lifespan" else self.app)(scope, receive, send)
            return
        path, root = scope["path"], scope.get("root_path", "")
        kind = kind_of(scope["method"], path, root)
        if kind is not None and not self.is_unauthorized(scope):
            await self._admit(kind, scope, receive, send)
        elif path == METRICS or (path.startswith(METRICS) and plain_path(path, root) == METRICS):
            await self.send_metrics(scope, receive, send)
        elif path in (DRAIN, STATUS):
            await self._control(scope, receive, send)
        else:
            self.admission.metrics.passed += 1
            await self.app(scope, receive, send)

    async def run_lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the ASGI lifespan protocol on to the wrapped app."""
        await self.app(scope, receive, send)

    def is_unauthorized(self, scope: Scope) -> bool:
        """Whether the server will refuse this request for a missing or wrong API key; False unless overridden."""
        return False

    def has_dead_engine(self) -> bool:
        """Whether the server's engine has ended, so that only a restart helps; overridden by the middleware."""
        return False

    async def learn_limits(self, scope: Scope) -> None:
        """Hook to read the engine's KV pool and flags before a request is weighed; does nothing unless overridden."""

    async def send_metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the server's metrics page with the guard's series appended; subclasses define it."""
        raise NotImplementedError

    async def call_server(self, method: str, path: str, body: bytes = b"") -> bytes | None:
        """The body of the server's answer, None where it fails or is not a 200; subclasses define it."""
        raise NotImplementedError

    async def tokenize(self, body: bytes) -> int | None:
        """The server's token count for a `/tokenize` body; None where it gives none."""
        try:
            return int(json.loads(await self.call_server("POST", "/tokenize", body) or b"{}")["count"])
        except (ValueError, KeyError, TypeError):
            return None

    async def control_peers(self, status: dict[str, Any], drain: bool | None) -> dict[str, Any]:
        """`status` merged with the other API servers' after they apply `drain`; unless overridden, alone."""
        return status

    async def _admit(self, kind: Kind, scope: Scope, receive: Receive, send: Send) -> None:
        """Read, weigh and queue one request; then pass it to the server, or send the refusal."""
        admission = self.admission
        admission.reload()
        await self.learn_limits(scope)
        body = await read_whole_body(scope, receive, admission)
        if body is None:
            return
        if isinstance(body, Refusal):
            await send_refusal(body, send)
            return
        address = (scope.get("client") or ("",))[0]
        request = admission.read(kind, body, client_of(scope["headers"], str(address), admission.policy.clients))
        del body  # a stream may last for minutes
        if isinstance(request, Refusal):
            await send_refusal(request, send)
            return
        refusal = await admission.count(request) if admission.weigh(request) else None
        refusal = refusal or admission.admit(request)
        pending: Pending = None
        if refusal is None and admission.is_waiting(request):
            pending = asyncio.ensure_future(receive())
            try:
                refusal = await admission.wait(request, pending)
            except asyncio.CancelledError:
                pending.cancel()
                raise
            if refusal is not None:
                pending.cancel()
            elif pending.done():
                return
        if refusal is not None:
            await send_refusal(refusal, send)
            return
        await self._serve(request, scope, receive, pending, send)

    async def _serve(
        self, request: GuardedRequest, scope: Scope, receive: Receive, pending: Pending, send: Send
    ) -> None:
        """Run an admitted request in the server, and release its blocks when the response ends or fails."""
        admission, status, is_complete, is_replaced = self.admission, 0, False, False

        async def observe_and_send(message: Message) -> None:
            """Send a message of the response; learn from its chunks, and replace the 500 of a dead engine."""
            nonlocal status, is_complete, is_replaced
            if message["type"] == "http.response.body":
                if status == 200 and (chunk := message.get("body")):
                    admission.on_chunk(request, chunk)
                is_complete = not message.get("more_body", False)
            elif message["type"] == "http.response.start":
                status = message["status"]
                if status == 500 and self.has_dead_engine():
                    is_replaced = True
                    await send_refusal(refusals.engine_dead(admission.policy.queue.drain_retry_s), send)
                if status in (429, 503):
                    headers = list(message.get("headers", ()))
                    if not any(name.lower() == b"retry-after" for name, _ in headers):
                        seconds = admission.policy.queue.drain_retry_s if admission.draining else 1
                        headers.append((b"retry-after", b"%d" % seconds))
                    message["headers"] = headers
            if not is_replaced:
                await send(message)

        if request.changed:
            replaced = (b"content-length", b"transfer-encoding")
            headers = [header for header in scope["headers"] if header[0] not in replaced]
            scope["headers"] = [*headers, (b"content-length", b"%d" % len(request.body))]
        scope[ON_CHUNK] = partial(admission.on_chunk, request)
        replay = replayed_body(request.body, receive, pending)
        request.body = b""
        try:
            await self.app(scope, replay, observe_and_send)
        finally:
            # After 504 the server may still run the request until it sees that the connection was closed.
            admission.release(request, finished=is_complete and status != 504)
            if pending is not None:
                pending.cancel()

    async def _control(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request to the guard's control endpoints: status and drain."""
        await self.learn_limits(scope)
        method, authorization = scope["method"], dict(scope["headers"]).get(b"authorization", b"")
        body: bytes | Refusal | None = b""
        if method == "POST" and control.token_refusal(self.token, authorization) is None:
            body = await read_whole_body(scope, receive, self.admission)
        if body is None:
            return
        if isinstance(body, Refusal):
            await send_refusal(body, send)
            return
        request = (method, scope["path"], authorization, body)
        status, document = control.answer_control(self.admission, self.token, *request)
        if status == 200:
            document = await self.control_peers(document, self.admission.draining if method == "POST" else None)
        await send_response(status, [(b"content-type", b"application/json")], json.dumps(document).encode(), send)


async def read_whole_body(scope: Scope, receive: Receive, admission: Admission) -> bytes | Refusal | None:
    """The request body, or the refusal if it is too large or too slow; None if the client disconnected."""
    policy = admission.policy
    most_bytes, chunks, size = policy.requests.body_bytes, [], 0
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > most_bytes:
            return admission.refuse(refusals.too_large(most_bytes))
    try:
        async with asyncio.timeout(policy.queue.body_timeout_s):
            while (message := await receive())["type"] == "http.request":
                chunk = message.get("body", b"")
                chunks.append(chunk)
                size += len(chunk)
                if size > most_bytes:
                    return admission.refuse(refusals.too_large(most_bytes))
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        return admission.refuse(refusals.body_timeout(policy.queue.body_timeout_s))
    return None


def replayed_body(body: bytes, receive: Receive, pending: Pending) -> Receive:
    """An ASGI `receive` of a `body` read already, then of later messages, first `pending` if one is under way."""
    bodies, messages = [body], [pending] if pending is not None else []

    async def replay_body() -> Message:
        """The next message: the body that was read, then the pending message, then the client's."""
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        if not messages:
            return await receive()
        # Shielded: a reader that stops waiting must not cancel the receive that sees the disconnect.
        message = await asyncio.shield(messages[0])
        messages.clear()
        return message

    return replay_body


async def collect_response(app: App, scope: Scope, receive: Receive) -> tuple[int, Headers, bytes]:
    """(Status, headers, whole body) of an application's response."""
    status, headers, chunks = 0, [], []

    async def collect(message: Message) -> None:
        """An ASGI `send` that keeps the status, headers and body."""
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            chunks.append(message.get("body", b""))

    await app(scope, receive, collect)
    return status, headers, b"".join(chunks)


async def send_refusal(refusal: Refusal, send: Send) -> None:
    """Send a refusal as the whole response."""
    await send_response(refusal.status, refusal.headers(), refusal.body(), send)


async def send_response(status: int, headers: Headers, body: bytes, send: Send) -> None:
    """Send a whole response; the content-length is added to its headers."""
    headers = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
