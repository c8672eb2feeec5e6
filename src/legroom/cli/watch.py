"""`legroom watch`: a live page, one check, a JSON stream, or the sidecar."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from legroom.cli.output import note, print_answer, print_json_line, print_text
from legroom.drawing.text import plural
from legroom.errors import ANSWER_IS_NO, OK, UNREACHABLE, LegroomError
from legroom.files import read_text
from legroom.live.journal.journal import Journal
from legroom.live.journal.journal_records import JournalUnavailable
from legroom.live.metrics.endpoint import endpoint
from legroom.live.server_view import ServerView
from legroom.planning.plan_document import read_plan
from legroom.render.incident_text import local_time_text
from legroom.render.watch_text import servers_text

if TYPE_CHECKING:
    from legroom.sidecar.watch_config import SidecarConfig
    from legroom.sidecar.watch_session import WatchSession

USAGE = "legroom watch URL ... [options]"
DESCRIPTION = """\
Watch serving vLLMs: KV use, running and waiting, preemptions, prefix cache, tokens, latency, GPU memory of a server on
this machine; a state and a sentence for each, a forecast, and incidents. On a terminal a live page; elsewhere, or with
--once, check once and end with an exit code. --daemon runs the sidecar, which notifies and, if allowed to, acts."""

EPILOG = """\
examples:
  legroom watch http://gpu1:8000 http://gpu2:8000
  legroom watch localhost:8000 --once
  legroom watch localhost:8000 --json --interval 2 | jq .kv_use
  legroom watch localhost:8000 --record monday.jsonl.zst
  legroom watch --replay monday.jsonl.zst
  legroom watch --prometheus http://prometheus:9090
  legroom watch --prometheus http://prometheus:9090 --fleet --over 7d
  legroom watch --daemon --config watch.toml
  legroom watch --daemon --config watch.toml --rehearse monday.jsonl.zst

exit codes: 0 healthy, 1 an incident, 2 the call is wrong, 3 a server (or what lists them) is unreachable
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("urls", nargs="*", metavar="URL", help="servers, such as http://127.0.0.1:8000")
    where = parser.add_argument_group("other places to find servers")
    where.add_argument("--prometheus", metavar="URL", help="every vLLM that this Prometheus scrapes")
    where.add_argument("--match", metavar="LABELS", default="", help='of those, only these: job="vllm"')
    where.add_argument("--kubernetes", metavar="SELECTOR", help="pods with these labels, such as app=vllm")
    where.add_argument("--namespace", metavar="NAME", help="of the pods (default: all)")
    where.add_argument("--replay", metavar="FILE", help="what --record wrote, fast-forward")
    how = parser.add_argument_group("how to watch")
    how.add_argument("--interval", type=float, metavar="S", help="seconds between checks (default: 5)")
    how.add_argument("--once", action="store_true", help="check once and end with an exit code")
    how.add_argument("--fleet", action="store_true", help="with --prometheus: which servers could go")
    how.add_argument("--over", default="1h", metavar="TIME", help="how far --fleet looks back (default: 1h)")
    how.add_argument("--plan", metavar="FILE", help="legroom plan --json: for drift from it and better flags")
    how.add_argument("--record", metavar="FILE", help="record what is seen, for --replay (.gz and .zst are compressed)")
    how.add_argument("--token-file", metavar="FILE", help="a bearer token for the servers (or $LEGROOM_TOKEN)")
    how.add_argument("--insecure", action="store_true", help="accept any TLS certificate")
    how.add_argument("--ca-file", metavar="FILE", help="certificates of your own authority")
    how.add_argument("--json", action="store_true", help="a stream: a line of JSON per server and check")
    sidecar = parser.add_argument_group("the sidecar")
    sidecar.add_argument("--daemon", action="store_true", help="stay, notify others, serve /metrics and /incidents")
    sidecar.add_argument("--config", metavar="FILE", help="watch.toml")
    sidecar.add_argument("--act", action="append", default=[], metavar="NAME", help="turn an action on; repeatable")
    sidecar.add_argument("--rehearse", metavar="FILE", help="what it would have done with a recording or a journal")


def run(args: argparse.Namespace) -> int:
    """Runs the view, check, stream, replay, dry run or sidecar that the options name; returns its exit status."""
    if args.record:
        if args.daemon or args.rehearse:
            raise LegroomError("--record is not for the sidecar", "its journal keeps the samples; leave --daemon out")
        if args.replay and Path(args.record).resolve() == Path(args.replay).resolve():
            raise LegroomError(f"--record would overwrite {args.replay} while it is played", "name another file")
    if args.rehearse:
        from legroom.sidecar.policy_dry_run import dry_run

        result = dry_run(Path(args.rehearse), _watch_config(args))
        lines = [f"{local_time_text(event.time_s)}  {event.server}  {event.text}\n" for event in result.events]
        servers, actions = plural(result.servers, "server"), plural(len(result.actions), "action")
        lines.append(f"\n{result.looks:,} checks of {servers}; {actions} would have been taken\n")
        print_answer(args.json, result.to_json, "".join(lines))
        return OK
    if args.daemon:
        from legroom.sidecar.sidecar import run_sidecar

        return run_sidecar(_watch_config(args))
    if args.act:
        raise LegroomError("--act is for the sidecar", "say --daemon: a page watches and never acts")
    if args.replay:
        return _print_replay(args)
    config = _watch_config(args)
    if args.fleet:
        from legroom.cli.watch_fleet import run_fleet_view

        return run_fleet_view(args, config)
    # Textual reads and draws on all three.
    has_terminal = all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    if args.once or not (args.json or has_terminal):
        return _check_once_and_print(args, config)
    return _print_stream(args, config) if args.json else _run_page(args, config)


def _check_once_and_print(args: argparse.Namespace, config: SidecarConfig) -> int:
    """Check every server once, print its state, and return the exit code that the states give."""
    from legroom.sidecar.watch_session import check_once

    session = _watch_session(args, None, config)
    check_once(config, session, min(1.0, config.interval_s))
    session.close()
    views = list(session.views.values())
    if not views:
        hint = "is the selector right?" if config.kubernetes else "does it scrape a vLLM, and does --match name one?"
        raise LegroomError("no server was found", hint, UNREACHABLE)
    document = {"servers": [view.to_json() for view in views]}
    print_answer(args.json, document, lambda style: servers_text(views, style))
    return _exit_code(views)


def _exit_code(views: Sequence[ServerView]) -> int:
    """The exit code of these servers' states; an incident counts before an unreachable server."""
    if any(view.has_incident and view.state != "unreachable" for view in views):
        return ANSWER_IS_NO
    return UNREACHABLE if any(view.state == "unreachable" for view in views) else OK


def _print_stream(args: argparse.Namespace, config: SidecarConfig) -> int:
    """Print one JSON line per server and scrape until interrupted; returns the exit code."""
    import asyncio

    from legroom.sidecar.watch_session import stream

    _handle_sigterm_as_ctrl_c()
    session = _watch_session(args, _open_journal_or_none(config), config)
    try:
        asyncio.run(stream(config, session, lambda view: print_json_line(view.to_json())))
    finally:
        session.close()
    return OK


def _handle_sigterm_as_ctrl_c() -> None:
    """Makes SIGTERM and SIGHUP end the process like Ctrl-C, so that files are closed."""
    import signal

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler)


def _run_page(args: argparse.Namespace, config: SidecarConfig) -> int:
    """Show the live terminal page until it is closed; returns the exit code that the last states give."""
    try:
        from legroom.cli.watch_page import WatchPage
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("textual"):
            hint = "pip install 'legroom[watch]', or use --once or --json"
            raise LegroomError("the live page needs Textual", hint) from None
        raise
    _handle_sigterm_as_ctrl_c()
    session = _watch_session(args, _open_journal_or_none(config), config)
    page = WatchPage(session, config)
    try:
        page.run()
    finally:
        session.close()
    if page.problem:
        raise page.problem
    return _exit_code(list(session.views.values()))


def _print_replay(args: argparse.Namespace) -> int:
    """Prints a recording's changes and last state, or JSON lines; the exit status says if an incident opened."""
    from legroom.sidecar.watch_session import replayed_views

    session = _watch_session(args, None, _watch_config(args))
    opened = 0
    for view in replayed_views(Path(args.replay), session):
        if args.json:
            print_json_line(view.to_json())
        while session.changes:
            change = session.changes.pop()
            opened += not change.is_over
            if not args.json:
                finding = change.incident.finding
                state = "over" if change.is_over else finding.reason if finding else ""
                print(f"{local_time_text(change.time_s)}  {change.incident.server}  {change.incident.title}: {state}")
    if not args.json:
        print(f"\n{session.scrapes:,} scrapes, {opened} incident{'s' if opened != 1 else ''}\n")
        print_text(lambda style: servers_text(list(session.views.values()), style))
    return ANSWER_IS_NO if opened else OK


def _watch_session(args: argparse.Namespace, journal: Journal | None, config: SidecarConfig) -> WatchSession:
    """A session with the thresholds, the plans to compare with, and the recorder of --record."""
    from legroom.sidecar.watch_session import WatchSession

    recorder = None
    if args.record:
        from legroom.live.metrics.scrape_recording import Recorder

        recorder = Recorder(Path(args.record))
    plans = {server.name: server.plan for server in config.servers if server.plan is not None}
    if args.plan:
        plans[""] = read_plan(args.plan, needs=("kv",))
    return WatchSession(config.thresholds, plans, journal=journal, recorder=recorder, log=note)


def _open_journal_or_none(config: SidecarConfig) -> Journal | None:
    """The journal; None, with a note on stderr, where it cannot be opened."""
    try:
        return Journal.open(config.journal)
    except JournalUnavailable as error:
        note(f"{error.message}: watching without it")
        return None


def _watch_config(args: argparse.Namespace) -> SidecarConfig:
    """The configuration of --config, else the default, with the servers and settings of the other options."""
    from legroom.sidecar import watch_config

    where, token = "LEGROOM_TOKEN", os.environ.get("LEGROOM_TOKEN", "")
    if args.token_file:
        where, token = args.token_file, read_text(args.token_file, "it must hold the token alone")
    if not token.strip().isprintable():
        raise LegroomError(f"the token of {where} has characters that no header may have", "one line, nothing else")
    bearer = token.strip() or None
    config = watch_config.simple_config([], args.act)
    if args.config:
        config = watch_config.with_more_actions(watch_config.read_config(Path(args.config)), args.act)
    known = {server.name for server in config.servers}
    given = [endpoint(url, bearer, verify_tls=not args.insecure, ca_file=args.ca_file) for url in args.urls]
    plan = read_plan(args.plan, needs=("kv",)) if args.plan else None
    # A server given twice, with and without http://, is scraped once.
    servers = {place.server: watch_config.ServerConfig(place, "default", plan=plan) for place in given}
    more = (server for name, server in servers.items() if name not in known)
    config = replace(config, servers=(*config.servers, *more))
    if args.prometheus:
        place = watch_config.PrometheusConfig(args.prometheus, bearer, args.match, not args.insecure, args.ca_file)
        config = replace(config, prometheus=place)
    if args.kubernetes:
        config = replace(config, kubernetes=watch_config.KubernetesConfig(args.kubernetes, args.namespace))
    if args.interval is not None:
        config = watch_config.with_interval(config, args.interval)
    if not (config.servers or config.prometheus or config.kubernetes or args.rehearse or args.replay):
        raise LegroomError("which server?", "legroom watch http://host:8000, or --prometheus, --kubernetes, --config")
    return config
