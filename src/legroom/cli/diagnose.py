"""`legroom diagnose`: what happened, the lines that prove it, why, and the command that will work."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from legroom.cli.output import note, print_json
from legroom.errors import ANSWER_IS_NO, BAD_INPUT, OK, LegroomError

if TYPE_CHECKING:
    from legroom.diagnosis.diagnose import LogReading
    from legroom.diagnosis.starting_plan import Hints
    from legroom.explain.outcomes import Outcome

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Read a vLLM log and say what happened, in which phase, proven by its lines; why, with this log's numbers; the command
that will work, with the memory it will have; what else could be done and what not to try. Files may be plain, gzip or
zstd."""

_EPILOG = """\
examples:
  legroom diagnose vllm.log
  kubectl logs my-pod | legroom diagnose -
  legroom diagnose --systemd vllm.service
  legroom diagnose --docker my-vllm --gpu a100-80gb
  legroom diagnose old.log --outcome worked --log new.log
  legroom diagnose vllm.log --command 'vllm serve Qwen/Qwen3-8B --max-model-len 32768' --gpu rtx4090

exit codes: 0 no problem found, 1 a problem was found, 2 the call is wrong or the log cannot be read or is not vLLM's
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Describe the command's options."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "diagnose",
        usage="legroom diagnose [FILE ... | -] [options]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="log files; - is standard input (the default)")
    where = parser.add_argument_group("other places to read from")
    where.add_argument("--systemd", metavar="UNIT", help="the journal of a systemd unit")
    where.add_argument("--docker", metavar="NAME", help="the log of a Docker container")
    known = parser.add_argument_group("what the log may not say")
    known.add_argument(
        "--command", metavar="LINE", dest="line", help="the vllm serve line that was run, or the file that has it"
    )
    known.add_argument("--model", metavar="MODEL", help="a Hub id or a folder with a config.json")
    known.add_argument("--gpu", metavar="NAME", help="a GPU (h100, rtx4090 ...) or a size (24GiB)")
    known.add_argument("--gpus", metavar="N", help="how many GPUs the machine has")
    known.add_argument("--vllm", metavar="VERSION", help="the vLLM release")
    learn = parser.add_argument_group("tell whether the first fix worked")
    learn.add_argument(
        "--outcome", choices=("worked", "failed"), help="record, on this machine only, what came of the first fix"
    )
    learn.add_argument("--log", metavar="NEW", help="the log of the start with the fix, to check the outcome against")
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="one JSON document on stdout")
    out.add_argument("--lang", choices=("en", "zh"), default="en", help="language of the answer (default: en)")
    out.add_argument("--all-runs", action="store_true", help="explain every restart in full, not only the last")
    return parser


def run(args: argparse.Namespace) -> int:
    """Read, diagnose, print; 1 where a problem was found."""
    hints = _hints(args)
    if args.log and not args.outcome:
        raise LegroomError("--log belongs to --outcome", "legroom diagnose OLD --outcome worked --log NEW")
    readings = [_read(name, pieces, hints) for name, pieces in _sources(args)]
    if args.outcome:
        return _record_outcome(args, readings, hints)
    if args.json:
        from legroom.diagnosis.diagnosis_json import readings_json

        print_json(readings_json(readings))
    else:
        from legroom.drawing.terminal import style_of
        from legroom.render.diagnosis_text import readings_text

        sys.stdout.write(readings_text(readings, style_of(sys.stdout), args.lang, args.all_runs))
    return exit_code(readings)


def exit_code(readings: list[LogReading]) -> int:
    """1 where the last run of a log has a problem, 2 where nothing could be made of any."""
    verdicts = [reading.runs[0].verdict if reading.runs else "not understood" for reading in readings]
    if any(verdict in ("cause found", "not a memory problem", "cause above") for verdict in verdicts):
        return ANSWER_IS_NO
    return OK if any(verdict == "no problem found" for verdict in verdicts) else BAD_INPUT


def _hints(args: argparse.Namespace) -> Hints:
    from legroom.cli.server_options import gpu_count
    from legroom.diagnosis.starting_plan import Hints

    return Hints(args.line, args.model, args.gpu, gpu_count(args.gpus, "--gpus"), args.vllm)


def _sources(args: argparse.Namespace) -> Iterator[tuple[str, Iterator[bytes]]]:
    from legroom.vllm_logs import log_sources

    for name, value in (("--systemd", args.systemd), ("--docker", args.docker)):
        if value is not None and (not value or value.startswith("-")):
            raise LegroomError(f"{name} needs a name, not {value!r}")
    if args.systemd:
        yield (
            args.systemd,
            log_sources.pieces_of_command(["journalctl", "--no-pager", "-o", "cat", "-u", args.systemd], args.systemd),
        )
    if args.docker:
        yield args.docker, log_sources.pieces_of_command(["docker", "logs", args.docker], args.docker)
    names = args.files or ([] if args.systemd or args.docker else ["-"])
    if names.count("-") > 1:
        raise LegroomError("standard input can be read once", "give - once")
    for name in names:
        yield (
            ("standard input", log_sources.pieces_of_stdin())
            if name == "-"
            else (name, log_sources.pieces_of_file(name))
        )


def _read(name: str, pieces: Iterator[bytes], hints: Hints) -> LogReading:
    from legroom.diagnosis.diagnose import read_log

    return read_log(pieces, name, hints)


def _record_outcome(args: argparse.Namespace, readings: list[LogReading], hints: Hints) -> int:
    """Write down what came of the first fix of the log that failed."""
    from legroom.explain.outcomes import record_outcome

    outcome = _outcome_of(readings, hints, worked=args.outcome == "worked")
    if args.log:
        _check_against(args.log, hints, outcome)
    path = record_outcome(outcome)
    if args.json:
        print_json({"recorded": asdict(outcome)})
    else:
        print(f"recorded: {outcome.fix} for {outcome.cause} ({outcome.entry}) {args.outcome}")
        note(f"in {path}: no text of the log, no names; it stays on this machine")
    return OK


def _outcome_of(readings: list[LogReading], hints: Hints, *, worked: bool) -> Outcome:
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


def _check_against(path: str, hints: Hints, outcome: Outcome) -> None:
    """A log that says otherwise is believed: a wrong record would be worse than none."""
    from legroom.diagnosis.diagnose import read_log
    from legroom.vllm_logs.log_sources import pieces_of_file

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
