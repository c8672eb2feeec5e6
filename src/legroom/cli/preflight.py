"""`legroom preflight`: the check of an init container, on the node that the pod was really put on."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from legroom.cli.output import print_answer
from legroom.cli.shared_options import add_source_options, described_server, parse
from legroom.errors import ANSWER_IS_NO, OK, LegroomError
from legroom.verify.node_preflight import preflight, read_node_state

__all__ = ["add_options", "parse", "run"]

_LOG = "/dev/termination-log"
_MAX_LOG_CHARACTERS = 2_000  # Kubernetes keeps 4,096 bytes, and a character may take two.
USAGE = "legroom preflight [options] [--] vllm serve MODEL [any vLLM flag]"
DESCRIPTION = """\
Check a server's command against the node it is on: the GPUs, by name and number, and what is free of them, the driver,
/dev/shm and the memory limit. In an init container with the server's own limits and volumes, a pod that cannot serve
ends before it loads anything, and says why in its events (the message goes to /dev/termination-log)."""

EPILOG = """\
examples:
  legroom preflight -- vllm serve Qwen/Qwen3-8B --max-model-len 32768
  legroom preflight --vllm 0.11.0 --json -- vllm serve /models/llama --tensor-parallel-size 4

exit codes: 0 it fits or is tight, 1 it does not fit, 2 the call is wrong, 3 there is no GPU here
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vllm", metavar="VERSION", help="vLLM release (default: the installed one, else the newest)")
    parser.add_argument("--host-memory", metavar="SIZE", help="the server's memory limit (default: the container's)")
    about = f"where the reason goes (default: {_LOG}, if it exists)"
    parser.add_argument("--termination-log", metavar="FILE", default=_LOG, help=about)
    parser.add_argument("--warn-only", action="store_true", help="say it, and exit with 0 all the same")
    add_source_options(parser)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Checks this node for the described server and prints the checks; exit status 1 where it does not hold it."""
    args.vllm = args.vllm or _installed_release()
    try:
        deployment = described_server(args)
        visible = deployment.args.env.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
        answer = preflight(deployment.args, deployment.release, read_node_state(visible), args.host_memory)
    except LegroomError as error:
        _write_termination_log(args.termination_log, [f"legroom preflight: {error.message}: {error.hint}"])
        raise
    order = {"failure": 0, "warning": 1, "ok": 2}
    ranked = sorted(answer.checks, key=lambda check: order[check.finding])
    head = "this node holds the server" if answer.ok else "this node does not hold the server"
    lines = [f"legroom preflight: {head}", *(f"  {check.finding:8}{check.name}: {check.message}" for check in ranked)]
    if not answer.ok:
        _write_termination_log(args.termination_log, lines)
    print_answer(args.json, answer.to_json, "\n".join(lines) + "\n")
    return OK if answer.ok or args.warn_only else ANSWER_IS_NO


def _installed_release() -> str | None:
    """The installed vLLM's version without its local part (`+cu128`); None where there is none."""
    try:
        return version("vllm").partition("+")[0]
    except PackageNotFoundError:
        return None


def _write_termination_log(path: str, lines: Sequence[str]) -> None:
    """Writes the lines to the file that Kubernetes copies into the pod's status; does nothing outside a pod."""
    if not os.path.exists(path):  # noqa: PTH110
        return
    try:
        with open(path, "w", encoding="utf-8") as log:  # noqa: PTH123
            log.write("\n".join(lines)[:_MAX_LOG_CHARACTERS])
    except OSError as error:
        print(f"the reason could not be written to {path}: {error.strerror}", file=sys.stderr)
