"""`legroom probe`: measures the GPU of this machine."""

import argparse
from collections.abc import Callable
from functools import partial

from legroom.cli.output import note, print_answer
from legroom.drawing.text import columns
from legroom.errors import OK, LegroomError
from legroom.facts.releases import release
from legroom.planning.calibration_store import store_observations
from legroom.planning.card_store import CardRecord, store_card
from legroom.probe.card_probe import probe_card, python_of_vllm
from legroom.units import human_bytes

DESCRIPTION = """\
Measure what a plan has to know of this machine's GPU: its usable memory, the CUDA context, what vLLM takes beside the
model, the allocator's sizes, copy speeds, and how much host memory can be pinned."""

EPILOG = """\
examples:
  legroom probe
  legroom probe --python /opt/vllm/bin/python
  legroom probe --ranks 2                   # the link between two cards takes memory too
  legroom probe --no-vllm --dry-run --json
  legroom probe -- vllm serve Qwen/Qwen3-8B --max-model-len 32768     # this deployment too, with dummy weights

It takes about a minute and needs an idle GPU. Torch and vLLM are those of your own vLLM; legroom itself needs neither.
vLLM is started once with a model of two layers that is made on the spot. What is measured is kept for this card, driver
and release, and later plans on this machine use it. The JSON is a record that can be added to legroom's facts.

exit codes: 0 measured, 2 the call was wrong, 3 there is no GPU here, or no Python with torch
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--python", metavar="PATH", help="the Python that has vLLM (default: that of `vllm`)")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="tensor-parallel ranks (default: 1)")
    parser.add_argument("--no-vllm", action="store_true", help="ask torch alone, and start no vLLM")
    parser.add_argument("--dry-run", action="store_true", help="measure, and keep nothing")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def parse(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """The namespace of the options, with the server's command after `--` as its list `served`."""
    cut = words.index("--") if "--" in words else len(words)
    return argparse.Namespace(**vars(parser.parse_args(words[:cut])), served=words[cut + 1 :])


def run(args: argparse.Namespace) -> int:
    """Measures this machine's GPU, prints the record and, without --dry-run, stores it."""
    if not 1 <= args.ranks <= 64:
        raise LegroomError(f"--ranks {args.ranks} is no number of cards", "say 1 to 64")
    python = python_of_vllm(args.python)
    note(f"asking the GPU with {python}; this takes about a minute")
    served = _served_words(args.served)
    outcome = probe_card(python, ranks=args.ranks, with_vllm=not args.no_vllm, serve_args=served)
    for problem in outcome.problems:
        note(f"note: {problem}")
    if not args.dry_run:
        store_card(outcome.record)
        if outcome.profile is not None:
            import shlex

            from legroom.deployments.deployment import deployment_from_command
            from legroom.planning.calibration import probed_observation

            deployment = deployment_from_command(shlex.join(args.served), release(outcome.vllm))
            name = outcome.record.name
            observation = probed_observation(deployment.args, deployment.release, name, outcome.profile)
            if remark := store_observations([observation]):
                note(f"note: {remark}")
    text = "\n".join(_record_lines(outcome.record, kept=not args.dry_run)) + "\n"
    print_answer(args.json, {**outcome.record.to_json(), "deployment": outcome.profile}, text)
    return OK


def _served_words(command: list[str]) -> list[str]:
    """The model and flags after `vllm serve` in the command; LegroomError for another command."""
    if not command:
        return []
    if command[:2] != ["vllm", "serve"] or len(command) < 3:
        hint = "legroom probe -- vllm serve MODEL [flags]"
        raise LegroomError("what follows -- is not a `vllm serve MODEL ...`", hint)
    return command[2:]


def _record_lines(record: CardRecord, *, kept: bool) -> list[str]:
    """A table of what the probe measured on the GPU, and a line on whether it was stored (`kept`)."""

    def text_if_measured(value: int | None, form: Callable[[int], str]) -> str:
        """The value as `form` shows it; `not measured` for None."""
        return "not measured" if value is None else form(value)

    size, exactly = partial(text_if_measured, form=human_bytes), partial(text_if_measured, form="{:,} bytes".format)
    speed = partial(text_if_measured, form=lambda bytes_s: f"{bytes_s / 1e9:,.1f} GB/s")

    rows = [
        ("usable total", size(record.total_bytes), "what CUDA reports; a utilization is a share of it"),
        ("CUDA context", size(record.context_bytes), "held before the first allocation"),
        ("vLLM beside torch", size(record.vllm_non_torch_bytes), "modules and handles, by its own accounting"),
        ("smallest block", exactly(record.smallest_block_bytes), "torch rounds requests up to it"),
        ("segments", f"{size(record.small_segment_bytes)}, {size(record.large_segment_bytes)}", "small and large"),
        ("a graph's kernel", exactly(record.graph_node_bytes), "the driver's part of captured graphs"),
        ("host to GPU", speed(record.host_to_device_bytes_s), "from pinned memory"),
        ("GPU to host", speed(record.device_to_host_bytes_s), "into pinned memory"),
        ("GPU to GPU memory", speed(record.device_to_device_bytes_s), "a copy within the card"),
        ("pageable to GPU", speed(record.pageable_to_device_bytes_s), "from memory that is not pinned"),
        ("host memory pinned", size(record.pinned_bytes), record.pin_refused or "as much as was tried"),
    ]
    if record.ranks > 1:
        rows.insert(3, ("NCCL", size(record.nccl_bytes), f"a rank of {record.ranks}, after the first all-reduce"))
    title = f"{record.name}, driver {record.driver or 'not known'}, torch {record.torch}"
    title += f", vLLM {record.vllm}" if record.vllm else ""
    end = "Kept: later plans for this card on this machine use it." if kept else "Nothing was kept."
    return [title, "", *columns(rows, "<><"), "", end]
