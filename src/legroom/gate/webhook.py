"""The admission webhook over HTTPS: reviews, probes and metrics."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import ssl
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import prometheus_client
from cryptography import x509
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from legroom.errors import BAD_INPUT, LegroomError
from legroom.gate import admission_review as review
from legroom.gate.verdict import CacheOptions, NoVerdict, VerdictCache
from legroom.records import dataclass
from legroom.web.uvicorn_server import serve_asgi

MAX_BODY_BYTES = 8 << 20
"""etcd stores objects of up to 1.5 MiB; an update carries two, and JSON escapes add to them."""
_MAX_BUFFERED_BYTES = 64 << 20  # Of all bodies that are being received.
_BODY_TIMEOUT_S = 10.0
_GIL_SWITCH_INTERVAL_S = 0.0005
"""Python's default of 5 ms would delay every read and write of the event loop by that much while a plan runs."""
_PATHS: Mapping[str, review.Mode | None] = {"/validate": None, "/validate/warn": "warn", "/validate/enforce": "enforce"}
_MODES: Mapping[str, review.Mode] = {"warn": "warn", "enforce": "enforce"}
_OUTCOMES = ["allowed", "warned", "refused", "would_refuse", "not_understood", "no_server"]
_OUTCOMES += ["skipped", "unchanged", "failed_open"]
_FAILED_OPEN = {
    "timeout": "no verdict in time",
    "error": "an error in the gate; its log shows where",
    "overload": "too many other objects",
}
_BEING_SEARCHED = "Flags that fix it are being searched for: the answer to the next try has them."
_COUNTED_OUTCOMES = {"does_not_fit": "would_refuse", "tight": "warned", "fits": "allowed"}
_COUNTED_OUTCOMES |= {name: name for name in ("not_understood", "no_server")}
"""The outcome of a verdict -> that of an allowed review."""


@dataclass(frozen=True, slots=True)
class GatePolicy:
    """Which objects are reviewed, and whether a failing one is refused."""

    mode: review.Mode = "warn"
    only_namespaces: frozenset[str] = frozenset()
    not_namespaces: frozenset[str] = frozenset({"kube-system", "kube-public", "kube-node-lease"})
    only_labelled: bool = False
    """Skip objects without the label or annotation `legroom/gate`."""

    def mode_for(self, request: review.AdmissionRequest, path_mode: review.Mode | None) -> review.Mode | None:
        """`enforce` or `warn` for an object, None to skip it; `path_mode`: the mode in the URL's path, if any."""
        switch, namespace = request.switch, request.namespace
        if switch == "off" or namespace in self.not_namespaces:
            return None
        if (self.only_namespaces and namespace not in self.only_namespaces) or (self.only_labelled and not switch):
            return None
        return _MODES.get(switch) or path_mode or self.mode


class GateMetrics:
    def __init__(self) -> None:
        untyped: Any = prometheus_client
        untyped.disable_created_metrics()
        self._registry = CollectorRegistry()
        self.reviews = self._counter("reviews", "Objects reviewed, by outcome.", outcome=_OUTCOMES)
        self.failed_open = self._counter("failed_open", "Objects allowed without a verdict.", reason=_FAILED_OPEN)
        self.cache = self._counter("cache", "Lookups in the verdict cache.", result=("hit", "miss"))
        self.bad_request = self._counter("bad_request", "Bodies that were no AdmissionReview, or too large.")
        about = "Answers given while fixes for the object were still searched for."
        self.answered_before_search = self._counter("answered_before_search", about)
        self.searches_dropped = self._counter("searches_dropped", "Searches for fixes not started: the queue is full.")
        self.certificate_reloads = self._counter("certificate_reloads", "Certificates reloaded.")
        about = "Certificates that could not be loaded; the old one stays in use."
        self.certificate_reload_failures = self._counter("certificate_reload_failures", about)
        name, about = "legroom_gate_decision_seconds", "Time from the last byte of the request to the answer."
        buckets = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
        self.decision_seconds = Histogram(name, about, buckets=buckets, registry=self._registry)
        name, about = "legroom_gate_certificate_expiry_timestamp_seconds", "When the certificate in use expires."
        self.certificate_expiry = Gauge(name, about, registry=self._registry)

    def _counter(self, name: str, documentation: str, **label_values: Any) -> Counter:
        """A counter whose series exist from the start; `label_values`: all values of its one label, by the label."""
        counter = Counter(f"legroom_gate_{name}", documentation, list(label_values), registry=self._registry)
        for value in next(iter(label_values.values()), ()):
            counter.labels(value)
        return counter

    def page(self) -> bytes:
        """All series in Prometheus' text format."""
        return generate_latest(self._registry)


class _BadBody(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


class GateApp:
    """The ASGI application of the webhook: admission reviews, probes and metrics."""

    def __init__(self, policy: GatePolicy, verdicts: VerdictCache, metrics: GateMetrics) -> None:
        self._policy, self._verdicts, self._metrics = policy, verdicts, metrics
        self._buffered_bytes = 0
        self.is_ready = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path in _PATHS:
            response = await self._review(scope, receive)
        elif method not in ("GET", "HEAD"):
            response = PlainTextResponse("only a GET is answered here\n", 405)
        elif path in ("/healthz", "/livez") or (path == "/readyz" and self.is_ready):
            response = PlainTextResponse("ok\n")
        elif path == "/readyz":
            response = PlainTextResponse("it has just started\n", 503)
        elif path == "/metrics":
            response = Response(self._metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")
        else:
            response = PlainTextResponse("reviews go to /validate\n", 404)
        await response(scope, receive, send)

    async def _review(self, scope: Scope, receive: Receive) -> Response:
        """The answer to one AdmissionReview: 405 if not a POST, 4xx for a bad body, else 200."""
        if scope["method"] != "POST":
            return PlainTextResponse("a review is a POST\n", 405)
        body = b""
        try:
            body = await self._read_body(receive)
            started_s = time.perf_counter()
            request = review.parse_review(json.loads(body))
        except _BadBody as refused:
            self._metrics.bad_request.inc()
            return PlainTextResponse(f"{refused.text}\n", refused.status)
        except (review.NotAReview, ValueError, RecursionError) as error:
            self._metrics.bad_request.inc()
            text = error.message if isinstance(error, LegroomError) else "the body is not JSON"
            return PlainTextResponse(f"{text}\n", 400)
        finally:
            self._buffered_bytes -= len(body)
        outcome, response = await self._decide(request, _PATHS[scope["path"]])
        self._metrics.decision_seconds.observe(time.perf_counter() - started_s)
        self._metrics.reviews.labels(outcome).inc()
        return Response(response, media_type="application/json")

    async def _read_body(self, receive: Receive) -> bytes:
        """The whole body, added to the buffered bytes; raises _BadBody where it is too large, slow or cut off."""
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _BadBody(400, "the connection ended")
                    piece = message.get("body", b"")
                    size += len(piece)
                    self._buffered_bytes += len(piece)
                    if size > MAX_BODY_BYTES:
                        raise _BadBody(413, f"a review has at most {MAX_BODY_BYTES >> 20} MiB")
                    if self._buffered_bytes > _MAX_BUFFERED_BYTES:
                        raise _BadBody(429, "too many large reviews at once")
                    pieces.append(piece)
                    if not message.get("more_body"):
                        return b"".join(pieces)
        except (TimeoutError, _BadBody) as error:
            self._buffered_bytes -= size
            raise error if isinstance(error, _BadBody) else _BadBody(408, "the review stopped coming") from None

    async def _decide(self, request: review.AdmissionRequest, path_mode: review.Mode | None) -> tuple[str, bytes]:
        """(Outcome label for the metrics, response body) of one reviewed object."""
        mode = self._policy.mode_for(request, path_mode)
        if mode is None or request.is_deleted or request.is_owned:
            return "skipped", review.review_response(request.uid, True)
        try:
            fields = review.startup_fields(request.new)
            if request.operation == "UPDATE" and request.old and fields == review.startup_fields(request.old):
                return "unchanged", review.review_response(request.uid, True)
            key, verdict = self._verdicts.get(fields)
            self._metrics.cache.labels("miss" if verdict is None else "hit").inc()
            if verdict is None or not verdict.is_searched:
                verdict = await self._verdicts.decide(key, fields)
        except NoVerdict as error:
            return self._fail_open(request, error.reason)
        except Exception as error:
            print(f"legroom gate: {type(error).__name__}: {error}", file=sys.stderr)
            return self._fail_open(request, "error")
        if not verdict.is_searched:
            self._metrics.answered_before_search.inc()
        sentences = verdict.sentences
        if not verdict.is_searched and not verdict.has_fixes:
            sentences = (*sentences, _BEING_SEARCHED)
        if verdict.outcome == "does_not_fit" and mode == "enforce":
            return "refused", review.review_response(request.uid, False, " ".join(sentences))
        counted = _COUNTED_OUTCOMES[verdict.outcome]
        is_quiet = verdict.outcome in ("fits", "no_server")
        return counted, review.review_response(request.uid, True, warnings=() if is_quiet else sentences)

    def _fail_open(self, request: review.AdmissionRequest, reason: str) -> tuple[str, bytes]:
        """(Outcome label, response body) that admits an object without a verdict and warns of the counted reason."""
        self._metrics.failed_open.labels(reason).inc()
        warning = f"this {request.kind} was not checked ({_FAILED_OPEN[reason]}) and is let through"
        return "failed_open", review.review_response(request.uid, True, warnings=[warning])


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """A certificate and its key, as a mounted Secret of type kubernetes.io/tls."""

    certificate: Path
    key: Path

    @classmethod
    def in_folder(cls, folder: str) -> CertificateFiles:
        """The paths of tls.crt and tls.key in a folder, as a Kubernetes TLS Secret is mounted."""
        return cls(Path(folder) / "tls.crt", Path(folder) / "tls.key")

    def fingerprint(self) -> tuple[object, ...]:
        """A value that changes when the files do; Kubernetes updates a mounted Secret by swapping a link."""
        both = (self.certificate.stat(), self.key.stat())
        return tuple((info.st_mtime_ns, info.st_ino, info.st_size) for info in both)

    def server_context(self) -> ssl.SSLContext:
        """A TLS context for TLS 1.2 and later; LegroomError where the files cannot be loaded."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            reason = error.strerror or str(error)
            hint = "a Secret of type kubernetes.io/tls has them as tls.crt and tls.key; legroom export gate writes one"
            raise LegroomError(f"no certificate in {self.certificate.parent}: {reason}", hint, BAD_INPUT) from None
        return context

    def expiry_timestamp_s(self) -> float:
        """When the certificate expires, in Unix seconds."""
        return x509.load_pem_x509_certificate(self.certificate.read_bytes()).not_valid_after_utc.timestamp()


async def reload_certificates(
    context: ssl.SSLContext, files: CertificateFiles, metrics: GateMetrics, interval_s: float = 5.0
) -> None:
    """Load the files into the context whenever they change; if that fails, the old certificate stays in use."""
    loaded = files.fingerprint()
    metrics.certificate_expiry.set(files.expiry_timestamp_s())
    while True:
        await asyncio.sleep(interval_s)
        try:
            current = files.fingerprint()
            if current == loaded:
                continue
            context.load_cert_chain(files.certificate, files.key)
            metrics.certificate_expiry.set(files.expiry_timestamp_s())
        except (OSError, ssl.SSLError, ValueError) as error:
            metrics.certificate_reload_failures.inc()
            print(f"legroom gate: the new certificate could not be loaded: {error}", file=sys.stderr)
            continue
        loaded = current
        metrics.certificate_reloads.inc()


def serve(listening: socket.socket, policy: GatePolicy, options: CacheOptions, files: CertificateFiles) -> None:
    """Serve the admission webhook over TLS until SIGTERM or SIGINT."""
    context = files.server_context()
    metrics = GateMetrics()
    verdicts = VerdictCache(options, metrics.searches_dropped.inc)
    app = GateApp(policy, verdicts, metrics)
    sys.setswitchinterval(_GIL_SWITCH_INTERVAL_S)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # uvicorn raises the signal again after its shutdown

    async def become_ready() -> None:
        """Warms the planner up, then reports readiness even if that failed."""
        with suppress(Exception):  # without a warm-up the first requests are slower
            await verdicts.warm_up()
        app.is_ready = True

    async def app_with_lifespan(scope: Scope, receive: Receive, send: Send) -> None:
        """The app, with certificates reloaded and verdicts warmed up from its startup to its shutdown."""
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        await receive()
        tasks = [asyncio.create_task(reload_certificates(context, files, metrics)), asyncio.create_task(become_ready())]
        await send({"type": "lifespan.startup.complete"})
        await receive()
        app.is_ready = False
        for task in tasks:
            task.cancel()
        verdicts.close()
        await send({"type": "lifespan.shutdown.complete"})

    serve_asgi(app_with_lifespan, listening, context, log_level="critical")
