"""`legroom models [WORDS]`: the models that legroom knows without a network, or those that a GPU serves."""

import argparse
from functools import partial

from legroom.cli.output import print_answer, progress_bar
from legroom.drawing.terminal import Style
from legroom.drawing.text import columns
from legroom.errors import ANSWER_IS_NO, OK, LegroomError
from legroom.facts.bundled import Bundled, all_bundled
from legroom.units import parse_length, parse_whole

DESCRIPTION = """\
List the models whose facts come with legroom: they can be planned without a network.

With --gpu: which of them that GPU serves, the largest first, with the users it holds at once, the longest request and
the tokens a second of one user and of all; then the models that lack the least memory. Every row is a full plan."""
EPILOG = """\
examples:
  legroom models
  legroom models qwen3 fp8
  legroom models --gpu rtx4090
  legroom models qwen --gpu l40s --context 32k --concurrency 4 --sort speed
  legroom models --gpu rtx4090 --gpu-used 2GiB

Any other model is read from the Hugging Face Hub by its id, or from a folder with a config.json.

exit codes: 0 something matches (and fits), 1 nothing does
"""

_NO_SUCH_NAME = "No bundled model has such a name; plan takes any Hugging Face id, or a folder with a config.json.\n"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="WORD", help="only those with all of these words in a name")
    where = parser.add_argument_group("which of them a GPU serves")
    where.add_argument("--gpu", metavar="NAME", help="a GPU (rtx4090, l4, h100 ...) or a size (24GiB)")
    where.add_argument("--gpus", metavar="N", help="how many of it (default: 1)")
    where.add_argument("--context", metavar="LEN", help="tokens a request may have (default: 8k)")
    where.add_argument("--concurrency", "--users", metavar="N", help="requests of that length at once (default: 1)")
    where.add_argument("--gpu-used", metavar="SIZE", help="what a desktop and other programs use of one GPU (2GiB)")
    orders = ("size", "name", "context", "users", "speed")
    where.add_argument("--sort", choices=orders, help="what the list is sorted by (default: size)")
    where.add_argument("--vllm", metavar="VERSION", help="vLLM release (default: the newest known)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Prints the bundled models whose names contain all the words, with --gpu those that it serves; 1 for none."""
    words = [word.lower() for word in args.words]
    models = [named for model in all_bundled() if (named := model.with_words(words))]
    if args.gpu is not None:
        return _run_on_card(args, models)
    options = ("gpus", "context", "concurrency", "gpu_used", "sort", "vllm")
    for name in (f"--{each.replace('_', '-')}" for each in options if getattr(args, each) is not None):
        raise LegroomError(f"{name} needs a GPU", f"add one, as in legroom models --gpu rtx4090 {name} ...")
    document = {"models": [model.as_json() for model in models]}
    print_answer(args.json, document, lambda style: _table_text(models, style))
    return OK if models else ANSWER_IS_NO


def _run_on_card(args: argparse.Namespace, models: list[Bundled]) -> int:
    """Prints which of the models the GPU serves; the exit code is 1 where it serves none."""
    from legroom.cli.shared_options import gpu_count
    from legroom.planning.machine import Machine
    from legroom.render.size_text import card_models_text
    from legroom.simulation.card_models import CardSearch, models_on_card

    users = parse_whole(args.concurrency or "1", "--concurrency", 1, 10**6)
    machine = Machine(args.gpu, gpu_count(args.gpus, "--gpus"), used=args.gpu_used)
    search = CardSearch.of(machine, args.vllm, parse_length(args.context or "8k", "--context"), users)
    with progress_bar("planning") as bar:
        answer = models_on_card(models, search, progress=bar, order=args.sort or "size")
    text = partial(card_models_text, answer) if models else _NO_SUCH_NAME
    print_answer(args.json, answer.as_json, text)
    return OK if answer.fitting else ANSWER_IS_NO


def _table_text(models: list[Bundled], style: Style) -> str:
    """A row for each model with its parameters and two of its Hugging Face ids, or that none was found."""
    if not models:
        return _NO_SUCH_NAME
    rows = [tuple(style.paint(word, "dim") for word in ("name", "parameters", "Hugging Face ids"))]
    for model in models:
        parameters = f"{model.parameters / 1e9:,.2f} B" if model.parameters else ""
        more = f" and {len(model.ids) - 2} more" if len(model.ids) > 2 else ""
        rows.append((style.paint(model.name, "bold"), parameters, ", ".join(model.ids[:2]) + more))
    return "\n".join(columns(rows, "<><")) + "\n"
