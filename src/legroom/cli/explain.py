"""`legroom explain`: the long story of one cause."""

import argparse

from legroom.cli.output import note, print_answer
from legroom.errors import ANSWER_IS_NO, OK, LegroomError
from legroom.explain.catalog_entries import entries, entry, search, search_json
from legroom.explain.entry import summary_json, terms_in
from legroom.render.explain_text import entry_document, entry_list_text, explain_text, hits_text

USAGE = "legroom explain [LR203 | WORDS] [--lang en|zh] [--json]"
DESCRIPTION = """\
Tell the long story of one cause of the catalog: what it is, why vLLM does it, the arithmetic with a worked example,
what helps, what not to try, and how to tell it from its look-alikes. Without an entry: list the catalog. Or search it
by words in English or Chinese, by a cause label, or by a line of a log. Words of a plan (outside, headroom) say what
they mean."""

EPILOG = """\
examples:
  legroom explain LR203
  legroom explain LR203 --lang zh
  legroom explain
  legroom explain exit code 137
  legroom explain outside
  legroom explain --search 'No available memory for the cache blocks'

exit codes: 0 found, 1 the search found nothing, 2 no such entry
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    about = "an entry (LR203) or words to search; none: list them all"
    parser.add_argument("words", nargs="*", metavar="ID", help=about)
    parser.add_argument("--search", nargs="+", metavar="WORD", help="find entries by words, a label or a line of a log")
    parser.add_argument("--lang", choices=("en", "zh"), default="en", help="English or Chinese")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Prints one catalog entry, the hits of --search or the list of all; exit status 1 where nothing is found."""
    if args.words and args.search:
        raise LegroomError("explain what?", "legroom explain LR203, or legroom explain WORDS")
    lang, word = args.lang, args.words[0].lower() if len(args.words) == 1 else ""
    is_id = word.startswith("lr") or word in {each.id.lower() for each in entries()}
    words = None if is_id else " ".join(args.search or args.words) or None
    terms = terms_in(words, lang) if words else {}
    if words is not None and not (hits := search(words, entries())) and not terms:
        note(f"nothing in the catalog fits {words!r}; legroom explain shows all of it")
        print_answer(args.json, lambda: search_json(words, hits, lang), "")
        return ANSWER_IS_NO
    if words is not None:
        document = search_json(words, hits, lang) | {"terms": terms}
        print_answer(args.json, document, lambda style: hits_text(hits, style, lang, terms))
    elif not is_id:
        listed = {"entries": [summary_json(each, lang) for each in entries()]}
        print_answer(args.json, listed, lambda style: entry_list_text(entries(), style, lang))
    else:
        chosen = entry(args.words[0])
        print_answer(args.json, lambda: entry_document(chosen, lang), lambda style: explain_text(chosen, style, lang))
    return OK
