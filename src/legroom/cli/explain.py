"""`legroom explain`: the long story of one cause."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from legroom.cli.output import note, print_json
from legroom.errors import ANSWER_IS_NO, OK, LegroomError

_DESCRIPTION = """\
Tell the long story of one cause of the catalog: what it is, why vLLM does it, the arithmetic with a worked example,
what helps, what not to try, and how to tell it from its look-alikes. Or list the catalog, or search it: by words in
English or Chinese, by a cause label, or by a line of a log."""

_EPILOG = """\
examples:
  legroom explain LR203
  legroom explain LR203 --lang zh
  legroom explain --list
  legroom explain --search cumem
  legroom explain --search 'No available memory for the cache blocks'

exit codes: 0 found, 1 the search found nothing, 2 no such entry
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Describe the command's options."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "explain",
        usage="legroom explain LR203 | --list | --search WORDS [--lang en|zh] [--json]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("id", nargs="?", metavar="ID", help="an entry, such as LR203")
    parser.add_argument("--list", action="store_true", help="list every entry, one per line")
    parser.add_argument("--search", metavar="WORDS", help="find entries by words, a label or a line of a log")
    parser.add_argument("--lang", choices=("en", "zh"), default="en", help="English or Chinese")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


def run(args: argparse.Namespace) -> int:
    """Explain, list or search."""
    if sum((args.id is not None, args.list, args.search is not None)) != 1:
        raise LegroomError("explain what?", "legroom explain LR203, or --list, or --search WORDS")
    if args.search is not None:
        return _search(args)
    return _list(args) if args.list else _explain(args)


def _explain(args: argparse.Namespace) -> int:
    from legroom.explain.catalog_entries import entry

    chosen = entry(args.id)
    if args.json:
        from legroom.explain.entry import entry_json

        print_json(entry_json(chosen, args.lang))
        return OK
    from legroom.drawing.terminal import style_of
    from legroom.render.explain_text import explain_text

    sys.stdout.write(explain_text(chosen, style_of(sys.stdout), args.lang))
    return OK


def _list(args: argparse.Namespace) -> int:
    from legroom.explain.catalog_entries import entries

    if args.json:
        from legroom.explain.entry import summary_json

        print_json({"entries": [summary_json(listed, args.lang) for listed in entries()]})
        return OK
    from legroom.drawing.terminal import style_of
    from legroom.render.explain_text import list_text

    sys.stdout.write(list_text(entries(), style_of(sys.stdout), args.lang))
    return OK


def _search(args: argparse.Namespace) -> int:
    from legroom.explain.catalog_entries import entries
    from legroom.explain.catalog_search import search

    hits = search(args.search, entries())
    if args.json:
        from legroom.explain.entry import summary_json

        print_json(
            {"query": args.search, "hits": [{**summary_json(hit.entry, args.lang), "score": hit.score} for hit in hits]}
        )
    elif hits:
        from legroom.drawing.terminal import style_of
        from legroom.render.explain_text import hits_text

        sys.stdout.write(hits_text(hits, style_of(sys.stdout), args.lang))
    else:
        note(f"nothing in the catalog fits {args.search!r}; legroom explain --list shows all of it")
    return OK if hits else ANSWER_IS_NO
