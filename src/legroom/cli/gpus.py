"""`legroom gpus [WORDS]`: the GPUs that legroom knows."""

import argparse

from legroom.cli.output import print_answer
from legroom.drawing.terminal import Style
from legroom.drawing.text import columns
from legroom.errors import ANSWER_IS_NO, OK
from legroom.facts.gpus import Gpu, all_gpus, gpu_names
from legroom.units import gib

DESCRIPTION = "List the GPUs that --gpu takes, with the memory that CUDA reports for each. Needs no network."
EPILOG = """\
examples:
  legroom gpus
  legroom gpus a100
  legroom gpus amd --json

A card that is not listed can be planned by its size: legroom plan MODEL --gpu 24GiB.

exit codes: 0 something matches, 1 nothing does
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="WORD", help="only those with all of these words in them")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Prints the known GPUs whose names contain all the words; exit status 1 where none does."""
    words = [word.lower() for word in args.words]
    names = gpu_names()
    texts = {card: " ".join((card.name, card.vendor, *names[card.name])).lower() for card in all_gpus()}
    cards = [card for card, text in texts.items() if all(word in text for word in words)]
    document = {"gpus": [card.as_json(names[card.name]) for card in cards]}
    print_answer(args.json, document, lambda style: _table_text(cards, names, style))
    return OK if cards else ANSWER_IS_NO


def _table_text(cards: list[Gpu], names: dict[str, tuple[str, ...]], style: Style) -> str:
    """A row for each GPU: the shortest of its `names` for --gpu (keyed by GPU), its memory and its bandwidth."""
    if not cards:
        return "No GPU matches; give its memory to legroom plan instead, like --gpu 24GiB.\n"
    rows = [tuple(style.paint(word, "dim") for word in ("--gpu", "GPU", "memory", "GB/s"))]
    for card in cards:
        short = min(names[card.name], key=len, default=card.name)
        speed = f"{card.bandwidth_bytes_s / 1e9:,.0f}" if card.bandwidth_bytes_s else ""
        rows.append((style.paint(short, "bold"), card.name, gib(card.total_bytes), speed))
    return "\n".join(columns(rows, "<<>>")) + "\n"
