"""`legroom diagnose`: what happened, the lines that prove it, why, and the command that will work."""

import argparse
from collections.abc import Iterator

from legroom.cli.output import print_answer
from legroom.cli.shared_options import gpu_count
from legroom.deployments.described import refuse_two_models
from legroom.diagnosis.diagnosis_json import readings_json
from legroom.diagnosis.fixes.failed_run import Hints
from legroom.diagnosis.log_diagnosis import LogReading, read_log
from legroom.errors import ANSWER_IS_NO, BAD_INPUT, OK, LegroomError
from legroom.render.diagnosis_text import readings_text
from legroom.vllm_logs import log_sources

USAGE = "legroom diagnose [FILE ... | -] [options]"
DESCRIPTION = """\
Read a vLLM log and say what happened, in which phase, proven by its lines; why, with this log's numbers; the command
that will work, with the memory it will have; what else could be done and what not to try. Files may be plain, gzip or
zstd."""

EPILOG = """\
examples:
  legroom diagnose vllm.log
  kubectl logs my-pod | legroom diagnose -
  legroom diagnose --systemd vllm.service
  legroom diagnose --docker my-vllm --gpu a100-80gb
  legroom diagnose vllm.log --command 'vllm serve Qwen/Qwen3-8B --max-model-len 32768' --gpu rtx4090

exit codes: 0 no problem found, 1 a problem was found, 2 the call is wrong or the log cannot be read or is not vLLM's
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", metavar="FILE", help="log files; - is standard input (the default)")
    where = parser.add_argument_group("other places to read from")
    where.add_argument("--systemd", metavar="UNIT", help="the journal of a systemd unit")
    where.add_argument("--docker", metavar="NAME", help="the log of a Docker container")
    known = parser.add_argument_group("what the log may not say")
    known.add_argument("--command", metavar="LINE", dest="line", help="the vllm serve line that was run, or its file")
    known.add_argument("--model", metavar="MODEL", help="a Hub id or a folder with a config.json")
    known.add_argument("--gpu", metavar="NAME", help="a GPU (h100, rtx4090 ...) or a size (24GiB)")
    known.add_argument("--gpus", metavar="N", help="how many GPUs the machine has")
    known.add_argument("--vllm", metavar="VERSION", help="the vLLM release")
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="one JSON document on stdout")
    out.add_argument("--lang", choices=("en", "zh"), default="en", help="language of the answer (default: en)")
    out.add_argument("--explain-math", action="store_true", help="show the ledger of the card, seen and planned")
    out.add_argument("--all-runs", action="store_true", help="explain every restart in full, not only the last")


def run(args: argparse.Namespace) -> int:
    """Reads the logs and prints the diagnosis of each; the exit status is `exit_code` of the readings."""
    refuse_two_models(args.line, args.model)
    hints = Hints(args.line, args.model, args.gpu, gpu_count(args.gpus, "--gpus"), args.vllm)
    readings = [read_log(pieces, name, hints) for name, pieces in _log_sources(args)]
    options = (args.lang, args.all_runs, args.explain_math)
    print_answer(args.json, lambda: readings_json(readings), lambda style: readings_text(readings, style, *options))
    return exit_code(readings)


def exit_code(readings: list[LogReading]) -> int:
    """1 where the last run of a log has a problem, 2 where no log was understood, else 0."""
    verdicts = [reading.runs[0].verdict if reading.runs else "not understood" for reading in readings]
    if any(verdict in ("cause found", "not a memory problem", "cause above") for verdict in verdicts):
        return ANSWER_IS_NO
    return OK if any(verdict == "no problem found" for verdict in verdicts) else BAD_INPUT


def _log_sources(args: argparse.Namespace) -> Iterator[tuple[str, Iterator[bytes]]]:
    """(name, pieces of the log) of each journal unit, container, file or stdin that the options name."""
    for name, value in (("--systemd", args.systemd), ("--docker", args.docker)):
        if value is not None and (not value or value.startswith("-")):
            raise LegroomError(f"{name} needs a name, not {value!r}")
    if args.systemd:
        command = ["journalctl", "--no-pager", "-o", "cat", "-u", args.systemd]
        yield args.systemd, log_sources.pieces_of_command(command, args.systemd)
    if args.docker:
        yield args.docker, log_sources.pieces_of_command(["docker", "logs", args.docker], args.docker)
    names = args.files or ([] if args.systemd or args.docker else ["-"])
    if names.count("-") > 1:
        raise LegroomError("standard input can be read once", "give - once")
    for name in names:
        if name == "-":
            yield "standard input", log_sources.pieces_of_stdin()
        else:
            yield name, log_sources.pieces_of_file(name)
