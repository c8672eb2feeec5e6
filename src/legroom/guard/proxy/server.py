"""`legroom guard --upstream URL`: listens, learns what the server can hold, and stops in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from legroom.errors import UNREACHABLE, LegroomError
from legroom.guard.log import LOG, log_bug
from legroom.guard.pool.admission import Admission
from legroom.guard.pool.block_pool import PoolLimits
from legroom.guard.pool.engine_usage import use_of_page
from legroom.guard.pool.meters import with_page
from legroom.guard.proxy.client import ClientConnection
from legroom.guard.proxy.reader import BufferedBodies
from legroom.guard.proxy.upstream import ServerPool
from legroom.guard.proxy.wire import Headers, Upstream
from legroom.guard.request.endpoints import METRICS
from legroom.guard.serving import control
from legroom.guard.weight.engine_limits import EngineLimits, limits_of_metrics
from legroom.records import dataclass

if TYPE_CHECKING:
    from pathlib import Path

    import aiohttp

ASK_S = 5.0
SWEEP_S = 1.0
"""How often deadlines and the policy file are looked at."""
LEARN_AGAIN_S = 30.0
"""A server behind the guard may be restarted with another pool."""
LEARN_SOON_S = 2.0
USE_SOON_S, USE_S, USE_SELDOM_S = 0.05, 0.25, 0.5
"""How soon after requests begin to wait to ask what is in use, then twice as long each time up to the second, or to the
third where a page takes long."""
USE_PART = 0.02
"""Of the server's time, what its pages may take."""
TWICE_S = 1.0
"""Signals closer together than this are one."""

Ready = Callable[[int], None]
"""Called with the port once it is listened on."""


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    upstream: Upstream
    policy: Path | None = None
    plan: EngineLimits | None = None
    host: str = "127.0.0.1"
    port: int = 8100
    token: str | None = None
    api_key: str | None = None
    """For what the guard itself asks the server; clients bring their own."""
    answer_s: float = 600.0
    """The server must begin to answer within this; 0: no limit."""
    drain_s: float = 30.0
    most_buffered_bytes: int = 400 << 20


class Proxy:
    """What all connections share."""

    def __init__(self, options: ProxyOptions) -> None:
        self.options = options
        self.upstream = options.upstream
        self.admission = Admission(options.policy, options.plan, self._tokenize)
        self.answer_s = options.answer_s
        self.clients: set[ClientConnection] = set()
        self.buffered = BufferedBodies(options.most_buffered_bytes)
        self.closing = False
        self._drain_until_s = math.inf
        self.now_s = self.admission.clock()
        """The time as of the last second: deadlines need no finer one."""
        self.servers = ServerPool(options.upstream, self.admission.clock)
        self._session: aiohttp.ClientSession | None = None
        self._learnt = EngineLimits()
        self._version = ""
        self._logged: tuple[PoolLimits, bool] | None = None
        """What the log said last."""

    async def start(self) -> asyncio.Server:
        import aiohttp

        secret, key = self.upstream.authorization, self.options.api_key
        credentials = secret.decode() if secret else f"Bearer {key}" if key else None
        headers = {"authorization": credentials} if credentials else {}
        timeout = aiohttp.ClientTimeout(total=ASK_S)
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, trust_env=False)
        loop = asyncio.get_running_loop()
        try:
            return await loop.create_server(
                lambda: ClientConnection(self), self.options.host, self.options.port, backlog=2048
            )
        except OSError as error:
            await self._session.close()
            where = f"{self.options.host}:{self.options.port}"
            raise LegroomError(
                f"cannot listen on {where}: {error.strerror}", "choose another --host or --port", UNREACHABLE
            ) from error

    async def run(self, stop: asyncio.Event, ready: Ready | None = None) -> None:
        """Serve until told to stop, then let what runs finish."""
        server = await self.start()
        if ready is not None:
            ready(server.sockets[0].getsockname()[1])
        chores = [asyncio.create_task(chore) for chore in (self._sweep(), self._learn(), self._watch_engine())]
        try:
            await stop.wait()
            await self._drain(server)
        finally:
            for chore in chores:
                chore.cancel()
            for client in list(self.clients):
                client.transport.abort()
            self.servers.close()
            assert self._session is not None
            await self._session.close()

    async def _drain(self, server: asyncio.Server) -> None:
        server.close()
        self.closing = self.admission.draining = True
        LOG.info("stopping: %d requests run, %d wait", self.admission.pool.running, self.admission.pool.waiting)
        begun_s = self.admission.clock()
        self._drain_until_s = begun_s + self.options.drain_s
        while self.admission.clock() < self._drain_until_s:
            for client in list(self.clients):
                client.stop()
            if not self.clients:
                return
            await asyncio.sleep(0.05)
        LOG.warning(
            "stopped with %d connections open after %.0f s", len(self.clients), self.admission.clock() - begun_s
        )

    def told_to_stop(self, stop: asyncio.Event) -> None:
        """A signal: let what runs finish. One more, a second or more later (what starts us may pass one on twice): do
        not wait for it.
        """
        now_s = self.admission.clock()
        if self.closing and now_s > self._drain_until_s - self.options.drain_s + TWICE_S:
            self._drain_until_s = now_s
        stop.set()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                self._sweep_once()
            except Exception as error:  # without it no client would ever be too slow again
                log_bug(error)

    def _sweep_once(self) -> None:
        self.now_s = self.admission.clock()
        self.admission.reload()
        self.servers.sweep(self.now_s)
        for client in list(self.clients):
            client.sweep(self.now_s)

    async def _watch_engine(self) -> None:
        """While requests wait, ask the server what is in use: else there is nothing to decide."""
        admission, delay_s = self.admission, USE_SOON_S
        while True:
            await asyncio.sleep(delay_s)
            if not admission.pool.waiting:
                delay_s = USE_SOON_S
                continue
            asked_s = admission.clock()
            page = await self._get(METRICS)
            longest_s = min(USE_SELDOM_S, max(USE_S, (admission.clock() - asked_s) / USE_PART))
            delay_s = min(longest_s, 2 * delay_s)
            use = use_of_page(page.decode("utf-8", "replace")) if page is not None else None
            if use is not None:
                admission.pool.learn_use(use, admission.clock())

    async def _learn(self) -> None:
        """Ask the server again and again what it can hold."""
        while True:
            known = False
            try:
                known = await self._learn_once()
            except Exception as error:  # whatever the server says, it is asked again
                log_bug(error)
            await asyncio.sleep(LEARN_AGAIN_S if known else LEARN_SOON_S)

    async def _learn_once(self) -> bool:
        """Whether the server said how large its pool is; where it does not, what it said before stays."""
        limits = await self._limits()
        self._learnt = limits.over(self._learnt)
        self.admission.learn_engine(self._learnt)
        reached = (self.admission.pool.limits, self.admission.limits.known)
        if reached != self._logged:
            self._logged = reached
            LOG.info("%s", self.admission.summary())
            if limits.known and (hint := self.admission.native_flags_hint(self._version)):
                LOG.info("%s", hint)
        return limits.known

    async def _limits(self) -> EngineLimits:
        page = await self._get(METRICS)
        limits = (
            limits_of_metrics(page.decode("utf-8", "replace"))
            if page is not None
            else EngineLimits(source=f"{self.upstream.shown}{METRICS} does not answer")
        )
        models = await self._get("/v1/models")
        with contextlib.suppress(ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError):
            lengths = [model.get("max_model_len") for model in json.loads(models or b"{}")["data"]]
            limits = replace(limits, max_model_len=max(int(length) for length in lengths if length))
        self._version = await self._read_version()
        return limits

    async def _read_version(self) -> str:
        """Empty where the server has none: another server, or an old release."""
        try:
            return str(json.loads(await self._get("/version") or b"{}")["version"])
        except (ValueError, KeyError, TypeError):
            return ""

    async def _get(self, path: str) -> bytes | None:
        assert self._session is not None
        try:
            async with self._session.get(self.upstream.url + path) as answer:
                return await answer.read() if answer.status == 200 else None
        except Exception:  # whatever is wrong with the server, it is asked again later
            return None

    async def _tokenize(self, body: bytes) -> int | None:
        assert self._session is not None
        headers = {"content-type": "application/json"}
        try:
            async with self._session.post(f"{self.upstream.url}/tokenize", data=body, headers=headers) as answer:
                return int((await answer.json())["count"]) if answer.status == 200 else None
        except Exception:
            return None

    async def own_page(self, client: ClientConnection, method: str, path: str, headers: Headers, body: bytes) -> None:
        """The pages that the guard answers itself, or adds to."""
        if path == METRICS:
            theirs = await self._get(METRICS)
            down = theirs is None
            page = with_page(theirs or b"", self.admission.page(upstream_up=not down))
            status = 503 if down and self.admission.policy.proxy.metrics_when_down == "503" else 200
            client.respond(
                status,
                [
                    (b"content-type", b"text/plain; version=0.0.4; charset=utf-8"),
                    (b"content-length", b"%d" % len(page)),
                ],
                page,
            )
            return
        given = dict(headers).get(b"authorization", b"")
        status, document = control.answer(self.admission, self.options.token, method, path, given, body)
        length = b"%d" % len(document)
        client.respond(status, [(b"content-type", b"application/json"), (b"content-length", length)], document)


def serve(options: ProxyOptions, ready: Ready | None = None) -> int:
    """Run the proxy until SIGTERM or SIGINT."""
    _raise_file_limit()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(options, ready))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed; the standard loop serves as well, with about a third fewer requests a second."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _serve(options: ProxyOptions, ready: Ready | None) -> int:
    proxy, stop = Proxy(options), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, proxy.told_to_stop, stop)
    loop.add_signal_handler(signal.SIGHUP, lambda: proxy.admission.reload(force=True))
    await proxy.run(stop, ready)
    return 0


def _raise_file_limit() -> None:
    """Two connections a stream: take as many as the system gives."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
