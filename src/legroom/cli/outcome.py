"""Outcomes of fixes: `legroom diagnose --outcome` records one, `legroom score --outcomes` counts them."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from legroom.cli.output import print_json
from legroom.errors import OK, LegroomError

if TYPE_CHECKING:
    from legroom.diagnosis.diagnose import LogReading
    from legroom.diagnosis.starting_plan import Hints
    from legroom.explain.outcomes import Outcome


def record(args: argparse.Namespace, readings: list[LogReading], hints: Hints) -> int:
    """Write down what came of the first fix of the log that failed."""
    from legroom.explain.outcomes import record_outcome

    outcome = _outcome(readings, hints, worked=args.outcome == "worked")
    if args.log:
        _agrees(args.log, hints, outcome)
    path = record_outcome(outcome)
    if args.json:
        print_json({"recorded": asdict(outcome)})
    else:
        print(f"recorded: {outcome.fix} for {outcome.cause} ({outcome.entry}) {args.outcome}")
        print(f"in {path}: no text of the log, no names; it stays on this machine", file=sys.stderr)
    return OK


def show(as_json: bool) -> int:
    """How often first fixes worked here."""
    from legroom.explain.outcomes import counted_by, outcomes_json, outcomes_path, read_outcomes, total

    outcomes = read_outcomes()
    if as_json:
        print_json(outcomes_json(outcomes))
        return OK
    if not outcomes:
        print("no outcome is recorded here yet: legroom diagnose OLD.log --outcome worked|failed [--log NEW.log]")
        return OK
    from legroom.drawing.text import columns

    whole = total(outcomes)
    print(f"first fixes that worked: {whole.worked} of {whole.tried} ({whole.rate:.0%})")
    for part, title in (("cause", "by cause"), ("fix", "by kind of fix"), ("release", "by release")):
        rows = [[title, "tried", "worked", "rate"]]
        for name, count in counted_by(outcomes, part).items():
            rows.append([name, str(count.tried), str(count.worked), f"{count.rate:.0%}"])
        print("\n" + "\n".join(columns(rows, "<>>>")))
    print(f"\n{outcomes_path()}")
    return OK


def _outcome(readings: list[LogReading], hints: Hints, *, worked: bool) -> Outcome:
    from legroom.diagnosis.starting_plan import known_of
    from legroom.explain.outcomes import Outcome

    run = next((reading.runs[0] for reading in readings if reading.runs and reading.runs[0].findings), None)
    finding = run.findings[0] if run else None
    if run is None or finding is None or not finding.fixes:
        raise LegroomError(
            "there is no fix in this log whose outcome could be recorded", "give the log of the start that failed"
        )
    known = known_of(run.case, hints)
    release = known.release.version if known.release_known else ""
    return Outcome(finding.cause, finding.entry, finding.fixes[0].kind, release, worked)


def _agrees(path: str, hints: Hints, outcome: Outcome) -> None:
    """A log that says otherwise is believed: a wrong record would be worse than none."""
    from legroom.diagnosis.diagnose import read_log
    from legroom.diagnosis.reader import pieces_of_file

    new = read_log(pieces_of_file(path), path, hints)
    run = new.runs[0] if new.runs else None
    if run is None or run.verdict == "not understood":
        raise LegroomError(f"{path} does not show how that start ended", "give the whole log, or leave --log out")
    if outcome.worked and run.findings:
        raise LegroomError(
            f"{path} shows that the start failed again: {run.findings[0].cause}", "record it with --outcome failed"
        )
    if not outcome.worked and not run.findings:
        raise LegroomError(f"{path} shows a server that came up", "record it with --outcome worked")
