"""`legroom incident 17`: what was seen, what was diagnosed, what was done, and the flags it recommends."""

import argparse
import time

from legroom.cli.incidents import open_journal
from legroom.cli.output import print_answer, write_file
from legroom.errors import OK, LegroomError
from legroom.render.incident_text import incident_json, incident_svg, incident_text

DESCRIPTION = "The story of one incident: what was seen (with its curves), diagnosed, done and recommended."
EPILOG = """\
examples:
  legroom incident 17
  legroom incident 17 --svg incident.svg
  legroom incident 17 --json

exit codes: 0 shown, 2 there is no such incident or the file is no journal, 3 the journal cannot be read
"""
_BEFORE_S, _AFTER_S = 600.0, 300.0
"""Samples are shown from ten minutes before the incident to five minutes after it."""
_MAX_POINTS = 1000


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("number", metavar="NUMBER", help="as legroom incidents lists it")
    parser.add_argument("--journal", metavar="FILE", help="another journal than the default one")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--svg", metavar="FILE", help="write the story as a picture")


def run(args: argparse.Namespace) -> int:
    """Prints one incident of the journal with its samples; LegroomError where there is no such number."""
    if not args.number.lstrip("#").isdecimal() or len(args.number) > 18:
        raise LegroomError(f"{args.number!r} is not the number of an incident", "legroom incidents lists them")
    journal = open_journal(args.journal)
    incident = journal.incident(int(args.number.lstrip("#"))) if journal else None
    if journal is None or incident is None:
        raise LegroomError(f"there is no incident {args.number}", "legroom incidents lists them")
    now_s = time.time()
    until_s = (incident.closed_s if incident.closed_s is not None else now_s) + _AFTER_S
    points = journal.samples(incident.server, incident.opened_s - _BEFORE_S, min(until_s, now_s), _MAX_POINTS)
    if args.svg:
        write_file(args.svg, incident_svg(incident, points, now_s), "picture")
    document = incident_json(incident, points)
    print_answer(args.json, document, lambda style: incident_text(incident, points, now_s, style))
    return OK
