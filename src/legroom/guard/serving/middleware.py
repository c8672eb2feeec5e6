"""`vllm serve ... --middleware legroom.guard.Guard`: admission inside vLLM's own API server. vLLM adds this middleware
outside its API-key check (0.32), so it also sees requests that the check will refuse; these pass without admission."""

import asyncio
import hashlib
import hmac
import os
import sys
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.releases import release
from legroom.guard.log import LOG, log_to_stderr
from legroom.guard.pool.admission import Admission
from legroom.guard.pool.engine_usage import steps_of_registry
from legroom.guard.pool.guard_metrics import append_page
from legroom.guard.request.endpoints import METRICS, TOKEN_NAME
from legroom.guard.serving.admission_app import AdmissionApp, App, Message, Receive, Scope, Send, collect_response
from legroom.guard.serving.control import Peers, merge_statuses
from legroom.guard.weight.engine_limits import limits_of_metrics, limits_of_vllm, read_limits
from legroom.process_table import engines_below, is_stopped, shares_engines

_CHECKED_PATHS = (("0.0.0", ("/v1",)), ("0.22.0", ("/v2", "/inference")), ("0.27.0", ("/cohere",)))
"""Paths that vLLM's API-key check covers, each with the first release that covers it."""


def checked_paths(version: str) -> tuple[str, ...]:
    """Path prefixes that need an API key in this vLLM release; of an unknown one, those that every release checks."""
    try:
        running = release(version)
    except LegroomError:
        return _CHECKED_PATHS[0][1]
    return tuple(path for since, paths in _CHECKED_PATHS if not running.before(since) for path in paths)


class Guard(AdmissionApp):
    """A vLLM middleware. LEGROOM_GUARD_POLICY and LEGROOM_GUARD_PLAN name its files, LEGROOM_GUARD_TOKEN its token."""

    def __init__(self, app: App, policy: str | None = None, plan: str | None = None, token: str | None = None) -> None:
        log_to_stderr()
        policy = policy or os.environ.get("LEGROOM_GUARD_POLICY")
        plan = plan or os.environ.get("LEGROOM_GUARD_PLAN")
        self._learn_at_s = 0.0
        self._key_hashes: list[bytes] | None = None
        self._checked_paths: tuple[str, ...] = ()
        self._peers: Peers | None = None
        self._engine_pids: tuple[int, ...] = ()
        self._server: Any = None
        try:
            planned = read_limits(Path(plan)) if plan else None
            file = Path(policy) if policy else None
            admission = Admission(file, planned, self.tokenize, read_steps=steps_of_registry)
        except LegroomError as error:
            # vLLM prints a traceback for other exceptions of a middleware.
            raise SystemExit(f"legroom guard: {error.message}{f' ({error.hint})' if error.hint else ''}") from None
        super().__init__(app, admission, token or os.environ.get(TOKEN_NAME) or None)

    def is_unauthorized(self, scope: Scope) -> bool:
        """Whether vLLM will refuse the request: its path needs one of the API keys, and it bears no valid one."""
        if self._key_hashes is None:
            args = getattr(getattr(scope.get("app"), "state", None), "args", None)
            configured = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
            keys = [configured] if isinstance(configured, str) else configured
            self._key_hashes = [hashlib.sha256(key.encode()).digest() for key in keys if key]
            self._checked_paths = checked_paths(_vllm_version())
        if not self._key_hashes:
            return False
        if not scope["path"].removeprefix(scope.get("root_path", "")).startswith(self._checked_paths):
            return False
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = header.partition(b" ")
        digest = hashlib.sha256(key).digest()
        return scheme.lower() != b"bearer" or not any(hmac.compare_digest(digest, known) for known in self._key_hashes)

    def has_dead_engine(self) -> bool:
        """Whether vLLM's engine client reports that its engine has failed."""
        return getattr(getattr(getattr(self._server, "state", None), "engine_client", None), "errored", False) is True

    async def send_metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send vLLM's own metrics page with the guard's series appended."""
        await self.learn_limits(scope)
        stopped = await asyncio.to_thread(self._stopped_engines)
        # Without accept-encoding the page is not compressed, so that lines can be appended.
        plain = {**scope, "headers": [header for header in scope["headers"] if header[0] != b"accept-encoding"]}
        status, headers, page = await collect_response(self.app, plain, receive)
        headers = [(name.lower(), value) for name, value in headers]
        if status == 200:
            is_open_metrics = b"openmetrics" in dict(headers).get(b"content-type", b"")
            page = append_page(page, self.admission.page(is_open_metrics, stopped_engines=stopped))
        headers = [header for header in headers if header[0] != b"content-length"]
        headers.append((b"content-length", b"%d" % len(page)))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": page})

    def _stopped_engines(self) -> int | None:
        """Engine processes that a signal has stopped (SIGSTOP); None where no engine process is found."""
        if not self._engine_pids:
            own = os.getpid()
            self._engine_pids = tuple(engines_below(os.getppid() if shares_engines(own) else own))
        return sum(map(is_stopped, self._engine_pids)) if self._engine_pids else None

    async def control_peers(self, status: dict[str, Any], drain: bool | None) -> dict[str, Any]:
        """`status` merged with that of vLLM's other API servers, which apply `drain`; alone where there are none."""
        return status if self._peers is None else merge_statuses(status, await self._peers.statuses(drain))

    async def run_lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Listen for the other API servers of this vLLM while it runs, because a drain must reach all of them."""
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

    async def learn_limits(self, scope: Scope) -> None:
        """Read limits from vLLM's config, else its metrics page; at most every 5 s, until the pool's size is known."""
        now_s = self.admission.clock()
        if (self.admission.limits.known and self._learn_at_s) or now_s < self._learn_at_s:
            return
        self._learn_at_s = now_s + 5.0
        self._server = scope.get("app")
        state = getattr(self._server, "state", None)
        limits = limits_of_vllm(getattr(state, "vllm_config", None), getattr(state, "args", None))
        if not limits.known and (page := await self.call_server("GET", METRICS)) is not None:
            limits = limits_of_metrics(page.decode("utf-8", "replace")).completed_by(limits)
        self.admission.learn_engine(limits)
        self.log_limits(_vllm_version(), limits.known)

    async def call_server(self, method: str, path: str, body: bytes = b"") -> bytes | None:
        """The body of this vLLM's answer, called in this process; None where it fails, takes 5 s or is not a 200."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
            "state": {},
            "app": self._server,  # Starlette's handlers read it
            "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
        }
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            """The next of `messages`; after the last it waits for ever, as this client never disconnects."""
            if not messages:
                await asyncio.Event().wait()  # this client never disconnects
            return messages.pop()

        try:
            async with asyncio.timeout(5.0):
                status, _, answer = await collect_response(self.app, scope, receive)
        except Exception as error:
            LOG.error("could not read %s: %r", path, error)
            return None
        return answer if status == 200 else None


def _vllm_version() -> str:
    """The version of the imported vLLM; empty where it is not imported or has none."""
    return str(getattr(sys.modules.get("vllm"), "__version__", ""))
