"""What the commands that listen have in common."""

from __future__ import annotations

import socket

from legroom.errors import LegroomError


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that takes connections already: who comes before the server is ready waits."""
    if not 0 <= port <= 65535:
        raise LegroomError(f"--port {port} is no port", "give 1 to 65535, or 0 for any")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2_048)
    except OSError as error:
        hint = "another program has it: give another --port, or 0 for any" if port else "check --host"
        raise LegroomError(f"cannot listen on {host} port {port}: {error.strerror}", hint) from None
    return listening
