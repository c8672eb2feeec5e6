"""Ports for servers that listen a moment after they were told where, or stop and start again."""

from __future__ import annotations

import itertools
import os
import random
import socket
from pathlib import Path

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_FIRST = 10_000


def _never_given_by_the_kernel() -> range:
    """To a connection or to who asks for any port; and to no other process of these tests."""
    ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range")
    end = int(ephemeral.read_text().split()[0]) if ephemeral.exists() else 32_768
    return range(_FIRST + _WORKER, max(end, _FIRST + 1000 * _WORKERS), _WORKERS)


def _each_in_turn() -> itertools.cycle[int]:
    ports = list(_never_given_by_the_kernel())
    begin = random.Random(os.getpid()).randrange(len(ports))
    return itertools.cycle(ports[begin:] + ports[:begin])


_ports = _each_in_turn()


def free_port() -> int:
    """Another one each time: nobody listens there, and nobody else is told of it."""
    for port in _ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("unreachable: the ports go round")
