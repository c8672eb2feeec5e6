"""`legroom guard --upstream URL`: admission in front of a forwarder, on uvicorn's HTTP protocol."""

import asyncio
import contextlib
import json
import math
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from uvicorn import Config
from uvicorn.server import ServerState

from legroom.errors import UNREACHABLE, LegroomError
from legroom.guard.log import LOG, log_bug
from legroom.guard.pool.admission import Admission
from legroom.guard.pool.engine_usage import steps_of_page
from legroom.guard.pool.guard_metrics import append_page
from legroom.guard.request.endpoints import METRICS
from legroom.guard.serving.admission_app import ON_CHUNK, Receive, Scope, Send, send_refusal, send_response
from legroom.guard.serving.client_connection import SCOPE_KEY, ClientConnection, ClientServer
from legroom.guard.serving.upstream import Upstream, UpstreamError, UpstreamPool, connection_headers, down, request_head
from legroom.guard.weight.engine_limits import EngineLimits, limits_of_metrics
from legroom.live.run_record import run_under_way, start_requested
from legroom.records import dataclass

SWEEP_INTERVAL_S = 1.0
"""Deadlines and the policy file are checked this often."""
RELEARN_INTERVAL_S, RETRY_INTERVAL_S = 30.0, 2.0
"""Between two reads of the server's limits: it may restart with another pool; the second while they are unknown."""
USAGE_INTERVALS_S = (0.05, 0.25)
"""First and longest interval between scrapes of the engine's usage while requests wait; each is twice the last."""
REPEATED_SIGNAL_S = 1.0
"""Supervisors may pass the same signal on twice within this time."""

Ready = Callable[[int], None]
"""Called with the port that the proxy listens on."""


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    upstream: Upstream
    policy: Path | None = None
    plan: EngineLimits | None = None
    host: str = "127.0.0.1"
    port: int = 8100
    token: str | None = None
    api_key: str | None = None
    """Sent with the guard's own requests; clients send their own."""
    answer_timeout_s: float = 600.0
    """The server must begin its response within this; 0: no limit."""
    drain_timeout_s: float = 30.0
    most_buffered_bytes: int = 400 << 20


class Forwarder:
    """An ASGI application that forwards each request to the server."""

    def __init__(self, pool: UpstreamPool, admission: Admission) -> None:
        self._pool, self._admission = pool, admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read_body(receive)
        client: ClientConnection = scope[SCOPE_KEY]
        if body is None or client.transport.is_closing():
            return
        method, target = scope["method"], scope["raw_path"]
        if scope["query_string"]:
            target = b"%b?%b" % (target, scope["query_string"])
        length = len(body) if body or method in ("POST", "PUT", "PATCH") else None
        peer = (scope["client"] or ("",))[0]
        head = request_head(method, target, scope["headers"], self._pool.upstream, length, peer)
        left = down("the client left")
        try:
            server = await self._pool.exchange(
                method, head, body, lambda connection: setattr(client, "on_lost", partial(connection.fail, left))
            )
        except UpstreamError as error:
            if not client.transport.is_closing():
                await send_refusal(self._admission.refuse(error.refusal), send)
            return
        del body
        if not server.unsent:
            client.release_body()
        try:
            dropped = connection_headers(server.headers)
            headers = [header for header in server.headers if header[0] not in dropped]
            await send({"type": "http.response.start", "status": server.status, "headers": headers})
            on_chunk = scope.get(ON_CHUNK) if server.status == 200 else None

            def write_chunks() -> bool:
                """Write what the server has sent so far; False if that was all or the client can take no more."""
                if server.is_complete or not client.can_write_chunk:
                    return False
                chunk = server.take_chunks()
                if on_chunk is not None:
                    on_chunk(chunk)
                client.write_chunk(chunk)
                return True

            server.on_chunks = write_chunks
            while True:
                if server.chunks or server.is_complete:
                    is_complete = server.is_complete
                    chunk = server.take_chunks()
                    await send({"type": "http.response.body", "body": chunk, "more_body": not is_complete})
                    if is_complete:
                        return
                elif server.failure is not None:
                    client.abort()
                    return
                else:
                    await server.changed()
        finally:
            server.finish()


async def _read_body(receive: Receive) -> bytes | None:
    """The whole request body, bounded by the client's connection; None if the client disconnected."""
    chunks: list[bytes] = []
    while (message := await receive())["type"] == "http.request":
        chunks.append(message["body"])
        if not message.get("more_body", False):
            return b"".join(chunks)
    return None


class Proxy(ClientServer):
    def __init__(self, options: ProxyOptions) -> None:
        self.options = options
        admission = Admission(options.policy, options.plan, self.tokenize)
        self.upstreams = UpstreamPool(options.upstream, admission.clock)
        super().__init__(Forwarder(self.upstreams, admission), admission, options.token)
        self.config = Config(
            self, ws="none", lifespan="off", log_config=None, proxy_headers=False, timeout_keep_alive=75
        )
        self.server_state = ServerState()
        self.buffered_bytes, self.most_buffered_bytes = 0, options.most_buffered_bytes
        self.now_s = admission.clock()
        secret, key = options.upstream.authorization, options.api_key
        self._authorization = secret or (f"Bearer {key}".encode() if key else b"")
        self.is_draining = False
        self._drain_until_s = math.inf
        self._learnt = EngineLimits()

    @property
    def clients(self) -> set[ClientConnection]:
        """The open connections of clients."""
        return self.server_state.connections  # type: ignore[return-value]

    async def start(self) -> asyncio.Server:
        """Listen on the configured host and port; raises where that is not possible."""
        options = self.options
        try:
            return await asyncio.get_running_loop().create_server(
                lambda: ClientConnection(self), options.host, options.port, backlog=2048
            )
        except OSError as error:
            problem = f"cannot listen on {options.host}:{options.port}: {error.strerror}"
            raise LegroomError(problem, "choose another --host or --port", UNREACHABLE) from error

    async def run(self, stop: asyncio.Event, ready: Ready | None = None) -> None:
        """Serve until `stop` is set, then drain."""
        server = await self.start()
        if ready is not None:
            ready(server.sockets[0].getsockname()[1])
        work = (self._sweep_forever(), self._learn_limits_forever(), self._scrape_steps_forever())
        tasks = [asyncio.create_task(each) for each in work]
        try:
            await stop.wait()
            await self._drain(server)
        finally:
            for task in tasks:
                task.cancel()
            for client in list(self.clients):
                client.abort()
            self.upstreams.close()

    async def _drain(self, server: asyncio.Server) -> None:
        """Stop listening, tell clients to finish, and wait until all are gone or the drain timeout passes."""
        server.close()
        self.is_draining = self.admission.draining = True
        LOG.info("stopping: %d requests run, %d wait", self.admission.pool.running, self.admission.pool.waiting)
        begun_s = self.admission.clock()
        self._drain_until_s = begun_s + self.options.drain_timeout_s
        while self.admission.clock() < self._drain_until_s:
            for client in list(self.clients):
                client.shutdown()
            if not self.clients:
                return
            await asyncio.sleep(0.05)
        took_s = self.admission.clock() - begun_s
        LOG.warning("stopped with %d connections open after %.0f s", len(self.clients), took_s)

    def on_signal(self, drain_requested: asyncio.Event) -> None:
        """Called at SIGTERM and SIGINT: sets `drain_requested`; a second signal, 1 s or more later, ends the drain."""
        now_s = self.admission.clock()
        if self.is_draining and now_s > self._drain_until_s - self.options.drain_timeout_s + REPEATED_SIGNAL_S:
            self._drain_until_s = now_s
        drain_requested.set()

    async def _sweep_forever(self) -> None:
        """Calls `sweep` at intervals; an exception is logged as a bug and does not end the loop."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            try:
                self.sweep(self.admission.clock())
            except Exception as error:
                log_bug(error)

    def sweep(self, now_s: float) -> None:
        """Reload a changed policy file, and close connections and exchanges past their deadline."""
        self.now_s = now_s
        self.admission.reload()
        queue = self.admission.policy.queue
        self.upstreams.sweep(now_s, self.options.answer_timeout_s, queue.body_timeout_s, queue.drain_retry_s)
        for client in list(self.clients):
            client.sweep(now_s)

    async def _scrape_steps_forever(self) -> None:
        """Scrape the engine's step counter regularly while requests wait in the queue."""
        admission, (delay_s, longest_s) = self.admission, USAGE_INTERVALS_S
        while True:
            await asyncio.sleep(delay_s)
            if not admission.pool.waiting:
                delay_s = USAGE_INTERVALS_S[0]
                continue
            begun_s = admission.clock()
            page = await self.call_server("GET", METRICS)
            delay_s = max(min(longest_s, 2 * delay_s), 50 * (admission.clock() - begun_s))  # 2 % of the time
            steps = steps_of_page(page.decode("utf-8", "replace")) if page is not None else None
            if steps is not None:
                admission.pool.learn_steps(steps, admission.clock())

    async def _learn_limits_forever(self) -> None:
        """Ask the server for its limits again and again, more often while they are unknown."""
        while True:
            is_known = False
            try:
                is_known = await self.learn_limits_once()
            except Exception as error:
                log_bug(error)
            await asyncio.sleep(RELEARN_INTERVAL_S if is_known else RETRY_INTERVAL_S)

    async def learn_limits_once(self) -> bool:
        """Read the server's limits; those it does not report now stay. Returns whether its pool's size is known."""
        page = await self.call_server("GET", METRICS)
        limits = EngineLimits(source=f"{self.options.upstream.shown}{METRICS} does not answer")
        if page is not None:
            limits = limits_of_metrics(page.decode("utf-8", "replace"))
        invalid = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)
        with contextlib.suppress(*invalid):
            models = json.loads(await self.call_server("GET", "/v1/models") or b"{}")["data"]
            lengths = [model.get("max_model_len") for model in models]
            limits = replace(limits, max_model_len=max(int(length) for length in lengths if length))
        version = ""
        with contextlib.suppress(*invalid):
            version = str(json.loads(await self.call_server("GET", "/version") or b"{}")["version"])
        self._learnt = limits.completed_by(self._learnt)
        self.admission.learn_engine(self._learnt)
        self.log_limits(version, limits.known)
        return limits.known

    async def call_server(self, method: str, path: str, body: bytes = b"") -> bytes | None:
        """The body of the upstream's answer; None where it fails, takes 5 s or is not a 200."""
        try:
            async with asyncio.timeout(5.0):
                status, answer = await self.upstreams.request(method, path, self._authorization, body)
        except (UpstreamError, TimeoutError):
            return None
        return answer if status == 200 else None

    def _server_values(self, server_page: bytes | None) -> dict[str, int | None]:
        """Gauges about the upstream by name: whether it answers, is being restarted, and why it was restarted."""
        url = self.options.upstream.shown
        if server_page is None:
            return {"upstream_up": 0, "upstream_under_way": int(run_under_way(url) is not None)}
        is_told = b"legroom_guard_start_requested" in server_page  # by a guard inside vLLM
        return {"upstream_up": 1, "start_requested": None if is_told else start_requested(url)}

    async def send_metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the server's metrics page with the guard's; the guard's alone (200, or 503) while it is down."""
        if scope["method"] != "GET":
            await self.app(scope, receive, send)
            return
        server_page = await self.call_server("GET", METRICS)
        page = append_page(server_page or b"", self.admission.page(False, **self._server_values(server_page)))
        is_refused = server_page is None and self.admission.policy.proxy.metrics_when_down == "503"
        headers = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
        await send_response(503 if is_refused else 200, headers, page, send)


def serve(options: ProxyOptions, ready: Ready | None = None) -> int:
    """Run the proxy until SIGTERM or SIGINT; returns the exit code. `ready` is called once it listens."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:  # each stream has two connections
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(_serve_until_stopped(options, ready))


async def _serve_until_stopped(options: ProxyOptions, ready: Ready | None) -> int:
    """Run the proxy until SIGTERM or SIGINT; SIGHUP reloads the policy. Returns the exit code 0."""
    proxy, stop = Proxy(options), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, proxy.on_signal, stop)
    loop.add_signal_handler(signal.SIGHUP, lambda: proxy.admission.reload(force=True))
    await proxy.run(stop, ready)
    return 0
