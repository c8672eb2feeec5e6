"""`legroom serve-api`: the API of `legroom ui` without the page, for other programs and for clusters."""

from __future__ import annotations

import argparse
import os
import socket
from typing import Any

from legroom.cli.output import print_json_line
from legroom.cli.serving import listening_socket
from legroom.errors import OK, LegroomError

_PORT = 8401
_TOKEN = "LEGROOM_API_TOKEN"
_DESCRIPTION = """\
Plan, size, read, lint, diagnose and simulate over HTTP: /openapi.json describes it, and clients can be made from that.
It keeps nothing between requests, so replicas need nothing in common. /healthz says that it lives, /readyz that it
answers, /metrics is for Prometheus. An address that others can reach needs a token (LEGROOM_API_TOKEN), or --no-token
where something else decides who may ask."""

_EPILOG = """\
examples:
  legroom serve-api
  LEGROOM_API_TOKEN="$(openssl rand -hex 16)" legroom serve-api --host 0.0.0.0
  curl -s localhost:8401/api/plan -H 'Content-Type: application/json' -d '{"model": "llama-3.1-8b", "gpu": "h100"}'

exit codes: 0 it ended, 2 the call is wrong or the port is in use, 3 something needed is missing
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "serve-api",
        usage="legroom serve-api [--host ADDRESS] [--port N] [options]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--host", metavar="ADDRESS", default="127.0.0.1", help="address to serve on (default: 127.0.0.1)"
    )
    parser.add_argument("--port", metavar="N", type=int, default=_PORT, help=f"port; 0: any (default: {_PORT})")
    parser.add_argument("--no-token", action="store_true", help="answer everybody who can reach the address")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--workers", metavar="N", type=int, help="requests that are worked on at once (default: 4 to 8)"
    )
    limits.add_argument("--timeout", metavar="S", type=float, default=60.0, help="seconds per request (default: 60)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout: where it is")
    return parser


def run(args: argparse.Namespace) -> int:
    if (args.workers is not None and not 1 <= args.workers <= 256) or not 0.1 <= args.timeout <= 3600:
        raise LegroomError(
            "--workers is 1 to 256, and --timeout 0.1 to 3600 seconds", "the defaults suit most machines"
        )
    token = _token(args)
    listening = listening_socket(args.host, args.port)
    host = f"[{args.host}]" if ":" in args.host else args.host
    url = f"http://{host}:{listening.getsockname()[1]}/"
    if args.json:
        print_json_line({"url": url, "openapi": f"{url}openapi.json", "token": bool(token)})
    else:
        print(f"legroom's API is at {url}api/, described at {url}openapi.json (Ctrl-C ends it)", flush=True)
    _serve(listening, token, args)
    return OK


def _token(args: argparse.Namespace) -> str:
    from legroom.web.security import is_loopback

    token = os.environ.get(_TOKEN, "")
    if token and (len(token) < 8 or not token.isascii() or not token.isprintable() or " " in token):
        raise LegroomError(f"{_TOKEN} wants 8 or more plain characters", f'{_TOKEN}="$(openssl rand -hex 16)"')
    if not token and not args.no_token and not is_loopback(args.host):
        raise LegroomError(f"others can reach {args.host}, and there is no token", f"set {_TOKEN}, or say --no-token")
    return token


def _serve(listening: socket.socket, token: str, args: argparse.Namespace) -> None:
    from legroom.web.app import create_app
    from legroom.web.pool import WorkerLimits
    from legroom.web.security import Access
    from legroom.web.uvicorn_server import serve_asgi

    workers = WorkerLimits(**({"workers": args.workers} if args.workers else {}), call_s=args.timeout)
    app = create_app(Access(token, args.no_token), workers, page=False)
    serve_asgi(app, listening)
