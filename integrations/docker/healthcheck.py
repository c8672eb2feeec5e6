"""The health check of the image: asks the command that runs as process 1 on the port that it was given."""

from __future__ import annotations

import http.client
import itertools
import socket
import ssl
import sys
import tomllib
from pathlib import Path

PORTS = {"gate": 9443, "guard": 8100, "ui": 8400, "watch": 9477}


def option(words: list[str], name: str) -> str:
    """The value of an option, written `--port 1` or `--port=1`; empty where it is not given."""
    joined = [word.partition("=")[2] for word in words if word.startswith(f"{name}=")]
    apart = [value for word, value in itertools.pairwise(words) if word == name]
    return next(iter([*joined, *apart]), "")


def check(words: list[str]) -> bool:
    """Whether the command with these words answers; a command that serves nothing is healthy while it runs."""
    command = next((word for word in words if word in PORTS), "")
    if not command:
        return True
    port = int(option(words, "--port") or PORTS[command])
    if config := option(words, "--config"):  # of watch
        port = int(tomllib.loads(Path(config).read_text("utf-8")).get("port", port))
    if command == "guard":  # what it answers is its upstream's
        socket.create_connection(("127.0.0.1", port), 4).close()
        return True
    if command == "gate":  # its certificate is of the Service's name
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=4, context=ssl._create_unverified_context())
    else:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=4)
    connection.request("GET", "/healthz")
    return connection.getresponse().status == 200


if __name__ == "__main__":
    try:
        sys.exit(0 if check(Path("/proc/1/cmdline").read_text("utf-8").split("\0")) else 1)
    except OSError as error:
        print(error)
        sys.exit(1)
