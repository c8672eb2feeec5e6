"""`legroom models [WORDS]`: the models that legroom knows without a network."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from legroom.cli.output import print_answer
from legroom.errors import ANSWER_IS_NO, OK

if TYPE_CHECKING:
    from legroom.drawing.terminal import Style
    from legroom.facts.bundled import Bundled

DESCRIPTION = "List the models whose facts come with legroom: they can be planned without a network."
EPILOG = """\
examples:
  legroom models
  legroom models qwen3 fp8
  legroom models llama --json

Any other model is read from the Hugging Face Hub by its id, or from a folder with a config.json.

exit codes: 0 something matches, 1 nothing does
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="WORD", help="only those with all of these words in a name")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """`legroom models`: lists the bundled models that match the words; returns the exit status."""
    from legroom.facts.bundled import bundled_names, find

    words = [word.lower() for word in args.words]
    every = (model for name in bundled_names() if (model := find(name)))
    models = [model for model in every if all(word in " ".join((model.name, *model.ids)).lower() for word in words)]
    print_answer(
        args.json, lambda: {"models": [model.as_json() for model in models]}, lambda style: _table_text(models, style)
    )
    return OK if models else ANSWER_IS_NO


def _table_text(models: list[Bundled], style: Style) -> str:
    from legroom.drawing.text import columns

    if not models:
        return (
            "No bundled model matches; any Hugging Face id, or a folder with a config.json, can be planned as well.\n"
        )
    rows = [tuple(style.paint(word, "dim") for word in ("name", "parameters", "Hugging Face ids"))]
    for model in models:
        parameters = f"{model.parameters / 1e9:,.2f} B" if model.parameters else ""
        more = f" and {len(model.ids) - 2} more" if len(model.ids) > 2 else ""
        rows.append((style.paint(model.name, "bold"), parameters, ", ".join(model.ids[:2]) + more))
    return "\n".join(columns(rows, "<><")) + "\n"
