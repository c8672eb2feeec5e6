"""`legroom ui`: the page, served from this machine or written as files that need no server."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from legroom.cli.output import print_json_line
from legroom.cli.serving import listening_socket
from legroom.errors import OK, UNREACHABLE, LegroomError

if TYPE_CHECKING:
    from legroom.web.live import LiveFeed

_PORT = 8400
_WATCH_PACKAGES = ("aiohttp", "psutil")
"""What looking at servers takes beyond `legroom[ui]`."""
_DESCRIPTION = """\
Plan, diagnose, simulate, watch and look up causes on a page. It is served on this machine alone, unless --host says
otherwise; then a token is needed, and printed. The same over HTTP: /openapi.json describes it. --static writes the
page as plain files for any web host: the engine then runs in the visitor's browser, and nothing is sent anywhere."""

_EPILOG = """\
examples:
  legroom ui --open
  legroom ui --port 9000 --watch http://gpu1:8000 --watch http://gpu2:8000
  legroom ui --watch http://gpu1:8000 --plan plan.json
  legroom ui --host 0.0.0.0 --token "$(openssl rand -hex 16)"
  legroom ui --static site/
  curl -s localhost:8400/api/plan -H 'Content-Type: application/json' -d '{"model": "llama-3.1-8b", "gpu": "h100"}'

exit codes: 0 it ended, 2 the call is wrong or the port is in use, 3 something needed is missing
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "ui",
        usage="legroom ui [--port N] [--watch URL ...] | legroom ui --static DIR",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--host", metavar="ADDRESS", default="127.0.0.1", help="address to serve on (default: 127.0.0.1)"
    )
    parser.add_argument("--port", metavar="N", type=int, default=_PORT, help=f"port; 0: any (default: {_PORT})")
    parser.add_argument(
        "--token",
        metavar="TEXT",
        help="the token that visitors need (default: one is made up if --host is another address)",
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument("--watch", metavar="URL", action="append", nargs="+", default=[], help="servers to show live")
    parser.add_argument(
        "--plan", metavar="FILE", help="the output of legroom plan --json: shows the watched servers beside it"
    )
    parser.add_argument("--interval", metavar="S", type=float, default=5.0, help="seconds between checks (default: 5)")
    parser.add_argument("--static", metavar="DIR", help="write the page as files instead")
    parser.add_argument(
        "--runtime", metavar="FILE", help="for --static: the npm package of Pyodide, where npm cannot fetch it"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout: where it is")
    return parser


def run(args: argparse.Namespace) -> int:
    if args.static is not None:
        return _write_static(args)
    from legroom.web.security import is_loopback

    token = _token(args, is_loopback(args.host))
    feed = _feed(args)
    listening = listening_socket(args.host, args.port)
    host = f"[{args.host}]" if ":" in args.host else args.host
    url = f"http://{host}:{listening.getsockname()[1]}/"
    address = f"{url}?token={token}" if token else url
    if args.json:
        print_json_line({"url": url, "token": token or None})
    else:
        print(f"legroom is at {address} (Ctrl-C ends it)", flush=True)
    if args.open:
        import webbrowser

        webbrowser.open(address)
    from legroom.web.app import create_app
    from legroom.web.security import Access
    from legroom.web.uvicorn_server import serve_asgi

    app = create_app(Access(token), feed=feed)
    serve_asgi(app, listening, before_shutdown=feed.close if feed is not None else lambda: None)
    return OK


def _token(args: argparse.Namespace, is_local: bool) -> str:
    if args.token is not None:
        if len(args.token) < 8 or not args.token.isascii() or not args.token.isprintable() or " " in args.token:
            raise LegroomError("--token wants 8 or more plain characters", 'say --token "$(openssl rand -hex 16)"')
        return str(args.token)
    if is_local:
        return ""
    import secrets

    return secrets.token_urlsafe(16)


def _feed(args: argparse.Namespace) -> LiveFeed | None:
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
    from legroom.sidecar.config import simple_config, with_interval
    from legroom.web.live import LiveFeed

    plan = read_plan(args.plan, needs=("kv",)) if args.plan else None
    return LiveFeed(with_interval(simple_config(servers), args.interval), plan)


def _write_static(args: argparse.Namespace) -> int:
    from legroom.web.static_edition import write_static

    written = write_static(args.static, args.runtime)
    if args.json:
        print_json_line(written.as_json())
    else:
        sys.stdout.write(written.text())
    return OK
