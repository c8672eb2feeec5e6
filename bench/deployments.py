"""Every file of a folder through `plan --file`'s reader and through `lint`'s: do both see the same servers?

    python bench/deployments.py FOLDER [--json] [--different]

Any folder with files that start vLLM will do: checkouts of vLLM's own examples and docs, recipes, production-stack,
KServe, Dynamo, SkyPilot. For each kind of file: how many there are, in how many each reader finds a server, how many
servers lint finds, and in how many files the two disagree on how many servers there are or on the words of the first.
A file whose servers plan sees and refuses (a template, a release before any that is known) is counted by its reason.
Leaves with 1 where the readers disagree.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path

from legroom.deployments.deployment import deployment_from_file, deployment_of
from legroom.deployments.file_kinds import kind_of
from legroom.deployments.source_text import read_text
from legroom.deployments.subjects import StartedServer
from legroom.errors import LegroomError
from legroom.facts.releases import latest
from legroom.lint.linted_parts import LintedPart, linted_parts

_COUNT = re.compile(r"(\d+) servers were found")
_KNOWN_REASONS = ("is a template", "is older than any release", "never closed")


def planned(path: Path) -> tuple[int, object, str]:
    """How many servers `plan --file` finds, the flags of the first, and why it refuses them."""
    try:
        deployment = deployment_from_file(path)
    except LegroomError as error:
        return 0, None, error.message
    counts = [int(count[1]) for note in deployment.notes if (count := _COUNT.match(note))]
    return (counts or [1])[0], deployment.args, ""


def linted(path: Path) -> list[StartedServer]:
    """The servers that lint judges."""
    parts = [part for part in linted_parts(str(path), read_text(path), latest()) if isinstance(part, LintedPart)]
    servers = [subject for part in parts for subject in part.subjects if isinstance(subject, StartedServer)]
    return [server for server in servers if server.words]


def compare(path: Path) -> dict[str, object]:
    """One file through both."""
    count, args, reason = planned(path)
    servers = linted(path)
    known = next((known for known in _KNOWN_REASONS if known in reason), "") if servers else ""
    same = bool(known) or count == len(servers)
    if count and servers:
        same = same and deployment_of(servers[0]).args == args
    return {"path": str(path), "plan": count, "lint": len(servers), "refused": known, "same": same}


def main() -> int:
    """Read a folder and print what both readers saw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--different", action="store_true", help="name the files that the readers disagree on")
    args = parser.parse_args()
    began = time.perf_counter()
    rows, tally, unread = [], {}, 0
    for path in sorted(path for path in args.folder.rglob("*") if path.is_file()):
        try:
            text = read_text(path)
        except LegroomError:
            unread += 1
            continue
        row = compare(path)
        rows.append(row)
        counts = tally.setdefault(kind_of(str(path), text), Counter())
        counts.update(
            files=1,
            plan=row["plan"] > 0,
            lint=row["lint"] > 0,
            servers=row["lint"],
            refused=bool(row["refused"]),
            different=not row["same"],
        )
    total = sum(tally.values(), Counter())
    seconds = time.perf_counter() - began
    different = [row["path"] for row in rows if not row["same"]]
    if args.json:
        kinds = {kind: dict(counts) for kind, counts in sorted(tally.items())}
        print(
            json.dumps(
                {"total": dict(total), "kinds": kinds, "not_text": unread, "different": different, "seconds": seconds}
            )
        )
    else:
        columns = ("files", "plan", "lint", "servers", "refused", "different")
        print(f"{'kind':12}" + "".join(f"{column:>10}" for column in columns))
        for kind, counts in [*sorted(tally.items()), ("all", total)]:
            print(f"{kind:12}" + "".join(f"{counts[column]:>10}" for column in columns))
        print(f"{seconds:.1f} s, {unread} files that are no text")
        for path in different if args.different else ():
            print(path)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
