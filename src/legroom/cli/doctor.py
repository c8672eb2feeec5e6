"""`legroom doctor`: what is wrong, or will be, on this machine and with the vLLM servers on it."""

import argparse

from legroom.api.doctor_report import doctor
from legroom.cli.output import print_answer

USAGE = "legroom doctor [--json]"
DESCRIPTION = """\
Look at this machine once: GPUs (NVML or nvidia-smi), driver, cgroup, /dev/shm, leftovers of dead servers; and at every
vLLM server that runs on it: its command is planned on what others leave it, its metrics and its log are read. Says in
ten lines what is wrong, what to watch, and what could not be read. Changes nothing."""
EPILOG = """\
examples:
  legroom doctor
  sudo legroom doctor --json        # root sees the processes of other users

exit codes: 0 nothing is wrong, 1 something is, 3 there is no GPU to look at
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Checks this machine and its vLLM servers, prints the report and returns the report's exit status."""
    report = doctor()
    print_answer(args.json, report.to_json, report.text)
    return report.exit_code
