"""`legroom catalog`: check the catalog, write it in the shape other knowledge bases read, take a record in."""

import argparse
import json
from typing import Any

from legroom.cli.output import note, print_answer, print_json, write_file
from legroom.errors import ANSWER_IS_NO, OK, LegroomError
from legroom.explain.catalog_entries import bundled_documents, catalog_problems, entries, entry
from legroom.explain.deadends import import_record, records_of, stored_records

DESCRIPTION = "The error catalog as data: check it, export it, import a record."
EPILOG = """\
examples:
  legroom catalog validate
  legroom catalog export --format deadends -o catalog.json
  legroom catalog export --format deadends LR203
  legroom catalog import record.json

exit codes: 0 fine, 1 validate found a fault, 2 the call or a file is wrong
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="validate | export | import")
    validate = actions.add_parser("validate", help="check every entry and imported record")
    validate.add_argument("--json", action="store_true", help="one JSON document on stdout")
    export = actions.add_parser("export", help="write entries as records")
    export.add_argument("ids", nargs="*", metavar="ID", help="which (default: all)")
    export.add_argument("--format", choices=("deadends",), default="deadends", help="the shape of the records")
    export.add_argument("-o", "--output", metavar="FILE", help="write to a file (default: stdout)")
    export.add_argument("--json", action="store_true", help="accepted for symmetry: the export is JSON already")
    taken = actions.add_parser("import", help="check one record and keep it")
    taken.add_argument("file", metavar="FILE")
    taken.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Validates the catalog, or exports or imports entries; LegroomError for another action."""
    actions = {"validate": _validate_catalog, "export": _export_entries, "import": _import_entry}
    if args.action not in actions:
        raise LegroomError("do what with the catalog?", "legroom catalog validate, export or import FILE")
    return actions[args.action](args)


def _validate_catalog(args: argparse.Namespace) -> int:
    """Prints the problems of bundled entries and imported records; the exit code is 1 where there are any."""
    records = stored_records()
    wrong = catalog_problems() + [f"{path}: {problem}" for path, _, problems in records for problem in problems]
    count = len(bundled_documents())
    summary = f"{count} entries and {len(records)} imported records: {len(wrong) or 'no'} "
    summary += "problem" if len(wrong) == 1 else "problems"
    document = {"entries": count, "imported": len(records), "problems": wrong}
    print_answer(args.json, document, "".join(f"{line}\n" for line in (*wrong, summary)))
    return ANSWER_IS_NO if wrong else OK


def _export_entries(args: argparse.Namespace) -> int:
    """Write entries as dead-end records to stdout or a file; returns the exit code."""
    every = entries()
    records = records_of([entry(name) for name in args.ids] if args.ids else list(every), every)
    document: Any = records[0] if len(args.ids) == 1 else records
    if args.output is None:
        print_json(document)
        return OK
    write_file(args.output, json.dumps(document, indent=2, ensure_ascii=False) + "\n", "records")
    note(f"{len(records)} records written to {args.output}")
    return OK


def _import_entry(args: argparse.Namespace) -> int:
    """Store a dead-end record of a file for later diagnoses; returns the exit code."""
    target = import_record(args.file)
    text = f"kept as {target}; legroom explain --search finds it now\n"
    print_answer(args.json, {"imported": str(target)}, text)
    return OK
