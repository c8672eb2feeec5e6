"""`legroom incidents`: what went wrong lately, from the journal."""

import argparse
import math
import sqlite3
import time
from pathlib import Path

from legroom.cli.output import print_answer
from legroom.errors import OK, LegroomError
from legroom.live.journal.journal import Journal, journal_path
from legroom.live.journal.journal_records import SQLITE_HEAD, VERSION, Incident, JournalUnavailable, schema_version
from legroom.live.metrics.endpoint import endpoint
from legroom.render.incident_text import incidents_text
from legroom.units import seconds_in

DESCRIPTION = "What went wrong with servers, the newest first: from the journal of legroom watch and run."
EPILOG = """\
examples:
  legroom incidents
  legroom incidents --since 2d --json
  legroom incidents --open

exit codes: 0 read (even if there are none), 2 the call is wrong or the file is no journal, 3 the journal cannot be read
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--since", metavar="AGO", help="how far back: 90min, 12h, 2d, 1w (default: all that is kept)")
    parser.add_argument("--server", metavar="URL", help="only those of this server")
    parser.add_argument("--open", action="store_true", dest="open_only", help="only those that are still open")
    parser.add_argument("--limit", type=int, default=100, metavar="N", help="show at most this many (default: 100)")
    parser.add_argument("--journal", metavar="FILE", help="another journal than the default one")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Prints the journal's incidents, newest first; exit status 0 also where there are none."""
    now_s = time.time()
    since_s = now_s - duration_seconds(args.since) if args.since else None
    if args.limit < 1:
        raise LegroomError(f"--limit {args.limit} leaves nothing to show", "give 1 or more")
    journal = open_journal(args.journal)
    incidents: list[Incident] = []
    limit = min(args.limit, 1_000_000)
    if journal:
        for name in _journal_names(args.server):
            incidents += journal.incidents(since_s, name, limit, args.open_only)
    incidents = sorted(incidents, key=lambda incident: (incident.opened_s, incident.id), reverse=True)[:limit]
    document = {"incidents": [incident.to_json() for incident in incidents]}
    print_answer(args.json, document, lambda style: incidents_text(incidents, now_s, style))
    return OK


def _journal_names(server: str | None) -> list[str | None]:
    """The names that a server may have in the journal: as given, and as its address; [None], any server, for None."""
    if server is None:
        return [None]
    try:
        return list(dict.fromkeys([server, endpoint(server).server]))
    except LegroomError:
        return [server]


def duration_seconds(text: str, option: str = "--since") -> float:
    """Seconds of a duration such as `90min`, `12h` or `2d`; a LegroomError that names `option` for another text."""
    seconds = seconds_in(text)
    if not 0 < seconds < math.inf or text.strip()[-1].isdigit():
        raise LegroomError(f"{option} {text!r} is not a time", "write it like 90min, 12h, 2d or 1w")
    return seconds


def open_journal(named: str | None) -> Journal | None:
    """The named journal, or the user's; None where the user has none yet, LegroomError if the named one is missing."""
    path = Path(named) if named else journal_path()
    if not path.exists():
        if named:
            raise LegroomError(f"there is no journal {named}", "legroom watch and legroom run write one")
        return None
    _check_is_journal(path)
    try:
        return Journal.open(path)
    except JournalUnavailable:
        if readable := _open_read_only(path):
            return readable
        raise


def _check_is_journal(path: Path) -> None:
    """Raises LegroomError unless the path is an empty or SQLite file, or one that may not be read."""
    reason = ""
    if path.is_file():
        try:
            with path.open("rb") as file:
                if file.read(len(SQLITE_HEAD)) in (b"", SQLITE_HEAD):
                    return
        except PermissionError:
            return  # opening it reports the error
        except OSError as error:
            reason = f": it cannot be read ({error.strerror})"
    raise LegroomError(f"{path} is not a journal{reason}", "name the file that legroom watch or legroom run wrote")


def _open_read_only(path: Path) -> Journal | None:
    """The journal on a full or read-only disk, without its write-ahead log if need be; None if unreadable."""
    for mode in ("mode=ro", "mode=ro&immutable=1"):
        try:
            db = sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True, isolation_level=None)
        except sqlite3.Error:
            continue
        try:
            if schema_version(db) == VERSION:
                return Journal(db, path, time.time)
        except sqlite3.Error as error:
            if "locked" in str(error):
                db.close()
                return None  # a writer is active: the file may be inconsistent
        db.close()
    return None
