"""`legroom verify`: a load test of a running server against its plan."""

import argparse
import json
import os
import sys
from pathlib import Path

from legroom.cli.output import print_answer, progress_bar, write_file
from legroom.errors import ANSWER_IS_NO, INTERRUPTED, OK, LegroomError
from legroom.live.metrics.endpoint import endpoint
from legroom.render.verify_page import verification_html, verification_svg, verification_text
from legroom.units import parse_whole
from legroom.verify.verification_checks import PassCriteria, planned_pool
from legroom.verify.verification_run import VerificationRequest, verify

USAGE = "legroom verify URL [--plan FILE] [--load LOAD] [options]"
DESCRIPTION = """\
Test a server: health and model, one completion, a request at the full context, then a ramp to the planned number of
requests at a time with prompts of the planned lengths, while its metrics are watched. It passes if nothing failed,
nothing was preempted, the KV pool was as planned and memory did not grow. It ends by itself, after a bounded number of
requests and seconds. It loads the server to its limit, so one that is not on this machine needs --yes-load-remote."""

EPILOG = """\
loads: chat, code, long-prompts, full (all at the full context), lengths such as 512/128, a mix such as
'prompt=lognormal(800,0.5) output=100 prefix=4,512' (see legroom simulate), or a trace file

examples:
  legroom verify http://127.0.0.1:8000
  legroom plan llama-3.1-8b --gpu h100 --json > plan.json; legroom verify localhost:8000 --plan plan.json
  legroom verify localhost:8000 --load long-prompts --concurrency 32 --requests 200 --svg verify.svg

exit codes: 0 verified, 1 not verified, 2 the call is wrong, 3 the server cannot be reached, 130 interrupted
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="of an OpenAI-compatible server, such as http://127.0.0.1:8000")
    asked = parser.add_argument_group("what is asked of it")
    asked.add_argument("--plan", metavar="FILE", help="the output of legroom plan --json: the pool must be as planned")
    asked.add_argument("--load", default="chat", metavar="LOAD", help="lengths of prompts and answers (default: chat)")
    asked.add_argument("--trace", metavar="FILE", help="the lengths of a trace; the same as --load FILE")
    asked.add_argument("--concurrency", metavar="N", help="requests at once (default: as many as always fit)")
    asked.add_argument("--requests", metavar="N", help="requests in total (default: 4 each, 16 to 400)")
    asked.add_argument("--max-preemptions", metavar="N", default="0", help="preemptions that still pass (default: 0)")
    asked.add_argument("--timeout", type=float, default=600.0, metavar="S", help="stop after this (default: 600)")
    asked.add_argument("--seed", type=int, default=0, help="seed of the random lengths (default: 0)")
    how = parser.add_argument_group("how to reach it")
    how.add_argument("--api-key", metavar="KEY", help="default: $OPENAI_API_KEY, then $VLLM_API_KEY")
    how.add_argument("--insecure", action="store_true", help="accept any TLS certificate")
    how.add_argument("--yes-load-remote", action="store_true", help="load a server that is not on this machine")
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="one JSON document on stdout")
    out.add_argument("--svg", metavar="FILE", help="write the picture of KV use and queue")
    out.add_argument("--report", metavar="FILE", help="write the report to a file too: .json, .html or text")


def run(args: argparse.Namespace) -> int:
    """Tests the running server under load and prints the result; exit status 1 where it is not as planned."""
    request = _verification_request(args)
    with progress_bar("verifying") as bar:
        verification = verify(request, bar)
    print_answer(args.json, verification.json, lambda style: verification_text(verification, style))
    sys.stdout.flush()  # the answer is printed even if a file below cannot be written
    if args.svg:
        write_file(args.svg, verification_svg(verification), "picture")
    if args.report:
        kind = Path(args.report).suffix.lower()
        if kind == ".json":
            report = json.dumps(verification.json(), indent=1) + "\n"
        else:
            report = (verification_html if kind in (".html", ".htm") else verification_text)(verification)
        write_file(args.report, report, "report")
    return INTERRUPTED if verification.interrupted else OK if verification.ok else ANSWER_IS_NO


def _verification_request(args: argparse.Namespace) -> VerificationRequest:
    """What the options ask of the server; LegroomError for a bad number or a path that cannot be written."""
    if args.trace and args.load != "chat":
        raise LegroomError("--trace and --load both say what the load is", "give one of them")
    if not 0 < args.timeout <= 86_400:
        raise LegroomError(f"--timeout {args.timeout:g} is not between 0 and 86400 seconds")
    for option, path in (("--svg", args.svg), ("--report", args.report)):
        if path is not None and (Path(path).is_dir() or not Path(path).resolve().parent.is_dir()):
            hint = "give a path in a folder that is there"
            raise LegroomError(f"{option} {path}: not a file that can be written", hint)
    return VerificationRequest(
        url=args.url,
        api_key=args.api_key or _environment_key(args.url),
        planned=planned_pool(args.plan) if args.plan else None,
        load=args.trace or args.load,
        concurrency=_parse_count(args.concurrency, "--concurrency", 1),
        requests=_parse_count(args.requests, "--requests", 1),
        timeout_s=args.timeout,
        seed=args.seed,
        limits=PassCriteria(max_preemptions=_parse_count(args.max_preemptions, "--max-preemptions", 0) or 0),
        verify_tls=not args.insecure,
        load_remote=args.yes_load_remote,
    )


def _environment_key(url: str) -> str | None:
    """The API key in OPENAI_API_KEY or VLLM_API_KEY; None without one, or where the URL has credentials."""
    if "Authorization" in endpoint(url).headers:
        return None
    return os.environ.get("OPENAI_API_KEY") or os.environ.get("VLLM_API_KEY") or None


def _parse_count(text: str | None, option: str, least: int) -> int | None:
    """A count from `least` to 100,000; LegroomError, naming the `option`, for another text; None for None."""
    return None if text is None else parse_whole(text, option, least, 100_000)
