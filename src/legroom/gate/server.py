"""The gate's processes: one socket, one set of figures, and certificates that are loaded anew when they change."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
from cryptography import x509

from legroom.errors import BAD_INPUT, LegroomError
from legroom.gate.app import GateApp, GatePolicy
from legroom.gate.judges import JudgeOptions, Judges
from legroom.gate.meters import GateMeters
from legroom.gate.shared_judgements import SharedJudgements
from legroom.records import dataclass

_LOOK_S = 5.0
"""Between two looks at the certificate's files."""
_SHUTDOWN_S = 3
_RESTART_S = 1.0


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """As a Secret of type kubernetes.io/tls is mounted."""

    certificate: Path
    key: Path

    @classmethod
    def in_folder(cls, folder: str) -> CertificateFiles:
        return cls(Path(folder) / "tls.crt", Path(folder) / "tls.key")

    def mark(self) -> tuple[object, ...]:
        """Changes when the files do; a mounted Secret is swapped by a link."""
        return tuple(
            (info.st_mtime_ns, info.st_ino, info.st_size) for info in (self.certificate.stat(), self.key.stat())
        )

    def load(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(self.certificate, self.key)

    def expiry_s(self) -> float:
        """When the certificate ends."""
        return x509.load_pem_x509_certificate(self.certificate.read_bytes()).not_valid_after_utc.timestamp()


@dataclass(frozen=True, slots=True)
class GateOptions:
    policy: GatePolicy
    judging: JudgeOptions
    files: CertificateFiles
    processes: int = 2


def check_certificates(files: CertificateFiles) -> None:
    """End with what is wrong with the files, before anything listens."""
    try:
        files.load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or str(error)
        hint = "a Secret of type kubernetes.io/tls has them as tls.crt and tls.key; legroom export gate writes one"
        raise LegroomError(f"no certificate in {files.certificate.parent}: {reason}", hint, BAD_INPUT) from None


def serve(listening: socket.socket, options: GateOptions) -> None:
    """Serve until SIGTERM or SIGINT; a process that dies is replaced."""
    meters, shared = GateMeters(options.processes), SharedJudgements()
    children: dict[int, int] = {}
    stopping = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopping
        stopping = True
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    for row in range(options.processes):
        children[_forked(listening, options, meters, shared, row)] = row
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    while children:
        pid, _ = os.wait()
        row = children.pop(pid, -1)
        if row >= 0 and not stopping:
            time.sleep(_RESTART_S)
            print("legroom gate: a process ended and is replaced", file=sys.stderr)
            children[_forked(listening, options, meters, shared, row)] = row


def _forked(
    listening: socket.socket, options: GateOptions, meters: GateMeters, shared: SharedJudgements, row: int
) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent says when to end
        meters.choose_row(row)
        _run(listening, options, meters, shared)
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def _run(listening: socket.socket, options: GateOptions, meters: GateMeters, shared: SharedJudgements) -> None:
    judges = Judges(options.judging, shared, meters.count)
    app = GateApp(options.policy, judges, meters)
    context = server_context(options.files)

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send, app, judges, context, options.files, meters)
        else:
            await app(scope, receive, send)

    config = uvicorn.Config(
        asgi,
        log_level="critical",
        access_log=False,
        lifespan="on",
        ws="none",
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=_SHUTDOWN_S,
        timeout_keep_alive=120,
        limit_concurrency=2_000,
        backlog=2_048,
    )
    config.load()
    config.ssl = context
    uvicorn.Server(config).run(sockets=[listening])


def server_context(files: CertificateFiles) -> ssl.SSLContext:
    """TLS 1.2 and later; new connections use whatever the context has loaded last."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    files.load(context)
    return context


async def _lifespan(
    receive: Any,
    send: Any,
    app: GateApp,
    judges: Judges,
    context: ssl.SSLContext,
    files: CertificateFiles,
    meters: GateMeters,
) -> None:
    await receive()
    async with _beside(watch_certificates(context, files, meters), _warmed(app, judges)):
        await send({"type": "lifespan.startup.complete"})
        await receive()
        app.is_ready = False
    await judges.close()
    await send({"type": "lifespan.shutdown.complete"})


@asynccontextmanager
async def _beside(*work: Any) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _warmed(app: GateApp, judges: Judges) -> None:
    """Ready once plans have been made; ready all the same where that fails, since the gate then fails open."""
    with suppress(LegroomError):
        await judges.warm_up()
    app.is_ready = True
    with suppress(LegroomError):
        await judges.warm_up_search()


async def watch_certificates(
    context: ssl.SSLContext, files: CertificateFiles, meters: GateMeters, look_s: float = _LOOK_S
) -> None:
    """Load the files anew whenever they change; what cannot be loaded leaves the old certificate in use."""
    mark = files.mark()
    meters.put("expiry", files.expiry_s())
    while True:
        await asyncio.sleep(look_s)
        try:
            now = files.mark()
            if now == mark:
                continue
            files.load(context)
            meters.put("expiry", files.expiry_s())
        except (OSError, ssl.SSLError, ValueError) as error:
            meters.count("certificate_reload_failures")
            print(f"legroom gate: the new certificate could not be loaded: {error}", file=sys.stderr)
            continue
        mark = now
        meters.count("certificate_reloads")
