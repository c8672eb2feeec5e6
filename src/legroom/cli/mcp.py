"""`legroom mcp`: the tools for agents, over stdio or streamable HTTP."""

import argparse
import socket

from legroom.cli.output import note
from legroom.errors import OK, UNREACHABLE, LegroomError
from legroom.live.metrics.endpoint import is_loopback_host

_DEFAULT_HOST, _DEFAULT_PORT = "127.0.0.1", 8722

DESCRIPTION = """\
Serve plan, size, diagnose, explain, search_catalog, simulate and lint to an agent over the Model Context Protocol: on
standard input and output, or as streamable HTTP under /mcp. Needs the official SDK: pip install 'legroom[mcp]'.
Nothing is changed on this machine. Over HTTP a caller cannot name files of this machine, and the address is a loopback
one unless another is named: there is no authentication."""

EPILOG = """\
examples:
  legroom mcp
  legroom mcp --http
  legroom mcp --http 127.0.0.1:9000

an agent's configuration:
  {"mcpServers": {"legroom": {"command": "legroom", "args": ["mcp"]}}}

exit codes: 0 the client left, 2 the call is wrong, 3 the SDK is missing or the address cannot be listened on
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    about = f"streamable HTTP in place of stdio (default: {_DEFAULT_HOST}:{_DEFAULT_PORT})"
    parser.add_argument("--http", nargs="?", const="", metavar="HOST:PORT", help=about)


def run(args: argparse.Namespace) -> int:
    """Serves the MCP tools until it is stopped; LegroomError where the MCP SDK is missing."""
    address = None if args.http is None else address_of(args.http)
    try:
        from legroom.mcp.mcp_tools import build_server
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("mcp", "pydantic"):
            raise
        hint = "pip install 'legroom[mcp]'"
        raise LegroomError("legroom mcp needs the official MCP SDK, version 2 or later", hint, UNREACHABLE) from None
    server = build_server(local_files=address is None)
    if address is None:
        server.run("stdio")
        return OK
    host, port = address
    refuse_busy(host, port)
    if not is_loopback_host(host):
        note(f"note: {host} can be reached from other machines, and there is no authentication")
    note(f"legroom's tools are at http://{f'[{host}]' if ':' in host else host}:{port}/mcp")
    server.run("streamable-http", host=host, port=port, stateless_http=True)
    return OK


def address_of(text: str) -> tuple[str, int]:
    """(host, port) of `HOST:PORT`, `HOST`, `:PORT` or nothing (the defaults), IPv6 in brackets; else LegroomError."""
    host, port = text, str(_DEFAULT_PORT)
    if text.startswith("["):
        host, closing, rest = text[1:].partition("]")
        port = rest[1:] if closing and rest.startswith(":") else port if closing and not rest else ""
    elif ":" in text:
        host, _, port = text.rpartition(":")
    bare_ipv6 = ":" in host and not text.startswith("[")
    if bare_ipv6 or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 1 << 16):
        raise LegroomError(f"--http {text!r} is not HOST:PORT", f"write it like --http {_DEFAULT_HOST}:{_DEFAULT_PORT}")
    return host or _DEFAULT_HOST, int(port)


def refuse_busy(host: str, port: int) -> None:
    """Raises LegroomError if `host`:`port` cannot be listened on; the HTTP server would only log it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        why = error.strerror or error
        raise LegroomError(f"cannot listen on {host}:{port}: {why}", "name another HOST:PORT", UNREACHABLE) from None
