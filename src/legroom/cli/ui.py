"""`legroom ui`: the page and its HTTP API, served from this machine or written as files that need no server."""

from __future__ import annotations

import argparse
import os
import socket
from typing import TYPE_CHECKING

from legroom.cli.output import print_json_line
from legroom.errors import OK, UNREACHABLE, LegroomError

if TYPE_CHECKING:
    from legroom.web.live import LiveFeed

_PORT = 8400
_TOKEN_VARIABLE = "LEGROOM_API_TOKEN"
_WATCH_PACKAGES = ("aiohttp", "psutil")  # What `--watch` needs beyond `legroom[ui]`.
USAGE = "legroom ui [--port N] [--watch URL ...] | --api-only [--workers N] [--timeout S] | --static DIR"
DESCRIPTION = """\
Plan, diagnose, simulate, watch and look up causes on a page. It is served on this machine alone, unless --host says
otherwise; then a token is needed, and printed. The same over HTTP: /openapi.json describes it. --static writes the
page as plain files for any web host: the engine then runs in the visitor's browser, and nothing is sent anywhere.
--api-only serves the HTTP API without the page, for other programs and for replicas in a cluster: /healthz, /readyz and
/metrics need no token; an address that others can reach needs one (LEGROOM_API_TOKEN), or --no-token."""

EPILOG = """\
examples:
  legroom ui --open
  legroom ui --port 9000 --watch http://gpu1:8000 --watch http://gpu2:8000
  legroom ui --watch http://gpu1:8000 --plan plan.json
  legroom ui --host 0.0.0.0 --token "$(openssl rand -hex 16)"
  legroom ui --static site/
  LEGROOM_API_TOKEN="$(openssl rand -hex 16)" legroom ui --api-only --host 0.0.0.0
  curl -s localhost:8400/api/plan -H 'Content-Type: application/json' -d '{"model": "llama-3.1-8b", "gpu": "h100"}'

exit codes: 0 it ended, 2 the call is wrong or the port is in use, 3 something needed is missing
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help="where to serve (default: 127.0.0.1)")
    parser.add_argument("--port", metavar="N", type=int, default=_PORT, help=f"port; 0: any (default: {_PORT})")
    parser.add_argument("--token", metavar="TEXT", help="what visitors need (default: made up for another --host)")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument("--watch", metavar="URL", action="append", nargs="+", default=[], help="servers to show live")
    parser.add_argument("--plan", metavar="FILE", help="a plan (legroom plan --json) to show beside --watch")
    parser.add_argument("--interval", metavar="S", type=float, default=5.0, help="seconds between checks (default: 5)")
    parser.add_argument("--static", metavar="DIR", help="write the page as files instead")
    parser.add_argument("--runtime", metavar="FILE", help="for --static: the npm package of Pyodide")
    api = parser.add_argument_group("the HTTP API without the page")
    api.add_argument("--api-only", action="store_true", help="serve the API alone")
    api.add_argument("--no-token", action="store_true", help="answer everybody who can reach the address")
    api.add_argument("--workers", metavar="N", type=int, help="requests that are worked on at once (default: 4 to 8)")
    api.add_argument("--timeout", metavar="S", type=float, default=60.0, help="seconds per request (default: 60)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout: where it is")


def run(args: argparse.Namespace) -> int:
    """Serves the page and its API until it is stopped; with --static writes them as files instead."""
    if args.static is not None:
        from legroom.web.static_edition import write_static

        written = write_static(args.static, args.runtime)
        if args.json:
            print_json_line(written.as_json())
        else:
            print(written.text(), end="")
        return OK
    if (args.workers is not None and not 1 <= args.workers <= 256) or not 0.1 <= args.timeout <= 3600:
        hint = "the defaults suit most machines"
        raise LegroomError("--workers is 1 to 256, and --timeout 0.1 to 3600 seconds", hint)
    token = _access_token(args)
    feed = _live_feed(args)
    listening = listening_socket(args.host, args.port)
    host = f"[{args.host}]" if ":" in args.host else args.host
    url = f"http://{host}:{listening.getsockname()[1]}/"
    address = f"{url}?token={token}" if token and not args.api_only else url
    if args.json and args.api_only:
        print_json_line({"url": url, "openapi": f"{url}openapi.json", "token": bool(token)})
    elif args.json:
        print_json_line({"url": url, "token": token or None})
    elif args.api_only:
        print(f"legroom's API is at {url}api/, described at {url}openapi.json (Ctrl-C ends it)", flush=True)
    else:
        print(f"legroom is at {address} (Ctrl-C ends it)", flush=True)
    if args.open:
        import webbrowser

        webbrowser.open(address)
    from legroom.web.app import create_app
    from legroom.web.endpoint_processes import WorkerLimits
    from legroom.web.security import Access
    from legroom.web.uvicorn_server import serve_asgi

    limits = WorkerLimits(**({"workers": args.workers} if args.workers else {}), call_s=args.timeout)
    app = create_app(Access(token, args.no_token), limits, feed, page=not args.api_only)
    serve_asgi(app, listening, before_shutdown=feed.close if feed is not None else lambda: None)
    return OK


def _access_token(args: argparse.Namespace) -> str:
    """The token that requests need: the given one, else for a public --host a random one; empty where none is needed.
    LegroomError for an unfit token, and with --api-only instead of a random one."""
    from legroom.live.metrics.endpoint import is_loopback_host

    given, variable = args.token, f'{_TOKEN_VARIABLE}="$(openssl rand -hex 16)"'
    if given is None and args.api_only:
        given = os.environ.get(_TOKEN_VARIABLE) or None
    if given is not None:
        if len(given) < 8 or not given.isascii() or not given.isprintable() or " " in given:
            name, hint = ("--token", '--token "$(openssl rand -hex 16)"') if args.token else (_TOKEN_VARIABLE, variable)
            raise LegroomError(f"{name} wants 8 or more plain characters", f"say {hint}")
        return str(given)
    if args.no_token or is_loopback_host(args.host):
        return ""
    if args.api_only:
        raise LegroomError(f"others can reach {args.host}, and there is no token", f"set {variable}, or say --no-token")
    import secrets

    return secrets.token_urlsafe(16)


def _live_feed(args: argparse.Namespace) -> LiveFeed | None:
    """The feed of the servers in --watch; None without any. LegroomError for --plan alone, or missing packages."""
    servers = [url for urls in args.watch for url in urls]
    if not servers:
        if args.plan:
            raise LegroomError("--plan is what watched servers are compared with", "say --watch http://host:8000, too")
        return None
    from importlib.util import find_spec

    if missing := next((name for name in _WATCH_PACKAGES if find_spec(name) is None), None):
        hint = "pip install 'legroom[ui,watch]'"
        raise LegroomError(f"legroom ui --watch needs the Python package {missing}", hint, UNREACHABLE)
    from legroom.planning.plan_document import read_plan
    from legroom.sidecar.watch_config import simple_config, with_interval
    from legroom.web.live import LiveFeed

    plan = read_plan(args.plan, needs=("kv",)) if args.plan else None
    return LiveFeed(with_interval(simple_config(servers), args.interval), plan)


def listening_socket(host: str, port: int) -> socket.socket:
    """A listening socket, which queues connections until the server answers; LegroomError if it cannot be bound."""
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
