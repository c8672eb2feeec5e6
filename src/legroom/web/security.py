"""Access checks before every request, security headers on every answer, and error responses."""

import hmac
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from legroom.errors import LegroomError
from legroom.live.metrics.endpoint import host_name, is_loopback_host
from legroom.records import dataclass
from legroom.web.endpoints import error_document

COOKIE = "legroom-token"
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; connect-src "
    "'self'; worker-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})


@dataclass(frozen=True, slots=True)
class Access:
    """The token that requests need, and whether any Host header is accepted."""

    token: str = ""
    """Empty: no token is needed, and the Host header must name the loopback address."""
    any_host: bool = False
    """Answer any Host without a token, where a proxy or network policy controls access."""


def denial(access: Access, method: str, path: str, query: str, headers: dict[str, str]) -> Response | None:
    """The error response for a foreign Host, a cross-site request or a missing token; None for an allowed request."""
    host = headers.get("host", "")
    if not access.token and not access.any_host and not is_loopback_host(host_name(host)):
        # DNS rebinding: another site can point its name at 127.0.0.1 and read the answers.
        hint = "open http://127.0.0.1 and the port"
        return error_response(421, "this address is not one of this machine's own", hint)
    origin = headers.get("origin")
    is_cross_site = headers.get("sec-fetch-site") == "cross-site" and (method != "GET" or path.startswith("/api/"))
    if is_cross_site or (origin is not None and urlsplit(origin).netloc != host):
        return error_response(403, "a page of another site asked for this", "open legroom's own page")
    if access.token and path not in _OPEN_PATHS and not _has_token(access.token, query, headers):
        hint = "open the whole address, ?token=... included, or send it as Authorization: Bearer ..."
        return error_response(401, "this needs the token that the server was started with", hint)
    return None


def _has_token(token: str, query: str, headers: dict[str, str]) -> bool:
    """Whether the Authorization header, the query or the cookie carries the token (compared in constant time)."""
    shown = [headers.get("authorization", "").removeprefix("Bearer "), *parse_qs(query).get("token", ())[:1]]
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        cookie = None
    if cookie is not None:
        shown.append(cookie.value)
    return any(hmac.compare_digest(text.encode(), token.encode()) for text in shown)


def error_response(status: int, message: str, hint: str = "", exit_code: int = 2) -> Response:
    """legroom's JSON error document with this HTTP status; 429 also gets Retry-After."""
    retry = {"retry-after": "2"} if status == 429 else {}
    document = error_document(LegroomError(message, hint, exit_code))
    return JSONResponse(document, status, {"cache-control": "no-store", **retry})


class SecurityLayer:
    """Middleware that applies `denial` and adds the security headers."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[str, str] = {}
        for raw_name, raw_value in scope["headers"]:
            name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
            headers[name] = f"{headers[name]}, {value}" if name in headers else value  # a second Host counts too
        query = scope.get("query_string", b"").decode("latin-1")
        denied = denial(self._access, scope["method"], scope["path"], query, headers)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        await (denied or self._app)(scope, receive, send_with_headers)
