"""Where a server listens, and how its own machine asks it: what --host, --port, --ssl-* and --uds make of a probe."""

from __future__ import annotations

import shlex

from legroom.errors import LegroomError
from legroom.exports.deploy.words import ServerWords
from legroom.records import dataclass

DEFAULT_PORT = 8000
_EVERYWHERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""Hosts that mean every address of the machine, and the one of them that is near."""
_CERTIFICATE_REQUIRED = "2"
"""ssl.CERT_REQUIRED, as --ssl-cert-reqs takes it."""


@dataclass(frozen=True, slots=True)
class Address:
    host: str = ""
    port: int = DEFAULT_PORT
    tls: bool = False
    socket: str = ""
    """A Unix socket; vLLM then listens on no port."""

    @property
    def everywhere(self) -> bool:
        """Whether it listens on every address of its machine."""
        return not self.socket and self.host in _EVERYWHERE

    @property
    def scheme(self) -> str:
        return "https" if self.tls else "http"

    @property
    def url(self) -> str:
        """How the machine itself reaches it."""
        if self.socket:
            return f"{self.scheme}://localhost"
        near = _EVERYWHERE.get(self.host, self.host)
        return f"{self.scheme}://{f'[{near}]' if ':' in near else near}:{self.port}"

    def curl_words(self, path: str, *options: str) -> tuple[str, ...]:
        """A request to the server. Its certificate is for its name, not for this address, and is not checked."""
        insecure = ("-k",) if self.tls else ()
        through = ("--unix-socket", self.socket) if self.socket else ()
        return ("curl", "-fsS", "-m", "5", *insecure, *through, *options, self.url + path)

    def curl(self, path: str, *options: str) -> str:
        """The same as a line of shell."""
        return shlex.join(self.curl_words(path, *options))

    def watch_words(self, url: str = "") -> tuple[str, ...]:
        """The words of `legroom watch` for it; `url` where it is reached by another name."""
        if self.socket:
            raise LegroomError("legroom watch reads a port, and --uds has none", "leave out --with-sidecar or --uds")
        return ("watch", "--daemon", *(("--insecure",) if self.tls else ()), url or self.url)


def address_of(words: ServerWords) -> Address:
    """Where a command line makes the server listen."""
    given = {name: phrase.value for name in _FLAGS if (phrase := words.get(name))}
    port = given.get("--port", "")
    return Address(
        given.get("--host", "").strip("[]"),
        int(port) if port.isdigit() else DEFAULT_PORT,
        bool(given.get("--ssl-certfile") or given.get("--ssl-keyfile")),
        given.get("--uds", ""),
    )


_FLAGS = ("--host", "--port", "--ssl-certfile", "--ssl-keyfile", "--uds")


def check_probes(words: ServerWords) -> None:
    """Refuse a server that no probe could ask: it answers no HTTP, or wants a certificate from everybody."""
    for flag in ("--headless", "--grpc"):
        if words.get(flag) is not None:
            raise LegroomError(
                f"a server with {flag} answers no HTTP, so no health check could tell that it has started",
                "export a script and watch the server yourself",
            )
    phrase = words.get("--ssl-cert-reqs")
    if phrase is not None and phrase.value == _CERTIFICATE_REQUIRED and address_of(words).tls:
        raise LegroomError(
            "--ssl-cert-reqs 2 asks every client for a certificate, and a health check has none",
            "leave it out, or export a script and watch the server yourself",
        )


def check_inside(words: ServerWords) -> None:
    """Refuse what nobody outside the container would reach."""
    check_probes(words)
    address = address_of(words)
    if address.socket:
        raise LegroomError(
            f"--uds {address.socket} is a socket inside the container, which nobody outside reaches",
            "leave out --uds and use --port",
        )
    if not address.everywhere:
        raise LegroomError(
            f"--host {address.host} is not reached from outside the container",
            "leave out --host, and publish the port on an address of the host instead",
        )
