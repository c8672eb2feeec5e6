"""Addresses of servers as users type them. Credentials are kept out of names and reprs."""

import base64
import ipaddress
import re
from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from legroom.errors import LegroomError
from legroom.records import dataclass, field

METRICS_PATH = "/metrics"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A metrics URL with headers and TLS settings. Its repr shows no secret."""

    url: str
    """Without credentials and query."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    verify_tls: bool = True
    ca_file: str | None = None
    query: str = field(default="", repr=False)
    """The query string, which may contain a key."""

    @property
    def full_url(self) -> str:
        """The URL with its query, which may hold secrets: not to be printed."""
        return f"{self.url}?{self.query}" if self.query else self.url

    @property
    def server(self) -> str:
        """The server's name in samples and incidents: the URL without `/metrics`."""
        return self.url.removesuffix(METRICS_PATH)


def endpoint(address: str, token: str | None = None, verify_tls: bool = True, ca_file: str | None = None) -> Endpoint:
    """The endpoint of `host:8000` or `https://user:pass@host/metrics`, with a bearer `token`; else LegroomError."""
    given = address.strip()
    url = given if "://" in given else f"http://{given}"
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        usable = host and not re.search(r"\s", host) and parts.scheme in {"http", "https"} and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        hint = "write it like http://host:8000 (http or https)"
        raise LegroomError(f"{masked_url(url)} is not the address of a server", hint)
    headers = {}
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        headers["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
    if token:
        headers["Authorization"] = f"Bearer {token}"
    path = parts.path.rstrip("/")
    if not path.endswith(METRICS_PATH):
        path = path.removesuffix("/v1") + METRICS_PATH
    url = urlunsplit((parts.scheme, _host_and_port(parts), path, "", ""))
    return Endpoint(url, headers, verify_tls, ca_file, parts.query)


def masked_url(address: str) -> str:
    """An address without user and password, its query replaced by `[masked]`."""
    try:
        parts = urlsplit(address.strip())
        host = _host_and_port(parts)
    except ValueError:
        return "[an address that cannot be read]"
    return urlunsplit((parts.scheme, host, parts.path, "[masked]" if parts.query else "", ""))


@lru_cache(16_384)
def is_loopback(address: str) -> bool:
    """Whether requests to an address stay on this machine."""
    host = urlsplit(address if "://" in address else f"http://{address}").hostname or ""
    try:
        ip = ipaddress.ip_address(host)
        return ip.is_loopback or ip.is_unspecified  # 0.0.0.0: a listening address used as a target
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def port_of(address: str) -> int:
    """The port in an address, by default that of its scheme."""
    parts = urlsplit(address if "://" in address else f"http://{address}")
    return parts.port or (443 if parts.scheme == "https" else 80)


def host_name(header: str) -> str:
    """The host name in a Host header, without its port; empty where the header is malformed."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def is_loopback_host(host: str) -> bool:
    """Whether only this machine can reach a socket that listens on this host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _host_and_port(parts: SplitResult) -> str:
    """`host:8000` or `[::1]:8000`, without the port where none is given."""
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{parts.port}" if parts.port is not None else host
