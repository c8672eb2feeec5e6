"""uvicorn with the settings that `legroom ui`, its API and the admission webhook share."""

import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import uvicorn


def serve_asgi(
    app: Any,
    listening: socket.socket,
    ssl_context: ssl.SSLContext | None = None,
    before_shutdown: Callable[[], object] = lambda: None,
    log_level: str = "error",
) -> None:
    """Serves an ASGI application until SIGINT or SIGTERM; `before_shutdown` is to end streams that would delay it."""

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """Ends streams before uvicorn waits for all answers to end."""
            before_shutdown()
            await super().shutdown(sockets)

    config = uvicorn.Config(
        app,
        log_level=log_level,
        access_log=False,
        lifespan="on",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=3,
        timeout_keep_alive=120,  # above the 90 s after which a Kubernetes API server closes idle connections
        limit_concurrency=4_000,
    )
    config.load()
    config.ssl = ssl_context
    try:
        with suppress(KeyboardInterrupt):  # uvicorn raises it again after its shutdown
            Server(config).run(sockets=[listening])
    finally:
        listening.close()
