"""`legroom guard`: the admission guard as a reverse proxy, and its policy file."""

import argparse
import math
import os
from pathlib import Path

from legroom.cli.output import note, print_answer
from legroom.errors import OK, LegroomError
from legroom.guard import TOKEN_NAME
from legroom.guard.policy import Policy, policy_toml, read_policy

USAGE = "legroom guard --upstream URL [options] | --check FILE | --print-policy"
DESCRIPTION = """\
Stand in front of an OpenAI-compatible server and admit what its KV cache can hold: each request is bounded (prompt,
max_tokens, n, logprobs, images) and weighed (prompt and answer in blocks, times n); what does not fit now waits, or
gets 429 with Retry-After. By default it fills the cache and lets vLLM preempt now and then; `admit = "strict"` in the
policy has vLLM never preempt, and with long answers finish up to a quarter fewer tokens a second. Clients take turns.
Inside vLLM the same guard is a middleware, without a hop
(LEGROOM_GUARD_POLICY and LEGROOM_GUARD_PLAN name its files, LEGROOM_GUARD_TOKEN lets somebody drain it):

  vllm serve MODEL --middleware legroom.guard.Guard"""

EPILOG = """\
examples:
  legroom guard --upstream http://127.0.0.1:8000
  legroom guard --upstream http://127.0.0.1:8000 --policy guard.toml --plan plan.json --port 8100
  legroom guard --print-policy > guard.toml
  legroom guard --check guard.toml

signals: SIGHUP reads the policy again, SIGTERM drains and stops
exit codes: 0 stopped as asked, the policy is right; 2 the call or a file is wrong; 3 the address cannot be listened on
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--upstream", metavar="URL", help="the server to stand in front of")
    parser.add_argument("--policy", metavar="FILE", help="bounds and limits (TOML); read again when it changes")
    parser.add_argument("--plan", metavar="FILE", help="a plan (legroom plan --json) for what the server does not tell")
    where = parser.add_argument_group("listening")
    where.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    where.add_argument("--port", type=int, default=8100, help="port to listen on (default: 8100)")
    where.add_argument("--drain-timeout", type=float, default=30.0, metavar="S", help="for requests to finish (30)")
    files = parser.add_argument_group("policy files")
    files.add_argument("--check", metavar="FILE", help="check a policy file and exit")
    files.add_argument("--print-policy", action="store_true", help="print the policy in force, with comments, and exit")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout (--check, --print-policy)")


def run(args: argparse.Namespace) -> int:
    """Serves the guard until it is stopped; with --check or --print-policy only reads or prints a policy."""
    if args.check is not None or args.print_policy:
        from dataclasses import asdict

        path = args.check if args.check is not None else args.policy
        policy = read_policy(Path(path)) if path is not None else Policy()
        if args.check is not None:
            print_answer(args.json, {"file": path, "valid": True, "policy": asdict(policy)}, f"{path}: fine\n")
        else:
            print_answer(args.json, asdict(policy), policy_toml(policy))
        return OK
    if not args.upstream:
        hint = "legroom guard --upstream http://127.0.0.1:8000"
        raise LegroomError("--upstream is missing: which server should the guard protect?", hint)
    from legroom.guard.log import log_to_stderr
    from legroom.guard.serving.proxy import ProxyOptions, serve
    from legroom.guard.serving.upstream import is_itself, upstream_of
    from legroom.guard.weight.engine_limits import read_limits

    if not 0 <= args.port <= 65535:
        raise LegroomError(f"--port {args.port} is not a port", "choose one between 1 and 65535")
    if not 0 <= args.drain_timeout < math.inf:
        raise LegroomError(f"--drain-timeout {args.drain_timeout} is not a number of seconds", "0 or more")
    if args.json:
        raise LegroomError("--json goes with --check or --print-policy; a guard that serves prints no document")
    upstream = upstream_of(args.upstream)
    if args.port and is_itself(upstream, args.host, args.port):
        raise LegroomError(f"{upstream.shown} is where the guard itself would listen", "choose another --port")
    log_to_stderr()
    options = ProxyOptions(
        upstream=upstream,
        policy=Path(args.policy) if args.policy else None,
        plan=read_limits(Path(args.plan)) if args.plan else None,
        host=args.host,
        port=args.port,
        token=os.environ.get(TOKEN_NAME) or None,
        api_key=os.environ.get("VLLM_API_KEY") or None,
        drain_timeout_s=args.drain_timeout,
    )
    shown = f"[{args.host}]" if ":" in args.host else args.host
    return serve(options, lambda port: note(f"guarding {upstream.shown} on http://{shown}:{port}"))
